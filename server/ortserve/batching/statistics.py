"""Measurements and counts of a batcher: arrivals, the time of answers, saturation, and its decisions.

``describe`` makes plain numbers of them for operators, only when they are read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ortserve.batching.queue import RequestQueue, ShapeClass

_RATE_INTERVAL_NS: Final = 1e9
_RATE_MEMORY_NS: Final = 5e9

_MEAN_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4
_DEVIATIONS: Final = 2
"""Two mean deviations are 1.6 standard deviations of a normal distribution: 19 of 20 batches are answered faster."""
_ANSWER_INTERVAL_NS: Final = 2_000_000
"""Minimum time between two measured batches, because a measurement takes a turn of the event loop."""
_MAX_RATIO: Final = 10
"""An observation counts as at most this multiple of the mean, so that one long pause does not reject the next hundred
requests."""


class ArrivalRate:
    """Arriving rows per second, including rejected ones: an exponentially weighted rate with a memory of 5 s.

    Written on the loop thread only.
    """

    __slots__ = ("_at_ns", "_per_s", "_rows")

    def __init__(self) -> None:
        self._per_s = 0.0
        self._rows = 0
        self._at_ns = 0

    def count(self, rows: int, now_ns: int) -> None:
        self._rows += rows
        if now_ns - self._at_ns > _RATE_INTERVAL_NS:  # not for each request: the rate is seldom read
            self._per_s = self.per_s(now_ns)
            self._rows = 0
            self._at_ns = now_ns

    def per_s(self, now_ns: int) -> float:
        """Rows per second."""
        passed_ns = now_ns - self._at_ns
        if self._at_ns == 0 or passed_ns <= 0:
            return self._per_s
        kept = math.exp(-passed_ns / _RATE_MEMORY_NS)
        return kept * self._per_s + (1 - kept) * self._rows / (passed_ns / 1e9)


class AnswerTime:
    """How long encoding and writing the answers of a batch takes: a mean and a mean deviation.

    Both are exponentially weighted, as TCP estimates round trips (RFC 6298, section 2). Loop thread only.

    Attributes:
        high_ns: The time in which nearly all batches are answered; 0 before the first measurement.
        due_ns: Time from which the next batch may be measured (monotonic).
    """

    __slots__ = ("_deviation_ns", "_mean_ns", "due_ns", "high_ns")

    def __init__(self) -> None:
        self._mean_ns = 0.0
        self._deviation_ns = 0.0
        self.high_ns = 0.0
        self.due_ns = 0

    def observe(self, computed_ns: int, now_ns: int) -> None:
        """Learn from a batch whose outputs reached the loop at ``computed_ns`` and whose answers are written now."""
        self.due_ns = now_ns + _ANSWER_INTERVAL_NS
        ns = now_ns - computed_ns
        if not self._mean_ns:
            self._mean_ns = float(ns)
        else:
            off_ns = min(ns, _MAX_RATIO * self._mean_ns) - self._mean_ns
            self._mean_ns += _MEAN_GAIN * off_ns
            self._deviation_ns += _DEVIATION_GAIN * (abs(off_ns) - self._deviation_ns)
        self.high_ns = self._mean_ns + _DEVIATIONS * self._deviation_ns

    def share_ns(self, left_ns: int) -> int:
        """The part of the time until a deadline that is reserved for the answer.

        At least half of the time remains for the queue and the run, so that a wrong measurement cannot reject all
        requests.
        """
        return int(min(self.high_ns, max(0, left_ns) / 2))


def saturation(
    offered_rows_per_s: float, *, batch_rows: int, batch_ns: float | None, parallel_batches: int
) -> float | None:
    """Offered rows per second divided by the rows that can be computed per second: the signal to start more servers.

    Above 1, more rows arrive than can ever be answered.

    Args:
        offered_rows_per_s: Recent arrivals, rejected ones included.
        batch_rows: Rows of a full batch.
        batch_ns: Predicted time of a full batch.
        parallel_batches: Batches that run at a time; 0 if no instance is left.

    Returns:
        None if rows arrive and the time of a batch is unknown, or no instance is left.
    """
    if offered_rows_per_s <= 0:
        return 0.0
    if batch_ns is None or not parallel_batches:
        return None
    return offered_rows_per_s * batch_ns / 1e9 / (batch_rows * parallel_batches)


@dataclass(slots=True)
class Decisions:
    """How often each decision was taken since the model was loaded."""

    batches: int = 0
    """Batches that ran, including those of searches for a failing request."""
    inline: int = 0
    """Batches that ran on the event loop."""
    inline_overruns: int = 0
    """Runs on the event loop over the limit, each of which barred the model from it."""
    retries: int = 0
    """Batches that ran as a part of a failed batch."""
    refused_full: int = 0
    """Requests rejected because the queue was full."""
    refused_late: int = 0
    """Requests rejected because their deadline could not be met."""
    dropped_late: int = 0
    """Requests evicted because they could no longer finish, or start, in time."""
    left: int = 0
    """Requests cancelled while they were queued."""
    wasted_rows: int = 0
    """Rows computed for requests that were cancelled meanwhile."""
    delayed: int = 0
    """Times that an instance was free and a batch waited for more rows because of a configured delay."""
    closed_loop_waits: int = 0
    """Times that a batch waited for the next requests of callers that were just answered."""
    padding_rows: int = 0
    """Rows of padding to fill a bucket."""
    run_timeouts: int = 0
    """Runs that were terminated because they exceeded their time limit."""
    abandoned: int = 0
    """Runs that did not end when they were terminated, and whose instances were abandoned."""
    out_of_memory: int = 0
    """Batches that ran out of memory. Later batches are smaller."""


@dataclass(frozen=True, slots=True)
class LearnedClass:
    """One shape class. Times are milliseconds; ``latency_ms`` is the time of a batch by its rows."""

    shape: str
    waiting_rows: int
    observations: int
    a_ms: float | None
    b_ms: float | None
    error_ms: float
    latency_ms: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Learned:
    """The state of a batcher at one moment.

    Attributes:
        max_rows: Maximum rows of a batch.
        queued_rows: Rows of all queued requests.
        arrival_rows_per_s: Mean over the last seconds, including rejected rows.
        saturation: See the function ``saturation``.
        answer_ms: Time reserved before every deadline: the answers of 19 of 20 batches are encoded and written in it.
        off_loop_because: Why no run uses the event loop; empty if short runs do.
        decisions: See ``Decisions``.
        classes: Shape classes, most recently used first.
    """

    max_rows: int
    queued_rows: int
    arrival_rows_per_s: float
    saturation: float | None
    answer_ms: float
    off_loop_because: str
    decisions: Decisions
    classes: tuple[LearnedClass, ...] = ()


def describe(
    queue: RequestQueue,
    decisions: Decisions,
    *,
    max_rows: int,
    rows_per_s: float,
    saturation: float | None,
    answer_ns: float,
    off_loop_because: str = "",
) -> Learned:
    """Describe a batcher whose batches have at most ``max_rows`` rows. Only reads, so any thread may call it."""
    return Learned(
        max_rows,
        queue.rows,
        rows_per_s,
        saturation,
        answer_ns / 1e6,
        off_loop_because,
        decisions,
        tuple(_describe_class(shape_class, max_rows) for shape_class in reversed(queue.classes())),
    )


def _describe_class(shape_class: ShapeClass, max_rows: int) -> LearnedClass:
    latency = shape_class.batch_latency
    line = latency.line(max_rows)
    return LearnedClass(
        "" if shape_class.key is None else str(shape_class.key),
        shape_class.rows,
        latency.observations,
        line.a_ns / 1e6 if line else None,
        line.b_ns / 1e6 if line else None,
        latency.residual_ns / 1e6,
        {rows: ns / 1e6 for rows, ns in latency.knots().items()},
    )
