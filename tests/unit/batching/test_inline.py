"""Which runs may stop the loop, and for how long in one turn."""

import asyncio

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop, run_virtual
from ortserve.batching.inline import MAX_RUN_NS, MAX_TURN_NS, InlineBudget


def test_only_runs_known_to_be_short_are_let_in() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        assert InlineBudget(loop).take(MAX_RUN_NS)
        assert not InlineBudget(loop).take(MAX_RUN_NS + 1)
        assert not InlineBudget(loop).take(None)
        assert not InlineBudget(loop).take(float("nan"))
        assert not InlineBudget(loop).take(float("inf"))

    run_virtual(main)


def test_a_turn_of_the_loop_is_bounded_and_the_next_one_starts_afresh() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> list[int]:
        budget = InlineBudget(loop)
        taken = []
        for _ in range(3):
            taken.append(sum(budget.take(MAX_RUN_NS - 1) for _ in range(10)))
            await asyncio.sleep(0)
        return taken

    assert run_virtual(main) == [MAX_TURN_NS // (MAX_RUN_NS - 1)] * 3


def test_refused_run_uses_nothing_up() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        budget = InlineBudget(loop)
        for _ in range(10):
            assert not budget.take(MAX_RUN_NS + 1)
        assert budget.take(MAX_RUN_NS)

    run_virtual(main)
