"""How loads share the processors and devices: opened side by side, and measured so that times mean something."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ortserve.clock import Clock

WAITING: Final = "waiting for its turn"
"""What a load does while as many others as may are under way."""


@dataclass(frozen=True, slots=True)
class _Step:
    doing: str
    began_ns: int


class Progress:
    """The steps of one load, told by whoever loads, one thread at a time; read from any."""

    def __init__(self, clock: Clock, on_warming: Callable[[], None] = lambda: None) -> None:
        """``on_warming`` is called on the thread that loads."""
        self._clock = clock
        self._part = ""
        self._step = _Step(WAITING, clock())
        self.begin_warming: Final = on_warming
        """To be called when the model is open and its warm-up begins."""

    def begin(self, doing: str) -> None:
        """Tell the step that begins, in words that go on with *for 5 s*."""
        self._step = _Step(self._part + doing, self._clock())  # in one piece: who reads it has both or neither

    def turn_to(self, part: str) -> None:
        """Tell of what all steps are from now on, such as ``instance 2 of 3``."""
        self._part = f"{part}: "

    def describe(self) -> str:
        """The present step, and for how long: ``warming up: batches of 8 rows, for 5 s``."""
        step = self._step
        return f"{step.doing}, for {(self._clock() - step.began_ns) // 10**9} s"


MOST_LOADS: Final = 4
"""Side by side, on however many processors: a model that is being opened takes memory for its weights twice."""


class LoadTurns:
    """Lends processors to loads in the order in which they ask, and devices to one load at a time. From any thread.

    A load has one processor. While it measures a session of several threads it has as many as those, so that sessions
    are opened side by side, and what is measured runs on processors that no other load uses. Loads on devices have no
    processor, as they mostly wait.
    """

    def __init__(self, processors: int) -> None:
        """``processors`` is how many loads may have together, at least 1."""
        self._processors: Final = processors
        self._free = processors
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._device = threading.Lock()
        self._proof = threading.Lock()

    @contextmanager
    def proving(self) -> Iterator[None]:
        """For work that holds the interpreter lock: side by side it takes no less time, and the event loop waits."""
        with self._proof:
            yield

    @contextmanager
    def turn(self, on_wait: Callable[[], None] = lambda: None) -> Iterator["LoadTurn"]:
        """One load's turn, once there is a processor. ``on_wait`` is called when it begins to wait for more."""
        turn = LoadTurn(self, on_wait)
        self._take(1, on_wait)
        try:
            yield turn
        finally:
            if turn.is_on_device:
                self._device.release()
            else:
                self._give(1)

    def _take(self, processors: int, on_wait: Callable[[], None]) -> None:
        with self._changed:
            if self._waiting or self._free < processors:
                on_wait()
                place = object()
                self._waiting.append(place)
                # In order: else a load that wants all of them would wait until no other one is left.
                self._changed.wait_for(lambda: self._waiting[0] is place and self._free >= processors)
                self._waiting.popleft()
                self._changed.notify_all()
            self._free -= processors

    def _give(self, processors: int) -> None:
        with self._changed:
            self._free += processors
            self._changed.notify_all()


class LoadTurn:
    """What one load has of them. For its thread only. While it waits for more it has none, so that no two wait for
    each other.
    """

    def __init__(self, turns: LoadTurns, on_wait: Callable[[], None]) -> None:
        self._turns = turns
        self._on_wait = on_wait
        self.is_on_device = False
        """Whether it has the devices for the rest of the load, instead of a processor."""

    def move_to_device(self) -> None:
        """Wait for the devices."""
        assert not self.is_on_device
        self._turns._give(1)
        if not self._turns._device.acquire(blocking=False):
            self._on_wait()
            self._turns._device.acquire()
        self.is_on_device = True

    @contextmanager
    def measuring(self, threads: int) -> Iterator[None]:
        """Have as many processors as a run keeps busy, as far as there are so many."""
        wanted = min(threads, self._turns._processors)
        if self.is_on_device or wanted <= 1:
            yield
            return
        self._exchange(1, wanted)
        try:
            yield
        finally:
            self._exchange(wanted, 1)

    def _exchange(self, held: int, wanted: int) -> None:
        self._turns._give(held)
        self._turns._take(wanted, self._on_wait)
