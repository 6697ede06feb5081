"""Sets how the kernel schedules threads: first the event loop, then runs of models, last loads and long decoding."""

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from ortserve.core.thread_pool import ThreadPool

_Made = TypeVar("_Made")

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""Numbers of the system call sched_setattr, for which glibc has a function only since 2.41."""
_SCHED_OTHER: Final = 0
_RESET_ON_FORK: Final = 1

LOOP_SLICE_NS: Final = 1_000_000
"""Longer than most turns of the event loop, so that these are not interrupted, and shorter than the kernel's default,
1.4 ms with two processors."""
LONGEST_SLICE_NS: Final = 100_000_000
"""The kernel's maximum."""
_LOOP_NICE: Final = -10
"""Nine times the share of a processor that a thread of level 0 gets."""

_OWN_NICE: Final = os.getpriority(os.PRIO_PROCESS, 0)


def own_nice() -> int:
    """The nice level that the process was started with."""
    return _OWN_NICE


def set_nice(level: int) -> str:
    """Set the nice level of the calling thread. Returns the reason of a failure; empty on success."""
    if sys.platform != "linux":
        return f"only Linux has nice levels of threads, this is {sys.platform}"
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), level)
    except OSError as error:
        return f"level {level}, below the process's {own_nice()}, needs CAP_SYS_NICE or RLIMIT_NICE: {error.strerror}"
    return ""


def call_with_nice(level: int, make: Callable[[], _Made]) -> _Made:
    """Call ``make`` on a new thread with this nice level, which threads that ``make`` starts inherit. Blocks.

    The calling thread itself could not return to its own level without a privilege.

    Raises:
        ServeError: overloaded, if the system permits no further thread.
    """
    with ThreadPool(1, "open with nice", set_nice, (level,)) as thread:
        return thread.submit(make).result()


def put_loop_first() -> None:
    """Let the kernel prefer the calling thread, which runs the event loop, to all other threads.

    Most turns of the loop take less than a millisecond. A turn that loses its processor waits for the next tick of the
    kernel, 4 ms at 250 Hz. So the loop gets a short slice (``set_slice``). It also gets a nice level below 0 if
    CAP_SYS_NICE or RLIMIT_NICE allow it and the process was started with level 0. Threads and processes that it starts
    have level 0.
    """
    if _OWN_NICE != 0 or not _set_schedule(LOOP_SLICE_NS, _LOOP_NICE):
        set_slice(LOOP_SLICE_NS)


def set_slice(slice_ns: int) -> bool:
    """Set the time slice of the calling thread. Threads that it starts have the default.

    Since Linux 6.12, a thread that wakes preempts a thread with a longer slice at once; otherwise it waits until that
    slice ends. Shares of the processor do not change, so no privilege is needed. Nice levels need one, because a thread
    cannot lower its level again. Threads of loads and of long decoding have the longest slices.

    Args:
        slice_ns: 100,000 to ``LONGEST_SLICE_NS``.

    Returns:
        Whether the kernel accepted it. Kernels from 3.14 to 6.11 accept it without effect.
    """
    return _set_schedule(slice_ns, None)


def _set_schedule(slice_ns: int, nice: int | None) -> bool:
    """Set slice and nice level (None: unchanged) of the calling thread. Returns whether the kernel accepted them."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != _SCHED_OTHER:
        return False
    if nice is None:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes = _SchedAttr(ctypes.sizeof(_SchedAttr), _SCHED_OTHER, _RESET_ON_FORK, nice, 0, slice_ns)
    return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), 0) == 0)


class _SchedAttr(ctypes.Structure):
    """struct sched_attr of sched_setattr(2)."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )
