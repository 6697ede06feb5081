"""Row checks: the requests of a batch that run again alone, their selection, their time, and their outcome."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fakes.clock import FakeClock
from fakes.inflight import Outcome, inflight, submit
from fakes.loop import VirtualTimeLoop, run_virtual
from fakes.runner import FakeRunner, answer, rows_of
from ortserve.batching.admission import QueueLimits
from ortserve.batching.batch_runs import BatchRuns
from ortserve.batching.batcher import Batcher
from ortserve.batching.groups import RequestGroup
from ortserve.batching.inline_runs import InlineBudget, InlineRuns
from ortserve.batching.planner import BatchPolicy, lower_cap, run_requests_alone
from ortserve.batching.queue import RequestQueue
from ortserve.batching.row_checks import EVERY_BATCHES, MAX_INPUT_BYTES, SHARE, Answer, Difference, RowChecks
from ortserve.batching.run_limits import RunLimits
from ortserve.batching.scheduler import Scheduler
from ortserve.batching.shared_threads import SharedThreads
from ortserve.batching.statistics import Decisions
from ortserve.core.batch import Arrays, BatchResult
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError

MS = 1_000_000
LOUD = 1000
"""In the models below, a row with this value changes the answers of the other rows."""
SIGNATURE = ModelSignature(
    (TensorSpec("x", DataType.INT64, (-1, -1)),),
    (TensorSpec("y", DataType.INT64, (-1, -1)), TensorSpec("sum", DataType.INT64, (-1,))),
)


def mixing(rows: np.ndarray) -> Arrays:
    """A loud row changes the answers of the other rows of its batch."""
    y, total = answer(rows)
    return (y + ((rows != LOUD) & (rows == LOUD).any()), total)


@dataclass
class Stage:
    """A batcher with its fakes. ``differences`` holds the reported differences."""

    loop: VirtualTimeLoop
    clock: FakeClock
    runner: FakeRunner
    queue: RequestQueue
    checks: RowChecks
    batcher: Batcher
    observed: list[int]
    differences: list[Difference] = field(default_factory=list)

    def submit(self, rows: np.ndarray) -> Outcome:
        return submit(self.batcher, (rows,), len(rows), rows.shape[1:], Timing(self.clock()))

    async def ask(self, *requests: np.ndarray) -> Sequence[Arrays]:
        """The answers to requests that share a batch."""
        return await asyncio.gather(*[self.submit(rows) for rows in requests])

    def sizes(self) -> list[list[int]]:
        """The rows of each request, by run."""
        return [run.sizes for run in self.runner.runs]

    async def rest(self) -> None:
        """Let the checks run that start while no request waits."""
        await asyncio.sleep(10)


def play(
    main: Callable[[Stage], Coroutine[Any, Any, None]],
    compute: Callable[[np.ndarray], Arrays] = answer,
    *,
    run_ns: Callable[[int], int] = lambda rows: MS * rows,
    max_rows: int = 8,
    buckets: tuple[int, ...] = (),
    is_inline: bool = False,
    run_limits: RunLimits | None = None,
) -> None:
    """Run ``main`` with a model that ``compute`` computes, whose batches of ``rows`` rows take ``run_ns(rows)``."""

    async def on_stage(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        runner = FakeRunner(loop, clock, run_ns, compute)
        known = [(rows, 10_000.0 if is_inline else float(MS * rows)) for rows in (1, 2, 4, 8)]
        queue = RequestQueue(known, known)
        checks = RowChecks(SIGNATURE, clock)
        shared = SharedThreads(1, loop)
        observed: list[int] = []
        differences: list[Difference] = []
        runs = BatchRuns(
            [runner],
            BatchPolicy(max_rows, buckets=buckets),
            queue,
            shared=shared,
            threads=1,
            inline=InlineRuns(InlineBudget(loop)),
            loop=loop,
            clock=clock,
            observe_batch=lambda rows, *_: observed.append(rows),
            run_limits=run_limits,
            row_checks=checks,
            on_difference=differences.append,
        )
        batcher = Batcher(runs, QueueLimits(4096, 2**30), clock)
        await main(Stage(loop, clock, runner, queue, checks, batcher, observed, differences))
        await batcher.close()
        assert not runner.violations
        assert (queue.rows, queue.nbytes) == (0, 0)

    run_virtual(on_stage)


def test_request_of_a_batch_runs_again_alone_and_is_no_batch_in_the_metrics() -> None:
    async def main(stage: Stage) -> None:
        await stage.ask(rows_of(1), rows_of(2), rows_of(3))
        await stage.rest()
        assert stage.sizes() == [[1, 1, 1], [1]]
        assert stage.checks.counts == {"agreed": 1, "differed": 0, "not_deterministic": 0, "failed": 0}
        assert stage.observed == [3]
        assert (stage.batcher.learned().decisions.batches, stage.batcher.learned().decisions.inline) == (1, 0)

    play(main)


def test_requests_that_ran_alone_are_not_checked() -> None:
    async def main(stage: Stage) -> None:
        for value in range(3):
            await stage.ask(rows_of(value, value))
        await stage.rest()
        assert stage.sizes() == [[2]] * 3

    play(main)


def test_short_check_runs_on_the_event_loop_as_any_short_run() -> None:
    async def main(stage: Stage) -> None:
        await stage.ask(rows_of(1), rows_of(2))
        await stage.rest()
        assert [run.is_inline for run in stage.runner.runs] == [True, True]
        assert stage.batcher.learned().decisions.inline == 1

    play(main, run_ns=lambda rows: 10_000, is_inline=True)


def test_after_a_difference_each_request_runs_alone_and_no_request_is_lost() -> None:
    async def main(stage: Stage) -> None:
        wrong, _ = await stage.ask(rows_of(1), rows_of(LOUD))
        assert not np.array_equal(wrong[0], answer(rows_of(1))[0])
        await asyncio.sleep(0.0015)  # the second of the two single runs has started
        assert stage.sizes() == [[1, 1], [1]]
        requests = [rows_of(value, *[LOUD] * (value % 3)) for value in range(20)]
        answers = await stage.ask(*requests)
        for rows, outputs in zip(requests, answers, strict=True):
            np.testing.assert_array_equal(outputs[0], mixing(rows)[0])
        assert stage.sizes() == [[1, 1], [1], [1], *[[len(rows)] for rows in requests]]
        assert stage.checks.counts == {"agreed": 0, "differed": 1, "not_deterministic": 0, "failed": 0}
        (difference,) = stage.differences
        assert difference.reason == "output 'y': 2 of 2 values differ, by 1.0e+00 at most"
        assert difference.neighbours == "1 of x[1, 2]"
        assert stage.batcher.learned().max_rows == 1
        assert stage.batcher.max_rows == 8  # of one request
        await stage.rest()
        assert stage.checks.counts["differed"] == 1

    play(main, mixing)


def test_large_request_still_runs_in_pieces_of_as_many_rows_as_before() -> None:
    async def main(stage: Stage) -> None:
        await stage.ask(rows_of(1), rows_of(LOUD))
        await stage.rest()
        rows = rows_of(*range(20))
        await submit(stage.batcher, (rows,), 20, rows.shape[1:], Timing(stage.clock()))
        assert stage.sizes()[3:] == [[8], [8], [4]]

    play(main, mixing)


def test_policy_of_requests_alone_keeps_the_rows_of_each_together() -> None:
    policy = run_requests_alone(BatchPolicy(8, 5, (4,), (1, 4, 8), closed_loop_wait=True))
    assert policy == BatchPolicy(1, buckets=(1, 4, 8), lone_rows=8)
    assert run_requests_alone(policy) == policy
    assert lower_cap(policy, 8) == BatchPolicy(1, buckets=(1, 4), lone_rows=4)


def test_parts_of_a_failed_batch_that_are_still_to_run_are_separated_as_well() -> None:
    async def main(stage: Stage) -> None:
        shape_class = stage.queue.shape_class((2,))
        requests = [inflight((rows_of(value),), 1, Timing(stage.clock())) for value in range(3)]
        decisions = Decisions()
        scheduler = Scheduler(stage.queue, decisions, stage.loop, stage.clock, lambda: None)
        scheduler.run_again([RequestGroup(shape_class, requests, 3)])
        policy = run_requests_alone(BatchPolicy(8))
        for request in requests:
            group = scheduler.next_group(policy, stage.clock())
            assert isinstance(group, RequestGroup)
            assert (list(group.requests), group.rows) == ([request], 1)
        assert scheduler.next_group(policy, stage.clock()) is None

    play(main)


def test_answer_that_differs_between_two_runs_alone_is_no_difference() -> None:
    drawn = iter(range(1000))

    async def main(stage: Stage) -> None:
        await stage.ask(rows_of(1), rows_of(2))
        await stage.rest()
        assert stage.sizes() == [[1, 1], [1], [1]]
        assert stage.checks.counts == {"agreed": 0, "differed": 0, "not_deterministic": 1, "failed": 0}
        assert not stage.differences
        await stage.ask(rows_of(1), rows_of(2))
        assert stage.sizes()[-1] == [1, 1]

    play(main, lambda rows: (answer(rows)[0] + next(drawn), answer(rows)[1]))


def test_failed_check_is_no_difference() -> None:
    def refuses_one(rows: np.ndarray) -> Arrays:
        if len(rows) == 1:
            raise ServeError(ErrorKind.INTERNAL, "one row is too few")
        return answer(rows)

    async def main(stage: Stage) -> None:
        await stage.ask(rows_of(1), rows_of(2))
        await stage.rest()
        assert stage.checks.counts["failed"] == 1
        assert not stage.differences

    play(main, refuses_one)


def test_no_check_begins_while_a_request_waits() -> None:
    async def main(stage: Stage) -> None:
        first = [stage.submit(rows_of(value)) for value in range(8)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        later = [stage.submit(rows_of(value)) for value in range(3)]  # sent during the first run
        await asyncio.gather(*first)
        await asyncio.gather(*later)
        assert stage.sizes() == [[1] * 8, [1] * 3]
        await stage.rest()
        assert stage.sizes() == [[1] * 8, [1] * 3, [1]]

    play(main)


def test_checks_are_one_in_many_batches_and_another_place_each_time() -> None:
    async def main(stage: Stage) -> None:
        batches = 2 * EVERY_BATCHES + 1
        for _ in range(batches):
            await stage.ask(rows_of(7), rows_of(8), rows_of(9))
            await stage.rest()
        checked = [int(run.parts[0][0, 0]) for run in stage.runner.runs if run.sizes == [1]]
        assert checked == [7, 8, 9]
        assert stage.checks.counts["agreed"] == 3

    play(main, run_ns=lambda rows: 10 * MS if rows == 3 else 1000)


def test_checks_take_a_hundredth_of_the_time_of_runs() -> None:
    async def main(stage: Stage) -> None:
        for _ in range(10 * EVERY_BATCHES):
            await stage.ask(rows_of(7), rows_of(8))
            await stage.rest()
        runs = stage.runner.runs
        spent = [sum(run.ended_ns - run.began_ns for run in runs if len(run.sizes) == size) for size in (1, 2)]
        assert 2 <= stage.checks.counts["agreed"] <= 5
        assert spent[0] <= spent[1] / SHARE + 4 * MS

    play(main, run_ns=lambda rows: 4 * MS if rows == 1 else MS)


def test_wait_of_a_check_for_a_busy_machine_delays_no_further_check() -> None:
    clock = FakeClock()
    checks, known = RowChecks(SIGNATURE, clock), RequestQueue().shape_class(None)
    request = inflight((rows_of(1),), 1, Timing(0))
    for _ in range(EVERY_BATCHES + 1):
        outputs = answer(rows_of(1, 1))
        checks.observe(RequestGroup(known, [request, request], 2), BatchResult(outputs, 0, 0, MS))
        group = checks.next_group(lambda request: None)
        if group is not None:
            clock.advance(1000 * MS)
            outputs = answer(rows_of(1))
            checks.observe(group, BatchResult(outputs, 0, 0, MS))
            group.requests[0].complete(outputs)
            checks.judge(group.requests[0])
    assert checks.counts["agreed"] == 2


def test_request_of_one_row_is_preferred_and_rows_of_another_stay_together() -> None:
    async def main(stage: Stage) -> None:
        await stage.ask(rows_of(1, 2), rows_of(3), rows_of(4, 5))
        await stage.rest()
        assert stage.sizes() == [[2, 1, 2], [1]]

    play(main)

    async def without(stage: Stage) -> None:
        await stage.ask(rows_of(1, 2), rows_of(4, 5))
        await stage.rest()
        assert stage.sizes() == [[2, 2], [2]]
        assert stage.checks.counts["agreed"] == 1

    play(without)


def test_check_runs_in_the_bucket_that_the_request_alone_would_have() -> None:
    async def main(stage: Stage) -> None:
        await stage.ask(*[rows_of(value) for value in range(4)])
        await stage.rest()
        assert [run.bucket for run in stage.runner.runs] == [4, 2]

    play(main, buckets=(2, 4, 8))


def test_inputs_are_those_of_the_batch_although_their_memory_is_written_to_after_the_answer() -> None:
    async def main(stage: Stage) -> None:
        memory = rows_of(1)
        await stage.ask(memory, rows_of(2))
        memory[:] = LOUD
        await stage.rest()
        assert stage.sizes() == [[1, 1], [1]]
        assert stage.checks.counts["agreed"] == 1

    play(main)


class TooLargeToCopy(np.ndarray):
    """An array whose copies fail for lack of memory."""

    def copy(self, order: str | None = "C") -> "TooLargeToCopy":
        raise MemoryError


def test_request_that_cannot_be_copied_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def main(stage: Stage) -> None:
        for _ in range(2):
            for (y, _), value in zip(
                await stage.ask(*[rows_of(n).view(TooLargeToCopy) for n in (1, 2)]), (1, 2), strict=True
            ):
                np.testing.assert_array_equal(y, answer(rows_of(value))[0])
        await stage.rest()
        assert stage.sizes() == [[1, 1], [1, 1]]

    play(main)
    assert [record.message for record in caplog.records] == ["a request could not be copied for a row check"]


def test_answer_that_cannot_be_compared_ends_the_check(caplog: pytest.LogCaptureFixture) -> None:
    async def main(stage: Stage) -> None:
        await stage.ask(rows_of(1), rows_of(2))
        await stage.rest()
        assert stage.sizes() == [[1, 1], [1]]

    play(main, lambda rows: (rows,))
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_large_request_is_not_kept() -> None:
    async def main(stage: Stage) -> None:
        wide = rows_of(1, width=MAX_INPUT_BYTES // 8 + 1)
        await stage.ask(wide, wide)
        await stage.rest()
        assert stage.sizes() == [[1, 1]]

    play(main)


def test_output_with_a_wrong_number_of_rows_is_not_sampled() -> None:
    async def main(stage: Stage) -> None:
        await stage.ask(rows_of(1), rows_of(2))
        await stage.rest()
        assert set(stage.checks.counts.values()) == {0}

    play(main, lambda rows: (rows[:1], rows[:1, 0]))


@pytest.mark.parametrize(("is_coarse", "outcome"), [(True, "agreed"), (False, "differed")])
def test_floats_of_gpus_are_compared_within_their_tolerance(is_coarse: bool, outcome: str) -> None:
    signature = ModelSignature(SIGNATURE.inputs, (TensorSpec("y", DataType.FP32, (-1, -1)),))
    checks = RowChecks(signature, FakeClock(), is_coarse=is_coarse)
    request = inflight((rows_of(1),), 1, Timing(0))
    outputs = (np.array([[1.005], [7.0]], np.float32),)
    checks.observe(RequestGroup(RequestQueue().shape_class(None), [request, request], 2), BatchResult(outputs, 0, 0, 0))
    while (group := checks.next_group(checks.judge)) is not None:
        group.requests[0].complete((np.array([[1.0]], np.float32),))
    assert {key for key, count in checks.counts.items() if count} == {outcome}


def test_neighbours_are_described_by_their_shapes_in_few_words() -> None:
    async def main(stage: Stage) -> None:
        await stage.ask(rows_of(1), rows_of(LOUD), rows_of(3), *[rows_of(*range(rows)) for rows in (2, 3)])
        await stage.rest()
        (difference,) = stage.differences
        assert difference.neighbours == "2 of x[1, 2], 1 of x[2, 2] and 1 more shapes"

    play(main, mixing)


def test_output_of_another_shape_is_a_difference() -> None:
    def longest(rows: np.ndarray) -> Arrays:
        return np.zeros((len(rows), rows.max()), np.int64), rows.sum(axis=1)

    async def main(stage: Stage) -> None:
        await stage.ask(rows_of(1), rows_of(3))
        await stage.rest()
        assert [found.reason for found in stage.differences] == ["output 'y' has the shapes [1, 3] and [1, 1]"]

    play(main, longest)


def test_server_that_stops_begins_no_check_and_waits_for_the_one_that_runs() -> None:
    async def main(stage: Stage) -> None:
        closing: list[asyncio.Task[None]] = []
        for value in range(2):  # the server stops as soon as they are answered
            stage.submit(rows_of(value)).add_done_callback(
                lambda _: closing.append(stage.loop.create_task(stage.batcher.close()))
            )
        await stage.rest()
        await asyncio.gather(*closing)
        assert stage.sizes() == [[1, 1]]

    play(main)

    async def during(stage: Stage) -> None:
        await stage.ask(rows_of(1), rows_of(2))
        await asyncio.sleep(0.0005)
        await stage.batcher.close()
        assert stage.sizes() == [[1, 1], [1]]
        assert stage.checks.counts["agreed"] == 1

    play(during)


def test_check_that_does_not_end_is_terminated_and_its_instance_abandoned_as_for_any_run() -> None:
    async def main(stage: Stage) -> None:
        stage.runner.is_endless = True
        await stage.ask(rows_of(1), rows_of(2))
        await asyncio.sleep(8)
        assert (stage.runner.terminated, stage.runner.is_abandoned) == (1, True)
        assert stage.checks.counts["failed"] == 1
        with pytest.raises(ServeError, match="has no instance left"):
            await stage.ask(rows_of(1))

    limits = RunLimits(timeout_ns=1000 * MS, grace_ns=1000 * MS)
    play(main, run_ns=lambda rows: 100_000 * MS if rows == 1 else MS, run_limits=limits)


@pytest.mark.parametrize("shape", [(1, 300_000), (2, 3, 5), (1, 0), (1,)])
def test_answer_keeps_shapes_and_values_that_are_spread_over_the_whole(shape: tuple[int, ...]) -> None:
    output = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    answered = Answer((output, output))
    assert answered.shapes == [shape, shape]
    (values, _) = answered.values
    assert values.size <= 16_384 // 2
    if output.size > 100_000:
        assert values[-1] > 0.99 * output.size
    else:
        assert values.size == output.size
    assert not np.shares_memory(values, output)
