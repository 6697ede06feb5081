"""The outcomes of requests. A generator records them and sends them in chunks; the measuring process joins these."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

_MAX_TIMINGS: Final = 2000
_MAX_BODY_BYTES: Final = 4 * 2**20
"""Limits of the timings and bodies that a chunk keeps."""
LOOK_EVERY: Final = 37
"""One in this many answers is compared. It is coprime with the number of different inputs, so that each is compared."""


@dataclass(slots=True)
class Ticket:
    """One request in flight.

    Attributes:
        number: The requests of a generator are numbered. The numbers of one caller of a closed loop are ``callers``
            apart.
        due_ns: When the request should be sent (monotonic).
        sent_ns: When it was sent.
        wants_body: Whether its answer is compared with the expected outputs.
        request: The index of the prepared request.
    """

    number: int
    due_ns: int
    sent_ns: int
    wants_body: bool = False
    request: int = 0


@dataclass(slots=True)
class Chunk:
    """The requests that ended since the last chunk.

    Attributes:
        times: Four integers per request: due, sent and done (monotonic nanoseconds), and 1 if it was answered, else 0.
        carried: The same of requests of the warm-up that were answered in the measurement. Only rates count them.
        failures: Counts by kind.
        examples: The text of one failure of each kind.
        timings: ``Server-Timing`` of some answers.
        bodies: Ticket number and content of some answers.
    """

    times: "array[int]" = field(default_factory=lambda: array("q"))
    carried: "array[int]" = field(default_factory=lambda: array("q"))
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    timings: list[bytes] = field(default_factory=list)
    bodies: list[tuple[int, object]] = field(default_factory=list)

    @property
    def answers(self) -> int:
        return len(self.times) // 4 - self.failures.total()


class Recorder:
    """Collects outcomes in chunks. Used by one thread at a time."""

    def __init__(self, begin_ns: int, look_every: int = LOOK_EVERY) -> None:
        """Record nothing yet.

        Args:
            begin_ns: Requests that are due before it belong to the warm-up. Only their answers after it are recorded.
            look_every: One in this many answers is kept for comparison, and the first one of the measurement, as slow
                targets may give no more.
        """
        self._begin_ns = begin_ns
        self._chunk = Chunk()
        self._body_bytes = 0
        self._look_every = look_every
        self._has_looked = False

    def wants_body(self, number: int, due_ns: int) -> bool:
        """Whether the answer to request ``number``, which is due at ``due_ns``, is kept for comparison."""
        is_first = due_ns >= self._begin_ns and not self._has_looked
        self._has_looked |= is_first
        return is_first or number % self._look_every == 0

    def answered(
        self, ticket: Ticket, done_ns: int, nbytes: int, timing: bytes | None = None, body: object = None
    ) -> None:
        """The answer arrived at ``done_ns``. ``timing`` is ``Server-Timing``; ``body`` only if the ticket wants it."""
        chunk, outcome = self._chunk, (ticket.due_ns, ticket.sent_ns, done_ns, 1)
        if ticket.due_ns < self._begin_ns:
            if done_ns >= self._begin_ns:
                chunk.carried.extend(outcome)
            return
        chunk.times.extend(outcome)
        if timing is not None and len(chunk.timings) < _MAX_TIMINGS:
            chunk.timings.append(timing)
        if body is not None and (not self._body_bytes or self._body_bytes + nbytes <= _MAX_BODY_BYTES):
            self._body_bytes += nbytes
            chunk.bodies.append((ticket.number, body))

    def failed(self, ticket: Ticket, done_ns: int, kind: str, example: str) -> None:
        """The request was rejected or timed out, its connection was lost, or its answer is malformed."""
        if ticket.due_ns < self._begin_ns:
            return
        self._chunk.times.extend((ticket.due_ns, ticket.sent_ns, done_ns, 0))
        self._chunk.failures[kind] += 1
        self._chunk.examples.setdefault(kind, example[:300])

    def take(self) -> Chunk:
        """Return the current chunk and begin a new one."""
        chunk, self._chunk, self._body_bytes = self._chunk, Chunk(), 0
        return chunk


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of the requests of all generators, ordered by due time. Times are in nanoseconds."""

    due_ns: np.ndarray
    sent_ns: np.ndarray
    done_ns: np.ndarray
    is_answered: np.ndarray

    def latencies_s(self, *, from_schedule: bool) -> np.ndarray:
        """Latencies of the answered requests, counted from the due time or from the sending."""
        begin = self.due_ns if from_schedule else self.sent_ns
        return np.asarray((self.done_ns - begin)[self.is_answered] / 1e9)


def join(chunks: Iterable[Chunk]) -> Outcomes:
    """Join the chunks of several generators."""
    return _outcomes(chunk.times for chunk in chunks)


def answers_between(chunks: Sequence[Chunk], begin_ns: int, end_ns: int) -> Outcomes:
    """The requests that were answered in the measurement, also those of the warm-up."""
    found = _outcomes(times for chunk in chunks for times in (chunk.times, chunk.carried))
    chosen = found.is_answered & (found.done_ns >= begin_ns) & (found.done_ns <= end_ns)
    return Outcomes(found.due_ns[chosen], found.sent_ns[chosen], found.done_ns[chosen], chosen[chosen])


def _outcomes(times: "Iterable[array[int]]") -> Outcomes:
    rows = np.frombuffer(b"".join(one.tobytes() for one in times), np.int64).reshape(-1, 4)
    due, sent, done, is_answered = rows[np.argsort(rows[:, 0], kind="stable")].T
    return Outcomes(due, sent, done, is_answered == 1)
