"""Orders the requests of each sequence of an ensemble.

Steps before a step with sequences may run in different batches or on different instances, and end in another order.
Therefore one request of a sequence runs at a time, so that the model with states receives them in order of arrival.
"""

import asyncio
from collections import deque
from typing import Final, Protocol

from ortserve.batching.sequence_table import enqueue, find, take_dependents
from ortserve.core.inflight import InflightRequest
from ortserve.core.sequence import SequenceId, SequencePart
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.ensemble.route import EnsembleTerms

MAX_WAITING: Final = 16_384
"""Maximum number of requests of one ensemble that wait for earlier requests of their sequences."""


class TurnOwner(Protocol):
    """A load of an ensemble, which submits requests of sequences."""

    def follow(self, turn: "EnsembleTurn") -> None:
        """Start a request that is next in its sequence."""
        ...

    def drop(self, turn: "EnsembleTurn") -> None:
        """Record that a waiting request was removed, and will not start."""
        ...


class EnsembleTurn:
    """A request of a sequence, and the load of the ensemble that received it.

    ``number`` is as in ``Queued``. ``timer`` fires at the deadline while the request waits; None without a deadline.
    """

    __slots__ = ("number", "owner", "part", "request", "terms", "timer")

    def __init__(self, owner: TurnOwner, request: InflightRequest, terms: EnsembleTerms, part: SequencePart) -> None:
        self.owner: Final[TurnOwner] = owner
        self.request: Final[InflightRequest] = request
        self.terms: Final[EnsembleTerms] = terms
        self.part = part
        self.number = 0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_start(self) -> bool:
        """Whether the state begins anew with the request."""
        return self.part.is_start

    def stop_timer(self) -> None:
        """Stop the timer, because the request no longer waits."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class SequenceTurns:
    """Tracks the sequences of an ensemble with a request under way, and the requests that wait. Loop thread only.

    All loads of an ensemble share one object, so that requests to a new load wait for those to earlier loads.
    """

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, deque[EnsembleTurn]] = {}
        self._rejected: set[SequenceId] = set()
        """Sequences that must end after the waiting requests, because a request behind these was rejected."""
        self._count = 0

    def enter(self, turn: EnsembleTurn) -> bool:
        """Whether a request may run at once. Otherwise it waits until ``leave`` returns it.

        Raises:
            ServeError: overloaded, if too many requests wait, or an earlier request was rejected for this reason.
        """
        waiting = self._waiting.get(turn.part.id)
        if waiting is None:
            self._waiting[turn.part.id] = deque()
            return True
        if self._count >= MAX_WAITING or turn.part.id in self._rejected:
            self._rejected.add(turn.part.id)
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"Exceeds maximum queue size: {self._count} requests wait for earlier requests of their sequences",
                retry_after_s=1,
            )
        self._count += 1
        turn.part = SequencePart(turn.part.id, turn.part.is_start, turn.part.is_end, is_ahead=True)
        enqueue(waiting, turn)
        return False

    def leave(self, sequence_id: SequenceId) -> EnsembleTurn | None:
        """Record that the running request of a sequence has ended. Returns the next request, or None."""
        waiting = self._waiting[sequence_id]
        if not waiting:
            del self._waiting[sequence_id]
            return None
        self._count -= 1
        return waiting.popleft()

    def take_rejection(self, sequence_id: SequenceId) -> bool:
        """Whether a request was rejected while earlier ones ran. These have ended, so the sequence must end now."""
        is_rejected = sequence_id in self._rejected
        self._rejected.discard(sequence_id)
        return is_rejected

    def is_followed(self, sequence_id: SequenceId) -> bool:
        """Whether requests wait for the running one, or were rejected while it ran."""
        return bool(self._waiting.get(sequence_id)) or sequence_id in self._rejected

    def withdraw(self, turn: EnsembleTurn) -> list[EnsembleTurn]:
        """Remove the requests behind a cancelled one, up to the next start, whose state begins anew.

        The cancelled request itself stays in the queue, because the sequence ends when the earlier requests have run.
        It is removed, too, if the request before it was also cancelled.
        """
        waiting = self._waiting.get(turn.part.id, deque())
        index = find(waiting, turn)
        removed = take_dependents(waiting, index + 1)
        if index > 0 and waiting[index - 1].request.is_settled:
            del waiting[index]
            removed.append(turn)
        self._count -= len(removed)
        return removed
