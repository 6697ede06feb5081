"""What travels between the batcher and an instance: arrays, and nothing of callers or futures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

Arrays: TypeAlias = tuple[np.ndarray, ...]


@dataclass(slots=True, init=False)
class Batch:
    """Requests that run together.

    ``parts[k]`` holds input ``k`` (in the signature's order) of each request, arrays of shape ``(rows_i, *item)`` with
    equal ``item``, or, for a model with padded axes, such that it is equal once padded; ``rows`` is the sum of
    ``rows_i``, and ``bucket``, at least as many, the rows to run: the rest is padding. For a model without a batch axis
    there is one request, its arrays have any shape, and both are 1. An optional input is absent (``core.tensor``) in
    all parts or in none.
    """

    parts: Final[tuple[Arrays, ...]]
    rows: Final[int]
    bucket: Final[int]

    def __init__(self, parts: tuple[Arrays, ...], rows: int, bucket: int) -> None:
        self.parts = parts
        self.rows = rows
        self.bucket = bucket


@dataclass(slots=True, init=False)
class BatchResult:
    """What a run gave.

    Attributes:
        outputs: In the signature's order, without padding rows. They stay unchanged for as long as somebody holds
            them or views on them; after that their memory may be used for another run.
        staged_ns: When the rows were gathered (monotonic).
        computed_ns: When the outputs were there (monotonic).
        run_ns: How long computing took, without the time a worker thread then waited for the interpreter lock.
    """

    outputs: Final[Arrays]
    staged_ns: Final[int]
    computed_ns: Final[int]
    run_ns: Final[int]

    def __init__(self, outputs: Arrays, staged_ns: int, computed_ns: int, run_ns: int) -> None:
        self.outputs = outputs
        self.staged_ns = staged_ns
        self.computed_ns = computed_ns
        self.run_ns = run_ns


BatchDone: TypeAlias = Callable[[BatchResult | Exception], None]


class Runner(Protocol):
    """Something that runs batches one at a time: an instance of a model, or a fake in tests."""

    def run(self, batch: Batch) -> BatchResult:
        """Run on the calling thread. The caller sees to it that nothing else runs here meanwhile.

        Raises:
            Exception: Whatever made the run fail; the runner stays usable.
        """
        ...

    def start(self, batch: Batch, done: BatchDone) -> None:
        """Run on the runner's own worker thread and call ``done`` there, exactly once. Returns at once."""
        ...

    def terminate(self) -> None:
        """Have the run on the worker fail as soon as its present node is computed. From any thread; returns at once.

        Only while a run is on its way whose ``done`` was not called, or has not reached the caller.
        """
        ...

    def abandon(self) -> None:
        """Leave the worker to its run, which does not end: ``done`` is not called, and ``close`` does not wait."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether there is still a worker. From any thread."""
        ...
