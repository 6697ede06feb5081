"""The times at which a request, and each step of an ensemble, reached each phase."""

from dataclasses import dataclass
from typing import Final

from ortserve.errors import ErrorKind

PHASES: Final = ("decode", "queue", "stage", "compute", "encode")
"""Consecutive, so that they sum to the total: body complete → queued → chosen for a batch → rows staged → computed →
answer passed to the transport. ``encode`` includes the wakeup of the event loop by the worker."""


@dataclass(slots=True, init=False)
class Timing:
    """Monotonic nanoseconds; 0 for points not reached. Written by one thread at a time, in the order of the fields.

    Only ``begun_ns`` is earlier than the others: when the head of the request was complete, 0 if the protocol does not
    show it. ``batch_rows`` is the number of rows of the request's batch, 0 if no batch was computed. ``is_cached``:
    whether the outputs are those of an equal request (``batching/cached_runs``). ``steps`` are the ended steps of an
    ensemble.
    """

    received_ns: int
    queued_ns: int
    taken_ns: int
    staged_ns: int
    computed_ns: int
    done_ns: int
    begun_ns: int
    batch_rows: int
    is_cached: bool
    steps: tuple["EndedStep", ...]

    def __init__(
        self,
        received_ns: int,
        queued_ns: int = 0,
        taken_ns: int = 0,
        staged_ns: int = 0,
        computed_ns: int = 0,
        done_ns: int = 0,
        begun_ns: int = 0,
        batch_rows: int = 0,
        *,
        is_cached: bool = False,
        steps: tuple["EndedStep", ...] = (),
    ) -> None:
        self.received_ns = received_ns
        self.queued_ns = queued_ns
        self.taken_ns = taken_ns
        self.staged_ns = staged_ns
        self.computed_ns = computed_ns
        self.done_ns = done_ns
        self.begun_ns = begun_ns
        self.batch_rows = batch_rows
        self.is_cached = is_cached
        self.steps = steps

    def phases_ns(self) -> tuple[int, int, int, int, int]:
        """Durations in the order of ``PHASES``; valid once all points were reached."""
        return (
            self.queued_ns - self.received_ns,
            self.taken_ns - self.queued_ns,
            self.staged_ns - self.taken_ns,
            self.computed_ns - self.staged_ns,
            self.done_ns - self.computed_ns,
        )

    def server_timing(self) -> bytes:
        """The phases in milliseconds, in the format of the header ``Server-Timing`` (W3C Server Timing, section 2)."""
        return b"decode;dur=%.3f, queue;dur=%.3f, stage;dur=%.3f, compute;dur=%.3f, encode;dur=%.3f" % (
            (self.queued_ns - self.received_ns) / 1e6,
            (self.taken_ns - self.queued_ns) / 1e6,
            (self.staged_ns - self.taken_ns) / 1e6,
            (self.computed_ns - self.staged_ns) / 1e6,
            (self.done_ns - self.computed_ns) / 1e6,
        )


@dataclass(slots=True, init=False)
class EndedStep:
    """A step of an ensemble that ended, for traces.

    Attributes:
        model: Name of the member.
        version: Version of the member.
        timing: The points that the step reached; no longer changed.
        ended_ns: End of the step (monotonic).
        kind: Kind of error; None for a step that was answered.
        rows: Rows of the step's request.
    """

    model: Final[str]
    version: Final[str]
    timing: Final[Timing]
    ended_ns: Final[int]
    kind: Final[ErrorKind | None]
    rows: Final[int]

    def __init__(
        self, model: str, version: str, timing: Timing, ended_ns: int, kind: ErrorKind | None, rows: int
    ) -> None:
        self.model = model
        self.version = version
        self.timing = timing
        self.ended_ns = ended_ns
        self.kind = kind
        self.rows = rows
