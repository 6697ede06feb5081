"""Being woken at a moment, to the tenth of a millisecond.

An event loop's own timers come in whole milliseconds (uvloop's are libuv's), which is longer than most waits that are
worth their while. Linux offers clocks as file descriptors; Python has them since 3.13, here they come through ctypes.
"""

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias


class Alarm(Protocol):
    """Calls back once at the moment that was set last. Loop thread only."""

    def set(self, due_ns: int, now_ns: int) -> None:
        """Call back at ``due_ns`` (monotonic) instead of whenever was set before."""
        ...

    def close(self) -> None:
        """Never call back again."""
        ...


MakeAlarm: TypeAlias = Callable[[Callable[[], object]], Alarm]


class LoopAlarm:
    """An alarm by the loop's own timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], object]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due_ns: int, now_ns: int) -> None:
        self.close()
        self._timer = self._loop.call_later(max(0, due_ns - now_ns) / 1e9, self._ring)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class ClockAlarm:
    """An alarm by a file descriptor of the kernel's (timerfd_create(2))."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], object]) -> None:
        """Raises OSError where the system has no such clocks."""
        self._loop = loop
        self._ring = ring
        self._fd = _call(_libc().timerfd_create, _CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        loop.add_reader(self._fd, self._on_readable)

    def set(self, due_ns: int, now_ns: int) -> None:
        if self._fd < 0:
            return
        # A moment that has passed rings at once; 0 would disarm.
        moment = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(max(1, due_ns), 1_000_000_000)))
        _call(_libc().timerfd_settime, self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(moment), None)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_readable(self) -> None:
        try:
            os.read(self._fd, 8)  # how often it rang; else it would go on
        except BlockingIOError:  # it was set again in the meantime
            return
        self._ring()


def best_alarm(loop: asyncio.AbstractEventLoop, ring: Callable[[], object]) -> Alarm:
    """The most exact alarm that the system has."""
    if sys.platform == "linux":
        try:
            return ClockAlarm(loop, ring)
        except OSError:
            pass
    return LoopAlarm(loop, ring)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


_CLOCK_MONOTONIC: Final = 1
_TFD_TIMER_ABSTIME: Final = 1


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(function: Callable[..., int], *arguments: object) -> int:
    """Raises OSError with the system's reason."""
    result = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
