"""Watches the event loop from a thread of its own, and reports a loop that stands still.

All connections wait while one callback runs. The watchdog asks the loop for an answer four times a second and, where
X
interpreter lock. While a call keeps the lock, the watchdog cannot run; it then reports the stall after its end, with
the step that the loop has reached by then, which is usually a later step of the same request.
"""

import asyncio
import logging
import sys
import threading
from types import FrameType
from typing import Final

from ortserve.clock import Clock
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.readings import LoopActivity, StallReading

logger: Final = logging.getLogger(__name__)

_ASK_EVERY_S: Final = 0.25
_STALL_S: Final = 0.75
"""Without an answer for so long the loop stands still. Together with the time between two questions that is 1 s: every
stall that lasts longer is seen."""

_LOG_EVERY_NS: Final = 10_000_000_000
"""Stalls that begin sooner after the last one in the log are counted in the metrics only."""

_FRAMES: Final = 6


class Watchdog:
    """Reports stalls from ``start`` to ``stop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, activity: LoopActivity, clock: Clock) -> None:
        """``clock`` gives monotonic nanoseconds."""
        self._loop = loop
        self._activity = activity
        self._clock = clock
        self._closed = threading.Event()
        self._answered = threading.Event()
        self._answered_ns = 0
        self._stalls = 0
        self._stalled_ns = 0  # of stalls that are over
        self._since_ns = 0  # of the stall that lasts; 0 without any
        self._logged_ns = clock() - _LOG_EVERY_NS
        self._unlogged = 0

    def start(self) -> None:
        """Watch. Loop thread only: the calling thread is the one whose stack is logged."""
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Report nothing any more; the thread ends within a second."""
        self._closed.set()

    def reading(self) -> StallReading:
        """The stalls so far, the one that lasts included. From any thread."""
        since_ns = self._since_ns
        return StallReading(self._stalls, self._stalled_ns + (self._clock() - since_ns if since_ns else 0))

    def _watch(self) -> None:
        while True:
            # When the loop is to be asked. Where this thread wakes later, the lock was kept, and the loop stood still.
            asked_ns = self._clock() + int(_ASK_EVERY_S * 1e9)
            if self._closed.wait(_ASK_EVERY_S):
                return
            self._answered.clear()
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                return
            is_logged = False
            if not self._answered.wait(_STALL_S):
                self._since_ns = asked_ns
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
            self._stalled_ns, self._since_ns = self._stalled_ns + stalled_ns, 0
            if is_logged or self._is_to_log(asked_ns):
                self._log("the event loop goes on after a stall", stalled_ns)

    def _answer(self) -> None:
        """Called on the loop thread."""
        self._answered_ns = self._clock()
        self._answered.set()

    def _log_begin(self, asked_ns: int) -> bool:
        if not self._is_to_log(asked_ns):
            return False
        stack = _stack(sys._current_frames().get(self._loop_thread))
        self._log("the event loop stands still", self._clock() - asked_ns, stack=stack)
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
    """The innermost calls of a thread, the innermost first: ``module:line < module:line``."""
    calls: list[str] = []
    while frame is not None and len(calls) < _FRAMES:
        module = frame.f_globals.get("__name__", frame.f_code.co_filename)
        calls.append(f"{module}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(calls)
