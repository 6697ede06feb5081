"""Sequences of requests: one request of a sequence runs at a time, and its states are stored for the next one.

``SequenceRuns`` sits between the served model and the batcher. A strategy runs each request when its turn comes:
``oldest_sequences`` enqueues it in the batcher, which batches requests of different sequences; ``direct_sequences``
forms batches of slots itself.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from ortserve.batching.kept_sequences import KeptSequences
from ortserve.batching.sequence_admission import SequenceAdmission, SequenceLimits
from ortserve.batching.sequence_table import (
    CANCELLED,
    END_REASONS,
    EVICTED,
    EXPIRED,
    FAILED,
    NO_SLOT,
    TIMED_OUT,
    UNLOADED,
    Sequence,
    SequenceTable,
    Strategy,
    Turn,
    ends_sequence,
    enqueue,
    find,
    take_dependents,
)
from ortserve.batching.sequence_timers import ENDED_AT_ONCE, SequenceTimers
from ortserve.clock import Clock
from ortserve.core.batch import Arrays, deep_bytes, shallow_bytes
from ortserve.core.inflight import InflightRequest, Terms, fail_in_turns
from ortserve.core.sequence import SequenceId, SequencePart, SequenceTensors
from ortserve.errors import STOPPING, ErrorKind, SequenceError, ServeError
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.readings import SequenceReading

logger: Final = logging.getLogger(__name__)

_TIMED_OUT: Final = "timeout of the corresponding sequence has been expired"
_LATE: Final = "Request timeout expired: its deadline passed while it waited for its turn or in its slot"


class SequenceRuns:
    """The sequences of one load of a model version. Loop thread only."""

    def __init__(
        self,
        model: str,
        tensors: SequenceTensors,
        table: SequenceTable,
        limits: SequenceLimits,
        make_strategy: Callable[["SequenceRuns"], Strategy],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
    ) -> None:
        """Start without sequences.

        Args:
            model: Name of the model, for errors and the log.
            tensors: The hidden tensors.
            table: An empty table.
            limits: Limits of sequences and of waiting requests.
            make_strategy: Makes the strategy, which reports to this object.
            loop: The running event loop.
            clock: Monotonic nanoseconds.
        """
        self.tensors: Final = tensors
        self._model: Final = model
        self._table: Final = table
        self._admission: Final = SequenceAdmission(model, tensors, limits)
        self._loop: Final = loop
        self._clock: Final = clock
        self._is_draining = self._is_closing = False
        self._ends = dict.fromkeys(END_REASONS, 0)
        self._timers = SequenceTimers(table, loop, clock, self._on_idle, self._on_waited, self._on_late)
        self.kept: Final = KeptSequences(model, table, loop, clock, partial(self._end, with_starts=True))
        """The sequences that requests of ensembles keep from expiring."""
        self._empty: asyncio.Event | None = None
        self.strategy = make_strategy(self)

    @property
    def waiting_rows(self) -> int:
        """Number of requests that wait outside of the batcher's queue; each has one row. Any thread."""
        return self._admission.waiting_rows + self.strategy.waiting_rows

    def reading(self) -> SequenceReading:
        """The present counts, for metrics. Any thread."""
        return SequenceReading(self._table.active, self._table.waiting, self._admission.state_bytes, self._ends.copy())

    def submit(self, request: InflightRequest, terms: Terms, part: SequencePart) -> None:
        """Enqueue a request behind the earlier ones of its sequence.

        It is settled with the outputs that clients may request. If it succeeded, ``inputs`` are then all inputs of the
        model. An error of the batcher fails it later.

        Args:
            request: A request of one row, with the client's inputs in the form of the model.
            terms: Only its deadlines apply; ``start_by_ns`` only while the sequence waits for a slot.
            part: The sequence parameters of the request.

        Raises:
            ServeError: SequenceError for a request that fits no sequence, and (not_ready) for a new sequence while the
                server stops; overloaded if there are too many sequences, states or waiting requests; invalid_input for
                an id of another datatype than the model expects.
        """
        self._admission.check(request, part)
        now_ns = self._clock()
        sequence = self._table.find(part.id)
        if sequence is not None and not self._table.resume(sequence, now_ns) and part.id not in self.kept:
            self._remove_expired(sequence)  # the timer is late
            sequence = None
        if sequence is None:
            sequence = self._begin(part)
        turn = Turn(request, sequence, part, terms, now_ns)
        if part.is_ahead or not sequence.is_idle:
            sequence.is_pipelined = True
        may_run = sequence.slot != NO_SLOT and sequence.running is None and not sequence.waiting
        if not may_run:
            self._wait(turn)
        request.timing.queued_ns = now_ns
        request.withdraw = partial(self._on_cancelled, turn)
        if part.is_end:
            self._table.close(sequence)
        if may_run:
            self._run(sequence, turn)

    def end(self, sequence_id: SequenceId, computed_ns: int | None = None) -> None:
        """End a sequence, if it exists, because one of its requests failed outside of it. Waiting requests fail.

        Args:
            sequence_id: The id.
            computed_ns: When the failed request was computed; None if it was not. A sequence that a later start has
                begun anew continues.
        """
        sequence = self._table.find(sequence_id)
        if sequence is None or (computed_ns is not None and sequence.begun_ns > computed_ns):
            return
        self._end(sequence, FAILED, self._admission.not_started(sequence.id))

    def limit_turn(self, turn: Turn) -> None:
        """Fail a request at its deadline, if it has one, until its run begins. Called by the strategy ``direct``."""
        self._timers.limit_turn(turn)

    def is_pipelined(self, sequence_id: SequenceId) -> bool:
        """Whether the client of a sequence has sent a request before the answer to an earlier one."""
        sequence = self._table.find(sequence_id)
        return sequence is not None and sequence.is_pipelined

    def begin_drain(self) -> None:
        """Reject new sequences. The present ones continue until they end."""
        self._is_draining = True

    @property
    def is_empty(self) -> bool:
        """Whether every sequence has ended."""
        return not len(self._table)

    async def wait_until_empty(self) -> None:
        """Wait until every sequence has ended."""
        while len(self._table):
            self._empty = self._empty or asyncio.Event()
            await self._empty.wait()

    async def close(self) -> None:
        """Run all waiting requests, then drop the states. ``submit`` must not be called any more."""
        self._is_draining = self._is_closing = True
        self.strategy.end_delays()
        remaining = self._table.open_sequences()
        while remaining:
            sequence = remaining.pop()  # one by one: to free all of them at the end would hold the loop, too
            if sequence.is_open:  # it may have ended during a pause
                self._table.close(sequence)
                sequence.ended_because = UNLOADED
                if sequence.is_idle:
                    self._remove(sequence)
            if len(remaining) % ENDED_AT_ONCE == 0:
                await asyncio.sleep(0)
        await self.wait_until_empty()
        self._timers.close()

    def on_computed(self, turn: Turn, outputs: Arrays) -> None:
        """Store the states and settle the request. The strategy calls it with all outputs of the model for one row."""
        sequence = turn.sequence
        states: Arrays = ()
        if sequence.is_open or sequence.waiting:
            try:
                states = self.tensors.next_states(outputs)
            except Exception as error:  # noqa: BLE001 - any error, such as a lack of memory, is for the request
                self.on_failed(turn, error)
                return
        sequence.running = None
        nbytes = deep_bytes(states)
        self._admission.state_bytes += nbytes - sequence.state_bytes
        sequence.states, sequence.state_bytes = states, nbytes
        if self._admission.has_outgrown(nbytes):
            log_event(
                logger,
                logging.WARNING,
                "a sequence ended because its state has grown beyond max_state_bytes",
                model=self._model,
                state_bytes=nbytes,
                of_all_sequences=self._admission.state_bytes,
            )
            self._end(sequence, EVICTED, self._admission.not_started(sequence.id))
        else:
            self._continue(sequence)
        # After the next request of the sequence was enqueued, because callbacks may enqueue and cancel requests.
        turn.request.inputs = turn.inputs
        turn.request.complete(outputs[: self.tensors.shown_outputs])

    def on_failed(self, turn: Turn, error: BaseException) -> None:
        """Fail the request. Called by the strategy.

        The states do not change, so that the client can repeat the request, also the last one. The sequence ends if its
        first request failed, if the client cannot know that this one failed, or if it was dropped before later ones.
        """
        sequence = turn.sequence
        sequence.running = None
        is_over = turn.is_start or turn.request.is_settled  # by a cancellation during its run
        if isinstance(error, ServeError) and not turn.request.timing.taken_ns:
            is_over = is_over or ends_sequence(error.kind, is_pipelined=sequence.is_pipelined)
        if is_over:
            self._end(sequence, FAILED, self._admission.not_started(sequence.id))
        else:
            if turn.is_end and not self._is_closing:
                self._table.reopen(sequence)
            self._continue(sequence)
        turn.request.fail(error)

    def _begin(self, part: SequencePart) -> Sequence:
        """Begin a sequence.

        Raises:
            ServeError: See ``submit``.
        """
        if not part.is_start:
            raise self._admission.not_started(part.id)
        if self._is_draining:
            raise SequenceError(ErrorKind.NOT_READY, STOPPING, retry_after_s=1)
        tensors = self.tensors
        self._admission.check_room(len(self._table))
        sequence = Sequence(part.id, tensors.id_array(part.id), tensors.first_states, tensors.initial_bytes)
        self._admission.state_bytes += tensors.initial_bytes
        self._table.add(sequence)
        return sequence

    def _wait(self, turn: Turn) -> None:
        """Queue a request behind others.

        Raises:
            ServeError: overloaded, if too many requests wait. The sequence then ends after its earlier requests,
                because later ones, which the client may have sent already, must not run without this one.
        """
        sequence = turn.sequence
        turn.nbytes = max(1, shallow_bytes(turn.inputs))
        if problem := self._admission.why_full(turn.nbytes):
            self._table.close(sequence)
            sequence.ended_because = FAILED
            if sequence.is_idle:  # it has just begun
                self._remove(sequence)
            else:
                problem += f"; sequence {sequence.id} ends with its earlier requests"
            raise ServeError(ErrorKind.OVERLOADED, problem, retry_after_s=1)
        self._admission.enter(turn)
        enqueue(sequence.waiting, turn)
        self._timers.limit_turn(turn)
        if sequence.slot == NO_SLOT and turn.terms.start_by_ns is not None:
            self._timers.limit_wait(sequence, turn.terms.start_by_ns, turn.arrived_ns)

    def _advance(self, sequence: Sequence) -> None:
        """Run the next request of a sequence, if it has a slot and none runs."""
        if sequence.slot == NO_SLOT or sequence.running is not None or not sequence.waiting:
            return
        turn = sequence.waiting.popleft()
        self._leave(turn)
        self._run(sequence, turn)

    def _run(self, sequence: Sequence, turn: Turn) -> None:
        sequence.running = turn
        if turn.is_start:
            sequence.begun_ns = self._clock()
        tensors = self.tensors
        states = tensors.first_states if turn.is_start else sequence.states
        try:
            turn.inputs = tensors.extend(turn.inputs, sequence.id_array, turn.is_start, turn.is_end, states)
            self.strategy.run(turn)
        except Exception as error:  # noqa: BLE001 - any error, such as a lack of memory, is for the request
            # Not in this turn: many requests of a sequence that all fail at once would nest their calls.
            self._loop.call_soon(self.on_failed, turn, error)

    def _continue(self, sequence: Sequence) -> None:
        """Continue a sequence whose run has ended, or some of whose requests were dropped."""
        if sequence.running is not None:
            return
        if sequence.waiting:
            self._advance(sequence)
        elif not sequence.is_open:
            self._remove(sequence)
        else:
            self._table.rest(sequence, self._clock())
            self._timers.watch_idle()

    def _remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, and run the one that receives its slot."""
        self._admission.state_bytes -= sequence.state_bytes
        sequence.state_bytes = 0
        sequence.states = ()
        self._ends[sequence.ended_because] += 1
        self._timers.stop_limit(sequence)
        following = self._table.remove(sequence)
        if following is not None:
            self._timers.stop_limit(following)
            # Not in this turn: a backlog of sequences that all fail at once would nest their calls.
            self._loop.call_soon(self._advance, following)
        if not len(self._table) and self._empty is not None:
            self._empty.set()
            self._empty = None

    def _leave(self, turn: Turn) -> None:
        """Note that a request no longer waits for its turn."""
        turn.stop_timer()
        self._admission.leave(turn)

    def _end(
        self, sequence: Sequence, reason: str, error: ServeError, first: int = 0, *, with_starts: bool = False
    ) -> None:
        """End a sequence early: after its run and its waiting requests before index ``first``. The others fail.

        A later start does not depend on them. Unless ``with_starts`` is set, the sequence goes on with it.
        """
        dropped = take_dependents(sequence.waiting, first, with_starts=with_starts)
        for turn in dropped:
            self._leave(turn)
        if len(sequence.waiting) == first:
            self._table.close(sequence)
            sequence.ended_because = reason
        self._continue(sequence)
        fail_in_turns([turn.request for turn in dropped], error)

    def _withdraw(self, turn: Turn) -> int | None:
        """Take back a request whose run has not begun.

        Returns:
            The index of the first waiting request behind it; None if it runs or was settled.
        """
        sequence = turn.sequence
        index = find(sequence.waiting, turn)
        if index >= 0:
            del sequence.waiting[index]
            self._leave(turn)
            return index
        if sequence.running is not turn or not self.strategy.withdraw(turn):
            return None
        sequence.running = None
        return 0

    def _on_cancelled(self, turn: Turn, _: InflightRequest) -> None:
        """Drop a request that its client cancelled. Later ones expect the state that it would have computed."""
        behind = self._withdraw(turn)
        if behind is not None:  # otherwise the run completes, and the sequence continues
            message = f"an earlier request of sequence {turn.sequence.id} was cancelled"
            self._end(turn.sequence, CANCELLED, SequenceError(ErrorKind.CANCELLED, message), behind)

    def _on_late(self, turn: Turn) -> None:
        """Fail a request whose deadline has passed before its run."""
        behind = self._withdraw(turn)
        if behind is not None:
            self._end(turn.sequence, FAILED, self._admission.not_started(turn.sequence.id), behind)
            turn.request.fail(ServeError(ErrorKind.DEADLINE, _LATE))

    def _on_idle(self, sequence: Sequence) -> None:
        """Remove a sequence that was idle for too long, unless a request of an ensemble keeps it."""
        if sequence.id in self.kept:
            self.kept.renew(sequence)
        else:
            self._remove_expired(sequence)

    def _remove_expired(self, sequence: Sequence) -> None:
        self._table.close(sequence)
        sequence.ended_because = EXPIRED
        self._remove(sequence)

    def _on_waited(self, sequence: Sequence) -> None:
        """End a sequence that has waited too long for a slot, unless the request with this limit has left."""
        limits = [turn.terms.start_by_ns for turn in sequence.waiting if turn.terms.start_by_ns is not None]
        now_ns = self._clock()
        if limits and min(limits) <= now_ns:
            self._end(sequence, TIMED_OUT, SequenceError(ErrorKind.NOT_READY, _TIMED_OUT), with_starts=True)
        elif limits:
            self._timers.limit_wait(sequence, min(limits), now_ns)
