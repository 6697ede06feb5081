"""Watches the event loop from its own thread, and reports stalls.

One blocked callback delays all connections. The watchdog posts a callback to the loop four times a second. If the loop
does not run it in time, the watchdog logs the current step (``LoopActivity``) and the Python stack of the loop thread.
Both need the interpreter lock. While a call holds the lock, the watchdog cannot run; it then reports the stall after
its end, with the step that the loop has reached by then, usually a later step of the same request.
"""

import asyncio
import logging
import sys
import threading
import time
from types import FrameType
from typing import Final

from ortserve.clock import Clock
from ortserve.core.thread_pool import start_thread
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.readings import LoopActivity, LoopReading

logger: Final = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.25
_STALL_S: Final = 0.75
"""Time without an answer that counts as a stall. With the interval between two callbacks that is 1 s: every longer
stall is detected."""

_LOG_EVERY_NS: Final = 10_000_000_000
"""Minimum interval between two logged stalls; others are only counted in the metrics."""

_FRAMES: Final = 6


class Watchdog:
    """Reports stalls between ``start`` and ``stop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, activity: LoopActivity, clock: Clock) -> None:
        """``clock`` gives monotonic nanoseconds."""
        self._loop = loop
        self._activity = activity
        self._clock = clock
        self._closed = threading.Event()
        self._answered = threading.Event()
        self._answered_ns = 0
        self._cpu_ns = 0
        self._stalls = 0
        # Time of finished stalls, and beginning of the current one, 0 if there is none. Replaced as one: readers of the
        # two would count a stall twice while it ends.
        self._stalled_ns = (0, 0)
        self._logged_ns = clock() - _LOG_EVERY_NS
        self._unlogged = 0

    def start(self) -> None:
        """Start watching. Loop thread only: the stack of the calling thread is logged.

        Raises:
            ServeError: overloaded, if the system permits no thread.
        """
        self._loop_thread = threading.get_ident()
        start_thread(threading.Thread(target=self._watch, name="watchdog", daemon=True))

    def stop(self) -> None:
        """Stop reporting; the thread ends within a second."""
        self._closed.set()

    def reading(self) -> LoopReading:
        """The stalls so far, a current one included, and the processor time, up to 0.25 s old. From any thread."""
        now_ns = self._clock()
        stalled_ns, since_ns = self._stalled_ns
        if since_ns:  # the loop may have answered before the watchdog could run again
            end_ns = min(now_ns, self._answered_ns) if self._answered.is_set() else now_ns
            stalled_ns += max(0, end_ns - since_ns)
        return LoopReading(self._stalls, stalled_ns, self._cpu_ns)

    def _watch(self) -> None:
        while True:
            # When the callback is due. If this thread wakes later, a call held the lock and the loop was blocked, too.
            asked_ns = self._clock() + int(_INTERVAL_S * 1e9)
            if self._closed.wait(_INTERVAL_S):
                return
            self._answered.clear()
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                return
            is_logged = False
            if not self._answered.wait(_STALL_S):
                self._stalled_ns = self._stalled_ns[0], asked_ns
                self._stalls += 1
                is_logged = self._log_begin(asked_ns)
                while not self._answered.wait(_STALL_S):
                    if self._closed.is_set():
                        return
            elif self._answered_ns - asked_ns >= _STALL_S * 1e9:
                self._stalls += 1  # the answer came before this thread could run again
            else:
                continue
            stalled_ns = self._answered_ns - asked_ns
            self._stalled_ns = self._stalled_ns[0] + stalled_ns, 0
            if is_logged or self._is_to_log(asked_ns):
                self._log("the event loop continues after a stall", stalled_ns)

    def _answer(self) -> None:
        """Runs on the loop thread."""
        self._answered_ns = self._clock()
        self._cpu_ns = time.thread_time_ns()
        self._answered.set()

    def _log_begin(self, asked_ns: int) -> bool:
        if not self._is_to_log(asked_ns):
            return False
        stack = _stack(sys._current_frames().get(self._loop_thread))
        self._log("the event loop is blocked", self._clock() - asked_ns, stack=stack)
        return True

    def _is_to_log(self, now_ns: int) -> bool:
        if now_ns - self._logged_ns < _LOG_EVERY_NS:
            self._unlogged += 1
            return False
        self._logged_ns = now_ns
        return True

    def _log(self, message: str, stalled_ns: int, **further: str) -> None:
        activity = self._activity
        fields: dict[str, object] = {
            "seconds": round(stalled_ns / 1e9, 3),
            "step": activity.step,
            "protocol": activity.protocol,
            "model": activity.model,
            "request_id": activity.request_id[:64],
            **further,
        }
        if self._unlogged:
            fields["stalls_not_logged"], self._unlogged = self._unlogged, 0
        log_event(logger, logging.WARNING, message, **{key: value for key, value in fields.items() if value})


def _stack(frame: FrameType | None) -> str:
    """The innermost calls of a thread, innermost first: ``module:line < module:line``."""
    calls: list[str] = []
    while frame is not None and len(calls) < _FRAMES:
        module = frame.f_globals.get("__name__", frame.f_code.co_filename)
        calls.append(f"{module}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(calls)
