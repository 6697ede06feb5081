"""Flow control: receive windows, and the budget for unsent answers."""

import asyncio
from collections import deque

from ortserve.frontends.grpc.native.flow_control import ReceiveWindow, UnsentBudget


def test_data_past_the_window_is_an_error() -> None:
    window = ReceiveWindow(100)
    assert window.take(100)
    assert not window.take(1)


def test_window_is_refilled_once_half_is_used() -> None:
    window = ReceiveWindow(100)
    window.take(49)
    assert window.credit() == 0
    window.take(1)
    assert window.credit() == 50
    assert window.credit() == 0
    assert window.take(100)
    assert window.credit() == 100


class FakeHolder:
    """Holds answers of these sizes, oldest first."""

    def __init__(self, budget: UnsentBudget, *sizes: int) -> None:
        self.answers = deque(sizes)
        self._budget = budget
        self.texts: list[str] = []
        budget.add(self)
        budget.held_bytes += sum(sizes)
        budget.enforce_soon()

    @property
    def unsent_bytes(self) -> int:
        return sum(self.answers)

    def end_oldest_unsent(self, text: str, *, is_alone: bool) -> bool:
        if len(self.answers) <= is_alone:
            return False
        self.texts.append(text)
        self._budget.held_bytes -= self.answers.popleft()
        return True


async def settle() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_share_applies_once_half_the_limit_is_used() -> None:
    budget = UnsentBudget(100)
    budget.held_bytes = 50
    assert not budget.is_exceeded_by(50)
    budget.held_bytes = 51
    assert budget.is_exceeded_by(26)
    assert not budget.is_exceeded_by(25)


async def test_largest_holder_loses_its_oldest_calls_until_the_budget_fits() -> None:
    budget = UnsentBudget(100)
    small, large = FakeHolder(budget, 30), FakeHolder(budget, 20, 25, 26)
    await settle()
    assert (list(small.answers), list(large.answers), budget.held_bytes) == ([30], [25, 26], 81)
    assert large.texts == ["grpc_unsent_bytes: expected at most 100 bytes of unsent answers, got 101"]
    another = FakeHolder(budget, 60)
    await settle()
    assert (list(small.answers), list(large.answers), list(another.answers)) == ([30], [25, 26], [])


async def test_exactly_full_budget_evicts_no_call() -> None:
    budget = UnsentBudget(100)
    holders = FakeHolder(budget, 50), FakeHolder(budget, 50)
    await settle()
    assert [holder.texts for holder in holders] == [[], []]


async def test_sole_answer_can_have_any_size() -> None:
    budget = UnsentBudget(100)
    alone = FakeHolder(budget, 90, 1000)
    await settle()
    assert list(alone.answers) == [1000]


async def test_removed_holder_is_not_evicted() -> None:
    budget = UnsentBudget(100)
    gone = FakeHolder(budget, 500)
    budget.remove(gone)
    await settle()
    assert list(gone.answers) == [500]
