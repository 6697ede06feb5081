"""Instances on devices: two batches at a time, out of memory, lost devices."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fakes.clock import FakeClock
from fakes.inflight import Outcome, submit
from fakes.loop import VirtualTimeLoop, run_virtual
from fakes.runner import FakeRunner, answer, first_values, rows_of
from ortserve.batching.admission import QueueLimits
from ortserve.batching.batch_runs import BatchRuns
from ortserve.batching.batcher import Batcher
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RequestQueue
from ortserve.batching.run_limits import NO_CALLBACKS, RunLimits
from ortserve.batching.shared_threads import SharedThreads
from ortserve.core.batch import Arrays
from ortserve.core.inflight import Terms
from ortserve.core.timing import Timing
from ortserve.errors import DeviceLostError, ErrorKind, OutOfMemoryError, RunTimeoutError, ServeError

MS = 1_000_000
RUN_NS = 10 * MS
OVER = 1000
"""A row with this value fails for lack of memory."""


@dataclass
class Stage:
    batcher: Batcher
    runners: list[FakeRunner]
    clock: FakeClock
    lost: list[str] = field(default_factory=list)

    def submit(self, rows: np.ndarray) -> Outcome:
        return submit(self.batcher, (rows,), len(rows), None, Timing(self.clock()))

    @property
    def batches(self) -> list[list[int]]:
        return [first_values(run.parts) for run in self.runners[0].runs]


def play(
    main: Callable[[Stage], Coroutine[Any, Any, None]],
    *,
    compute: Callable[[np.ndarray], Arrays] = answer,
    policy: BatchPolicy | None = None,
    instances: int = 1,
    depth: int = 2,
    run_ns: int = RUN_NS,
    run_limits: RunLimits | None = None,
) -> None:
    async def on_stage(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        runners = [FakeRunner(loop, clock, lambda rows: run_ns, compute, depth) for _ in range(instances)]
        known = [(rows, float(RUN_NS)) for rows in (1, 2, 4, 8)]
        lost: list[str] = []
        runs = BatchRuns(
            runners,
            policy or BatchPolicy(8),
            RequestQueue(known, known),
            shared=SharedThreads(4, loop),
            threads=1,
            inline=None,
            loop=loop,
            clock=clock,
            observe_batch=lambda *_: None,
            depth=depth,
            run_limits=run_limits,
            run_events=replace(NO_CALLBACKS, on_lost=lost.append),
        )
        batcher = Batcher(runs, QueueLimits(4096, 2**30), clock)
        await main(Stage(batcher, runners, clock, lost))
        await batcher.close()
        assert not [violation for runner in runners for violation in runner.violations]

    run_virtual(on_stage)


def test_a_second_batch_is_chosen_late_and_computed_without_a_gap() -> None:
    async def main(stage: Stage) -> None:
        answers = [stage.submit(rows_of(0))]
        await asyncio.sleep(0.001)
        answers.append(stage.submit(rows_of(1)))
        await asyncio.sleep(0.006)  # seven of ten milliseconds: too early to plan the next batch
        answers.append(stage.submit(rows_of(2)))
        for future, value in zip(answers, range(3), strict=True):
            np.testing.assert_array_equal((await future)[0], answer(rows_of(value))[0])
        assert stage.batches == [[0], [1, 2]]
        first, second = stage.runners[0].runs
        assert second.began_ns == first.ended_ns, "it was staged by then"

    play(main)


def test_under_a_steady_load_every_batch_is_chosen_late_and_none_waits_for_another() -> None:
    async def main(stage: Stage) -> None:
        async def arrive() -> list[Outcome]:
            futures = []
            for number in range(60):
                futures.append(stage.submit(rows_of(number)))
                await asyncio.sleep(0.00205)
            return futures

        await asyncio.gather(*await arrive())
        runs = stage.runners[0].runs
        assert [later.began_ns - earlier.ended_ns for earlier, later in pairwise(runs)] == [0] * (len(runs) - 1)
        # Requests that arrive during a run of ten milliseconds join the next batch, except in its last moments.
        assert all(4 <= len(batch) <= 6 for batch in stage.batches[2:-2])

    play(main)


def test_with_one_batch_at_a_time_the_second_is_chosen_when_the_first_is_over() -> None:
    async def main(stage: Stage) -> None:
        answers = [stage.submit(rows_of(0))]
        await asyncio.sleep(0.001)
        answers.append(stage.submit(rows_of(1)))
        await asyncio.gather(*answers)
        assert stage.batches == [[0], [1]]

    play(main, depth=1)


def test_request_that_arrives_during_two_batches_waits_for_the_first_to_end() -> None:
    async def main(stage: Stage) -> None:
        answers = [stage.submit(rows_of(0))]
        await asyncio.sleep(0.001)
        answers.append(stage.submit(rows_of(1)))
        await asyncio.sleep(0.00895)
        answers.append(stage.submit(rows_of(2)))
        await asyncio.gather(*answers)
        assert stage.batches == [[0], [1], [2]]

    play(main)


def test_a_batch_behind_a_long_one_has_its_own_time_limit() -> None:
    async def main(stage: Stage) -> None:
        first = stage.submit(rows_of(0))
        await asyncio.sleep(0.001)
        second = stage.submit(rows_of(1))
        for future, value in ((first, 0), (second, 1)):
            np.testing.assert_array_equal((await future)[0], answer(rows_of(value))[0])
        assert [run.ended_ns - run.began_ns for run in stage.runners[0].runs] == [3 * RUN_NS] * 2
        assert stage.runners[0].terminated == 0

    play(main, run_ns=3 * RUN_NS, run_limits=RunLimits(4 * RUN_NS))


def test_a_batch_behind_one_that_does_not_end_runs_on_another_instance() -> None:
    async def main(stage: Stage) -> None:
        healthy, stuck = stage.runners  # the last one is used first
        stuck.latency_ns = lambda rows: 3600_000 * MS
        stuck.is_endless = True
        lost = stage.submit(rows_of(0))
        await asyncio.sleep(0.001)
        beside = stage.submit(rows_of(1))
        await asyncio.sleep(0.001)
        behind = stage.submit(rows_of(2))
        for future, value in ((beside, 1), (behind, 2)):
            np.testing.assert_array_equal((await future)[0], answer(rows_of(value))[0])
        with pytest.raises(RunTimeoutError):
            await lost
        assert (stuck._in_flight, len(healthy.runs)) == (2, 2)

    play(main, instances=2, run_limits=RunLimits(5 * RUN_NS, 3 * RUN_NS))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_late_batch_behind_a_long_run_costs_no_instance(*, is_cancelled: bool) -> None:
    async def main(stage: Stage) -> None:
        runner = stage.runners[0]
        runner.is_endless = True  # a batch that waits behind a run does not end when it is terminated
        durations_ns = iter((20_000 * MS, RUN_NS, RUN_NS))
        runner.latency_ns = lambda rows: next(durations_ns)
        first = stage.submit(rows_of(0))
        await asyncio.sleep(0.001)
        terms = Terms(answer_by_ns=stage.clock() + 500 * MS)
        second = submit(stage.batcher, (rows_of(1),), 1, None, Timing(stage.clock()), terms)
        await asyncio.sleep(0.05)
        if is_cancelled:
            second.cancel()
        np.testing.assert_array_equal((await first)[0], answer(rows_of(0))[0])
        with pytest.raises(asyncio.CancelledError if is_cancelled else RunTimeoutError):
            await second
        await asyncio.sleep(60)
        np.testing.assert_array_equal((await stage.submit(rows_of(2)))[0], answer(rows_of(2))[0])
        assert (runner.terminated, runner.is_abandoned) == (1, False)

    play(main, run_limits=RunLimits(25_000 * MS, 2_000 * MS))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_late_batch_that_does_not_end_after_a_long_run_costs_its_instance(*, is_cancelled: bool) -> None:
    async def main(stage: Stage) -> None:
        runner = stage.runners[0]
        runner.is_endless = True
        durations_ns = iter((20_000 * MS, 3600_000 * MS))
        runner.latency_ns = lambda rows: next(durations_ns)
        first = stage.submit(rows_of(0))
        await asyncio.sleep(0.001)
        terms = Terms(answer_by_ns=stage.clock() + 500 * MS)
        second = submit(stage.batcher, (rows_of(1),), 1, None, Timing(stage.clock()), terms)
        await asyncio.sleep(0.05)
        if is_cancelled:
            second.cancel()
        await first
        await asyncio.sleep(26 if is_cancelled else 1)
        assert not runner.is_abandoned
        await asyncio.sleep(2)
        assert runner.is_abandoned
        with pytest.raises(asyncio.CancelledError if is_cancelled else RunTimeoutError):
            await second

    play(main, run_limits=RunLimits(25_000 * MS, 2_000 * MS))


async def answered_beside_a_slow_run(stage: Stage, values: Sequence[int]) -> None:
    """Send requests one after another. All are answered within the time of two runs."""
    began_ns = stage.clock()
    answers = []
    for value in values:
        answers.append(stage.submit(rows_of(value)))
        await asyncio.sleep(0.001)
    for future, value in zip(answers, values, strict=True):
        np.testing.assert_array_equal((await future)[0], answer(rows_of(value))[0])
    assert stage.clock() - began_ns <= 2.1 * RUN_NS


def test_no_batch_waits_behind_a_run_that_takes_far_longer_than_predicted() -> None:
    async def main(stage: Stage) -> None:
        stuck = stage.runners[1]  # the last one is used first
        stuck.latency_ns = lambda rows: 20_000 * MS
        slow = stage.submit(rows_of(0))
        await asyncio.sleep(2)
        await answered_beside_a_slow_run(stage, (1, 2, 3))
        np.testing.assert_array_equal((await slow)[0], answer(rows_of(0))[0])

    play(main, instances=2)


def test_no_batch_waits_behind_such_a_run_after_a_request_that_was_cancelled() -> None:
    async def main(stage: Stage) -> None:
        stage.runners[1].latency_ns = lambda rows: 20_000 * MS  # the last one is used first
        slow = stage.submit(rows_of(0))
        await asyncio.sleep(0.001)
        beside = stage.submit(rows_of(1))
        await asyncio.sleep(0.009)
        stage.submit(rows_of(2)).cancel()  # when the slow run should end, so that its instance may take a second batch
        await beside
        await asyncio.sleep(2)
        await answered_beside_a_slow_run(stage, (3, 4))
        np.testing.assert_array_equal((await slow)[0], answer(rows_of(0))[0])

    play(main, instances=2)


def test_a_hundred_callers_get_their_own_answers_two_batches_at_a_time() -> None:
    async def main(stage: Stage) -> None:
        async def call(number: int) -> None:
            for turn in range(5):
                rows = rows_of(1000 * number + turn)
                await asyncio.sleep(0.0013 * (number % 7))
                np.testing.assert_array_equal((await stage.submit(rows))[0], answer(rows)[0])

        await asyncio.gather(*map(call, range(100)))

    play(main, instances=2)


def out_of_memory_over(limit: int) -> Callable[[np.ndarray], Arrays]:
    def compute(rows: np.ndarray) -> Arrays:
        if len(rows) > limit:
            raise OutOfMemoryError("cuda:0 has too little memory for the batch")
        return answer(rows)

    return compute


@pytest.mark.parametrize("depth", [1, 2])
def test_too_little_memory_makes_batches_smaller_and_all_requests_are_answered(depth: int) -> None:
    async def main(stage: Stage) -> None:
        for _ in range(3):
            futures = [stage.submit(rows_of(number)) for number in range(16)]
            for number, future in enumerate(futures):
                np.testing.assert_array_equal((await future)[0], answer(rows_of(number))[0])
        assert stage.batcher.max_rows == 2
        assert all(len(batch) <= 2 for batch in stage.batches[-8:])
        assert 2 <= stage.batcher.learned().decisions.out_of_memory <= 6

    play(main, compute=out_of_memory_over(3), depth=depth)


def test_a_request_too_large_for_the_memory_fails_and_the_next_one_runs_in_pieces() -> None:
    async def main(stage: Stage) -> None:
        large = rows_of(*range(8))
        with pytest.raises(OutOfMemoryError):
            await stage.submit(large)
        assert stage.batcher.max_rows == 4
        (whole, _) = await submit(stage.batcher, (large,), 8, None, Timing(stage.clock()))
        np.testing.assert_array_equal(whole, answer(large)[0])

    play(main, compute=out_of_memory_over(4))


def test_queued_request_with_more_rows_than_the_lowered_limit_runs_alone() -> None:
    async def main(stage: Stage) -> None:
        first = stage.submit(rows_of(*range(8)))
        await asyncio.sleep(0.001)
        second = stage.submit(rows_of(*range(6)))
        third = stage.submit(rows_of(9))
        outcomes = await asyncio.gather(first, second, third, return_exceptions=True)
        assert isinstance(outcomes[0], OutOfMemoryError)
        assert isinstance(outcomes[1], OutOfMemoryError)
        assert not isinstance(outcomes[2], BaseException)

    play(main, compute=out_of_memory_over(4), policy=BatchPolicy(8, buckets=(1, 2, 4, 8)), depth=1)


def test_a_size_that_fails_twice_at_once_makes_batches_smaller_once() -> None:
    async def main(stage: Stage) -> None:
        outcomes = [stage.submit(rows_of(0, 1, 2))]
        await asyncio.sleep(0.001)
        outcomes.append(stage.submit(rows_of(3, 4, 5)))
        assert {type(outcome) for outcome in await asyncio.gather(*outcomes, return_exceptions=True)} == {
            OutOfMemoryError
        }
        assert stage.batches == [[0, 1, 2], [3, 4, 5]]
        assert stage.batcher.max_rows == 2, "both were padded to four rows"

    play(main, compute=out_of_memory_over(2), policy=BatchPolicy(4, buckets=(1, 2, 4)))


def test_a_request_in_pieces_is_put_together_though_batches_became_smaller_meanwhile() -> None:
    async def main(stage: Stage) -> None:
        large = rows_of(*range(16))
        answered = submit(stage.batcher, (large,), 16, None, Timing(stage.clock()))
        await asyncio.sleep(0)
        failing = stage.submit(rows_of(*[OVER] * 8))
        np.testing.assert_array_equal((await answered)[0], answer(large)[0])
        with pytest.raises(OutOfMemoryError):
            await failing

    def compute(rows: np.ndarray) -> Arrays:
        if rows[0, 0] == OVER:
            raise OutOfMemoryError("cuda:0 has too little memory for the batch")
        return answer(rows)

    play(main, compute=compute, instances=3, depth=1)


def test_lost_device_never_runs_again_and_all_requests_fail() -> None:
    async def main(stage: Stage) -> None:
        futures = [stage.submit(rows_of(number)) for number in range(20)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {DeviceLostError}
        assert len(stage.runners[0].runs) == 1, "not even to find an offender"
        assert stage.lost == ["cuda:0 is lost"]
        with pytest.raises(ServeError, match="cuda:0 is lost") as refused:
            stage.submit(rows_of(1))
        assert refused.value.kind is ErrorKind.NOT_READY

    play(main, compute=lost_device, depth=1)


@pytest.mark.parametrize("depth", [1, 2])
def test_close_returns_while_the_device_is_being_lost(depth: int) -> None:
    async def main(stage: Stage) -> None:
        answers = [stage.submit(rows_of(0))]
        await asyncio.sleep(0.001)
        answers.append(stage.submit(rows_of(1)))
        await asyncio.sleep(0.008)
        closing = asyncio.ensure_future(stage.batcher.close())
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {DeviceLostError}
        await asyncio.wait_for(closing, 1)

    play(main, compute=lost_device, depth=depth)


def test_close_after_the_loss_of_the_device_waits_for_the_other_running_batch() -> None:
    async def main(stage: Stage) -> None:
        answers = [stage.submit(rows_of(0))]
        await asyncio.sleep(0.001)
        answers.append(stage.submit(rows_of(1)))
        with pytest.raises(DeviceLostError):
            await answers[0]
        assert stage.lost
        assert not answers[1].done()
        await asyncio.wait_for(stage.batcher.close(), 1)
        assert isinstance(answers[1].exception(), DeviceLostError)

    play(main, compute=lost_device)


def test_learned_values_can_be_read_without_a_device() -> None:
    async def main(stage: Stage) -> None:
        await asyncio.sleep(1)
        await asyncio.gather(*[stage.submit(rows_of(number)) for number in range(3)], return_exceptions=True)
        await asyncio.sleep(1)
        assert stage.batcher.learned().arrival_rows_per_s > 0
        assert stage.batcher.learned().saturation is None

    play(main, compute=lost_device)


def test_while_another_instance_has_its_device_the_model_answers() -> None:
    lost = [0]

    def compute(rows: np.ndarray) -> Arrays:
        if not lost[0]:
            lost[0] = 1
            raise DeviceLostError("cuda:0 is lost")
        return answer(rows)

    async def main(stage: Stage) -> None:
        with pytest.raises(DeviceLostError):
            await stage.submit(rows_of(0))
        for number in range(10):
            np.testing.assert_array_equal((await stage.submit(rows_of(number)))[0], answer(rows_of(number))[0])
        assert stage.lost == []
        assert sorted(len(runner.runs) for runner in stage.runners) == [1, 10]

    play(main, compute=compute, instances=2)


def lost_device(rows: np.ndarray) -> Arrays:
    raise DeviceLostError("cuda:0 is lost")
