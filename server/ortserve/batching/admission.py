"""Admission: rejects a request before it is queued if the queue is full or the request cannot finish in time.

Without admission, an overloaded queue answers no request in time. A request without a prediction is not rejected for
its deadline.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from ortserve.batching.instances import Instances
from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RequestQueue, ShapeClass
from ortserve.batching.statistics import Decisions
from ortserve.core.inflight import InflightRequest
from ortserve.errors import ErrorKind, ServeError, invalid_input

_RETRY_AFTER_S: Final = 1.0
"""Suggested delay of a retry if it cannot be predicted."""
_PRICED_CLASSES: Final = 16
"""Maximum number of other shape classes whose queued batches are predicted for a new request with a deadline. It bounds
the time of admission. Rows of further classes count as if they had the shape of the new request."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The predicted work ahead of a new request, in nanoseconds.

    Attributes:
        busy_ns: Time until an instance is idle; 0 if one is.
        queued_ns: Time of the batches ahead of the request, spread over the instances.
        own_ns: Time of the request's batch, with the other requests in it.
        solo_ns: Time of the request's rows alone.
        error_ns: Prediction error that at most one of twenty batches exceeds.
        answer_ns: Time to encode and write the answer.
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
        """Time from now until the request is answered."""
        return self.wait_ns + self.own_ns + self.error_ns + self.answer_ns


@dataclass(frozen=True, slots=True)
class TooLate:
    """Why a request is rejected for its deadline.

    Attributes:
        excess_ns: How late the answer would be, which is also the suggested delay of a retry.
        is_hopeless: A retry cannot help, because the request alone takes longer than its caller waits.
    """

    excess_ns: float
    is_hopeless: bool


def judge(left_ns: float, backlog: Backlog, observations: int) -> TooLate | None:
    """Decide whether a request can be answered in the time that is left; None to admit it.

    Args:
        left_ns: Time until the deadline; not positive if it has passed.
        backlog: The predicted work.
        observations: Number of batches of this shape class that the prediction is based on.
    """
    if left_ns <= 0:
        return TooLate(0.0, is_hopeless=True)
    is_idle = backlog.wait_ns <= 0
    if is_idle or observations < MIN_OBSERVATIONS or backlog.finish_ns <= left_ns:
        return None
    return TooLate(backlog.finish_ns - left_ns, is_hopeless=backlog.solo_ns > left_ns)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue of one model. An empty queue admits a request of any size, which could never run otherwise.

    ``requests`` maps a priority level to the maximum number of its queued requests; other levels have no such limit.
    """

    rows: int
    nbytes: int
    requests: Mapping[int, int] = field(default_factory=dict)


class Admission:
    """Admits requests to the queue of one batcher, or rejects them. Loop thread only."""

    def __init__(self, queue: RequestQueue, limits: QueueLimits, decisions: Decisions, instances: Instances) -> None:
        """``queue`` and ``instances`` are the batcher's; ``decisions`` counts rejections."""
        self._queue = queue
        self._limits = limits
        self._decisions = decisions
        self._instances = instances

    def check_weight(self, nbytes: int, rows: int) -> None:
        """Reject a request with more rows than may be queued and less than one byte per row.

        Such rows cost the client nothing: a few digits of a shape announce any number of them.

        Raises:
            ServeError: invalid_input.
        """
        if nbytes < rows > self._limits.rows:
            raise invalid_input(
                f"expected at most max_queue_rows {self._limits.rows} rows of less than a byte each, got {rows} rows "
                f"of {nbytes} bytes"
            )

    def check_room(self, request: InflightRequest, shape_class: ShapeClass, policy: BatchPolicy) -> None:
        """Reject a request that does not fit into the queue, or whose priority level has too many queued requests.

        Raises:
            ServeError: overloaded.
        """
        queue, limits = self._queue, self._limits
        if queue.rows and (queue.rows + request.rows > limits.rows or queue.nbytes + request.nbytes > limits.nbytes):
            self._decisions.refused_full += 1
            full_ns = shape_class.batch_latency.predict_ns(policy.max_rows) or 0.0
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"Exceeds maximum queue size: {queue.rows} rows with {queue.nbytes} bytes are queued, the limits are "
                f"max_queue_rows {limits.rows} and max_queue_bytes {limits.nbytes}",
                retry_after_s=queue.rows / policy.max_rows * full_ns / self._instances.count / 1e9 or _RETRY_AFTER_S,
            )
        most = limits.requests.get(request.level)
        if most is not None and queue.requests(request.level) >= most:
            self._decisions.refused_full += 1
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"Exceeds maximum queue size: {queue.requests(request.level)} requests of its priority level are "
                f"queued, the limit is {most}",
                retry_after_s=_RETRY_AFTER_S,
            )

    def check_deadline(
        self,
        request: InflightRequest,
        shape_class: ShapeClass,
        policy: BatchPolicy,
        last_rows: int,
        answer_ns: float,
        busy_ns: float,
        slowdown: float,
        now_ns: int,
    ) -> None:
        """Reject a request that cannot be answered in time.

        Args:
            request: A request whose ``finish_by_ns`` is set.
            shape_class: The class of the request.
            policy: The current limits of batches.
            last_rows: Rows of the last batch: under a steady load the next one will have about as many.
            answer_ns: Time from ``finish_by_ns`` to the deadline of the answer.
            busy_ns: Predicted time until an instance is idle.
            slowdown: Factor by which the work ahead takes longer because other models use the threads, too.
            now_ns: Monotonic time.

        Raises:
            ServeError: overloaded if a retry may be in time, deadline if the request by itself takes too long.
        """
        assert request.finish_by_ns is not None
        settle_ns = request.finish_by_ns - now_ns
        if self._is_far(request.rows, shape_class, policy, settle_ns, busy_ns, slowdown):
            return
        usual_rows = last_rows if busy_ns > 0 else 0
        backlog = self._backlog(request, shape_class, policy, usual_rows, answer_ns, busy_ns, slowdown, now_ns)
        left_ns = settle_ns + answer_ns
        verdict = judge(left_ns, backlog, shape_class.batch_latency.observations)
        if verdict is not None:
            self._decisions.refused_late += 1
            raise _rejection(verdict, left_ns, backlog)

    def _is_far(
        self,
        rows: int,
        shape_class: ShapeClass,
        policy: BatchPolicy,
        settle_ns: float,
        busy_ns: float,
        slowdown: float,
    ) -> bool:
        """Whether the deadline would be met even if each queued row took the time of two full batches.

        Most deadlines would, since they only guard against hangs. They need no detailed prediction.
        """
        if self._queue.rows != shape_class.rows:
            return False
        latency = shape_class.batch_latency
        full_ns = policy.batch_ns(policy.max_rows, latency)
        batches = shape_class.rows + rows + 1
        return busy_ns + 2 * batches * (full_ns * slowdown + latency.residual_ns) < settle_ns

    def _backlog(
        self,
        request: InflightRequest,
        shape_class: ShapeClass,
        policy: BatchPolicy,
        usual_rows: int,
        answer_ns: float,
        busy_ns: float,
        slowdown: float,
        now_ns: int,
    ) -> Backlog:
        assert request.finish_by_ns is not None
        settle_ns = request.finish_by_ns - now_ns
        latency, rows, max_rows = shape_class.batch_latency, request.rows, policy.max_rows
        order = (request.level, shape_class.due_ns(request.finish_by_ns, now_ns, max_rows))
        first_ns = settle_ns
        if shape_class.requests and shape_class.requests[0].finish_by_ns is not None:
            first_ns = min(settle_ns, shape_class.requests[0].finish_by_ns - now_ns)
        # Under a steady load a request arrives just after a batch has begun, waits for it and runs in the next one. So
        # each of the two may take half of the time, or more if the first queued request has more time left.
        fits = max(min(rows, max_rows), _most_rows(policy, latency, max(settle_ns / 2, first_ns - busy_ns)))
        others = self._others(shape_class, policy, order)
        ahead = shape_class.rows_ahead(order) + others.unpriced_rows
        batches_ahead = (ahead + min(rows, fits) - 1) // fits
        # Requests that arrive while this one waits join its batch, too. A batch kept small for the deadlines of earlier
        # requests would make all requests behind it late.
        own_rows = fits if batches_ahead else min(max(ahead + rows, usual_rows), fits)
        own_batches = -(-rows // max_rows)
        ahead_ns = others.work_ns + batches_ahead * policy.batch_ns(fits, latency)
        return Backlog(
            busy_ns=busy_ns,
            queued_ns=ahead_ns / self._instances.count * slowdown,
            own_ns=policy.batch_ns(own_rows, latency) * own_batches,
            solo_ns=policy.batch_ns(min(rows, max_rows), latency) * own_batches,
            # The errors of consecutive runs add up like independent errors.
            error_ns=math.hypot(
                latency.residual_ns * math.sqrt(own_batches + batches_ahead + (busy_ns > 0)), others.error_ns
            ),
            answer_ns=answer_ns,
        )

    def _others(self, shape_class: ShapeClass, policy: BatchPolicy, order: tuple[int, float]) -> "_OtherWork":
        """The work of other shape classes ahead of a request of this order: full batches and a rest for each class."""
        if self._queue.rows == shape_class.rows:
            return _NO_OTHER_WORK
        max_rows = policy.max_rows
        work_ns = error_ns = 0.0
        unpriced_rows = self._queue.rows - shape_class.rows
        for other in islice(self._queue.others(shape_class), _PRICED_CLASSES):
            unpriced_rows -= other.rows
            full, rest = divmod(other.rows_ahead(order), max_rows)
            latency = other.batch_latency
            if full:
                work_ns += full * policy.batch_ns(max_rows, latency)
            if rest:
                work_ns += policy.batch_ns(rest, latency)
            error_ns = math.hypot(error_ns, latency.residual_ns * math.sqrt(full + (rest > 0)))
        return _OtherWork(work_ns, error_ns, unpriced_rows)


@dataclass(frozen=True, slots=True)
class _OtherWork:
    """Predicted work of other shape classes, its prediction error, and rows of classes beyond ``_PRICED_CLASSES``."""

    work_ns: float
    error_ns: float
    unpriced_rows: int


_NO_OTHER_WORK: Final = _OtherWork(0.0, 0.0, 0)


def _most_rows(policy: BatchPolicy, latency: LatencyModel, ns: float) -> int:
    """Maximum rows of a batch that takes at most ``ns``; 0 if even one row takes longer."""
    max_rows = policy.max_rows
    if policy.batch_ns(max_rows, latency) <= ns:
        return max_rows
    return bisect_right(range(1, max_rows + 1), ns, key=lambda rows: policy.batch_ns(rows, latency))


def _rejection(verdict: TooLate, left_ns: float, backlog: Backlog) -> ServeError:
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
