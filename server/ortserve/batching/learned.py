"""What a batcher has learned and decided, for operators: plain numbers, made when somebody asks."""

from collections.abc import Mapping
from dataclasses import dataclass

from ortserve.batching.queue import RiderQueue, ShapeClass


@dataclass(slots=True)
class Decisions:
    """How often each decision was taken, since the model was loaded."""

    batches: int = 0
    """Batches run, those of searches for an offender included."""
    inline: int = 0
    """Of these, run on the event loop."""
    inline_overruns: int = 0
    """Of these, the one that took longer than any may, after which no other runs there."""
    retries: int = 0
    """Of these, run again in part, because the whole failed."""
    refused_full: int = 0
    """Requests refused because the queue was full."""
    refused_late: int = 0
    """Requests refused because their deadline could not be met."""
    dropped_late: int = 0
    """Requests that waited until they could no longer finish, or start, in time."""
    left: int = 0
    """Requests whose callers left while they waited."""
    wasted_rows: int = 0
    """Rows computed for callers who had left by then."""
    delayed: int = 0
    """Times that an instance was free and a batch waited for more, because a delay was set."""
    echo_waits: int = 0
    """Times that a batch waited for callers to come back."""
    padding_rows: int = 0
    """Rows computed for nobody, to fill a bucket."""
    run_timeouts: int = 0
    """Batches that were asked to end, because they were over their time limit."""
    abandoned: int = 0
    """Of these, batches that did not end, whose instances were given up."""
    out_of_memory: int = 0
    """Batches that found too little memory, after each of which batches are smaller."""


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
    """A batcher at one moment.

    ``arrival_rows_per_s`` is a mean over the last seconds, of refused rows too; ``saturation`` is that by what can be
    computed in a second, None where nothing was learned of it. ``answer_ms`` is taken off every deadline: the time in
    which all but one batch of twenty are encoded and written, once their outputs are there. ``off_loop_because`` says
    why no run happens on the event loop, empty where short ones do.
    """

    max_rows: int
    queued_rows: int
    arrival_rows_per_s: float
    saturation: float | None
    answer_ms: float
    off_loop_because: str
    decisions: Decisions
    classes: tuple[LearnedClass, ...] = ()
    """Used last first."""


def describe(
    queue: RiderQueue,
    decisions: Decisions,
    *,
    max_rows: int,
    rows_per_s: float,
    saturation: float | None,
    answer_ns: float,
    off_loop_because: str = "",
) -> Learned:
    """What is known of a batcher whose batches have at most ``max_rows`` rows. Only reads: from any thread."""
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
