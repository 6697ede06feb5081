"""Runs on the event loop, and their time limit per turn."""

import asyncio
import random

import pytest

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop, run_virtual
from ortserve.batching.inline_runs import MAX_OVERRUN_NS, MAX_RUN_NS, MAX_TURN_NS, TRIAL_RUNS, InlineBudget, InlineRuns
from ortserve.batching.latency import LatencyModel

SHORT = LatencyModel([(1, 1000)])


def test_only_runs_known_to_be_short_are_inline() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        assert InlineBudget(loop).take(MAX_RUN_NS)
        assert not InlineBudget(loop).take(MAX_RUN_NS + 1)
        assert not InlineBudget(loop).take(None)

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


def test_rejected_run_uses_no_budget() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        budget = InlineBudget(loop)
        for _ in range(10):
            assert not budget.take(MAX_RUN_NS + 1)
        assert budget.take(MAX_RUN_NS)

    run_virtual(main)


def test_a_long_run_bars_the_model_whatever_the_time(caplog: pytest.LogCaptureFixture) -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        runs = InlineRuns(InlineBudget(loop), "digits/1")
        assert runs.begin(SHORT, 1)
        assert not runs.end(MAX_OVERRUN_NS)
        assert runs.begin(SHORT, 1)
        assert runs.end(2_700_000_000)
        assert not runs.begin(SHORT, 1)
        await asyncio.sleep(3600)
        assert not runs.begin(SHORT, 1)
        assert runs.barred_because == (
            "a run took 2700.0 ms of the event loop, over the limit of 2 ms; 1,000 short runs in a row on a worker "
            "lift this"
        )

    run_virtual(main)
    (line,) = caplog.records
    assert "barred" in line.getMessage()


def test_short_runs_on_a_worker_end_a_bar_and_each_bar_needs_twice_as_many() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        runs = InlineRuns(InlineBudget(loop))
        for needed in (TRIAL_RUNS, 2 * TRIAL_RUNS, 4 * TRIAL_RUNS):
            await asyncio.sleep(0)  # each iteration of the loop has its own budget
            assert runs.begin(SHORT, 1)
            assert runs.end(MAX_OVERRUN_NS + 1)
            for _ in range(needed):
                assert not runs.begin(SHORT, 1)
                runs.observe_on_worker(SHORT, 1, MAX_OVERRUN_NS)
            assert not runs.barred_because

    run_virtual(main)


def test_rare_interruptions_never_bar_a_model_for_longer() -> None:
    """One in 3,000 runs, over months."""

    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        runs = InlineRuns(InlineBudget(loop))
        for _ in range(50):
            for number in range(3 * TRIAL_RUNS):
                if not number % 100:
                    await asyncio.sleep(0)
                assert runs.begin(SHORT, 1)
                assert runs.end(MAX_OVERRUN_NS + (number == 3 * TRIAL_RUNS - 1)) == (number == 3 * TRIAL_RUNS - 1)
            for _ in range(TRIAL_RUNS):
                assert runs.barred_because
                runs.observe_on_worker(SHORT, 1, MAX_OVERRUN_NS)

    run_virtual(main)


def test_a_model_with_a_slow_run_in_a_thousand_soon_leaves_the_loop_for_good() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> int:
        draw = random.Random(0)
        runs = InlineRuns(InlineBudget(loop))
        on_loop = 0
        for number in range(300_000):
            ns = 50_000_000 if draw.random() < 1 / TRIAL_RUNS else 1000
            if not number % 100:
                await asyncio.sleep(0)
            if runs.begin(SHORT, 1):
                on_loop += 1
                runs.end(ns)
            else:
                runs.observe_on_worker(SHORT, 1, ns)
        return on_loop

    assert run_virtual(main) < 20_000


def test_a_long_run_on_a_worker_starts_the_count_again() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        runs = InlineRuns(InlineBudget(loop))
        runs.begin(SHORT, 1)
        runs.end(MAX_OVERRUN_NS + 1)
        for _ in range(5):
            for _ in range(TRIAL_RUNS - 1):
                runs.observe_on_worker(SHORT, 1, 1000)
            runs.observe_on_worker(SHORT, 1, MAX_OVERRUN_NS + 1)
        assert runs.barred_because

    run_virtual(main)


def test_runs_that_the_loop_would_not_take_do_not_end_a_bar() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        runs = InlineRuns(InlineBudget(loop))
        runs.begin(SHORT, 1)
        runs.end(MAX_OVERRUN_NS + 1)
        for _ in range(2 * TRIAL_RUNS):
            runs.observe_on_worker(LatencyModel([(1, MAX_RUN_NS + 1)]), 1, 1000)
            runs.observe_on_worker(LatencyModel(), 1, 1000)
        assert runs.barred_because

    run_virtual(main)


def test_time_in_which_other_threads_ran_bars_nothing_where_cpu_time_is_known() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        runs = InlineRuns(InlineBudget(loop), cpu_clock=clock)
        assert runs.begin(SHORT, 1)
        clock.advance(100_000)
        assert not runs.end(50_000_000)
        clock.advance(MAX_OVERRUN_NS)
        assert runs.end(50_000_000)

    run_virtual(main)


def test_a_model_may_be_barred_from_the_start_and_for_good() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        runs = InlineRuns(InlineBudget(loop), barred_because="it has a loop")
        for _ in range(2 * TRIAL_RUNS):
            runs.observe_on_worker(SHORT, 1, 1000)
        assert not runs.begin(SHORT, 1)

    run_virtual(main)
