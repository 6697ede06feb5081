"""The numbers of a batcher for operators: its decisions, counted as they are taken; its saturation and what it has
learned, computed only when they are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ortserve.batching.queue import ShapeClass


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


def describe_class(shape_class: ShapeClass, max_rows: int) -> LearnedClass:
    """Describe a shape class of a batcher whose batches have at most ``max_rows`` rows. Called on any thread."""
    latency = shape_class.batch_latency
    line = latency.line(max_rows)
    return LearnedClass(
        shape="" if shape_class.key is None else str(shape_class.key),
        waiting_rows=shape_class.rows,
        observations=latency.observations,
        a_ms=line.a_ns / 1e6 if line else None,
        b_ms=line.b_ns / 1e6 if line else None,
        error_ms=latency.residual_ns / 1e6,
        latency_ms={rows: ns / 1e6 for rows, ns in latency.knots().items()},
    )
