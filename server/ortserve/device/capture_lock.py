"""A lock that separates the capture of CUDA graphs from all other GPU work in this process.

While a CUDA graph is captured, an allocation, a copy or a wait in another thread of the process breaks the capture or
fails itself (``cudaStreamCaptureModeGlobal``). So all GPU work holds the lock shared, and a capture holds it
exclusively.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_ATTEMPTS_S: Final = (1, 2, *(4,) * 15)
"""How long each attempt to hold the lock exclusively delays shared requests. As much time passes before the next one,
so that a run that takes minutes, or never ends, does not stop all other GPU work meanwhile. A run that waits for the
lock may be terminated after ``run_limits.MIN_LATE_RUN_NS``, and its instance is abandoned if it has not ended 5 s
later, so delays must be shorter than both together."""


class StillHeldError(Exception):
    """The lock cannot be held exclusively, because a shared hold does not end."""


class CaptureLock:
    """A lock that many threads hold shared, or one thread holds exclusively. Any thread may release a shared hold.

    An exclusive request has priority: later shared requests wait behind it, while it waits for the present holders. So
    a thread that holds the lock must not acquire it again: both requests would wait for each other. If a holder does
    not release the lock, the request lets others pass, tries again later, and fails in the end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shared_holds = 0
        self._is_exclusive = False
        self._exclusive_requests = 0

    def acquire_shared(self) -> None:
        """Block while the lock is held, or requested, exclusively."""
        with self._changed:
            while self._is_exclusive or self._exclusive_requests:
                self._changed.wait()
            self._shared_holds += 1

    def try_acquire_shared(self) -> bool:
        """Acquire without blocking. Returns False if the lock is held, or requested, exclusively."""
        with self._changed:
            if self._is_exclusive or self._exclusive_requests:
                return False
            self._shared_holds += 1
            return True

    def release_shared(self) -> None:
        """Release one shared hold."""
        with self._changed:
            self._shared_holds -= 1
            if not self._shared_holds:
                self._changed.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock shared within the ``with``."""
        self.acquire_shared()
        try:
            yield
        finally:
            self.release_shared()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock exclusively within the ``with``.

        Raises:
            StillHeldError: A holder did not release the lock for two minutes.
        """
        self._acquire_exclusive()
        try:
            yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()

    def _acquire_exclusive(self) -> None:
        with self._changed:
            for attempt_s in _ATTEMPTS_S:
                self._exclusive_requests += 1
                try:
                    is_acquired = self._changed.wait_for(self._is_free, attempt_s)
                finally:
                    self._exclusive_requests -= 1
                if is_acquired:
                    self._is_exclusive = True
                    return
                self._changed.notify_all()
                self._changed.wait_for(self._is_free, attempt_s)
        raise StillHeldError(f"other work on the GPU did not end for {2 * sum(_ATTEMPTS_S)} s")

    def _is_free(self) -> bool:
        return not self._is_exclusive and not self._shared_holds
