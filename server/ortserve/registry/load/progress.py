"""The progress of a load: its current step, and its cancellation."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ortserve.clock import Clock
from ortserve.errors import ErrorKind, ServeError

WAITING: Final = "waiting for its turn"
"""The step of a load that waits for a slot or for room in memory."""


class LoadCancelledError(ServeError):
    """A load was cancelled because its result is not needed any more."""

    def __init__(self, because: str) -> None:
        super().__init__(ErrorKind.NOT_READY, f"its load was cancelled: {because}", retry_after_s=1)


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    began_ns: int


class _Children(list["subprocess.Popen[bytes]"]):
    """Processes of a load. One that starts while the load is being cancelled is killed as soon as it is appended."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        super().__init__()
        self._is_cancelled = is_cancelled

    def append(self, child: "subprocess.Popen[bytes]") -> None:
        super().append(child)
        if self._is_cancelled():
            child.kill()

    def kill(self) -> None:
        for child in tuple(self):
            child.kill()


class Progress:
    """The current step of one load, for the repository index, rejected requests and the log.

    One thread at a time writes, any thread reads. ONNX Runtime does not report progress inside a call, so a step covers
    at least one call, and only its duration can be shown.
    """

    def __init__(self, clock: Clock, on_warming: Callable[[], object] = lambda: None) -> None:
        """``on_warming`` is called on the thread of the load when warm-up begins."""
        self.clock: Final = clock
        """Monotonic nanoseconds."""
        self._part = ""
        self._step = _Step(WAITING, clock())
        self._cancelled_because = ""
        self._interrupts: list[Callable[[], object]] = []
        self.give_back: Callable[[], object] = lambda: None
        """Gives back what the load shares with others, for a load that is given up. Any thread."""
        self.begin_warming: Final = on_warming
        """Called by the load when the model is open and warm-up begins."""

    def cancel(self, because: str) -> None:
        """End the load at its next step, and a step that can be interrupted at once. Any thread."""
        self._cancelled_because = because
        for interrupt in tuple(self._interrupts):
            interrupt()

    @contextmanager
    def interruptible(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Call ``interrupt`` if the load is cancelled in the block or was cancelled before, at least once.

        It is called on the thread that cancels, and must not block. The block ends normally; ``check`` raises.
        """
        self._interrupts.append(interrupt)
        try:
            if self._cancelled_because:
                interrupt()
            yield
        finally:
            self._interrupts.remove(interrupt)

    @contextmanager
    def killing(self) -> Iterator[list["subprocess.Popen[bytes]"]]:
        """Yield a list, and kill the processes that are appended to it if the load is cancelled, at any time."""
        children = _Children(lambda: bool(self._cancelled_because))
        with self.interruptible(children.kill):
            yield children

    def check(self) -> None:
        """Raise LoadCancelledError after ``cancel``."""
        if self._cancelled_because:
            raise LoadCancelledError(self._cancelled_because)

    def begin(self, step: str) -> None:
        """Begin a step. ``describe`` appends a text like ``, for 5 s``. Raises LoadCancelledError after ``cancel``."""
        self.check()
        self.show(step)

    def show(self, step: str) -> None:
        """Begin a step that cannot be cancelled."""
        self._step = _Step(self._part + step, self.clock())  # One assignment, so that readers see a complete step.

    def begin_part(self, part: str) -> None:
        """Prefix all following steps, for example with ``instance 2 of 3``."""
        self._part = f"{part}: "

    def describe(self) -> str:
        """The current step with its duration, such as ``warming up: batches of 8 rows, for 5 s``."""
        step = self._step
        return f"{step.name}, for {(self.clock() - step.began_ns) // 10**9} s"
