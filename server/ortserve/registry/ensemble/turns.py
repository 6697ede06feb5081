"""The order of an ensemble's requests in their sequences.

The steps before one with sequences may run in other batches, or on other instances, and end in another order. So one
request of a sequence runs at a time, and the model with states gets them in the order of their arrival.
"""

from collections import deque
from typing import Final, Protocol

from ortserve.core.inflight import InflightRequest
from ortserve.core.sequence import SequenceId, SequencePart
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.ensemble.route import EnsembleTerms

MOST_WAITING: Final = 16_384
"""Requests of one ensemble that wait for earlier ones of their sequences."""


class TurnOwner(Protocol):
    """A load of an ensemble, whose requests wait."""

    def follow(self, turn: "EnsembleTurn") -> None:
        """Start a request, whose turn has come."""
        ...

    def drop(self) -> None:
        """Note that a request waits no more, and will not start."""
        ...


class EnsembleTurn:
    """A request of a sequence, and the load that it came to."""

    __slots__ = ("owner", "part", "request", "terms")

    def __init__(self, owner: TurnOwner, request: InflightRequest, terms: EnsembleTerms, part: SequencePart) -> None:
        self.owner: Final[TurnOwner] = owner
        self.request: Final[InflightRequest] = request
        self.terms: Final[EnsembleTerms] = terms
        self.part = part


class SequenceTurns:
    """The sequences of an ensemble that have a request under way, and the requests that wait. Loop thread only.

    All loads of an ensemble share them: the requests of one wait for those that came to earlier ones.
    """

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, deque[EnsembleTurn]] = {}
        self._rejected: set[SequenceId] = set()
        """Sequences under way that end after the requests that wait, because one behind those was rejected."""
        self._count = 0

    def enter(self, turn: EnsembleTurn) -> bool:
        """Whether a request may run at once. Otherwise it waits until ``leave`` returns it.

        Raises:
            ServeError: overloaded, if too many wait, or an earlier request was rejected for that.
        """
        waiting = self._waiting.get(turn.part.id)
        if waiting is None:
            self._waiting[turn.part.id] = deque()
            return True
        if self._count >= MOST_WAITING or turn.part.id in self._rejected:
            self._rejected.add(turn.part.id)
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"Exceeds maximum queue size: {self._count} requests wait for earlier ones of their sequences",
                retry_after_s=1,
            )
        self._count += 1
        turn.part = SequencePart(turn.part.id, turn.part.is_start, turn.part.is_end, is_ahead=True)
        waiting.append(turn)
        return False

    def leave(self, sequence_id: SequenceId) -> EnsembleTurn | None:
        """The request of a sequence that ran has ended. Returns the one whose turn it is."""
        waiting = self._waiting[sequence_id]
        if not waiting:
            del self._waiting[sequence_id]
            return None
        self._count -= 1
        return waiting.popleft()

    def take_rejection(self, sequence_id: SequenceId) -> bool:
        """Whether a request was rejected while earlier ones ran. All of those have ended, and so must the sequence."""
        is_rejected = sequence_id in self._rejected
        self._rejected.discard(sequence_id)
        return is_rejected

    def is_followed(self, sequence_id: SequenceId) -> bool:
        """Whether requests wait for the one that runs, or were rejected meanwhile."""
        return bool(self._waiting.get(sequence_id)) or sequence_id in self._rejected

    def withdraw(self, turn: EnsembleTurn) -> list[EnsembleTurn]:
        """Remove the requests behind a cancelled one, the last one first, and itself behind another cancelled one.

        A cancelled request keeps its turn otherwise, because the sequence ends when the earlier requests have run.
        """
        waiting = self._waiting.get(turn.part.id)
        removed: list[EnsembleTurn] = []
        while waiting and waiting[-1] is not turn:
            removed.append(waiting.pop())
        if waiting and len(waiting) > 1 and waiting[-2].request.is_settled:
            removed.append(waiting.pop())
        self._count -= len(removed)
        return removed
