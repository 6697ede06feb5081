"""The live sequences of one model version: which has a slot, which waits for one, and which has been idle for too long.

Pure decisions: time is passed in, and ``sequences`` acts on the results.
"""

import asyncio
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final, Protocol, TypeVar

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.inflight import InflightRequest, Terms
from ortserve.core.sequence import SequenceId, SequencePart
from ortserve.errors import ErrorKind

NO_SLOT: Final = -1

ENDED: Final = "ended"
EXPIRED: Final = "expired"
EVICTED: Final = "evicted"
CANCELLED: Final = "cancelled"
FAILED: Final = "failed"
TIMED_OUT: Final = "timed_out"
UNLOADED: Final = "unloaded"
END_REASONS: Final = (ENDED, EXPIRED, EVICTED, CANCELLED, FAILED, TIMED_OUT, UNLOADED)
"""Why sequences end: their last request ran, they were idle for too long, their state grew beyond its limit, a client
cancelled a request before it ran, the first request failed or one was dropped, they waited too long for a slot, or the
model was unloaded."""


def ends_sequence(kind: ErrorKind, *, is_pipelined: bool) -> bool:
    """Whether a sequence ends because one of its requests failed before it ran. Later ones must not run without it.

    A client that awaits each answer can send a rejected request again: no later request waits or was sent. A client
    whose deadline has passed, or that has cancelled, does not learn whether its request ran.

    Args:
        kind: The kind of the error.
        is_pipelined: Whether the client has sent a request of the sequence before the answer to an earlier one.
    """
    is_rejected = kind in (ErrorKind.OVERLOADED, ErrorKind.NOT_READY)
    return kind in (ErrorKind.CANCELLED, ErrorKind.DEADLINE) or (is_rejected and is_pipelined)


class Queued(Protocol):
    """A request in the queue of its sequence. ``number`` grows along the queue."""

    number: int

    @property
    def is_start(self) -> bool:
        """Whether the state begins anew with the request."""
        ...


AnyQueued = TypeVar("AnyQueued", bound=Queued)


def enqueue(waiting: deque[AnyQueued], turn: AnyQueued) -> None:
    """Append a request to the queue of its sequence."""
    turn.number = waiting[-1].number + 1 if waiting else 0
    waiting.append(turn)


def find(waiting: deque[AnyQueued], turn: AnyQueued) -> int:
    """The index of a request in a queue; -1 if it is not there.

    Not by comparing each request: a client may cancel all of a long queue, each in turn.
    """
    index = bisect_left(waiting, turn.number, key=_number)
    return index if index < len(waiting) and waiting[index] is turn else -1


def take_dependents(waiting: deque[AnyQueued], first: int, *, with_starts: bool = False) -> list[AnyQueued]:
    """Remove the requests from index ``first`` on, up to the next start or also those behind it.

    Moves no more requests than are removed or are in front of them, because each of a long queue may be cancelled.
    """
    taken: list[AnyQueued] = []
    waiting.rotate(-first)
    while len(waiting) > first and (with_starts or not waiting[0].is_start):
        taken.append(waiting.popleft())
    waiting.rotate(first)
    return taken


def _number(turn: Queued) -> int:
    return turn.number


class Turn:
    """One request of a sequence, from its arrival until its run has ended.

    Attributes:
        number: As in ``Queued``.
        request: The client's request. If it is cancelled during its run, the sequence continues.
        inputs: The client's inputs; all inputs of the model once the turn has come.
        run: The run of this request in the batcher; None before, and with the strategy ``direct``, whose runs hold rows
            of several sequences.
        timer: Fires at the deadline while the request waits for its turn or in its slot; None without a deadline.
    """

    def __init__(
        self, request: InflightRequest, sequence: "Sequence", part: SequencePart, terms: Terms, arrived_ns: int
    ) -> None:
        self.request: Final = request
        self.sequence: Final = sequence
        self.is_start: Final = part.is_start
        self.is_end: Final = part.is_end
        self.terms: Final = terms
        self.arrived_ns: Final = arrived_ns
        self.inputs: Arrays = request.inputs
        self.nbytes = 0
        self.number = 0
        self.run: InflightRequest | None = None
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        """Stop the timer, because the request runs or was dropped."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Strategy(Protocol):
    """Runs each request when its turn comes."""

    def run(self, turn: Turn) -> None:
        """Run a request: ``SequenceRuns.on_computed`` or ``on_failed`` is called once, possibly at once.

        Raises:
            Exception: The request cannot run; neither is called.
        """
        ...

    def withdraw(self, turn: Turn) -> bool:
        """Take back a request whose run has not begun. Returns False if it has."""
        ...

    @property
    def waiting_rows(self) -> int:
        """Number of requests whose turn has come, and which wait outside of the batcher's queue. Any thread."""
        ...

    def end_delays(self) -> None:
        """Stop delaying batches, because no further requests will arrive."""
        ...


class Sequence:
    """A sequence that began and has not ended.

    Attributes:
        id_array: The value of the control of kind ``id``; None without one.
        states: The states after the last successful run, or the first states.
        state_bytes: Size of ``states``.
        slot: Number of its slot; ``NO_SLOT`` while it waits for one.
        waiting: Requests whose turn has not come.
        running: The request whose turn it is; None if no request runs.
        begun_ns: When the run of its latest start was prepared; 0 before the first one.
        is_open: Whether the sequence accepts further requests.
        is_pipelined: Whether a request of the sequence arrived before an earlier one was answered.
        ended_because: One of ``END_REASONS``, for metrics.
    """

    def __init__(self, sequence_id: SequenceId, id_array: np.ndarray | None, states: Arrays, state_bytes: int) -> None:
        self.id: Final = sequence_id
        self.id_array: Final = id_array
        self.states = states
        self.state_bytes = state_bytes
        self.slot = NO_SLOT
        self.waiting: deque[Turn] = deque()
        self.running: Turn | None = None
        self.begun_ns = 0
        self.is_open = True
        self.is_pipelined = False
        self.ended_because = ENDED

    @property
    def is_idle(self) -> bool:
        """Whether no request of the sequence waits or runs."""
        return self.running is None and not self.waiting


class SequenceTable:
    """The sequences by id, their slots, and their order of idleness. Loop thread only.

    Slot number ``n`` is slot ``n // groups`` of group ``n % groups``. The lowest free number is assigned first, so
    sequences are spread over the groups.
    """

    def __init__(self, slots: int, max_idle_ns: int) -> None:
        self.max_idle_ns: Final = max_idle_ns
        self.slots: Final = slots
        self._latest: dict[SequenceId, Sequence] = {}
        """The sequence that began last with each id, until it is removed."""
        self._holders: set[Sequence] = set()
        # Not a plain dict: finding its first key takes time in proportion to the keys removed before it.
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()
        self._idle: OrderedDict[Sequence, int] = OrderedDict()
        """Idle sequences and the time at which each became idle, in that order."""
        self._free: list[int] = []
        """Released slots; a heap."""
        self._next_slot = 0

    def __len__(self) -> int:
        """The number of sequences, including those whose last request still runs."""
        return len(self._holders) + len(self._backlog)

    @property
    def active(self) -> int:
        """Sequences with a slot."""
        return len(self._holders)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._backlog)

    def find(self, sequence_id: SequenceId) -> Sequence | None:
        """The sequence that accepts requests with this id; None if there is none."""
        sequence = self._latest.get(sequence_id)
        return sequence if sequence is not None and sequence.is_open else None

    def holders(self) -> Iterable[Sequence]:
        """The sequences with a slot, in no particular order."""
        return self._holders

    def backlog(self) -> Iterable[Sequence]:
        """The sequences that wait for a slot, the first one first."""
        return self._backlog

    def open_sequences(self) -> list[Sequence]:
        """All sequences that accept requests."""
        return [sequence for sequence in self._latest.values() if sequence.is_open]

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence. It receives a slot, or waits for one behind the others."""
        self._latest[sequence.id] = sequence
        if self._free:
            self._hold(sequence, heappop(self._free))
        elif self._next_slot < self.slots:
            self._hold(sequence, self._next_slot)
            self._next_slot += 1
        else:
            self._backlog[sequence] = None

    def close(self, sequence: Sequence) -> None:
        """Stop accepting requests of a sequence. Its id is free for a new sequence at once."""
        sequence.is_open = False
        self._idle.pop(sequence, None)

    def reopen(self, sequence: Sequence) -> None:
        """Accept requests of a closed sequence again, unless a later one has begun with its id, even if that has ended.

        Otherwise requests that were sent to the later one would run on the states of this one.
        """
        sequence.is_open = self._latest.get(sequence.id) is sequence

    def remove(self, sequence: Sequence) -> Sequence | None:
        """Remove a closed sequence. Returns the waiting sequence that receives its slot now; None if there is none."""
        assert not sequence.is_open
        if self._latest.get(sequence.id) is sequence:
            del self._latest[sequence.id]
        self._backlog.pop(sequence, None)
        if sequence not in self._holders:
            return None
        self._holders.discard(sequence)
        slot, sequence.slot = sequence.slot, NO_SLOT
        if not self._backlog:
            heappush(self._free, slot)
            return None
        following, _ = self._backlog.popitem(last=False)
        self._hold(following, slot)
        return following

    def rest(self, sequence: Sequence, now_ns: int) -> None:
        """Note that a sequence has become idle, or that its idle time begins anew."""
        self._idle[sequence] = now_ns
        self._idle.move_to_end(sequence)

    def resume(self, sequence: Sequence, now_ns: int) -> bool:
        """Note that a sequence is no longer idle. Returns False if it was idle for too long."""
        since_ns = self._idle.pop(sequence, None)
        return since_ns is None or now_ns - since_ns < self.max_idle_ns

    def expired(self, now_ns: int, most: int) -> list[Sequence]:
        """Up to ``most`` sequences that have been idle for too long, the longest idle ones first."""
        over: list[Sequence] = []
        for sequence, since_ns in self._idle.items():
            if now_ns - since_ns < self.max_idle_ns or len(over) == most:
                break
            over.append(sequence)
        return over

    def next_expiry_ns(self) -> int | None:
        """When the next sequence will have been idle for too long; None if none is idle."""
        since_ns = next(iter(self._idle.values()), None)
        return None if since_ns is None else since_ns + self.max_idle_ns

    def _hold(self, sequence: Sequence, slot: int) -> None:
        sequence.slot = slot
        self._holders.add(sequence)
