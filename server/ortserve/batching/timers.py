"""Timers that fire at a given time, with a resolution of 0.1 ms on Linux.

Timers of an event loop have a resolution of a millisecond (uvloop uses those of libuv), which is longer than most waits
here. Linux offers timers as file descriptors. They are called through ctypes, because Python has them only since 3.13.
"""

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Final, Protocol, TypeAlias


class Timer(Protocol):
    """Calls back once at the time that was set last. Loop thread only."""

    def set(self, due_ns: int, now_ns: int) -> None:
        """Call back at ``due_ns`` (monotonic) instead of at the time that was set before."""
        ...

    def close(self) -> None:
        """Stop the timer for good; it does not call back any more."""
        ...


MakeTimer: TypeAlias = Callable[[Callable[[], object]], Timer]


class LoopTimer:
    """A timer of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._is_closed = False

    def set(self, due_ns: int, now_ns: int) -> None:
        if self._is_closed:
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(0, due_ns - now_ns) / 1e9, self._callback)

    def close(self) -> None:
        self._is_closed = True
        if self._handle is not None:
            self._handle.cancel()


class FileDescriptorTimer:
    """A timer of the kernel behind a file descriptor (timerfd_create(2))."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        """Open no descriptor yet: most models of a large repository never set a timer."""
        self._loop = loop
        self._callback = callback
        self._fd: int | None = None
        self._is_closed = False
        self._fallback: LoopTimer | None = None

    def set(self, due_ns: int, now_ns: int) -> None:
        if self._is_closed:
            return
        if self._fd is None and self._fallback is None:
            try:
                self._fd = _call(_libc().timerfd_create, _CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # the system has none, or the process has too many descriptors
                self._fallback = LoopTimer(self._loop, self._callback)
            else:
                self._loop.add_reader(self._fd, self._on_readable)
        if self._fallback is not None:
            self._fallback.set(due_ns, now_ns)
            return
        # A time in the past fires at once; 0 would disarm the timer.
        time = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(max(1, due_ns), 1_000_000_000)))
        _call(_libc().timerfd_settime, self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(time), None)

    def close(self) -> None:
        self._is_closed = True
        if self._fallback is not None:
            self._fallback.close()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _on_readable(self) -> None:
        assert self._fd is not None
        try:
            os.read(self._fd, 8)  # the number of expirations; unread, the descriptor would stay readable
        except BlockingIOError:  # the timer was set again in the meantime
            return
        self._callback()


def best_timer(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> Timer:
    """The timer with the best resolution that the system has."""
    return (FileDescriptorTimer if sys.platform == "linux" else LoopTimer)(loop, callback)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


_CLOCK_MONOTONIC: Final = 1
_TFD_TIMER_ABSTIME: Final = 1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(function: Callable[..., int], *arguments: object) -> int:
    """Raises OSError with the system's reason."""
    result = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
