"""What a load is doing, for those who wait for it: the repository index, refused requests, the log.

ONNX Runtime tells nothing of what goes on inside it, so steps are the calls of it, and what is told of one is how long
it has lasted.
"""

from collections.abc import Callable
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
