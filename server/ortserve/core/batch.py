"""Batches and their results, which the batcher and an instance exchange: arrays, without requests or callbacks."""

from collections.abc import Callable, Sized
from dataclasses import dataclass
from sys import getsizeof
from typing import Final, Protocol, TypeAlias, cast

import numpy as np

Arrays: TypeAlias = tuple[np.ndarray, ...]

_OBJECT_BYTES: Final = 64
"""Memory of a reference to a state, in addition to the state."""


@dataclass(slots=True, init=False)
class Batch:
    """Requests that run together.

    For a model without a batch axis, a batch has one request, its arrays have any shape, and ``rows`` and ``bucket``
    are 1.

    Attributes:
        parts: ``parts[k]`` holds input ``k`` (in the signature's order) of each request: arrays of shape
            ``(rows_i, *item)`` with equal ``item``, for a model with padded axes after padding. An optional input is
            absent (``core.tensor``) in all requests or in no request.
        rows: The sum of ``rows_i``.
        bucket: The rows to run, at least ``rows``; the rest is padding.
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
    """The result of a run.

    Attributes:
        outputs: In the signature's order, without padding rows. They stay unchanged while they or views on them are
            referenced; then another run may use their memory.
        staged_ns: When the rows were staged (monotonic).
        computed_ns: When the outputs were computed (monotonic).
        run_ns: Duration of the computation, without the wait of a worker thread for the interpreter lock afterwards.
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


BatchDone: TypeAlias = Callable[[BatchResult | Exception], object]


class BatchTap(Protocol):
    """Observes the batches of a model as they ran, for a profile. Loop thread only."""

    def observe(self, batch: Batch, run_ns: int) -> None:
        """Called for each batch whose requests were answered, with the duration of its computation. Returns at once."""
        ...

    def end(self, reason: str) -> None:
        """Called if the model accepts no more requests, with the reason."""
        ...


class Runner(Protocol):
    """Runs batches one at a time: an instance of a model, or a fake in tests."""

    def run(self, batch: Batch) -> BatchResult:
        """Run on the calling thread. The caller ensures that the runner has no other run meanwhile.

        Raises:
            Exception: The error of the run; the runner stays usable.
        """
        ...

    def start(self, batch: Batch, done: BatchDone) -> None:
        """Run on the runner's own worker thread and call ``done`` there, exactly once. Returns at once."""
        ...

    def terminate(self, batch: Batch) -> None:
        """Make the run of a started batch fail after its current node. Any thread; returns at once.

        Call it only during that run: before ``done`` is called, or before the caller has received that call.
        """
        ...

    def abandon(self) -> None:
        """Abandon a run that does not end: ``done`` is not called, and ``close`` does not wait for the worker."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether the worker still exists. Any thread."""
        ...


def shallow_bytes(arrays: Arrays) -> int:
    """The size of the arrays in memory; elements of texts count as pointers."""
    nbytes = 0
    for array in arrays:
        nbytes += array.nbytes
    return nbytes


def deep_bytes(arrays: Arrays) -> int:
    """The memory of arrays, including texts and states in other memory that they refer to."""
    total = 0
    for array in arrays:
        total += array.nbytes
        if array.dtype.hasobject:
            elements = array.ravel().tolist()
            try:  # texts, most of the time; ``getsizeof`` takes several times as long
                total += sum(map(str.__sizeof__, elements))
            except TypeError:
                total += sum([_object_bytes(element) for element in elements])
    return total


def _object_bytes(element: object) -> int:
    """The memory of a text, or of a reference to a state in other memory."""
    return getsizeof(element) if isinstance(element, (str, bytes)) else len(cast("Sized", element)) + _OBJECT_BYTES
