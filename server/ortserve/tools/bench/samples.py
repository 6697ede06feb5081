"""What became of each request: written by a generator, sent to the measuring process in chunks, joined there."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

_MOST_TIMINGS: Final = 2000
_MOST_BODY_BYTES: Final = 4 * 2**20
"""What a generator keeps of answers in a chunk; all others are only counted."""


@dataclass(slots=True)
class Ticket:
    """One request on its way.

    Attributes:
        number: Counts the requests of a generator; chooses the inputs.
        due_ns: When it should be sent (monotonic).
        sent_ns: When it was.
        wants_body: Whether its answer is looked at.
    """

    number: int
    due_ns: int
    sent_ns: int
    wants_body: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A kind of failure, with the text of one of them."""

    kind: str
    example: str


@dataclass(slots=True)
class Chunk:
    """What happened since the last chunk.

    Attributes:
        times: Of each request that ended: due, sent and done (monotonic nanoseconds), one after the other.
        codes: Of each: 0 for an answer, otherwise 1 + the index in ``failures``.
        nbytes: Of all answers.
        failures: All kinds that the generator has seen so far, not only in this chunk.
        timings: ``Server-Timing`` of some answers.
        bodies: Number and content of some answers.
        sent: Requests sent so far, those of warm-up apart.
        cpu_ns: Processor time of the generator so far, in the measured time.
        under_way: Requests without an answer.
    """

    times: "array[int]" = field(default_factory=lambda: array("q"))
    codes: bytearray = field(default_factory=bytearray)
    nbytes: int = 0
    failures: list[Failure] = field(default_factory=list)
    timings: list[bytes] = field(default_factory=list)
    bodies: list[tuple[int, object]] = field(default_factory=list)
    sent: int = 0
    cpu_ns: int = 0
    under_way: int = 0


class Recorder:
    """Collects what a generator sees. One thread at a time."""

    def __init__(self, begin_ns: int) -> None:
        """Requests that are due before ``begin_ns`` are warm-up and left out."""
        self._begin_ns = begin_ns
        self._chunk = Chunk()
        self._codes: dict[str, int] = {}
        self._failures: list[Failure] = []
        self._body_bytes = 0

    def answered(
        self, ticket: Ticket, done_ns: int, nbytes: int, timing: bytes | None = None, body: object = None
    ) -> None:
        """Count an answer; ``body`` is it, if the ticket wants it."""
        if ticket.due_ns < self._begin_ns:
            return
        chunk = self._chunk
        chunk.times.extend((ticket.due_ns, ticket.sent_ns, done_ns))
        chunk.codes.append(0)
        chunk.nbytes += nbytes
        if timing is not None and len(chunk.timings) < _MOST_TIMINGS:
            chunk.timings.append(timing)
        if body is not None and (not self._body_bytes or self._body_bytes + nbytes <= _MOST_BODY_BYTES):
            self._body_bytes += nbytes
            chunk.bodies.append((ticket.number, body))

    def failed(self, ticket: Ticket, done_ns: int, kind: str, example: str) -> None:
        """Count a request without a good answer."""
        if ticket.due_ns < self._begin_ns:
            return
        if kind not in self._codes:
            self._failures.append(Failure(kind, example[:300]))
            self._codes[kind] = min(len(self._failures), 255)
        self._chunk.times.extend((ticket.due_ns, ticket.sent_ns, done_ns))
        self._chunk.codes.append(self._codes[kind])

    def take(self, sent: int, cpu_ns: int, under_way: int) -> Chunk:
        """All since the last call."""
        chunk, self._chunk, self._body_bytes = self._chunk, Chunk(), 0
        chunk.failures, chunk.sent, chunk.cpu_ns, chunk.under_way = list(self._failures), sent, cpu_ns, under_way
        return chunk


@dataclass(frozen=True, slots=True)
class Samples:
    """Requests of all generators, in the order in which they were due: nanoseconds, and the kind of failure or ``""``.

    Attributes:
        due_ns: When each should have been sent.
        sent_ns: When it was.
        done_ns: When it ended.
        codes: Index of its kind in ``kinds``; 0 for an answer.
        kinds: The first is ``""``, of answers.
    """

    due_ns: np.ndarray
    sent_ns: np.ndarray
    done_ns: np.ndarray
    codes: np.ndarray
    kinds: tuple[str, ...]

    @property
    def is_answered(self) -> np.ndarray:
        return np.asarray(self.codes == 0)

    def latencies_s(self, *, from_schedule: bool) -> np.ndarray:
        """Of the answered ones, from the moment when they were due or when they were sent."""
        answered = self.is_answered
        begin = self.due_ns if from_schedule else self.sent_ns
        return np.asarray((self.done_ns[answered] - begin[answered]) / 1e9)


def join(chunks: Iterable[Chunk]) -> Samples:
    """Join chunks of any generators."""
    kinds = {"": 0}
    times, codes = [np.empty((0, 3), np.int64)], [np.empty(0, np.uint8)]
    for chunk in chunks:
        own = [0, *(kinds.setdefault(failure.kind, len(kinds)) for failure in chunk.failures)]
        times.append(np.frombuffer(chunk.times, np.int64).reshape(-1, 3))
        codes.append(np.array(own, np.uint8)[np.frombuffer(chunk.codes, np.uint8)])
    rows, code = np.concatenate(times), np.concatenate(codes)
    order = np.argsort(rows[:, 0], kind="stable")
    due, sent, done = rows[order].T
    return Samples(due, sent, done, code[order], tuple(kinds))
