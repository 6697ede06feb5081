"""An event loop in virtual time: whenever it is idle, the clock jumps to the next timer.

Hours pass in milliseconds, and every run of a test is the same. A task that waits for an event that can never occur
raises ``StalledError`` at once instead of hanging the test.
"""

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

from fakes.clock import FakeClock

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Keys = list[tuple[selectors.SelectorKey, int]]


class StalledError(Exception):
    """Nothing is scheduled; only another thread could wake the loop."""


class _ClockSelector(selectors.BaseSelector):
    """Never blocks: where a selector would wait, it advances the clock."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> Keys:
        ready = self._real.select(0)  # the loop's own pipe, through which call_soon_threadsafe wakes it
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise StalledError("every task waits, and nothing is scheduled that could wake one")
        self._clock.advance(max(1, round(timeout * 1e9)))
        return []

    def register(self, fileobj: "FileDescriptorLike", events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: "FileDescriptorLike") -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping["FileDescriptorLike", selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``time()`` is ``clock`` in seconds.

    ``faults`` collects exceptions of callbacks and of futures without a reader.
    """

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(_ClockSelector(clock))
        self._clock = clock
        self._made_by = threading.get_ident()
        self._clock_resolution = 1e-9  # asyncio runs timers that are due within this
        self.faults: list[str] = []
        self.set_exception_handler(lambda _, context: self.faults.append(f"{context}"))

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Like ``call_soon`` on the loop's own thread, because writing to the pipe costs more than most schedules."""
        if threading.get_ident() == self._made_by:
            return self.call_soon(callback, *args, context=context)
        return super().call_soon_threadsafe(callback, *args, context=context)

    def time(self) -> float:
        return self._clock.now_ns / 1e9


def run_virtual(main: Callable[[VirtualTimeLoop, FakeClock], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` on a new loop and check that no callback raised and no exception went unseen.

    Raises:
        StalledError: ``main`` can never finish.
    """
    clock = FakeClock()
    loop = VirtualTimeLoop(clock)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            result = runner.run(main(loop, clock))
        except BaseException as error:
            for fault in loop.faults:
                error.add_note(fault)
            raise
    assert not loop.faults, loop.faults
    return result
