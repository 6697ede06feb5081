"""The strategy ``direct``: each sequence has a row of its own in the batches of its group.

There is a group of slots for each instance, and one batch of a group runs at a time. A batch spans slot 0 to the
highest slot with a request. Rows of slots without a request, and rows behind them that pad the batch to a bucket, are
zeros, with READY false. A request that must run alone is a batch of one row.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from ortserve.batching.groups import check_rows
from ortserve.batching.queue import Alone
from ortserve.batching.sequence_table import Turn
from ortserve.batching.sequences import SequenceRuns
from ortserve.clock import Clock
from ortserve.core.batch import Arrays
from ortserve.core.inflight import NO_TERMS, InflightRequest, Terms
from ortserve.core.timing import Timing
from ortserve.errors import RunTimeoutError

EnqueueSlots: TypeAlias = Callable[[InflightRequest, Hashable, Terms], object]
"""Enqueues a batch of slots under a shape class that it shares with no other batch; raises ServeError to reject it."""


_ROUNDING: Final = 1 - 1e-6
"""Keeps 0.3 of 10 slots at 3 slots: in the 32 bits of a ``config.pbtxt`` the share is slightly more than 0.3."""


@dataclass(slots=True, init=False)
class Waiting:
    """A request that waits in its slot: its shape class, and the time of its arrival."""

    key: Final[Hashable]
    arrived_ns: Final[int]

    def __init__(self, key: Hashable, arrived_ns: int) -> None:
        self.key = key
        self.arrived_ns = arrived_ns


def choose_slots(ready: Mapping[int, Waiting], least: int, delay_ns: int, now_ns: int) -> tuple[list[int], int | None]:
    """Choose the slots of the next batch.

    Args:
        ready: The waiting requests by slot, at least one.
        least: Number of waiting requests with which a batch starts at once.
        delay_ns: How long the oldest request waits for that number.
        now_ns: Monotonic time.

    Returns:
        The slots whose requests have the shape class of the oldest one, ascending, and None; or no slots, and the time
        at which to ask again.
    """
    oldest = min(ready.values(), key=_arrival)
    due_ns = oldest.arrived_ns + delay_ns
    if len(ready) < least and due_ns > now_ns:
        return [], due_ns
    return sorted([slot for slot, waiting in ready.items() if waiting.key == oldest.key]), None


def batch_terms(turns: Iterable[Turn]) -> Terms:
    """The terms of a batch: it must end by the latest deadline of its requests, if each of them has one."""
    latest_ns = 0
    for turn in turns:
        by_ns = turn.terms.answer_by_ns
        if by_ns is None:
            return NO_TERMS
        latest_ns = max(latest_ns, by_ns)
    return Terms(answer_by_ns=latest_ns)


def form_rows(turns: Mapping[int, Turn], rows: int, padding: Arrays) -> Arrays:
    """Form the inputs of a batch of ``rows`` rows: ``padding`` for each slot without a request."""
    parts = [turns[slot].inputs if slot in turns else padding for slot in range(rows)]
    return tuple([np.concatenate(arrays) if rows > 1 else arrays[0] for arrays in zip(*parts, strict=True)])


class DirectRuns:
    """The groups of slots of one model version. Loop thread only."""

    def __init__(
        self,
        runs: SequenceRuns,
        groups: int,
        slots: int,
        enqueue: EnqueueSlots,
        padded_rows: Callable[[int], int],
        shape_class: Callable[[Arrays], Hashable],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        *,
        delay_ns: int = 0,
        min_utilization: float = 0.0,
    ) -> None:
        """Start without requests.

        Args:
            runs: The sequences whose requests run.
            groups: Number of groups, one for each instance.
            slots: Slots of each group; 1 for a model that is not batched.
            enqueue: Enqueues a batch in the batcher.
            padded_rows: Rows to which a batch of a number of rows is padded.
            shape_class: The shape class of a request with these inputs; equal for requests that may share a batch.
            loop: The running event loop.
            clock: Monotonic nanoseconds.
            delay_ns: How long a request waits until ``min_utilization`` of the slots have a request.
            min_utilization: Share of the slots; 0 to run at once.
        """
        least = max(1, math.ceil(slots * min_utilization * _ROUNDING))
        self._groups: Final = [
            _Group(runs, number, least, delay_ns, enqueue, padded_rows, shape_class, loop, clock)
            for number in range(groups)
        ]

    def run(self, turn: Turn) -> None:
        slot = turn.sequence.slot
        self._groups[slot % len(self._groups)].offer(slot // len(self._groups), turn)

    def withdraw(self, turn: Turn) -> bool:
        slot = turn.sequence.slot
        return self._groups[slot % len(self._groups)].withdraw(slot // len(self._groups), turn)

    @property
    def waiting_rows(self) -> int:
        return sum([group.waiting_rows for group in self._groups])

    def end_delays(self) -> None:
        for group in self._groups:
            group.end_delays()


class _Group:
    """The slots of one instance."""

    def __init__(
        self,
        runs: SequenceRuns,
        number: int,
        least: int,
        delay_ns: int,
        enqueue: EnqueueSlots,
        padded_rows: Callable[[int], int],
        shape_class: Callable[[Arrays], Hashable],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
    ) -> None:
        self._runs: Final = runs
        self._number: Final = number
        self._least: Final = least
        self._delay_ns = delay_ns
        self._enqueue: Final = enqueue
        self._padded_rows: Final = padded_rows
        self._shape_class: Final = shape_class
        self._loop: Final = loop
        self._clock: Final = clock
        self._turns: dict[int, Turn] = {}
        self._ready: dict[int, Waiting] = {}
        self._again: deque[tuple[int, Turn]] = deque()
        """Slots and requests of a failed batch. Each runs again alone, so that only the requests at fault fail."""
        self._is_running = False
        self._is_woken = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting_rows(self) -> int:
        """Number of requests that wait in their slots. Any thread."""
        return len(self._turns)

    def offer(self, slot: int, turn: Turn) -> None:
        """Accept a request whose turn has come. Raises the error of its shape class."""
        waiting = Waiting(self._shape_class(turn.inputs), turn.arrived_ns)
        self._turns[slot] = turn
        self._ready[slot] = waiting
        self._runs.limit_turn(turn)
        self._wake()

    def withdraw(self, slot: int, turn: Turn) -> bool:
        """Take back a request, if no batch contains it yet. Returns False if one does."""
        if self._turns.get(slot) is not turn:
            return False
        del self._turns[slot], self._ready[slot]
        turn.stop_timer()
        return True

    def end_delays(self) -> None:
        """Start batches without a delay from now on."""
        self._delay_ns = 0
        self._wake()

    def _wake(self) -> None:
        # In the next turn of the loop, so that all requests that became readable in this one join the same batch.
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._start)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()

    def _start(self) -> None:
        """Start a batch, if none runs and enough requests wait."""
        self._is_woken = False
        if self._is_running:
            return
        if self._again:
            slot, turn = self._again.popleft()
            self._run({slot: turn}, self._shape_class(turn.inputs))
            return
        if not self._ready:
            return
        now_ns = self._clock()
        slots, due_ns = choose_slots(self._ready, self._least, self._delay_ns, now_ns)
        if due_ns is not None:
            if self._timer is None:
                self._timer = self._loop.call_later((due_ns - now_ns) / 1e9, self._on_timer)
            return
        key = self._ready[slots[0]].key
        turns: dict[int, Turn] = {}
        for slot in slots:
            del self._ready[slot]
            turns[slot] = self._turns.pop(slot)
            turns[slot].stop_timer()
        self._run(turns, key)

    def _run(self, turns: dict[int, Turn], key: Hashable) -> None:
        is_alone = isinstance(key, Alone)
        last = max(turns)
        some = turns[last].inputs
        rows = 1 if is_alone else self._padded_rows(last + 1)
        batch = InflightRequest(Timing(self._clock()), some, rows)
        batch.on_settled = partial(self._on_settled, turns)
        self._is_running = True
        try:
            if not is_alone:
                padding = self._runs.tensors.padding_row(some) if len(turns) < rows else ()
                batch.inputs = form_rows(turns, rows, padding)
                # The number of the group in the shape class keeps batches of two groups out of one run.
                key = self._number, key
            self._enqueue(batch, key, batch_terms(turns.values()))
        except Exception as error:  # noqa: BLE001 - any error is for the requests
            batch.on_settled = None
            batch.fail(error)
            self._loop.call_soon(self._on_settled, turns, batch)

    def _on_settled(self, turns: dict[int, Turn], batch: InflightRequest) -> None:
        self._is_running = False
        timing = batch.timing
        for turn in turns.values():
            _copy_times(turn, timing)
        try:
            outputs = batch.take_outputs()
            if batch.rows > 1:
                check_rows(outputs, batch.rows)
        except BaseException as error:  # noqa: BLE001 - the error of the run, which is passed on
            # A run over its limit does not run again, because each of its requests may occupy the instance for as long.
            if len(turns) > 1 and timing.taken_ns and not isinstance(error, RunTimeoutError):
                self._again.extend(turns.items())
            else:
                for turn in turns.values():
                    self._runs.on_failed(turn, error)
        else:
            for slot, turn in turns.items():
                rows = outputs if batch.rows == 1 else tuple([output[slot : slot + 1] for output in outputs])
                self._runs.on_computed(turn, rows)
        self._wake()


def _copy_times(turn: Turn, run: Timing) -> None:
    """Copy the times of a run to the request that it answers."""
    timing = turn.request.timing
    timing.taken_ns = run.taken_ns
    timing.staged_ns = run.staged_ns
    timing.computed_ns = run.computed_ns
    timing.batch_rows = run.batch_rows


def _arrival(waiting: Waiting) -> int:
    return waiting.arrived_ns
