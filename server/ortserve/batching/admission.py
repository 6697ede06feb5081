"""Refusing what finds no room or cannot be finished in time, before any work is done for it.

A queue that takes everybody answers nobody in time once it is overloaded. The prediction is only ever used to refuse
early: where it is missing or no number, everybody is let in.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel, known_ns
from ortserve.batching.learned import Decisions
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RiderQueue, ShapeClass
from ortserve.core.batch import Arrays
from ortserve.core.terms import Terms
from ortserve.errors import ErrorKind, ServeError, invalid_input

_RETRY_AFTER_S: Final = 1.0
"""Where nothing is known of how long batches take."""
_PRICED_CLASSES: Final = 16
"""Other shape classes whose waiting batches are predicted one by one for each newcomer with a deadline, for some 15 µs
(measured). What waits beyond counts as if it were of the newcomer's shape."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What stands before a newcomer, predicted, in nanoseconds.

    Attributes:
        busy_ns: Until an instance is free, 0 where one is.
        queued_ns: Work of the batches that go before its own, divided by the instances.
        own_ns: Its own batch.
        solo_ns: Its own rows, were they alone.
        error_ns: By how much predictions fall short in all but one of twenty batches.
        answer_ns: Encoding and writing its answer.
    """

    busy_ns: float
    queued_ns: float
    own_ns: float
    solo_ns: float
    error_ns: float
    answer_ns: float = 0.0

    @property
    def wait_ns(self) -> float:
        return self.busy_ns + self.queued_ns

    @property
    def finish_ns(self) -> float:
        """From now to its answer."""
        return self.wait_ns + self.own_ns + self.error_ns + self.answer_ns


@dataclass(frozen=True, slots=True)
class TooLate:
    """Why somebody is refused.

    Attributes:
        excess_ns: By how much the answer would be late: how long to wait before trying again.
        is_hopeless: No wait helps, because the request alone takes longer than its caller has.
    """

    excess_ns: float
    is_hopeless: bool


def judge(left_ns: float, backlog: Backlog, observations: int) -> TooLate | None:
    """Say whether somebody with so much time left can still be answered in it; None to let them in.

    Args:
        left_ns: Until the deadline; not positive when it has passed.
        backlog: As predicted now.
        observations: Batches of this shape class that the prediction rests on.
    """
    if left_ns <= 0:
        return TooLate(0.0, is_hopeless=True)
    is_idle = backlog.wait_ns <= 0
    if is_idle or observations < MIN_OBSERVATIONS or not math.isfinite(backlog.finish_ns):
        return None
    if backlog.finish_ns <= left_ns:
        return None
    return TooLate(backlog.finish_ns - left_ns, is_hopeless=backlog.solo_ns > left_ns)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait for one model. An empty queue takes anything: what is too much alone would never get in.

    ``requests`` is how many may wait on a priority level, for levels that have such a bound.
    """

    rows: int
    nbytes: int
    requests: Mapping[int, int] = field(default_factory=dict)


class Admission:
    """Says who may enter a batcher's queue. Loop thread only."""

    def __init__(
        self,
        policy: Callable[[], BatchPolicy],
        queue: RiderQueue,
        limits: QueueLimits,
        decisions: Decisions,
        *,
        instances: int,
    ) -> None:
        """``policy`` gives the batcher's present one and ``queue`` is its own; ``decisions`` counts refusals."""
        self._policy = policy
        self._queue = queue
        self._limits = limits
        self._decisions = decisions
        self._instances = instances
        self._batch_rows = 0

    def on_batch(self, rows: int) -> None:
        """Note how many rows the batch chosen last has: under a steady load the next one will hold about as many."""
        self._batch_rows = rows

    def check_weight(self, nbytes: int, rows: int) -> None:
        """Let a newcomer's rows in that are more than may wait, as long as somebody had to send them.

        Raises:
            ServeError: invalid_input, for rows of no bytes, of which a few digits announce any number.
        """
        if nbytes < rows > self._limits.rows:
            raise invalid_input(
                f"expected at most max_queue_rows {self._limits.rows} rows where there is less than a byte of a row, "
                f"got {rows} rows of {nbytes} bytes"
            )

    def check_room(self, nbytes: int, rows: int, shape_class: ShapeClass) -> None:
        """Let a newcomer in whose tensors have so many bytes and rows, or say that there is no room.

        Raises:
            ServeError: overloaded.
        """
        queue, limits = self._queue, self._limits
        if queue and (queue.rows + rows > limits.rows or queue.nbytes + nbytes > limits.nbytes):
            self._decisions.refused_full += 1
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"Exceeds maximum queue size: {queue.rows} rows of {queue.nbytes} bytes wait, at most max_queue_rows "
                f"{limits.rows} and max_queue_bytes {limits.nbytes} may",
                retry_after_s=self._queued_ns(queue.rows, shape_class) / 1e9 or _RETRY_AFTER_S,
            )

    def check_level(self, terms: Terms) -> None:
        """Let a newcomer in on its priority level, or say that too many wait there.

        Raises:
            ServeError: overloaded.
        """
        most = self._limits.requests.get(terms.level or 1)
        if most is None:
            return
        waiting = self._queue.requests(terms.level or 1)
        if waiting >= most:
            self._decisions.refused_full += 1
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"Exceeds maximum queue size: {waiting} requests of its priority level wait, at most {most} may",
                retry_after_s=_RETRY_AFTER_S,
            )

    def check_deadline(
        self,
        rows: int,
        shape_class: ShapeClass,
        terms: Terms,
        answer_ns: float,
        busy_ns: float,
        slowdown: float,
        now_ns: int,
    ) -> None:
        """Let a newcomer in who can be answered in time, or say that it cannot.

        Args:
            rows: Of the request.
            shape_class: Its own.
            terms: Its level and deadline for the outputs; there is one.
            answer_ns: Between that and the deadline for its answer.
            busy_ns: Until an instance is free, predicted.
            slowdown: How many times longer the work ahead takes, because other models want the threads, too.
            now_ns: Monotonic.

        Raises:
            ServeError: overloaded when it could be in time later, deadline when it could not even by itself.
        """
        assert terms.finish_by_ns is not None
        settle_ns = terms.finish_by_ns - now_ns
        if self._is_far(rows, shape_class, settle_ns, busy_ns, slowdown):
            return
        order = (terms.level or 1, terms.finish_by_ns)
        backlog = self._backlog(rows, shape_class, order, settle_ns, answer_ns, busy_ns, slowdown, now_ns)
        left_ns = settle_ns + answer_ns
        verdict = judge(left_ns, backlog, shape_class.batch_latency.observations)
        if verdict is not None:
            self._decisions.refused_late += 1
            raise _refusal(verdict, left_ns, backlog)

    def _is_far(self, rows: int, shape_class: ShapeClass, settle_ns: float, busy_ns: float, slowdown: float) -> bool:
        """Whether there is time enough even if each row of those who wait took a full batch of its own, twice over.

        Most deadlines are such: they are there in case that something hangs, and are not worth a forecast.
        """
        if self._queue.rows != shape_class.rows:
            return False
        latency = shape_class.batch_latency
        full_ns = known_ns(self._predict_ns(latency, self._policy().max_rows))
        batches = shape_class.rows + rows + 1
        return busy_ns + 2 * batches * (full_ns * slowdown + latency.residual_ns) < settle_ns

    def _backlog(
        self,
        rows: int,
        shape_class: ShapeClass,
        order: tuple[int, float],
        settle_ns: float,
        answer_ns: float,
        busy_ns: float,
        slowdown: float,
        now_ns: int,
    ) -> Backlog:
        latency = shape_class.batch_latency
        max_rows = self._policy().max_rows
        first_ns = settle_ns
        if shape_class.riders and shape_class.riders[0].finish_by_ns is not None:
            first_ns = min(settle_ns, shape_class.riders[0].finish_by_ns - now_ns)
        # Under a steady load somebody comes just when a batch has begun, waits for it and rides in the next one, so
        # that each may take half of what there is; more where the first who waits has more left by then.
        fits = max(min(rows, max_rows), self._most_rows(latency, max(settle_ns / 2, first_ns - busy_ns)))
        strangers = self._strangers(shape_class, order)
        ahead = shape_class.rows_ahead(order) + strangers.unpriced_rows
        batches_ahead = (ahead + min(rows, fits) - 1) // fits
        # Not only those who are here already will ride along: others come while it waits, and a batch that is kept
        # small for the sake of those who were promised less makes everybody behind it late.
        usual_rows = self._batch_rows if busy_ns > 0 else 0
        own_rows = fits if batches_ahead else min(max(ahead + rows, usual_rows), fits)
        own_ns = self._predict_ns(latency, own_rows)
        if own_ns is None:
            own_ns = math.nan  # as no number: it refuses nobody
        own_batches = -(-rows // max_rows)
        ahead_ns = strangers.work_ns + batches_ahead * known_ns(self._predict_ns(latency, fits))
        solo_ns = self._predict_ns(latency, min(rows, max_rows)) or 0.0
        return Backlog(
            busy_ns=busy_ns,
            queued_ns=ahead_ns / self._instances * slowdown,
            own_ns=own_ns * own_batches,
            solo_ns=solo_ns * own_batches,
            # Errors of runs one after another add up like independent ones.
            error_ns=math.hypot(
                latency.residual_ns * math.sqrt(own_batches + batches_ahead + (busy_ns > 0)), strangers.error_ns
            ),
            answer_ns=answer_ns,
        )

    def _strangers(self, shape_class: ShapeClass, order: tuple[int, float]) -> "_Strangers":
        """The work of other shape classes that goes before somebody of this order: full batches, and a last one."""
        if self._queue.rows == shape_class.rows:
            return _NO_STRANGERS
        others = iter(self._queue.strangers(shape_class))
        max_rows = self._policy().max_rows
        work_ns = error_ns = 0.0
        for other in islice(others, _PRICED_CLASSES):
            full, rest = divmod(other.rows_ahead(order), max_rows)
            latency = other.batch_latency
            if full:
                work_ns += full * known_ns(self._predict_ns(latency, max_rows))
            if rest:
                work_ns += known_ns(self._predict_ns(latency, rest))
            error_ns = math.hypot(error_ns, latency.residual_ns * math.sqrt(full + (rest > 0)))
        return _Strangers(work_ns, error_ns, sum([other.rows for other in others]))

    def _most_rows(self, latency: LatencyModel, ns: float) -> int:
        """The most rows of a batch that takes no longer than ``ns``; 0 where not even one does."""
        sizes = range(1, self._policy().max_rows + 1)
        if known_ns(self._predict_ns(latency, sizes[-1])) <= ns:
            return sizes[-1]
        return bisect_right(sizes, ns, key=lambda rows: known_ns(self._predict_ns(latency, rows)))

    def _predict_ns(self, latency: LatencyModel, rows: int) -> float | None:
        return latency.predict_ns(self._policy().bucket_for(rows))

    def _queued_ns(self, rows: int, shape_class: ShapeClass) -> float:
        max_rows = self._policy().max_rows
        full_ns = known_ns(shape_class.batch_latency.predict_ns(max_rows))
        return rows / max_rows * full_ns / self._instances


@dataclass(frozen=True, slots=True)
class _Strangers:
    """Predicted work of other shape classes, the error of that, and rows of classes too many to predict."""

    work_ns: float
    error_ns: float
    unpriced_rows: int


_NO_STRANGERS: Final = _Strangers(0.0, 0.0, 0)


def tensor_bytes(arrays: Arrays) -> int:
    """What they take in memory; elements of texts count as pointers."""
    return sum([array.nbytes for array in arrays])


def _refusal(verdict: TooLate, left_ns: float, backlog: Backlog) -> ServeError:
    left_ms = max(0.0, left_ns) / 1e6
    if verdict.is_hopeless:
        return ServeError(
            ErrorKind.DEADLINE,
            f"deadline cannot be met: {left_ms:.1f} ms are left, and the request alone takes "
            f"{backlog.solo_ns / 1e6:.1f} ms",
        )
    return ServeError(
        ErrorKind.OVERLOADED,
        f"deadline cannot be met: {left_ms:.1f} ms are left, and the answer is expected in "
        f"{backlog.finish_ns / 1e6:.1f} ms, {backlog.wait_ns / 1e6:.1f} ms of it waiting",
        retry_after_s=verdict.excess_ns / 1e9,
    )
