"""Nice levels of the threads that run a model: its workers, and the threads that ONNX Runtime makes for a session."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Made = TypeVar("_Made")


def own_nice() -> int:
    """The nice level of the process."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def set_nice(level: int) -> str:
    """Set the nice level of the calling thread. Returns why that failed; empty if it did not."""
    if sys.platform != "linux":
        return f"only Linux has nice levels of threads, this is {sys.platform}"
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), level)
    except OSError as error:
        return f"level {level}, below the process's {own_nice()}, needs CAP_SYS_NICE or RLIMIT_NICE: {error.strerror}"
    return ""


def call_with_nice(level: int, make: Callable[[], _Made]) -> _Made:
    """Call ``make`` on a thread of that nice level, which the threads that it starts inherit. Blocks.

    Not on the calling thread, which could not return to its own level without a privilege.
    """
    with ThreadPoolExecutor(1, "open with nice", initializer=set_nice, initargs=(level,)) as thread:
        return thread.submit(make).result()
