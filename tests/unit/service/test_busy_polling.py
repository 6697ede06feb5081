"""Polling in single iterations, on a fake loop and with a clock that the tests set."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from fakes.clock import FakeClock
from ortserve.service.busy_polling import BusyPolling, PollPolicy
from ortserve.telemetry.readings import PollReading

GAP_NS = 50_000
TURN_NS = 1_000


class Turns:
    """A loop that only has the callbacks of its next iteration."""

    def __init__(self) -> None:
        self.due: list[Callable[..., object]] = []

    def call_soon(self, callback: Callable[..., object], *_: Any) -> None:
        self.due.append(callback)

    def turn(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


class World:
    """A server whose only client sends its next request ``GAP_NS`` after each answer, until a test changes it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.turns = Turns()
        self.is_allowed = True
        loop = cast("asyncio.AbstractEventLoop", self.turns)
        self.polling = BusyPolling(loop, self.clock, PollPolicy(200_000), lambda _: self.is_allowed)

    def serve(self) -> None:
        """A request arrives and is answered in the same iteration."""
        self.polling.on_request(self.clock.now_ns)
        self.clock.advance(20_000)
        self.polling.on_end(self.clock.now_ns)

    def wait(self, gap_ns: int) -> int:
        """Run iterations until the loop sleeps, for at most ``gap_ns``. Returns their number."""
        until_ns = self.clock.now_ns + gap_ns
        turned = 0
        while self.turns.due and self.clock.now_ns < until_ns:
            self.turns.turn()
            turned += 1
            self.clock.advance(TURN_NS)
        self.clock.advance(max(0, until_ns - self.clock.now_ns))
        return turned

    def learn(self) -> None:
        for _ in range(8):
            self.serve()
            self.wait(GAP_NS)
        self.serve()


def test_loop_sleeps_until_short_gaps_are_usual_and_then_polls() -> None:
    world = World()
    for _ in range(6):
        world.serve()
        assert world.wait(GAP_NS) == 0
    world.serve()
    assert world.wait(GAP_NS) == GAP_NS // TURN_NS
    world.serve()
    assert world.polling.reading() == PollReading(GAP_NS, hits=1, misses=0)


def test_polling_ends_where_no_request_comes() -> None:
    world = World()
    world.learn()
    before = world.polling.reading()
    assert world.wait(10_000_000) == 2 * GAP_NS // TURN_NS + 1
    assert not world.turns.due
    after = world.polling.reading()
    assert (after.hits, after.misses) == (before.hits, 1)
    assert after.polled_ns - before.polled_ns == 2 * GAP_NS


def test_a_process_that_is_suspended_while_it_polls_polls_again_soon() -> None:
    world = World()
    world.learn()
    world.serve()
    world.turns.turn()
    world.clock.advance(60_000_000_000)
    world.wait(GAP_NS)
    hits = world.polling.reading().hits
    for _ in range(20):
        world.serve()
        world.wait(GAP_NS)
    assert world.polling.reading().hits > hits


def test_loop_sleeps_while_a_request_is_in_flight() -> None:
    world = World()
    world.learn()
    world.polling.on_request(world.clock.now_ns)
    world.serve()
    assert world.wait(GAP_NS) == 1  # the iteration that was already due
    assert not world.turns.due
    world.polling.on_end(world.clock.now_ns)
    assert world.wait(GAP_NS) > 1


def test_loop_sleeps_while_something_else_needs_the_processor() -> None:
    world = World()
    world.learn()
    world.wait(GAP_NS)
    world.is_allowed = False
    world.clock.advance(5_000_000)  # the period for which the last answer is valid
    world.serve()
    assert world.wait(GAP_NS) <= 2
    assert not world.turns.due


def test_one_turn_is_due_at_a_time() -> None:
    world = World()
    world.learn()
    for _ in range(3):
        world.serve()
    assert len(world.turns.due) == 1
