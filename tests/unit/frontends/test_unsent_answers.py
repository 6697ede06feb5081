"""The budget for the unsent answers of all connections of a port."""

import asyncio
import select
import socket
from collections import deque

from fakes.clock import FakeClock
from ortserve.frontends.unsent_answers import UnsentBudget, unacknowledged_bytes


class FakeHolder:
    """Holds answers of these sizes, oldest first."""

    def __init__(self, budget: UnsentBudget, *sizes: int) -> None:
        self.unsent_bytes = 0
        self.unsent_since_ns = 0
        self.answers = deque(sizes)
        self._budget = budget
        self.texts: list[str] = []
        for size in sizes:
            budget.count(self, size)

    def count_unsent(self) -> None:
        pass

    def end_oldest_unsent(self, text: str, *, is_alone: bool) -> bool:
        if len(self.answers) <= is_alone:
            return False
        self.texts.append(text)
        self._budget.forget(self, self.answers.popleft())
        return True

    def read(self) -> None:
        self._budget.count(self, -self.answers.popleft())


def budget_of(max_bytes: int, clock: FakeClock | None = None) -> UnsentBudget:
    return UnsentBudget("grpc_unsent_bytes", max_bytes, clock or FakeClock())


async def settle() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_share_applies_once_half_the_limit_is_used() -> None:
    budget = budget_of(100)
    budget.held_bytes = 50
    assert not budget.is_exceeded_by(50)
    budget.held_bytes = 51
    assert budget.is_exceeded_by(26)
    assert not budget.is_exceeded_by(25)


async def test_largest_holder_loses_its_oldest_calls_until_the_budget_fits() -> None:
    budget = budget_of(100)
    small, large = FakeHolder(budget, 30), FakeHolder(budget, 20, 25, 26)
    await settle()
    assert (list(small.answers), list(large.answers), budget.held_bytes) == ([30], [25, 26], 81)
    assert large.texts == ["grpc_unsent_bytes: expected at most 100 bytes of unsent answers, got 101"]
    another = FakeHolder(budget, 60)
    await settle()
    assert (list(small.answers), list(large.answers), list(another.answers)) == ([30], [25, 26], [])


async def test_answer_that_is_read_is_kept_even_if_it_is_the_largest() -> None:
    """Otherwise a few callers that read nothing would take the large answers of all others away."""
    clock = FakeClock()
    budget = budget_of(100, clock)
    unread, read = FakeHolder(budget, 20, 20), FakeHolder(budget, 10, 50)
    clock.advance(1000)
    read.read()
    clock.advance(10)
    new = FakeHolder(budget, 20)
    await settle()
    assert (list(unread.answers), list(read.answers), list(new.answers)) == ([20], [50], [20])


async def test_calls_end_in_several_turns_of_the_loop() -> None:
    budget = budget_of(100)
    holders = [FakeHolder(budget, 1) for _ in range(350)]
    turns, ended = 0, 0
    while ended < 250:
        await asyncio.sleep(0)
        turns, before, ended = turns + 1, ended, sum([not holder.answers for holder in holders])
        assert ended - before <= 100
    assert (turns, budget.held_bytes) == (3, 100)


async def test_exactly_full_budget_evicts_no_call() -> None:
    budget = budget_of(100)
    holders = FakeHolder(budget, 50), FakeHolder(budget, 50)
    await settle()
    assert [holder.texts for holder in holders] == [[], []]


async def test_sole_answer_can_have_any_size() -> None:
    budget = budget_of(100)
    alone = FakeHolder(budget, 90, 1000)
    await settle()
    assert list(alone.answers) == [1000]


async def test_budget_that_fits_again_in_time_ends_no_call() -> None:
    budget = budget_of(100)
    holder = FakeHolder(budget, 60, 60)
    holder.read()
    await settle()
    assert list(holder.answers) == [60]


def test_unacknowledged_bytes_fall_before_the_system_accepts_more() -> None:
    assert unacknowledged_bytes(None) == 0
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(listener.getsockname())
        with listener.accept()[0] as server:
            assert unacknowledged_bytes(server) == 0
            server.setblocking(False)
            while select.select([], [server], [], 0)[1]:
                server.send(bytes(65536))
            full = unacknowledged_bytes(server)
            while unacknowledged_bytes(server) == full:
                peer.recv(4096)
            assert not select.select([], [server], [], 0)[1]
