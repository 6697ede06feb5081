"""Models that share threads: the order of runs, and the release of threads."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fakes.clock import FakeClock
from fakes.inflight import submit
from fakes.loop import VirtualTimeLoop, run_virtual
from fakes.runner import FakeRunner, rows_of
from ortserve.batching.admission import QueueLimits
from ortserve.batching.batch_runs import BatchRuns
from ortserve.batching.batcher import Batcher
from ortserve.batching.inline_runs import InlineBudget, InlineRuns
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RequestQueue
from ortserve.batching.shared_threads import Share, SharedThreads
from ortserve.core.timing import Timing

MS = 1_000_000
S = 1000 * MS


class Stage:
    """Shared threads and the names of the woken models, in order."""

    def __init__(self, loop: VirtualTimeLoop, threads: int) -> None:
        self.shared = SharedThreads(threads, loop)
        self.woken: list[str] = []

    def share(self, name: str, threads: int = 1) -> Share:
        return self.shared.share(threads, lambda: self.woken.append(name))


def on_stage(main: Callable[[Stage], Coroutine[Any, Any, None]], threads: int = 1) -> None:
    run_virtual(lambda loop, clock: main(Stage(loop, threads)))


def run(share: Share, predicted_ns: float = 1) -> None:
    assert share.may_start()
    share.begin(predicted_ns)


def test_runs_go_side_by_side_while_there_are_threads() -> None:
    async def main(stage: Stage) -> None:
        a, b, c = (stage.share(name) for name in "abc")
        run(a)
        run(b)
        assert stage.shared.free_threads == 0
        assert not c.may_start()
        b.end()
        await asyncio.sleep(0)
        assert stage.woken == ["c"]
        run(c)
        a.end()
        c.end()
        assert stage.shared.free_threads == 2

    on_stage(main, threads=2)


def test_run_that_requests_more_threads_than_exist_takes_all() -> None:
    async def main(stage: Stage) -> None:
        large = stage.share("large", threads=64)
        run(large)
        assert stage.shared.free_threads == 0
        large.end()
        assert stage.shared.free_threads == 4

    on_stage(main, threads=4)


def test_model_with_the_least_time_goes_first() -> None:
    async def main(stage: Stage) -> None:
        a, b, c = (stage.share(name) for name in "abc")
        for share, ns in ((a, 30), (b, 10), (c, 20)):
            share.begin(ns)
            share.end()
        blocker = stage.share("blocker")
        run(blocker, 1000)
        assert not any(share.may_start() for share in (a, c, b))
        blocker.end()
        await asyncio.sleep(0)
        assert stage.woken == ["b"]
        assert not a.may_start()
        run(b, 100)
        b.end()
        await asyncio.sleep(0)
        assert stage.woken == ["b", "c"]

    on_stage(main)


def test_models_with_equal_time_go_in_the_order_of_their_requests() -> None:
    async def main(stage: Stage) -> None:
        shares = {name: stage.share(name) for name in "abc"}
        blocker = stage.share("blocker")
        run(blocker)
        for name in "bca":
            assert not shares[name].may_start()
        blocker.end()
        for _ in range(3):
            await asyncio.sleep(0)
            run(shares[stage.woken[-1]])
            shares[stage.woken[-1]].end()
        assert stage.woken == ["b", "c", "a"]

    on_stage(main)


def test_no_run_overtakes_one_that_needs_more_threads() -> None:
    async def main(stage: Stage) -> None:
        small, other, large = stage.share("small"), stage.share("other"), stage.share("large", threads=2)
        run(small)
        assert not large.may_start()  # one thread is free, but it needs two
        assert not other.may_start(), "or the large one might wait for ever"
        small.end()
        await asyncio.sleep(0)
        assert stage.woken == ["large"]
        assert not small.may_start()
        run(large)

    on_stage(main, threads=2)


def test_withdrawal_lets_the_next_run_start() -> None:
    async def main(stage: Stage) -> None:
        blocker, a, b = (stage.share(name) for name in ("blocker", "a", "b"))
        run(blocker)
        assert not a.may_start()
        assert not b.may_start()
        blocker.end()
        await asyncio.sleep(0)
        a.withdraw()
        await asyncio.sleep(0)
        assert stage.woken == ["a", "b"]
        run(b)
        a.withdraw()  # it does not wait, so this has no effect
        b.end()
        assert stage.shared.free_threads == 1

    on_stage(main)


def test_idle_model_gets_no_credit() -> None:
    async def main(stage: Stage) -> None:
        busy, idle = stage.share("busy"), stage.share("idle")
        for _ in range(1000):
            run(busy, 10)
            busy.end()
        went = {"busy": 0, "idle": 0}
        blocker = stage.share("blocker")
        run(blocker, 0)
        assert not busy.may_start()
        assert not idle.may_start()
        blocker.end()
        for _ in range(100):
            await asyncio.sleep(0)
            name = stage.woken[-1]
            share, other = (busy, idle) if name == "busy" else (idle, busy)
            run(share, 10)
            assert not share.may_start()
            assert not other.may_start()
            share.end()
            went[name] += 1
        assert abs(went["busy"] - went["idle"]) <= 2

    on_stage(main)


def test_work_of_unknown_time_does_not_count() -> None:
    async def main(stage: Stage) -> None:
        shares = {name: stage.share(name) for name in "ab"}
        went: list[str] = []
        blocker = stage.share("blocker")
        run(blocker)
        assert not shares["a"].may_start()
        assert not shares["b"].may_start()
        blocker.end()
        for _ in range(10):
            await asyncio.sleep(0)
            name = stage.woken[-1]
            run(shares[name], predicted_ns=0)
            assert not shares[name].may_start()
            shares[name].end()
            went.append(name)
        assert went == ["a", "b"] * 5

    on_stage(main)


def test_short_run_overtakes_long_ones_while_its_model_has_had_less_time() -> None:
    async def main(stage: Stage) -> None:
        long, short, wide = stage.share("long", 2), stage.share("short"), stage.share("wide", 2)
        run(long, 100 * MS)
        assert not short.may_start()
        for _ in range(8):
            assert short.may_start(25 * MS)
            short.begin(25 * MS)
            assert stage.shared.free_threads == -1
            assert not wide.may_start(MS), "it would hold more than twice the threads"
            wide.withdraw()
            short.end()
        assert not short.may_start(25 * MS), "both have had 200 ms of threads"
        long.end()
        await asyncio.sleep(0)
        assert stage.woken[-1] == "short"

    on_stage(main, threads=2)


def test_run_of_known_time_overtakes_one_of_unknown_time() -> None:
    async def main(stage: Stage) -> None:
        unknown, known = stage.share("unknown"), stage.share("known")
        run(unknown, 0)
        assert not known.may_start()
        assert not known.may_start(6 * MS)
        for _ in range(3):
            assert known.may_start(5 * MS)
            known.begin(5 * MS)
            known.end()

    on_stage(main)


def test_no_run_overtakes_one_that_is_not_much_longer() -> None:
    async def main(stage: Stage) -> None:
        short, long, other = stage.share("short"), stage.share("long"), stage.share("other")
        run(long, 100 * MS)
        run(short, 8 * MS)
        assert not other.may_start(3 * MS)
        assert other.may_start(2 * MS)
        short.end()
        assert other.may_start(25 * MS)

    on_stage(main, threads=2)


def test_share_is_woken_when_its_run_may_overtake_the_runs_that_are_left() -> None:
    async def main(stage: Stage) -> None:
        long, short, other = stage.share("long"), stage.share("short"), stage.share("other")
        run(long, 100 * MS)
        assert short.may_start(10 * MS)
        short.begin(10 * MS)
        assert not other.may_start(20 * MS), "twice the threads are held"
        short.end()
        await asyncio.sleep(0)
        assert stage.woken == ["other"]
        assert other.may_start(20 * MS)

    on_stage(main)


def test_very_short_runs_overtake_whatever_runs() -> None:
    async def main(stage: Stage) -> None:
        one, other, third = stage.share("one"), stage.share("other"), stage.share("third")
        run(one, MS)
        for share in (other, third):
            assert share.may_start(MS // 10)
            share.begin(MS // 10)
        assert stage.shared.free_threads == -2

    on_stage(main)


@pytest.mark.parametrize("seed", range(30))
def test_threads_in_use_never_exceed_twice_the_limit_and_all_are_released(seed: int) -> None:
    draw = random.Random(seed)
    threads = draw.randint(1, 6)

    async def main(stage: Stage) -> None:
        shares = [stage.share(str(number), draw.randint(1, 8)) for number in range(draw.randint(1, 5))]
        running: list[Share] = []
        for _ in range(300):
            share = draw.choice(shares)
            match draw.randrange(4):
                case 0 | 1:
                    ns = draw.choice([0, MS, 1000 * MS])
                    if share.may_start() or share.may_start(ns or None):
                        share.begin(ns)
                        running.append(share)
                case 2:
                    share.withdraw()
                case _ if running:
                    running.pop(draw.randrange(len(running))).end()
            assert stage.shared.free_threads == threads - sum(share.threads for share in running)
            assert stage.shared.free_threads >= -threads
        for share in running:
            share.end()
        assert stage.shared.free_threads == threads
        for share in shares:
            share.withdraw()
        assert all(share.may_start() for share in shares)

    on_stage(main, threads)


def test_runs_on_the_loop_count_as_much_as_others() -> None:
    async def main(stage: Stage) -> None:
        inline, other = stage.share("inline"), stage.share("other")
        went = {"inline": 0, "other": 0}
        blocker = stage.share("blocker")
        run(blocker, 0)
        assert not inline.may_start()
        assert not other.may_start()
        blocker.end()
        for _ in range(120):
            other.may_start()  # so that both of them wait
            if inline.may_start():
                inline.charge(10, wants_more=True)
                assert stage.shared.free_threads == 1
                went["inline"] += 1
            else:
                run(other, 30)
                other.end()
                went["other"] += 1
        assert went["inline"] == pytest.approx(3 * went["other"], abs=3)

    on_stage(main)


def test_run_on_the_loop_does_not_let_models_with_more_time_overtake() -> None:
    async def main(stage: Stage) -> None:
        inline, other = stage.share("inline"), stage.share("other")
        run(other, 1000)
        other.end()
        assert inline.may_start()
        inline.charge(10, wants_more=True)
        assert not other.may_start()
        await asyncio.sleep(0)
        assert stage.woken == ["inline"]
        assert inline.may_start()
        inline.charge(10, wants_more=False)
        await asyncio.sleep(0)
        assert stage.woken == ["inline", "other"]
        run(other)

    on_stage(main)


def test_work_is_slower_by_the_ratio_of_requested_to_existing_threads() -> None:
    async def main(stage: Stage) -> None:
        a, b, c = stage.share("a", 2), stage.share("b", 2), stage.share("c", 4)
        assert a.slowdown() == 1
        run(a)
        assert (a.slowdown(), b.slowdown(), c.slowdown()) == (1, 1, 1.5)
        run(b)
        assert not c.may_start()
        assert [share.slowdown() for share in (a, b, c)] == [2, 2, 2]
        a.end()
        b.end()
        c.withdraw()
        assert a.slowdown() == 1

    on_stage(main, threads=4)


class Backlogged:
    """Models with a queue that never empties, each with instances that run for a set time, on the same threads."""

    def __init__(self, loop: VirtualTimeLoop, clock: FakeClock, threads: int) -> None:
        self.loop = loop
        self.clock = clock
        self.shared = SharedThreads(threads, loop)
        self.inline = InlineBudget(loop)
        self.runners: list[list[FakeRunner]] = []
        self.batchers: list[Batcher] = []

    def add(
        self, run_ns: int, *, threads: int = 1, instances: int = 1, is_known: bool = True, requests: int = 8
    ) -> None:
        runners = [FakeRunner(self.loop, self.clock, lambda rows: run_ns) for _ in range(instances)]
        known = [(1, run_ns), (2, run_ns)] if is_known else []
        runs = BatchRuns(
            runners,
            BatchPolicy(2),
            RequestQueue(known, known),
            shared=self.shared,
            threads=threads,
            inline=InlineRuns(self.inline),
            loop=self.loop,
            clock=self.clock,
            observe_batch=lambda *_: None,
        )
        batcher = Batcher(runs, QueueLimits(10**6, 10**9), self.clock)
        self.runners.append(runners)
        self.batchers.append(batcher)
        for _ in range(requests * instances):
            self.ask(batcher)

    def ask(self, batcher: Batcher) -> None:
        submit(batcher, (rows_of(1),), 1, None, Timing(self.clock())).add_done_callback(lambda _: self.ask(batcher))

    def worked_ns(self, model: int) -> int:
        return sum(run.ended_ns - run.began_ns for runner in self.runners[model] for run in runner.runs)


def play_backlogged(main: Callable[[Backlogged], Coroutine[Any, Any, None]], threads: int = 1) -> None:
    async def on_device(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        backlogged = Backlogged(loop, clock, threads)
        await main(backlogged)
        assert not [violation for runners in backlogged.runners for one in runners for violation in one.violations]

    run_virtual(on_device)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "learned"])
def test_models_with_short_and_long_batches_get_the_same_time(is_known: bool) -> None:
    async def main(backlogged: Backlogged) -> None:
        backlogged.add(1 * MS, is_known=is_known)
        backlogged.add(20 * MS, is_known=is_known)
        await asyncio.sleep(4)
        short, long = backlogged.worked_ns(0), backlogged.worked_ns(1)
        assert abs(short - long) <= 2 * 20 * MS
        assert short + long >= 3.96 * S, "and the device is never idle"

    play_backlogged(main)


def test_model_whose_runs_are_on_the_loop_gets_no_more_of_the_device() -> None:
    async def main(backlogged: Backlogged) -> None:
        backlogged.add(MS // 5)  # the longest run that the loop does
        backlogged.add(20 * MS)
        await asyncio.sleep(2)
        assert all(run.is_inline for run in backlogged.runners[0][0].runs[:100])
        assert backlogged.worked_ns(0) == pytest.approx(backlogged.worked_ns(1), rel=0.02)

    play_backlogged(main)


@pytest.mark.parametrize("run_ns", [MS // 10, 5 * MS], ids=["loop", "worker"])
@pytest.mark.parametrize("threads", [1, 2])
def test_short_runs_do_not_wait_for_a_long_run_on_all_threads(run_ns: int, threads: int) -> None:
    async def main(backlogged: Backlogged) -> None:
        backlogged.add(100 * MS, threads=2)
        backlogged.add(run_ns, threads=threads, requests=0)
        for _ in range(200):
            await asyncio.sleep(0.05)
            began_ns = backlogged.clock()
            await submit(backlogged.batchers[1], (rows_of(1),), 1, None, Timing(began_ns))
            assert backlogged.clock() - began_ns <= run_ns + MS
        assert backlogged.worked_ns(0) >= 9.9 * S, "and the long runs go on"

    play_backlogged(main, threads=2)


def test_each_of_several_models_gets_its_share_and_none_waits_longer_than_a_round() -> None:
    async def main(backlogged: Backlogged) -> None:
        for run_ns in (MS, 2 * MS, 5 * MS, 20 * MS):
            backlogged.add(run_ns)
        await asyncio.sleep(8)
        # More than 8 s in all: a simulated run that overtakes another does not slow it down.
        worked_ns = [backlogged.worked_ns(model) for model in range(4)]
        assert sum(worked_ns) >= 7.9 * S
        for model in range(4):
            assert worked_ns[model] == pytest.approx(sum(worked_ns) / 4, abs=2 * 20 * MS)
            (runner,) = backlogged.runners[model]
            pauses = [
                after.began_ns - before.ended_ns for before, after in zip(runner.runs, runner.runs[1:], strict=False)
            ]
            assert max(pauses) <= 3 * 2 * 20 * MS

    play_backlogged(main)


def test_model_of_many_threads_gets_its_share_beside_one_of_many_instances() -> None:
    async def main(backlogged: Backlogged) -> None:
        backlogged.add(3 * MS, instances=4)
        backlogged.add(10 * MS, threads=4)
        await asyncio.sleep(8)
        # Work is time multiplied by threads.
        small, large = backlogged.worked_ns(0), 4 * backlogged.worked_ns(1)
        assert small == pytest.approx(large, rel=0.02)

    play_backlogged(main, threads=4)


def test_late_model_gets_its_share_at_once_and_no_more() -> None:
    async def main(backlogged: Backlogged) -> None:
        backlogged.add(5 * MS)
        await asyncio.sleep(10)
        before_ns = backlogged.worked_ns(0)
        backlogged.add(5 * MS)
        await asyncio.sleep(1)
        assert backlogged.worked_ns(0) - before_ns == pytest.approx(S // 2, abs=20 * MS)
        assert backlogged.worked_ns(1) == pytest.approx(S // 2, abs=20 * MS)

    play_backlogged(main)


def test_model_gets_its_share_soon_after_a_first_batch_that_was_interrupted() -> None:
    async def main(backlogged: Backlogged) -> None:
        backlogged.add(10 * MS, is_known=False)
        (runner,) = backlogged.runners[0]
        runner.latency_ns = lambda rows: 10 * MS if runner.runs else 5 * S
        backlogged.add(10 * MS)
        await asyncio.sleep(7)
        before_ns = [backlogged.worked_ns(model) for model in range(2)]
        await asyncio.sleep(10)
        after_ns = [backlogged.worked_ns(model) for model in range(2)]
        assert [after_ns[model] - before_ns[model] for model in range(2)] == pytest.approx([5 * S, 5 * S], rel=0.02)

    play_backlogged(main)
