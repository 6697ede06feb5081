"""Sequences that requests of ensembles keep from expiring.

A request of an ensemble reaches one member long before or after another. Until it is answered, the sequence expires in
none of them. ``sequences`` asks before a sequence expires; ensembles keep and release sequences.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, TypeAlias

from ortserve.batching.sequence_table import TIMED_OUT, Sequence, SequenceTable
from ortserve.clock import Clock
from ortserve.core.sequence import SequenceId
from ortserve.errors import ErrorKind, SequenceError, ServeError

Members: TypeAlias = tuple["KeptSequences", ...]
"""The models with sequences that a request of an ensemble reaches."""
Backlogs: TypeAlias = Mapping["KeptSequences", Mapping[SequenceId, Sequence]]
"""For each model, the sequences that wait for a slot."""


class KeptSequences:
    """The sequences of one load of a model that requests of ensembles keep from expiring. Loop thread only.

    A kept sequence holds its slot while its request waits for a slot of another member. Such requests may wait for each
    other; the end of one of their sequences breaks the deadlock.
    """

    def __init__(
        self,
        model: str,
        table: SequenceTable,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        end: Callable[[Sequence, str, ServeError], None],
    ) -> None:
        """Keep nothing yet.

        Args:
            model: Name of the model, for errors and the log.
            table: The sequences of the model.
            loop: The running event loop.
            clock: Monotonic nanoseconds.
            end: Ends a sequence that waits for a slot, for one of ``END_REASONS``; its requests fail with the error.
        """
        self.model: Final = model
        self._table: Final = table
        self._loop: Final = loop
        self._clock: Final = clock
        self._end: Final = end
        self._requests: dict[SequenceId, list[Members]] = {}
        self._is_searching = False

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._requests

    def keep(self, sequence_id: SequenceId, members: Members) -> None:
        """Keep a sequence, which need not have begun, for a request that reaches ``members``."""
        self._requests.setdefault(sequence_id, []).append(members)

    def release(self, sequence_id: SequenceId, members: Members) -> None:
        """End a ``keep``. The idle time of the sequence begins now."""
        requests = self._requests[sequence_id]
        requests.remove(members)
        if requests:
            return
        del self._requests[sequence_id]
        sequence = self._table.find(sequence_id)
        if sequence is not None and sequence.is_idle:
            self._table.rest(sequence, self._clock())

    def renew(self, sequence: Sequence) -> None:
        """Let the idle time of a kept sequence begin anew. Search for a deadlock if others wait for its slot."""
        self._table.rest(sequence, self._clock())
        if self._table.waiting and not self._is_searching:
            self._is_searching = True
            self._loop.call_soon(self._break_deadlock)

    def _break_deadlock(self) -> None:
        """If no slot here can become free because of a deadlock, end a sequence for which one of the requests waits."""
        self._is_searching = False
        backlogs = self._backlogs()
        blocked = set(backlogs)
        while free := [
            model for model in blocked if not backlogs[model] or not all(model._blocking_waits(blocked, backlogs))
        ]:
            blocked.difference_update(free)
        if self in blocked:
            model, sequence = next(self._blocking_waits(blocked, backlogs))[0]
            why = (
                f"no slot of model '{model.model}' can become free: requests of its sequences wait in ensembles for "
                "slots of other models, and these wait for each other"
            )
            model._end(sequence, TIMED_OUT, SequenceError(ErrorKind.NOT_READY, why, retry_after_s=1))

    def _backlogs(self) -> Backlogs:
        """The backlogs of this model, and of all models that requests of kept sequences reach, directly or not."""
        backlogs: dict[KeptSequences, dict[SequenceId, Sequence]] = {}
        pending = {self}
        while pending:
            model = pending.pop()
            backlogs[model] = {sequence.id: sequence for sequence in model._table.backlog()}
            reached = {member for requests in model._requests.values() for members in requests for member in members}
            pending |= reached - backlogs.keys()
        return backlogs

    def _blocking_waits(
        self, blocked: Collection["KeptSequences"], backlogs: Backlogs
    ) -> Iterator[list[tuple["KeptSequences", Sequence]]]:
        """For each slot in use: where the requests of its sequence wait for slots of the models ``blocked``."""
        for holder in self._table.holders():
            yield [
                (member, backlogs[member][holder.id])
                for members in self._requests.get(holder.id, ())
                for member in members
                if holder.is_idle and member in blocked and holder.id in backlogs[member]
            ]
