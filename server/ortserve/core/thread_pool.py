"""Starts threads. The error names the thread if the system permits no further one.

The work of a pool is never rejected: it waits while the system has no further thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ortserve.errors import ErrorKind, ServeError


class ThreadPool(ThreadPoolExecutor):
    """A pool with at least one thread. If the system permits no further one, work waits for those that exist.

    Without it, ``submit`` would raise RuntimeError for work that is queued nevertheless: a request would fail, and
    later, on the next thread, still write its outputs. Work that must happen, such as the release of memory, would be
    lost.
    """

    def __init__(
        self,
        threads: int | None = None,
        name: str = "",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        """Start the first thread. The arguments are those of ``ThreadPoolExecutor``.

        Raises:
            ServeError: overloaded, if the system permits no thread.
        """
        super().__init__(threads, name, initializer, initargs)
        try:
            self.submit(int)
        except (RuntimeError, MemoryError):
            raise _no_thread(name) from None

    def _adjust_thread_count(self) -> None:
        """Implements the method of ``ThreadPoolExecutor`` that starts a thread for work that was just queued."""
        if not self._threads:
            super()._adjust_thread_count()
            return
        with suppress(RuntimeError, MemoryError):
            super()._adjust_thread_count()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        ServeError: overloaded, if the system permits no further thread.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        raise _no_thread(thread.name) from None


def _no_thread(name: str) -> ServeError:
    text = f"expected the system to start the thread '{name}', got none: the number of threads or the memory is limited"
    return ServeError(ErrorKind.OVERLOADED, text, retry_after_s=1)
