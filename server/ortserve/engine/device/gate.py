"""The gate that keeps captures apart from all other work on GPUs in this process.

While a CUDA graph is captured, an allocation, a copy or a wait in any other thread of the process breaks it, or fails
itself (``cudaStreamCaptureModeGlobal``). So whoever does anything on a GPU is inside the gate, and who captures has it
for himself.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureGate:
    """Many may be inside at a time, or one alone. Who entered may leave in another thread.

    Who wants it for himself goes first: newcomers wait behind him, those inside finish. Hence nobody may enter again
    while he is inside himself on behalf of the same work.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False
        self._waiting_alone = 0

    def enter(self) -> None:
        """Come in beside others; blocks while somebody has the gate for himself, or waits to."""
        with self._changed:
            while self._alone or self._waiting_alone:
                self._changed.wait()
            self._inside += 1

    def try_enter(self) -> bool:
        """Come in beside others if that is possible at once; False where it is not."""
        with self._changed:
            if self._alone or self._waiting_alone:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """Undo one ``enter``."""
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Be inside beside others."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be inside with nobody else."""
        with self._changed:
            self._waiting_alone += 1
            while self._alone or self._inside:
                self._changed.wait()
            self._waiting_alone -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
