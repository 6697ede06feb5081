"""The strategy ``direct``: each sequence has a row of its own in the batches of its group.

There is a group of slots for each instance, and one batch of a group runs at a time. A batch spans slot 0 to the
highest slot with a request in it. Rows without one are zeros, with READY false.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from ortserve.batching.groups import check_rows
from ortserve.batching.sequence_table import Turn
from ortserve.batching.sequences import SequenceRuns
from ortserve.clock import Clock
from ortserve.core.batch import Arrays
from ortserve.core.inflight import InflightRequest
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError

EnqueueSlots: TypeAlias = Callable[[InflightRequest, Hashable], object]
"""Enqueues a batch of slots with its shape class, which no other batch shares; raises ServeError if it is rejected."""

_LATE: Final = "Request timeout expired: its deadline passed in its slot"


@dataclass(slots=True, init=False)
class Waiting:
    """A request that waits in its slot: its shape class, and when it came."""

    key: Final[Hashable]
    arrived_ns: Final[int]

    def __init__(self, key: Hashable, arrived_ns: int) -> None:
        self.key = key
        self.arrived_ns = arrived_ns


def choose_slots(ready: Mapping[int, Waiting], least: int, delay_ns: int, now_ns: int) -> tuple[list[int], int | None]:
    """Choose the slots of the next batch.

    Args:
        ready: The requests that wait, at least one, by slot.
        least: Slots that let a batch run at once.
        delay_ns: How long the oldest request waits for as many.
        now_ns: The present time.

    Returns:
        The slots whose requests have the shape of the oldest one, ascending, and None; or none and when to ask again.
    """
    oldest = min(ready.values(), key=_arrival)
    due_ns = oldest.arrived_ns + delay_ns
    if len(ready) < least and due_ns > now_ns:
        return [], due_ns
    return sorted([slot for slot, waiting in ready.items() if waiting.key == oldest.key]), None


def form_rows(turns: Mapping[int, Turn], padding: Arrays) -> Arrays:
    """The inputs of a batch: the requests' by slot, and ``padding`` in the slots below the highest that have none."""
    slots = max(turns) + 1
    parts = [turns[slot].inputs if slot in turns else padding for slot in range(slots)]
    return tuple([np.concatenate(arrays) if slots > 1 else arrays[0] for arrays in zip(*parts, strict=True)])


class DirectRuns:
    """The groups of slots of one model version. Loop thread only."""

    def __init__(
        self,
        runs: SequenceRuns,
        groups: int,
        slots: int,
        enqueue: EnqueueSlots,
        shape_class: Callable[[Arrays], Hashable],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        *,
        delay_ns: int = 0,
        min_utilization: float = 0.0,
    ) -> None:
        """Start without requests.

        Args:
            runs: Whose requests run.
            groups: The number of instances.
            slots: Of each; 1 for a model that is not batched.
            enqueue: Hands a batch to the batcher.
            shape_class: Of the inputs of one request; equal for those that may share a batch.
            loop: The running one.
            clock: Monotonic nanoseconds.
            delay_ns: How long a request waits until ``min_utilization`` of the slots have one.
            min_utilization: 0 to run at once.
        """
        least = max(1, -int(-slots * min_utilization // 1))
        self._groups: Final = [
            _Group(runs, number, least, delay_ns, enqueue, shape_class, loop, clock) for number in range(groups)
        ]

    def run(self, turn: Turn) -> None:
        slot = turn.sequence.slot
        self._groups[slot % len(self._groups)].offer(slot // len(self._groups), turn)

    def withdraw(self, turn: Turn) -> bool:
        slot = turn.sequence.slot
        return self._groups[slot % len(self._groups)].withdraw(slot // len(self._groups), turn)

    def hurry(self) -> None:
        for group in self._groups:
            group.hurry()


class _Group:
    """The slots of one instance."""

    def __init__(
        self,
        runs: SequenceRuns,
        number: int,
        least: int,
        delay_ns: int,
        enqueue: EnqueueSlots,
        shape_class: Callable[[Arrays], Hashable],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
    ) -> None:
        self._runs: Final = runs
        self._number: Final = number
        self._least: Final = least
        self._delay_ns = delay_ns
        self._enqueue: Final = enqueue
        self._shape_class: Final = shape_class
        self._loop: Final = loop
        self._clock: Final = clock
        self._turns: dict[int, Turn] = {}
        self._ready: dict[int, Waiting] = {}
        self._again: deque[tuple[int, Turn]] = deque()
        """Requests of a batch that failed; each runs without the others, so that only one that is at fault fails."""
        self._is_running = False
        self._is_woken = False
        self._timer: asyncio.TimerHandle | None = None

    def offer(self, slot: int, turn: Turn) -> None:
        """It is the turn of this request."""
        try:
            key = self._shape_class(turn.inputs)
        except Exception as error:  # noqa: BLE001 - any error is for the request
            self._loop.call_soon(self._runs.on_failed, turn, error)
            return
        self._turns[slot] = turn
        self._ready[slot] = Waiting(key, turn.arrived_ns)
        self._wake()

    def withdraw(self, slot: int, turn: Turn) -> bool:
        """Take a request back that is in no batch yet."""
        if self._turns.get(slot) is not turn:
            return False
        del self._turns[slot], self._ready[slot]
        return True

    def hurry(self) -> None:
        """Delay nothing any more."""
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
        late: list[Turn] = []
        for slot in slots:
            del self._ready[slot]
            turn = self._turns.pop(slot)
            by_ns = turn.terms.finish_by_ns
            if by_ns is None or by_ns > now_ns:
                turns[slot] = turn
            else:
                late.append(turn)
        if turns:
            self._run(turns, key)
        elif self._ready:
            self._wake()
        for turn in late:
            self._runs.on_failed(turn, ServeError(ErrorKind.DEADLINE, _LATE))

    def _run(self, turns: dict[int, Turn], key: Hashable) -> None:
        slots = max(turns) + 1
        some = turns[slots - 1].inputs
        batch = InflightRequest(Timing(self._clock()), (), slots)
        batch.on_settled = partial(self._on_settled, turns)
        self._is_running = True
        try:
            batch.inputs = form_rows(turns, self._runs.tensors.padding_row(some) if len(turns) < slots else ())
            # Batches of two groups share no run, nor do those of one shape with other slots.
            self._enqueue(batch, (self._number, key))
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
            if len(turns) > 1 and timing.taken_ns:
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
    """The times of a run that began after the request came."""
    timing = turn.request.timing
    timing.taken_ns = run.taken_ns
    timing.staged_ns = run.staged_ns
    timing.computed_ns = run.computed_ns
    timing.batch_rows = run.batch_rows


def _arrival(waiting: Waiting) -> int:
    return waiting.arrived_ns
