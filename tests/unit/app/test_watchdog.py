"""The watchdog of a real event loop in a separate thread, which the test blocks until the watchdog reports it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from ortserve.app.watchdog import Watchdog
from ortserve.clock import monotonic_ns
from ortserve.errors import ServeError
from ortserve.telemetry.readings import NOTHING, RUN, LoopActivity
from scarcity import no_threads

LONG_S = 30.0


class Lines(logging.Handler):
    """The records of the watchdog, as fields by message."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()
        self.records: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self._news:
            self.records.append((record.getMessage(), record.__dict__["fields"]))
            self._news.notify_all()

    def wait_for(self, message: str) -> dict[str, Any]:
        with self._news:
            found = self._news.wait_for(lambda: [fields for text, fields in self.records if message in text], LONG_S)
        assert found, self.records
        return found[0]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("ortserve.app.watchdog")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def on_a_loop(main: Callable[[asyncio.AbstractEventLoop], None]) -> threading.Thread:
    """Call ``main`` on the thread of a loop that runs until it is stopped."""

    def run() -> None:
        loop = uvloop.new_event_loop()
        loop.call_soon(main, loop)
        loop.run_forever()
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_watchdog_without_a_thread_is_an_error_that_names_it() -> None:
    loop = uvloop.new_event_loop()
    with no_threads(), pytest.raises(ServeError, match="start the thread 'watchdog'"):
        Watchdog(loop, LoopActivity(), monotonic_ns).start()
    loop.close()


def test_stall_is_logged_with_the_running_code_and_at_its_end(lines: Lines) -> None:
    activity = LoopActivity()
    go_on = threading.Event()
    made: list[Watchdog] = []

    def stand_still(loop: asyncio.AbstractEventLoop) -> None:
        activity.model = "endless"
        activity.step = RUN
        go_on.wait(LONG_S)
        activity.step = NOTHING
        loop.call_soon(loop.stop)

    def main(loop: asyncio.AbstractEventLoop) -> None:
        watchdog = Watchdog(loop, activity, monotonic_ns)
        made.append(watchdog)
        watchdog.start()
        loop.call_soon(stand_still, loop)

    thread = on_a_loop(main)
    begin = lines.wait_for("is blocked")
    first = made[0].reading()
    second = made[0].reading()
    go_on.set()
    end = lines.wait_for("continues after a stall")
    thread.join(LONG_S)
    made[0].stop()

    assert (begin["step"], begin["model"]) == ("run", "endless")
    assert "stand_still" in begin["stack"]
    assert first.stalls == second.stalls == 1
    assert 0.75e9 <= first.stalled_ns < second.stalled_ns  # it rises while the stall lasts
    assert end["seconds"] >= begin["seconds"] >= 0.75
    assert (end.get("step"), end["model"]) == (None, "endless")
    assert made[0].reading().stalled_ns == pytest.approx(end["seconds"] * 1e9, abs=1e6)


def test_time_of_a_stall_does_not_decrease_at_its_end(lines: Lines) -> None:
    """The log keeps the watchdog from noticing the end, while ten seconds pass."""
    passed_ns = 0
    go_on, is_read = threading.Event(), threading.Event()
    made: list[Watchdog] = []

    def hold(record: logging.LogRecord) -> bool:
        if "is blocked" in record.getMessage():
            go_on.set()
            is_read.wait(LONG_S)
        return True

    lines.addFilter(hold)

    def stand_still(loop: asyncio.AbstractEventLoop) -> None:
        go_on.wait(LONG_S)
        loop.call_later(0.01, loop.stop)  # after the reply to the watchdog

    def main(loop: asyncio.AbstractEventLoop) -> None:
        made.append(Watchdog(loop, LoopActivity(), lambda: monotonic_ns() + passed_ns))
        made[0].start()
        loop.call_soon(stand_still, loop)

    on_a_loop(main).join(LONG_S)
    passed_ns = 10_000_000_000
    before = made[0].reading()
    is_read.set()
    lines.wait_for("continues after a stall")
    made[0].stop()
    assert made[0].reading().stalled_ns == before.stalled_ns < passed_ns


def test_stalls_in_quick_succession_are_counted_not_logged(lines: Lines) -> None:
    made: list[Watchdog] = []
    go_on = threading.Event()

    def stand_still(loop: asyncio.AbstractEventLoop, stalls: int) -> None:
        # Until the watchdog has counted it in its own reading.
        while made[0].reading().stalls < stalls:
            go_on.wait(0.01)
        if stalls == 2:
            loop.call_soon(loop.stop)
        else:
            # After the reply to the watchdog, which then sends its next ping.
            loop.call_later(0.01, stand_still, loop, stalls + 1)

    def main(loop: asyncio.AbstractEventLoop) -> None:
        watchdog = Watchdog(loop, LoopActivity(), monotonic_ns)
        made.append(watchdog)
        watchdog.start()
        loop.call_soon(stand_still, loop, 1)

    on_a_loop(main).join(LONG_S)
    made[0].stop()
    assert made[0].reading().stalls == 2
    assert [message for message, _ in lines.records if "is blocked" in message] == ["the event loop is blocked"]
