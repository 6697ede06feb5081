"""What became of each request: written by a generator, sent to the measuring process in chunks, joined there."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

_MOST_TIMINGS: Final = 2000
_MOST_BODY_BYTES: Final = 4 * 2**20
"""What a chunk keeps of answers; all others are only counted."""


@dataclass(slots=True)
class Ticket:
    """One request on its way.

    Attributes:
        number: Counts the requests of a generator. Those of one caller of a closed loop are ``callers`` apart.
        due_ns: When it should be sent (monotonic).
        sent_ns: When it was.
        wants_body: Whether its answer is looked at.
        request: Which of the prepared ones.
    """

    number: int
    due_ns: int
    sent_ns: int
    wants_body: bool = False
    request: int = 0


@dataclass(slots=True)
class Chunk:
    """What happened since the last chunk.

    Attributes:
        times: Of each request that ended: due, sent, done (monotonic nanoseconds), and 1 for an answer or 0.
        failures: Numbers by kind.
        examples: Of each kind, the text of one.
        timings: ``Server-Timing`` of some answers.
        bodies: Number and content of some answers.
    """

    times: "array[int]" = field(default_factory=lambda: array("q"))
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    timings: list[bytes] = field(default_factory=list)
    bodies: list[tuple[int, object]] = field(default_factory=list)

    @property
    def answers(self) -> int:
        return len(self.times) // 4 - self.failures.total()


class Recorder:
    """Collects what a generator sees. One thread at a time."""

    def __init__(self, begin_ns: int) -> None:
        """Requests that are due before ``begin_ns`` are warm-up and left out."""
        self._begin_ns = begin_ns
        self._chunk = Chunk()
        self._body_bytes = 0

    def answered(
        self, ticket: Ticket, done_ns: int, nbytes: int, timing: bytes | None = None, body: object = None
    ) -> None:
        """As ``Sink.answered``."""
        if ticket.due_ns < self._begin_ns:
            return
        chunk = self._chunk
        chunk.times.extend((ticket.due_ns, ticket.sent_ns, done_ns, 1))
        if timing is not None and len(chunk.timings) < _MOST_TIMINGS:
            chunk.timings.append(timing)
        if body is not None and (not self._body_bytes or self._body_bytes + nbytes <= _MOST_BODY_BYTES):
            self._body_bytes += nbytes
            chunk.bodies.append((ticket.number, body))

    def failed(self, ticket: Ticket, done_ns: int, kind: str, example: str) -> None:
        """As ``Sink.failed``."""
        if ticket.due_ns < self._begin_ns:
            return
        self._chunk.times.extend((ticket.due_ns, ticket.sent_ns, done_ns, 0))
        self._chunk.failures[kind] += 1
        self._chunk.examples.setdefault(kind, example[:300])

    def take(self) -> Chunk:
        """All since the last call."""
        chunk, self._chunk, self._body_bytes = self._chunk, Chunk(), 0
        return chunk


@dataclass(frozen=True, slots=True)
class Samples:
    """Requests of all generators, in the order in which they were due; times in nanoseconds."""

    due_ns: np.ndarray
    sent_ns: np.ndarray
    done_ns: np.ndarray
    is_answered: np.ndarray

    def latencies_s(self, *, from_schedule: bool) -> np.ndarray:
        """Of the answered ones, from the moment when they were due or when they were sent."""
        begin = self.due_ns if from_schedule else self.sent_ns
        return np.asarray((self.done_ns - begin)[self.is_answered] / 1e9)


def join(chunks: Iterable[Chunk]) -> Samples:
    """Join chunks of any generators."""
    rows = np.frombuffer(b"".join(chunk.times.tobytes() for chunk in chunks), np.int64).reshape(-1, 4)
    due, sent, done, is_answered = rows[np.argsort(rows[:, 0], kind="stable")].T
    return Samples(due, sent, done, is_answered == 1)
