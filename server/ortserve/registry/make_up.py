"""The ways in which inputs are made up for a model, and running them on an instance, for whoever waits for that."""

import threading
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from ortserve.core.batch import Arrays, Batch, BatchResult, Runner
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.errors import RunTimeoutError
from ortserve.registry.synthetic import (
    FREE_DIM,
    LARGER_FREE_DIMS,
    MOST_ELEMENTS,
    USUAL,
    Spread,
    first_dimensions,
    synthetic_inputs,
)

_MOST_BATCH_ELEMENTS: Final = 2**24
"""Of an input with larger free dimensions: a batch of images, not a film."""


@dataclass(frozen=True, slots=True)
class MakeUp:
    """Makes inputs up, by rows and seed."""

    signature: ModelSignature
    padding: Padding | None
    brings_optional: bool = False
    free_dim: int = FREE_DIM
    ones: frozenset[str] = frozenset()

    def ways(self) -> list["MakeUp"]:
        """All ways, that of choice first: optional inputs left out, free dimensions small, a first one that is free 1.

        A first dimension that is not the batch's may be that of a list of anything: one of it is the least.
        """
        ones = first_dimensions(self.signature)
        has_free_dims = any(-1 in shape for shape in self._row_shapes())
        larger = [dim for dim in LARGER_FREE_DIMS if has_free_dims and self._row_elements(dim) <= MOST_ELEMENTS]
        return [
            replace(self, brings_optional=brings_optional, free_dim=free_dim, ones=names)
            for brings_optional in ([False, True] if self.signature.has_optional_inputs else [False])
            for free_dim in (FREE_DIM, *larger)
            for names in dict.fromkeys((ones, frozenset[str]()))
        ]

    @property
    def most_rows(self) -> int:
        """How many rows may be made up at a time, where their free dimensions are larger than usual."""
        return max(1, _MOST_BATCH_ELEMENTS // max(1, self._row_elements(self.free_dim)))

    def _row_shapes(self) -> list[tuple[int, ...]]:
        return [spec.row_shape for spec in self.signature.inputs]

    def _row_elements(self, free_dim: int) -> int:
        """Of the largest input."""
        return max(prod(free_dim if dim == -1 else dim for dim in shape) for shape in self._row_shapes())

    def __call__(self, rows: int, seed: int, spread: Spread = USUAL) -> Arrays:
        return synthetic_inputs(
            self.signature,
            rows,
            seed,
            self.padding,
            brings_optional=self.brings_optional,
            free_dim=self.free_dim,
            ones=self.ones,
            spread=spread,
        )


@dataclass(frozen=True, slots=True)
class RunBounds:
    """How long one run in warm-up may take, and how long it may go on once it was asked to end, in seconds."""

    timeout_s: float = 600.0
    grace_s: float = 5.0


USUAL_BOUNDS: Final = RunBounds()


class WorkerRuns:
    """Has an instance's own worker run batches, and waits for each."""

    def __init__(self, runner: Runner, bounds: RunBounds) -> None:
        """``runner`` is abandoned where a run of it does not end."""
        self._runner = runner
        self._bounds = bounds
        self.has_run = False
        """Whether any of them ran."""
        self.most_rows = 0
        """Of the largest batch that ran."""

    def run(self, batch: Batch) -> BatchResult:
        """Run one batch.

        Raises:
            RunTimeoutError: It took too long.
            Exception: What the run raised.
        """
        finished = threading.Event()
        outcomes: list[BatchResult | Exception] = []

        def done(outcome: BatchResult | Exception) -> None:
            outcomes.append(outcome)
            finished.set()

        self._runner.start(batch, done)
        bounds = self._bounds
        if not finished.wait(bounds.timeout_s):
            self._runner.terminate()
            if not finished.wait(bounds.grace_s):
                self._runner.abandon()
            raise RunTimeoutError(
                f"a run in warm-up was ended after warmup_run_timeout_s {bounds.timeout_s:g} s, "
                f"with a batch of {batch.rows} rows"
            )
        outcome = outcomes.pop()
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                # Its traceback has this frame and those of the run, with the session, for which its device may have no
                # room beside the next: it must not wait for the garbage collector.
                del outcome
        self.has_run = True
        self.most_rows = max(self.most_rows, batch.rows)
        return outcome


def as_batch(inputs: Arrays, rows: int) -> Batch:
    """One request, alone in a batch without padding."""
    return Batch(tuple((array,) for array in inputs), rows, rows)
