"""A runner whose answers, failures and durations are functions of the batch, in virtual time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fakes.clock import FakeClock
from ortserve.core.batch import Arrays, Batch, BatchDone, BatchResult
from ortserve.errors import ErrorKind, ServeError

POISON = -1
"""A value that makes the run of every batch with it fail."""


def answer(rows: np.ndarray) -> Arrays:
    """The runner's outputs for INT64 rows of shape ``(rows, width)``: one of that shape, and one with a single axis."""
    return rows * 3 + 1, rows.sum(axis=1)


@dataclass(frozen=True, slots=True)
class FakeRun:
    """A batch that ran: the only input of each part, the rows, the padded rows, and its virtual times in ns."""

    parts: tuple[np.ndarray, ...]
    rows: int
    bucket: int
    is_inline: bool
    began_ns: int
    ended_ns: int

    @property
    def has_failed(self) -> bool:
        return any((part == POISON).any() for part in self.parts)

    @property
    def sizes(self) -> list[int]:
        """Rows of each part."""
        return [len(part) for part in self.parts]


class NeverOverdue:
    """The termination methods of a runner whose runs always end by themselves."""

    is_running = False

    def terminate(self, batch: Batch) -> None:
        raise AssertionError("its runs end by themselves")

    def abandon(self) -> None:
        raise AssertionError("its runs end by themselves")


class Idler(NeverOverdue):
    """A runner that is never asked to run."""

    def run(self, batch: Batch) -> BatchResult:
        raise AssertionError

    def start(self, batch: Batch, done: BatchDone) -> None:
        raise AssertionError


class FakeRunner:
    """Runs batches of one INT64 input with two axes; the duration is a function of the padded rows.

    It accepts ``depth`` batches at a time and computes them one after the other.

    ``runs`` lists the runs in order. ``violations`` lists the caller's violations of the contract of a batch and of
    ``Runner``. They are recorded and not raised, because the batcher handles every error of a run as a failed run.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: FakeClock,
        latency_ns: Callable[[int], int] = lambda rows: 1_000_000,
        compute: Callable[[np.ndarray], Arrays] = answer,
        depth: int = 1,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self.latency_ns = latency_ns
        self._compute = compute
        self._depth = depth
        self._in_flight = 0
        self._free_at_ns = 0
        self.runs: list[FakeRun] = []
        self.violations: list[str] = []
        self.terminated = 0
        self.is_endless = False
        self.is_abandoned = False
        self._pending: list[tuple[Batch, asyncio.TimerHandle, BatchDone]] = []

    def run(self, batch: Batch) -> BatchResult:
        """Run at once: advance the clock by the duration."""
        began_ns = self._begin(batch)
        self._clock.advance(self.latency_ns(batch.bucket))
        outcome = self._end(batch, began_ns, is_inline=True)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def start(self, batch: Batch, done: BatchDone) -> None:
        """Call ``done`` after the duration."""
        began_ns = self._begin(batch)
        computes_ns = max(began_ns, self._free_at_ns)
        self._free_at_ns = computes_ns + self.latency_ns(batch.bucket)
        seconds = (self._free_at_ns - began_ns) / 1e9

        def end() -> None:
            self._forget(batch)
            done(self._end(batch, computes_ns, is_inline=False))

        self._pending.append((batch, self._loop.call_later(seconds, end), done))

    def terminate(self, batch: Batch) -> None:
        """End the run at once with an error, unless ``is_endless`` or it has ended already."""
        self.terminated += 1
        pending = None if self.is_endless else self._forget(batch)
        if pending is not None:
            timer, done = pending
            timer.cancel()
            self._in_flight -= 1
            if not self._pending:
                self._free_at_ns = self._clock()
            done(ServeError(ErrorKind.INTERNAL, "terminate flag"))

    def _forget(self, batch: Batch) -> tuple[asyncio.TimerHandle, BatchDone] | None:
        """Remove a run, and return its timer and callback; None if it has ended."""
        for place, (pending, timer, done) in enumerate(self._pending):
            if pending is batch:
                del self._pending[place]
                return timer, done
        return None

    def abandon(self) -> None:
        self.is_abandoned = True

    @property
    def is_running(self) -> bool:
        return self._in_flight > 0

    def _begin(self, batch: Batch) -> int:
        if self._in_flight == self._depth:
            self.violations.append(f"more than {self._depth} runs at once")
        self._in_flight += 1
        (parts,) = batch.parts
        if len({part.shape[1:] for part in parts}) != 1:
            self.violations.append(f"shapes mixed: {[part.shape for part in parts]}")
        if batch.bucket < batch.rows:
            self.violations.append(f"{batch.rows} rows do not fit into {batch.bucket}")
        if sum(map(len, parts)) != batch.rows:
            self.violations.append(f"{batch.rows} rows announced, {sum(map(len, parts))} came")
        return self._clock()

    def _end(self, batch: Batch, began_ns: int, *, is_inline: bool) -> BatchResult | Exception:
        self._in_flight -= 1
        (parts,) = batch.parts
        run = FakeRun(parts, batch.rows, batch.bucket, is_inline, began_ns, self._clock())
        self.runs.append(run)
        if run.has_failed:
            return ServeError(ErrorKind.INTERNAL, "a row is poisoned")
        try:
            outputs = self._compute(np.concatenate(parts))
        except Exception as error:
            return error
        return BatchResult(outputs, run.began_ns, run.ended_ns, run.ended_ns - run.began_ns)


def rows_of(*values: int, width: int = 2) -> np.ndarray:
    """A request with a row for each value, filled with that value."""
    column = np.array(values, np.int64).reshape(-1, 1)
    return np.repeat(column, width, axis=1)


def first_values(parts: Sequence[np.ndarray]) -> list[int]:
    """The first element of each row of each part."""
    return [int(value) for part in parts for value in part[:, 0]]
