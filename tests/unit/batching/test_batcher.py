"""The batcher in single situations; ``test_batcher_properties`` tests properties of all schedules."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fakes.clock import FakeClock
from fakes.inflight import Outcome, submit
from fakes.loop import VirtualTimeLoop, run_virtual
from fakes.runner import POISON, FakeRunner, answer, first_values, rows_of
from ortserve.batching.admission import QueueLimits
from ortserve.batching.batch_runs import BatchRuns
from ortserve.batching.batcher import Batcher
from ortserve.batching.closed_loop import ClosedLoopWait
from ortserve.batching.inline_runs import TRIAL_RUNS, InlineBudget, InlineRuns
from ortserve.batching.large_requests import MAX_QUEUED_PIECES
from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel
from ortserve.batching.planner import AT_COST_OF_OTHERS, BatchPolicy
from ortserve.batching.queue import MAX_CLASSES, Alone, RequestQueue
from ortserve.batching.run_limits import NO_CALLBACKS, RunLimits
from ortserve.batching.shared_threads import SharedThreads
from ortserve.batching.statistics import Decisions
from ortserve.core.batch import Arrays, Batch
from ortserve.core.inflight import CANCELLED, NO_TERMS, Terms
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, OutOfMemoryError, ServeError

US = 1_000
MS = 1_000_000
RUN_NS = 2 * MS


@dataclass
class Stage:
    """A batcher with its fakes.

    ``observed`` holds the sizes of the reported batches; ``abandoned`` states for each abandoned instance whether it
    was the last one.
    """

    loop: VirtualTimeLoop
    clock: FakeClock
    runners: list[FakeRunner]
    queue: RequestQueue
    shared: SharedThreads
    batcher: Batcher
    observed: list[int]
    began_ns: int
    abandoned: list[bool]

    @property
    def runner(self) -> FakeRunner:
        return self.runners[0]

    @property
    def now_ns(self) -> int:
        """Virtual time since the start of the test."""
        return self.clock() - self.began_ns

    def submit(
        self, rows: np.ndarray, timing: Timing | None = None, terms: Terms = NO_TERMS, *, is_alone: bool = False
    ) -> Outcome:
        shape_class = Alone() if is_alone else rows.shape[1:]
        return submit(self.batcher, (rows,), len(rows), shape_class, timing or Timing(self.clock()), terms)

    def within(self, finish_ns: int | None = None, start_ns: int | None = None, level: int = 0) -> Terms:
        """Terms with times relative to now."""
        now_ns = self.clock()
        return Terms(
            level,
            None if finish_ns is None else now_ns + finish_ns,
            None if start_ns is None else now_ns + start_ns,
        )

    def practise(self, width: int = 2) -> None:
        """Let predictions count as based on enough runs to reject requests."""
        self.queue.shape_class((width,)).batch_latency.observations = MIN_OBSERVATIONS

    def began(self) -> list[int]:
        return [run.began_ns - self.began_ns for run in self.runner.runs]


def play(
    main: Callable[[Stage], Coroutine[Any, Any, None]],
    *,
    max_rows: int = 8,
    queue_delay_ns: int = 0,
    max_queue_rows: int = 4096,
    max_queue_bytes: int = 2**30,
    buckets: tuple[int, ...] = (),
    instances: int = 1,
    threads: int = 1,
    device_threads: int = 16,
    run_ns: int = RUN_NS,
    known_ns: int | None = None,
    compute: Callable[[np.ndarray], Arrays] = answer,
    closed_loop_wait: bool = False,
    run_limits: RunLimits | None = None,
    tries_one_row: bool = False,
    has_long_pieces: bool = False,
) -> None:
    """Run ``main`` on a stage where each run takes ``run_ns``; ``known_ns`` is the batcher's prediction."""

    async def on_stage(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        runners = [FakeRunner(loop, clock, lambda rows: run_ns, compute) for _ in range(instances)]
        known = [(rows, float(known_ns)) for rows in (1, 2, 4, 8, 16)] if known_ns is not None else []
        queue = RequestQueue(known, known, tries_one_row=tries_one_row)
        shared = SharedThreads(device_threads, loop)
        observed: list[int] = []
        abandoned: list[bool] = []
        runs = BatchRuns(
            runners,
            BatchPolicy(
                max_rows,
                queue_delay_ns,
                buckets=buckets,
                closed_loop_wait=closed_loop_wait,
                has_long_pieces=has_long_pieces,
            ),
            queue,
            shared=shared,
            threads=threads,
            inline=InlineRuns(InlineBudget(loop)),
            loop=loop,
            clock=clock,
            observe_batch=lambda rows, *_: observed.append(rows),
            name="slow",
            run_limits=run_limits,
            run_events=replace(NO_CALLBACKS, on_abandoned=lambda runner, reason, is_last: abandoned.append(is_last)),
        )
        batcher = Batcher(runs, QueueLimits(max_queue_rows, max_queue_bytes), clock)
        await main(Stage(loop, clock, runners, queue, shared, batcher, observed, clock(), abandoned))
        await batcher.close()
        assert not [violation for runner in runners for violation in runner.violations]
        assert (queue.rows, queue.nbytes) == (0, 0)
        assert shared.free_threads == device_threads

    run_virtual(on_stage)


def assert_answered(outputs: Arrays, rows: np.ndarray) -> None:
    for got, wanted in zip(outputs, answer(rows), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_requests_of_one_turn_of_the_loop_share_a_batch() -> None:
    async def main(stage: Stage) -> None:
        requests = [rows_of(1), rows_of(2, 3), rows_of(4)]
        for outputs, rows in zip(await asyncio.gather(*map(stage.submit, requests)), requests, strict=True):
            assert_answered(outputs, rows)
        assert [first_values(run.parts) for run in stage.runner.runs] == [[1, 2, 3, 4]]
        assert stage.observed == [4]

    play(main)


class Tap:
    """Records its observations (a ``BatchTap``)."""

    def __init__(self) -> None:
        self.batches: list[tuple[Batch, int]] = []
        self.ended_because: list[str] = []

    def observe(self, batch: Batch, run_ns: int) -> None:
        self.batches.append((batch, run_ns))

    def end(self, reason: str) -> None:
        self.ended_because.append(reason)


@pytest.mark.parametrize("tries_one_row", [False, True])
def test_tap_observes_the_batches_that_were_answered(tries_one_row: bool) -> None:
    """It observes the executed arrays, rows and padding, without failed runs and without the trial of a first row."""

    async def main(stage: Stage) -> None:
        tap = Tap()
        stage.batcher.tap_batches(tap)
        await asyncio.gather(*map(stage.submit, [rows_of(2, 3, 4), rows_of(1)]))
        outcomes = await asyncio.gather(
            *map(stage.submit, [rows_of(5), rows_of(POISON), rows_of(7, 8)]), return_exceptions=True
        )
        assert [isinstance(outcome, ServeError) for outcome in outcomes] == [False, True, False]
        await stage.submit(rows_of(*range(10, 23)))
        await stage.submit(rows_of(30, 31), is_alone=True)
        stage.batcher.tap_batches(None)
        await stage.submit(rows_of(40))
        answered = [run for run in stage.runner.runs[:-1] if not run.has_failed]
        if tries_one_row:
            assert answered.pop(0).sizes == [1]
        assert [(batch.rows, batch.bucket, run_ns) for batch, run_ns in tap.batches] == [
            (run.rows, run.bucket, run.ended_ns - run.began_ns) for run in answered
        ]
        for (batch, _), run in zip(tap.batches, answered, strict=True):
            assert list(map(id, batch.parts[0])) == list(map(id, run.parts))
        assert any(batch.bucket > batch.rows for batch, _ in tap.batches)
        assert tap.ended_because == []

    play(main, buckets=(2, 8), tries_one_row=tries_one_row)


def test_tap_does_not_observe_a_batch_whose_outputs_cannot_be_divided() -> None:
    """The requests of a failed batch run again alone, and each is observed once."""

    async def main(stage: Stage) -> None:
        tap = Tap()
        stage.batcher.tap_batches(tap)
        await asyncio.gather(*map(stage.submit, [rows_of(1), rows_of(2)]))
        assert [run.sizes for run in stage.runner.runs] == [[1, 1], [1], [1]]
        assert [batch.rows for batch, _ in tap.batches] == [1, 1]

    play(main, compute=lambda rows: (rows[:1], rows.sum(axis=1)))


def test_tap_ends_with_the_version() -> None:
    async def main(stage: Stage) -> None:
        tap = Tap()
        stage.batcher.tap_batches(tap)
        await stage.batcher.close()
        assert tap.ended_because == ["the version was unloaded or replaced"]
        stage.batcher.tap_batches(None)

    play(main)


def test_requests_that_arrive_during_a_run_share_the_next_one() -> None:
    async def main(stage: Stage) -> None:
        futures = [stage.submit(rows_of(1))]
        await asyncio.sleep(RUN_NS / 4e9)
        futures += [stage.submit(rows_of(2))]
        await asyncio.sleep(RUN_NS / 4e9)
        futures += [stage.submit(rows_of(3))]
        await asyncio.gather(*futures)
        assert [first_values(run.parts) for run in stage.runner.runs] == [[1], [2, 3]]
        assert stage.began() == [0, RUN_NS]

    play(main)


def test_timing_has_the_time_of_each_phase() -> None:
    async def main(stage: Stage) -> None:
        early, late = Timing(stage.clock()), Timing(stage.clock())
        first = stage.submit(rows_of(1), early)
        await asyncio.sleep(0.5e-3)
        second = stage.submit(rows_of(2), late)
        await asyncio.gather(first, second)
        start = stage.began_ns
        assert (early.queued_ns - start, early.taken_ns - start, early.computed_ns - start) == (0, 0, RUN_NS)
        assert (late.queued_ns - start, late.taken_ns - start) == (MS // 2, RUN_NS)
        assert late.computed_ns - start == 2 * RUN_NS

    play(main)


def test_lone_row_waits_for_others_as_long_as_the_queue_delay_and_no_longer() -> None:
    async def main(stage: Stage) -> None:
        await stage.submit(rows_of(1))
        assert stage.began() == [5 * MS]

    play(main, queue_delay_ns=5 * MS)


def test_queue_delay_ends_when_the_batch_is_full() -> None:
    async def main(stage: Stage) -> None:
        futures = [stage.submit(rows_of(1, 2, 3))]
        await asyncio.sleep(1e-3)
        futures.append(stage.submit(rows_of(4)))
        await asyncio.gather(*futures)
        assert stage.began() == [MS]
        assert stage.runner.runs[0].sizes == [3, 1]

    play(main, max_rows=4, queue_delay_ns=50 * MS)


def test_queue_delay_counts_from_the_oldest_row_and_also_behind_a_run() -> None:
    async def main(stage: Stage) -> None:
        futures = [stage.submit(rows_of(1, 2))]  # a full batch: runs from 0 to 2 ms
        await asyncio.sleep(1e-3)
        futures.append(stage.submit(rows_of(3)))
        await asyncio.gather(*futures)
        assert stage.began() == [0, MS + 5 * MS]

    play(main, max_rows=2, queue_delay_ns=5 * MS)


def test_each_shape_class_keeps_its_own_delay() -> None:
    async def main(stage: Stage) -> None:
        futures = [stage.submit(rows_of(1, width=2))]
        await asyncio.sleep(3e-3)
        futures.append(stage.submit(rows_of(2, width=3)))
        await asyncio.gather(*futures)
        assert stage.began() == [5 * MS, 8 * MS]

    play(main, queue_delay_ns=5 * MS)


def test_request_of_another_shape_neither_joins_nor_flushes_a_batch() -> None:
    async def main(stage: Stage) -> None:
        blocker = stage.submit(rows_of(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        futures = [stage.submit(rows_of(value, width=2 + value % 2)) for value in range(1, 7)]
        await asyncio.gather(blocker, *futures)
        assert [first_values(run.parts) for run in stage.runner.runs] == [[0], [1, 3, 5], [2, 4, 6]]

    play(main)


def test_short_run_takes_place_on_the_loop() -> None:
    async def main(stage: Stage) -> None:
        assert_answered(await stage.submit(rows_of(1)), rows_of(1))
        assert [run.is_inline for run in stage.runner.runs] == [True]

    play(main, run_ns=50 * US, known_ns=50 * US)


@pytest.mark.parametrize("known_ns", [None, 201 * US])
def test_long_or_unknown_run_takes_place_on_the_worker(known_ns: int | None) -> None:
    async def main(stage: Stage) -> None:
        await stage.submit(rows_of(1))
        assert [run.is_inline for run in stage.runner.runs] == [False]

    play(main, run_ns=50 * US, known_ns=known_ns)


def test_runs_again_after_a_failure_are_never_on_the_loop() -> None:
    async def main(stage: Stage) -> None:
        outcomes = await asyncio.gather(stage.submit(rows_of(1)), stage.submit(rows_of(POISON)), return_exceptions=True)
        assert isinstance(outcomes[1], ServeError)
        assert [run.is_inline for run in stage.runner.runs] == [True, False, False]

    play(main, run_ns=50 * US, known_ns=50 * US)


def test_runs_again_after_a_failure_overtake_only_on_workers() -> None:
    async def main(stage: Stage) -> None:
        other = stage.shared.share(1, lambda: None)
        assert other.may_start()
        other.begin(100 * MS)
        failed = asyncio.gather(stage.submit(rows_of(1)), stage.submit(rows_of(POISON)), return_exceptions=True)
        await asyncio.sleep(0.01)
        later = stage.submit(rows_of(3))
        await asyncio.sleep(0.01)
        assert stage.shared.free_threads == 0
        assert [run.is_inline for run in stage.runner.runs] == [True, False, False, True]
        other.end()
        outcomes = await failed
        assert isinstance(outcomes[0], tuple)
        assert_answered(outcomes[0], rows_of(1))
        assert isinstance(outcomes[1], ServeError)
        assert_answered(await later, rows_of(3))

    play(main, run_ns=50 * US, known_ns=50 * US, device_threads=1)


@pytest.mark.parametrize("ends_by", ["cancel", "expiry"])
def test_model_whose_last_request_ended_while_it_waited_holds_up_no_other(ends_by: str) -> None:
    async def main(stage: Stage) -> None:
        long, short = stage.shared.share(1, lambda: None), stage.shared.share(1, lambda: None)
        assert long.may_start()
        long.begin(1000 * MS)
        short.charge(1, wants_more=False)  # so that it is not the first because of its time
        terms = stage.within(start_ns=20 * MS) if ends_by == "expiry" else NO_TERMS
        waiting = stage.submit(rows_of(1), terms=terms)
        await asyncio.sleep(0.001)
        assert not short.may_start(MS), "the other model waits and is first"
        if ends_by == "cancel":
            waiting.cancel()
        await asyncio.sleep(0.05)
        assert short.may_start(MS)
        long.end()
        short.withdraw()
        await asyncio.gather(waiting, return_exceptions=True)

    play(main, run_ns=900 * MS, known_ns=900 * MS, device_threads=1)


def test_model_whose_chosen_requests_a_callback_cancels_holds_up_no_other() -> None:
    async def main(stage: Stage) -> None:
        long, short = stage.shared.share(1, lambda: None), stage.shared.share(1, lambda: None)
        assert long.may_start()
        long.begin(1500 * MS)
        short.charge(1, wants_more=False)  # so that it is not the first because of its time
        shape_class = stage.queue.shape_class((2,))
        shape_class.batch_latency = shape_class.run_latency = LatencyModel([(1, 250 * MS), (8, 400 * MS)])
        # Six requests would overtake the long run. Five without the first are padded to eight rows, too many for it.
        tight = stage.submit(rows_of(0), terms=stage.within(finish_ns=300 * MS))
        others = [stage.submit(rows_of(n), terms=stage.within(finish_ns=600 * MS)) for n in range(5)]
        tight.add_done_callback(lambda _: [other.cancel() for other in others])
        stage.practise()
        stage.clock.advance(1000)
        await asyncio.sleep(0.001)
        assert AT_COST_OF_OTHERS in refusal_of(tight).message
        assert not stage.queue
        assert short.may_start(MS)
        long.end()
        short.withdraw()

    play(main, buckets=(1, 8), device_threads=1)


def test_only_the_failing_request_of_a_batch_gets_the_error() -> None:
    async def main(stage: Stage) -> None:
        requests = [rows_of(value) for value in (1, 2, POISON, 4, 5)]
        timings = [Timing(stage.clock()) for _ in requests]
        outcomes = await asyncio.gather(*map(stage.submit, requests, timings), return_exceptions=True)
        for rows, outcome in zip(requests, outcomes, strict=True):
            if (rows == POISON).any():
                assert isinstance(outcome, ServeError)
                assert (outcome.kind, outcome.message) == (ErrorKind.INTERNAL, "a row is poisoned")
            else:
                assert isinstance(outcome, tuple)
                assert_answered(outcome, rows)
        assert len(stage.runner.runs) - 1 <= 2 * 3
        assert all(timing.taken_ns > 0 for timing in timings), "work was done for each of them"

    play(main)


def test_unexpected_exception_is_not_shown_to_callers(caplog: pytest.LogCaptureFixture) -> None:
    def compute(rows: np.ndarray) -> Arrays:
        raise KeyError("/secret/path")

    async def main(stage: Stage) -> None:
        with pytest.raises(ServeError) as caught:
            await stage.submit(rows_of(1))
        assert (caught.value.kind, caught.value.message) == (ErrorKind.INTERNAL, "the run failed")

    play(main, compute=compute)
    assert "/secret/path" in caplog.text


def test_outputs_that_cannot_be_split_are_computed_for_each_request_alone() -> None:
    def compute(rows: np.ndarray) -> Arrays:
        return rows[:-1], rows.sum(axis=1)

    async def main(stage: Stage) -> None:
        answers = await asyncio.gather(*(stage.submit(rows_of(value)) for value in (1, 2, 3)))
        for value, outputs in zip((1, 2, 3), answers, strict=True):
            assert outputs[0].shape == (0, 2)
            np.testing.assert_array_equal(outputs[1], [2 * value])
        assert stage.runner.runs[0].sizes == [1, 1, 1]

    play(main, compute=compute)


@pytest.mark.parametrize("others", [0, 1])
def test_outputs_of_padding_rows_that_cannot_be_cut_off_reach_no_request(others: int) -> None:
    async def main(stage: Stage) -> None:
        requests = [stage.submit(rows_of(value, value)) for value in range(1 + others)]
        for value, outputs in enumerate(await asyncio.gather(*requests)):
            assert outputs[0].tolist() == [value] * 4
        await stage.submit(rows_of(7, 7))
        # One padded run shows it; no later request of the shape is padded.
        assert [run.bucket for run in stage.runner.runs if run.rows == 2] == [8, *[2] * (1 + others), 2]

    play(main, buckets=(8,), compute=lambda rows: (rows.reshape(-1),))


def test_cancelled_request_does_not_delay_the_others_of_its_batch() -> None:
    async def main(stage: Stage) -> None:
        kept, left, after = (stage.submit(rows_of(value)) for value in (1, 2, 3))
        await asyncio.sleep(RUN_NS / 2e9)
        left.cancel()
        assert_answered(await kept, rows_of(1))
        assert_answered(await after, rows_of(3))
        assert stage.now_ns == RUN_NS

    play(main)


def test_request_cancelled_before_the_run_is_not_in_it() -> None:
    async def main(stage: Stage) -> None:
        left, kept = stage.submit(rows_of(1)), stage.submit(rows_of(2))
        left.cancel()
        await kept
        assert [first_values(run.parts) for run in stage.runner.runs] == [[2]]

    play(main)


@pytest.mark.parametrize("others", [0, 1])
def test_batch_of_cancelled_requests_does_not_delay_the_next_one(others: int) -> None:
    async def main(stage: Stage) -> None:
        left = [stage.submit(rows_of(value)) for value in (1, 2)]
        kept = [stage.submit(rows_of(value)) for value in range(3, 3 + others)]
        for future in left:
            future.cancel()
        await asyncio.gather(*kept)
        await asyncio.sleep(0)
        assert [first_values(run.parts) for run in stage.runner.runs] == [[3]] * others
        assert stage.queue.rows == 0

    play(main, max_rows=2)


def test_full_queue_rejects_at_once_until_there_is_room() -> None:
    async def main(stage: Stage) -> None:
        running = stage.submit(rows_of(0))
        await asyncio.sleep(RUN_NS / 2e9)
        waiting = [stage.submit(rows_of(1, 2)), stage.submit(rows_of(3, 4))]
        for rows in (rows_of(5), rows_of(5, 6)):
            with pytest.raises(ServeError) as caught:
                stage.submit(rows)
            assert caught.value.kind is ErrorKind.OVERLOADED
            assert caught.value.message == (
                "Exceeds maximum queue size: 4 rows with 64 bytes are queued, the limits are max_queue_rows 4 and "
                "max_queue_bytes 1073741824"
            )
            assert caught.value.retry_after_s == 1, "nothing is known of how long a batch takes"
        with pytest.raises(ServeError, match="Exceeds maximum queue size"):
            await stage.submit(rows_of(*range(20)))
        assert stage.queue.rows == 4
        await asyncio.gather(running, *waiting)
        assert_answered(await stage.submit(rows_of(7)), rows_of(7))

    play(main, max_rows=2, max_queue_rows=4)


def test_request_larger_than_the_queue_is_accepted_by_an_empty_queue() -> None:
    async def main(stage: Stage) -> None:
        rows = rows_of(*range(1, 11))
        assert_answered(await stage.submit(rows), rows)

    play(main, max_rows=2, max_queue_rows=4)


def test_number_of_queued_pieces_of_a_request_is_limited() -> None:
    async def main(stage: Stage) -> None:
        rows = rows_of(*range(1, 1001))
        task = asyncio.ensure_future(stage.submit(rows))
        waited = 0
        while not task.done():
            await asyncio.sleep(RUN_NS / 2e9)
            waited = max(waited, stage.queue.rows)
        assert_answered(await task, rows)
        assert len(stage.runner.runs) == 500
        assert 2 < waited <= 2 * 64

    play(main, max_rows=2)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_large_requests_of_one_turn_of_the_loop_share_the_limit_of_the_queue(is_cancelled: bool) -> None:
    async def main(stage: Stage) -> None:
        first = stage.submit(rows_of(1, 2, 3, 4))
        if is_cancelled:
            first.cancel()
        for rows in (rows_of(5, 6, 7), rows_of(5)):
            with pytest.raises(ServeError, match="4 rows with 64 bytes are queued"):
                stage.submit(rows)
        await asyncio.sleep(RUN_NS / 1e10)
        assert stage.queue.rows == (0 if is_cancelled else 2)  # the first piece runs
        await asyncio.sleep(10 * RUN_NS / 1e9)
        assert_answered(await stage.submit(rows_of(5, 6, 7)), rows_of(5, 6, 7))

    play(main, max_rows=2, max_queue_rows=4)


def test_large_requests_of_one_turn_of_the_loop_count_for_the_deadlines_of_the_next() -> None:
    async def main(stage: Stage) -> None:
        stage.practise()
        terms = stage.within(finish_ns=5 * RUN_NS)
        admitted = [stage.submit(rows_of(1, 2, 3, 4), terms=terms) for _ in range(2)]
        for _ in range(8):
            with pytest.raises(ServeError, match="deadline"):
                stage.submit(rows_of(1, 2, 3, 4), terms=terms)
        for outputs in await asyncio.gather(*admitted):
            assert_answered(outputs, rows_of(1, 2, 3, 4))

    play(main, max_rows=2, known_ns=RUN_NS)


def test_rows_without_bytes_count_towards_the_row_limit() -> None:
    async def main(stage: Stage) -> None:
        few, many = np.empty((4, 0), np.float32), np.empty((5, 0), np.float32)
        assert_answered(await stage.submit(few), few)
        with pytest.raises(ServeError, match=r"at most max_queue_rows 4 rows .* got 5 rows of 0 bytes") as caught:
            await stage.submit(many)
        assert caught.value.kind is ErrorKind.INVALID_INPUT

    play(main, max_rows=2, max_queue_rows=4)


def test_close_waits_for_a_request_of_which_pieces_are_still_to_come() -> None:
    async def main(stage: Stage) -> None:
        rows = rows_of(*range(1, 301))
        task = asyncio.ensure_future(stage.submit(rows))
        await asyncio.sleep(RUN_NS / 2e9)
        await stage.batcher.close()
        assert task.done()
        assert_answered(await task, rows)

    play(main, max_rows=2)


def test_large_request_runs_in_pieces_beside_others() -> None:
    async def main(stage: Stage) -> None:
        timing = Timing(stage.clock())
        large = rows_of(*range(1, 11))

        async def submit_small() -> Arrays:
            return await stage.submit(rows_of(11))

        outputs, other = await asyncio.gather(stage.submit(large, timing), submit_small())
        assert_answered(outputs, large)
        assert_answered(other, rows_of(11))
        assert [run.sizes for run in stage.runner.runs] == [[4], [4], [2, 1]]
        assert timing.computed_ns == stage.clock()

    play(main, max_rows=4)


def test_large_request_of_short_runs_has_longer_pieces_until_memory_is_too_small() -> None:
    async def main(stage: Stage) -> None:
        large = rows_of(*range(1, 11))
        assert_answered(await stage.submit(large), large)
        await asyncio.gather(*(stage.submit(rows_of(number)) for number in range(6)))
        with pytest.raises(OutOfMemoryError):
            await stage.submit(rows_of(*[77] * 12))
        assert_answered(await stage.submit(large), large)
        sizes = [run.sizes for run in stage.runner.runs]
        assert sizes == [[10], [1, 1, 1, 1], [1, 1], [12], [4], [4], [2]]

    def compute(rows: np.ndarray) -> Arrays:
        if rows[0, 0] == 77:
            raise OutOfMemoryError("too little memory for the batch")
        return answer(rows)

    play(main, max_rows=4, known_ns=100_000, run_ns=100_000, compute=compute, has_long_pieces=True)


def test_longer_pieces_take_no_more_rows_of_the_queue_than_batches() -> None:
    """Otherwise callers of small requests would be rejected as long as a large one waits."""

    async def main(stage: Stage) -> None:
        most = MAX_QUEUED_PIECES * 4
        large = np.ones((10 * most, 2), np.float32)
        task = asyncio.ensure_future(stage.submit(large))
        while not task.done():
            assert stage.queue.rows <= most
            await asyncio.sleep(RUN_NS / 4e9)
        assert_answered(await task, large)
        assert {run.sizes[0] for run in stage.runner.runs} == {32}

    play(main, max_rows=4, known_ns=100_000, has_long_pieces=True)


def test_large_request_fails_with_its_piece_and_leaves_nothing_in_the_queue() -> None:
    async def main(stage: Stage) -> None:
        with pytest.raises(ServeError, match="a row is poisoned"):
            await stage.submit(rows_of(1, 2, POISON, 4, 5, 6, 7, 8))
        await stage.submit(rows_of(9))
        ran = [first_values(run.parts) for run in stage.runner.runs]
        assert ran[-1] == [9]
        assert [7, 8] not in ran

    play(main, max_rows=2)


def test_cancelled_large_request_does_not_run_its_remaining_pieces() -> None:
    async def main(stage: Stage) -> None:
        task = asyncio.ensure_future(stage.submit(rows_of(*range(1, 11))))
        await asyncio.sleep(RUN_NS / 2e9)
        task.cancel()
        await asyncio.wait({task})
        await stage.submit(rows_of(11))
        assert [first_values(run.parts) for run in stage.runner.runs] == [[1, 2], [11]]

    play(main, max_rows=2)


def test_large_request_and_small_ones_of_its_shape_are_answered_while_more_shapes_arrive_than_are_known() -> None:
    async def main(stage: Stage) -> None:
        large = rows_of(*range(1, 301))
        outcomes = [stage.submit(large)]
        outcomes += [stage.submit(rows_of(1, width=width)) for width in range(3, 4 + MAX_CLASSES)]
        outcomes.append(stage.submit(rows_of(2)))
        answers = await asyncio.gather(*outcomes)
        assert_answered(answers[0], large)
        assert_answered(answers[-1], rows_of(2))

    play(main, max_rows=2)


def test_large_request_is_an_internal_error_when_a_piece_has_other_rows() -> None:
    async def main(stage: Stage) -> None:
        with pytest.raises(ServeError, match=r"output 0 has shape \[1, 2\] for a batch of 2 rows") as caught:
            await stage.submit(rows_of(1, 2, 3))
        assert caught.value.kind is ErrorKind.INTERNAL

    play(main, max_rows=2, compute=lambda rows: (rows[:1], rows[:1]))


def test_close_answers_admitted_requests_and_rejects_new_ones() -> None:
    async def main(stage: Stage) -> None:
        futures = [stage.submit(rows_of(value)) for value in (1, 2, 3)]
        closing = stage.loop.create_task(stage.batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(ServeError) as caught:
            stage.submit(rows_of(4))
        assert caught.value.kind is ErrorKind.NOT_READY
        assert "scheduler for model has stopped accepting new inference requests" in caught.value.message
        assert caught.value.retry_after_s == 1
        with pytest.raises(ServeError, match="stopped accepting"):
            await stage.submit(rows_of(*range(20)))
        await closing
        assert all(future.done() for future in futures)
        assert len(stage.runner.runs) == 2

    play(main, max_rows=2)


def test_close_of_an_idle_batcher_returns_at_once_and_may_be_repeated() -> None:
    async def main(stage: Stage) -> None:
        await stage.batcher.close()
        await stage.batcher.close()
        assert stage.now_ns == 0

    play(main)


def test_each_caller_of_close_returns() -> None:
    async def main(stage: Stage) -> None:
        future = stage.submit(rows_of(1))
        await asyncio.gather(stage.batcher.close(), stage.batcher.close())
        assert future.done()

    play(main)


def test_close_returns_when_all_queued_requests_are_cancelled() -> None:
    async def main(stage: Stage) -> None:
        future = stage.submit(rows_of(1))
        closing = stage.loop.create_task(stage.batcher.close())
        future.cancel()
        await closing
        assert not stage.runner.runs

    play(main, queue_delay_ns=5 * MS)


def test_close_waits_for_a_search_to_end() -> None:
    async def main(stage: Stage) -> None:
        futures = [stage.submit(rows_of(value)) for value in (1, POISON, 3, 4)]
        await stage.batcher.close()
        assert [future.exception() is None for future in futures] == [True, False, True, True]

    play(main)


def test_close_waits_for_late_requests_that_fail_over_several_turns_of_the_loop() -> None:
    async def main(stage: Stage) -> None:
        running = stage.submit(rows_of(0))
        await asyncio.sleep(1e-3)
        late = [stage.submit(rows_of(n), terms=stage.within(finish_ns=RUN_NS // 4)) for n in range(100)]
        stage.clock.advance(RUN_NS)
        await stage.batcher.close()
        assert all(request.done() for request in [running, *late])

    play(main)


def test_close_waits_for_requests_that_run_again_after_all_queued_ones_were_late() -> None:
    async def main(stage: Stage) -> None:
        divided = [stage.submit(rows_of(value)) for value in range(4)]
        await asyncio.sleep(1e-3)
        late = [stage.submit(rows_of(n), terms=stage.within(finish_ns=RUN_NS + MS // 2)) for n in range(8)]
        stage.practise()  # so that they are evicted when the run ends, before their deadline
        await stage.batcher.close()
        assert [request.done() for request in late + divided] == [True] * 12
        assert stage.runner.runs[0].sizes == [1] * 4
        assert not any(isinstance(request.exception(), ServeError) for request in divided)

    # The outputs of a batch have one row, so they cannot be divided, and each request runs alone.
    play(main, known_ns=RUN_NS, compute=lambda rows: answer(rows[:1]))


def test_close_ends_the_queue_delay() -> None:
    async def main(stage: Stage) -> None:
        future = stage.submit(rows_of(1))
        await asyncio.sleep(1e-3)
        await stage.batcher.close()
        assert future.done()
        assert stage.now_ns == MS + RUN_NS

    play(main, queue_delay_ns=60_000 * MS)


def test_instances_run_at_the_same_time_and_each_one_batch() -> None:
    async def main(stage: Stage) -> None:
        requests = [rows_of(value) for value in range(7)]
        for outputs, rows in zip(await asyncio.gather(*map(stage.submit, requests)), requests, strict=True):
            assert_answered(outputs, rows)
        began = sorted(run.began_ns - stage.began_ns for runner in stage.runners for run in runner.runs)
        assert began == [0, 0, 0, RUN_NS]
        assert stage.now_ns == 2 * RUN_NS

    play(main, max_rows=2, instances=3)


def test_instances_wait_for_each_other_where_the_device_has_too_few_threads() -> None:
    async def main(stage: Stage) -> None:
        await asyncio.gather(*[stage.submit(rows_of(value)) for value in range(4)])
        began = sorted(run.began_ns - stage.began_ns for runner in stage.runners for run in runner.runs)
        assert began == [0, 0, RUN_NS, RUN_NS]

    play(main, max_rows=1, instances=4, threads=2, device_threads=4)


def test_close_waits_for_all_instances() -> None:
    async def main(stage: Stage) -> None:
        futures = [stage.submit(rows_of(value)) for value in range(3)]
        await stage.batcher.close()
        assert [future.done() for future in futures] == [True] * 3
        assert stage.now_ns == 2 * RUN_NS

    play(main, max_rows=1, instances=2)


def test_failed_batch_of_one_instance_is_searched_by_all() -> None:
    async def main(stage: Stage) -> None:
        requests = [rows_of(value) for value in (1, 2, POISON, 4)]
        outcomes = await asyncio.gather(*map(stage.submit, requests), return_exceptions=True)
        assert [isinstance(outcome, ServeError) for outcome in outcomes] == [False, False, True, False]
        assert stage.now_ns == 3 * RUN_NS
        assert stage.batcher.learned().decisions.retries == 4

    play(main, instances=2)


def refusal_of(promise: Outcome) -> ServeError:
    error = promise.exception()
    assert isinstance(error, ServeError)
    return error


def test_request_whose_deadline_passes_in_the_queue_is_never_run() -> None:
    async def main(stage: Stage) -> None:
        blocker = stage.submit(rows_of(0))
        await asyncio.sleep(1e-3)
        late = stage.submit(rows_of(1), terms=stage.within(finish_ns=RUN_NS // 4))
        kept = stage.submit(rows_of(2), terms=stage.within(finish_ns=10 * RUN_NS))
        await asyncio.gather(blocker, kept)
        error = refusal_of(late)
        assert (error.kind, error.retry_after_s) == (ErrorKind.DEADLINE, None)
        assert error.message == "Request timeout expired: its deadline came too close while it was queued"
        assert [first_values(run.parts) for run in stage.runner.runs] == [[0], [2]]
        assert stage.batcher.learned().decisions.dropped_late == 1

    play(main)


def test_many_late_requests_fail_over_several_turns_of_the_loop() -> None:
    async def main(stage: Stage) -> None:
        stage.submit(rows_of(0))
        await asyncio.sleep(1e-3)
        late = [stage.submit(rows_of(n), terms=stage.within(finish_ns=RUN_NS // 4)) for n in range(50)]
        stage.clock.advance(RUN_NS // 2)
        stage.batcher._runs._scheduler._sweep()
        assert await failed_in_each_turn(late) == [16, 32, 48, 50]
        assert stage.batcher.learned().decisions.dropped_late == 50

    play(main)


def test_many_requests_without_an_instance_fail_over_several_turns_of_the_loop() -> None:
    async def main(stage: Stage) -> None:
        stage.submit(rows_of(0))
        await asyncio.sleep(1e-3)
        waiting = [stage.submit(rows_of(n)) for n in range(50)]
        stage.batcher._runs._on_abandoned_last("its run does not end")
        assert await failed_in_each_turn(waiting) == [16, 32, 48, 50]
        assert refusal_of(waiting[-1]).message == "Model 'slow' has no instance left: its run does not end"

    play(main)


async def failed_in_each_turn(requests: Sequence[Outcome]) -> list[int]:
    """The different numbers of failed requests after the next turns of the loop."""
    counts = set()
    for _ in range(20):
        counts.add(sum(request.done() for request in requests))
        await asyncio.sleep(0)
    return sorted(counts - {0})


def test_late_request_behind_one_without_a_deadline_neither_runs_nor_makes_its_batch_smaller() -> None:
    async def main(stage: Stage) -> None:
        blocker = stage.submit(rows_of(0))
        await asyncio.sleep(1e-3)
        free = [stage.submit(rows_of(value), terms=stage.within(level=1)) for value in (1, 2)]
        late = stage.submit(rows_of(3), terms=stage.within(finish_ns=RUN_NS // 4, level=2))
        behind = stage.submit(rows_of(4), terms=stage.within(level=3))
        await asyncio.gather(blocker, behind, *free)
        assert refusal_of(late).kind is ErrorKind.DEADLINE
        assert [first_values(run.parts) for run in stage.runner.runs] == [[0], [1, 2, 4]]

    play(main, known_ns=RUN_NS)


def test_request_that_can_no_longer_finish_is_dropped_before_its_run() -> None:
    async def main(stage: Stage) -> None:
        stage.practise()
        blocker = stage.submit(rows_of(0))
        await asyncio.sleep(0.5e-3)
        late = stage.submit(rows_of(1), terms=stage.within(finish_ns=2 * RUN_NS))
        # A request with an earlier deadline arrives after it was admitted.
        urgent = stage.submit(rows_of(2), terms=stage.within(finish_ns=int(1.8 * RUN_NS)))
        assert_answered(await urgent, rows_of(2))
        await blocker
        await asyncio.sleep(1)
        error = refusal_of(late)
        assert (error.kind, error.retry_after_s) == (ErrorKind.DEADLINE, None)
        assert error.message == (
            "Request timeout expired: its deadline can no longer be met, after waiting in the queue"
        )
        assert [first_values(run.parts) for run in stage.runner.runs] == [[0], [2]]

    play(main, max_rows=1, known_ns=RUN_NS)


def test_request_enqueued_by_the_callback_of_a_late_one_begins_to_run_after_its_arrival() -> None:
    async def main(stage: Stage) -> None:
        stage.practise()
        stage.submit(rows_of(0))
        await asyncio.sleep(0.5e-3)
        late = stage.submit(rows_of(1), terms=stage.within(finish_ns=2 * RUN_NS))
        stage.submit(rows_of(2), terms=stage.within(finish_ns=int(1.8 * RUN_NS)))
        following: list[Timing] = []

        def answer_late(_: Outcome) -> None:
            stage.clock.advance(MS // 2)
            following.append(Timing(stage.clock()))
            stage.submit(rows_of(3), following[0])

        late.add_done_callback(answer_late)
        await asyncio.sleep(1)
        timing = following[0]
        assert timing.received_ns == timing.queued_ns <= timing.taken_ns < timing.computed_ns

    play(main, known_ns=RUN_NS, max_rows=1)


def test_request_admitted_by_an_idle_server_runs_despite_its_prediction() -> None:
    """Otherwise a far too long prediction would reject all requests, and no run could correct it."""

    async def main(stage: Stage) -> None:
        stage.practise()
        for number in range(200):
            rows = rows_of(number)
            assert_answered(await stage.submit(rows, terms=stage.within(finish_ns=2 * RUN_NS)), rows)
        assert stage.batcher.learned().decisions == Decisions(batches=200)
        assert stage.queue.shape_class((2,)).batch_latency.predict_ns(1) == pytest.approx(RUN_NS, rel=0.05)

    play(main, known_ns=100 * RUN_NS)


def test_passed_deadline_is_rejected_before_the_queue() -> None:
    async def main(stage: Stage) -> None:
        with pytest.raises(ServeError) as caught:
            stage.submit(rows_of(1), terms=stage.within(finish_ns=0))
        assert (caught.value.kind, caught.value.retry_after_s) == (ErrorKind.DEADLINE, None)
        with pytest.raises(ServeError, match="deadline cannot be met"):
            await stage.submit(rows_of(*range(20)), terms=stage.within(finish_ns=-1))
        assert not stage.runner.runs
        assert stage.batcher.learned().decisions == Decisions(refused_late=2)

    play(main)


def test_time_that_answers_take_to_be_written_is_taken_off_deadlines() -> None:
    async def main(stage: Stage) -> None:
        stage.practise()
        encoding_ns = RUN_NS // 2
        answered = stage.submit(rows_of(1))
        answered.add_done_callback(lambda _: stage.clock.advance(encoding_ns))
        await answered
        await asyncio.sleep(0)
        assert stage.batcher.learned().answer_ms == encoding_ns / 1e6
        running = stage.submit(rows_of(2))
        await asyncio.sleep(0)
        needed_ns = 2 * RUN_NS + encoding_ns  # the current run, its own, and its answer
        with pytest.raises(ServeError, match="deadline cannot be met"):
            stage.submit(rows_of(3), terms=stage.within(finish_ns=needed_ns - 1))
        in_time = stage.submit(rows_of(4), terms=stage.within(finish_ns=needed_ns))
        await asyncio.gather(running, in_time)

    play(main, known_ns=RUN_NS)


def test_deadline_behind_a_long_queue_is_rejected_with_a_retry_time() -> None:
    async def main(stage: Stage) -> None:
        stage.practise()
        waiting = [stage.submit(rows_of(0))]
        await asyncio.sleep(0.5e-3)
        waiting += [stage.submit(rows_of(value)) for value in range(1, 4)]
        near = stage.submit(rows_of(4), terms=stage.within(finish_ns=20 * RUN_NS))
        with pytest.raises(ServeError) as caught:  # 3 of the 4 are due after it: 1.5 ms, then its own batch
            stage.submit(rows_of(5), terms=stage.within(finish_ns=3 * MS))
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert caught.value.retry_after_s == pytest.approx(0.5e-3)
        await asyncio.gather(near, *waiting)

    play(main, max_rows=1, known_ns=RUN_NS)


def test_overdue_run_is_not_taken_for_an_idle_instance() -> None:
    async def main(stage: Stage) -> None:
        stage.practise()
        overdue = stage.submit(rows_of(0))
        await asyncio.sleep(2 * RUN_NS / 1e9)  # the run takes 5, but 1 was predicted
        for finish_ns in (RUN_NS, 1):
            with pytest.raises(ServeError, match="deadline cannot be met") as caught:
                stage.submit(rows_of(1), terms=stage.within(finish_ns=finish_ns))
            # No request waits: only the current run, which may end at any time, is ahead.
            assert caught.value.kind is (ErrorKind.OVERLOADED if finish_ns == RUN_NS else ErrorKind.DEADLINE)
        assert stage.batcher.learned().decisions.refused_late == 2
        await overdue

    play(main, run_ns=5 * RUN_NS, known_ns=RUN_NS)


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        ("finish_ns", "its deadline came too close while it was queued"),
        ("start_ns", "its timeout passed in the queue"),
    ],
    ids=["deadline", "timeout"],
)
@pytest.mark.parametrize("instances", [1, 2])
def test_request_deep_in_the_queue_is_evicted_at_its_deadline_and_frees_its_place(
    bound: str, why: str, instances: int
) -> None:
    async def main(stage: Stage) -> None:
        running = [stage.submit(rows_of(value, value)) for value in range(instances)]
        await asyncio.sleep(1e-3)
        ahead = [stage.submit(rows_of(value), terms=Terms(1)) for value in (3, 4, 5)]
        terms = stage.within(**{bound: 7 * MS}, level=2)
        late = stage.submit(rows_of(6, 7), terms=terms)
        behind = stage.submit(rows_of(8), terms=Terms(3))
        with pytest.raises(ServeError, match="6 rows with 96 bytes are queued"):
            stage.submit(rows_of(9, 10))
        with pytest.raises(ServeError, match="Request timeout expired"):
            await late
        assert 0 < stage.now_ns - 8 * MS <= MS
        assert refusal_of(late).message == f"Request timeout expired: {why}"
        assert (stage.queue.rows, stage.queue.nbytes) == (4, 64)
        await asyncio.gather(*running, *ahead, behind, stage.submit(rows_of(9, 10)))
        assert stage.batcher.learned().decisions.dropped_late == 1

    play(main, max_rows=2, max_queue_rows=6, run_ns=100 * MS, instances=instances)


def test_many_late_requests_are_evicted_in_few_sweeps_of_the_queue() -> None:
    async def main(stage: Stage) -> None:
        running = stage.submit(rows_of(0))
        await asyncio.sleep(1e-3)
        late = [stage.submit(rows_of(1), terms=stage.within(finish_ns=MS + 10 * US * number)) for number in range(1000)]
        first_ns = stage.now_ns + MS
        evicted_ns = []
        for number, future in enumerate(late):
            with pytest.raises(ServeError, match="its deadline came too close while it was queued"):
                await future
            evicted_ns.append(stage.now_ns)
            assert 0 < stage.now_ns - (first_ns + 10 * US * number) <= 1.1 * MS
        assert len(set(evicted_ns)) <= 12  # sweeps in the 10 ms
        assert not running.done()
        await running

    play(main, run_ns=100 * MS)


def test_timer_of_a_request_that_ran_in_time_evicts_no_request() -> None:
    async def main(stage: Stage) -> None:
        for value in range(50):
            rows = rows_of(value)
            assert_answered(await stage.submit(rows, terms=stage.within(finish_ns=3 * RUN_NS)), rows)
        await asyncio.sleep(1)
        assert stage.batcher.learned().decisions == Decisions(batches=50)

    play(main)


def test_request_cancelled_in_the_middle_of_the_queue_frees_its_place_at_once() -> None:
    async def main(stage: Stage) -> None:
        running = stage.submit(rows_of(0))
        await asyncio.sleep(1e-3)
        waiting = [stage.submit(rows_of(value, value)) for value in (1, 2, 3)]
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert (stage.queue.rows, stage.queue.nbytes, stage.batcher.learned().decisions.left) == (4, 64, 1)
        other = stage.submit(rows_of(4, 4))
        await asyncio.gather(running, waiting[0], waiting[2], other)
        assert [first_values(run.parts) for run in stage.runner.runs] == [[0], [1, 1], [3, 3], [4, 4]]

    play(main, max_rows=2, max_queue_rows=6)


def test_predictions_do_not_count_rows_of_cancelled_requests() -> None:
    async def main(stage: Stage) -> None:
        stage.practise()
        running = stage.submit(rows_of(0))
        await asyncio.sleep(1e-3)
        waiting = [stage.submit(rows_of(value), terms=stage.within(finish_ns=9 * RUN_NS)) for value in range(5)]
        with pytest.raises(ServeError, match="deadline cannot be met"):
            stage.submit(rows_of(9), terms=stage.within(finish_ns=2 * RUN_NS, level=2))
        for future in waiting:
            future.cancel()
        await asyncio.sleep(0)
        await asyncio.gather(running, stage.submit(rows_of(9), terms=stage.within(finish_ns=2 * RUN_NS, level=2)))

    play(main, max_rows=1, known_ns=RUN_NS)


def test_cancellation_after_the_run_changes_nothing() -> None:
    async def main(stage: Stage) -> None:
        outcome = stage.submit(rows_of(1))
        await outcome
        assert not outcome.request.cancel() or outcome.request.state == CANCELLED
        assert_answered(outcome.result(), rows_of(1))
        assert stage.batcher.learned().decisions == Decisions(batches=1)

    play(main)


def test_queue_timeout_bounds_the_start_and_not_the_run() -> None:
    async def main(stage: Stage) -> None:
        at_once = stage.submit(rows_of(0), terms=stage.within(start_ns=1))
        await asyncio.sleep(1e-3)
        late = stage.submit(rows_of(1), terms=stage.within(start_ns=MS - 1))
        just = stage.submit(rows_of(2), terms=stage.within(start_ns=MS))
        assert_answered(await at_once, rows_of(0))
        assert_answered(await just, rows_of(2))
        assert refusal_of(late).message == "Request timeout expired: its timeout passed in the queue"
        assert refusal_of(late).kind is ErrorKind.DEADLINE
        assert [first_values(run.parts) for run in stage.runner.runs] == [[0], [2]]
        assert stage.batcher.learned().decisions.dropped_late == 1

    play(main)


def test_large_request_counts_as_one_and_its_queue_timeout_ends_with_its_first_piece() -> None:
    async def main(stage: Stage) -> None:
        rows = rows_of(*range(6))
        in_time = stage.submit(rows, terms=stage.within(start_ns=1))
        assert (stage.queue.requests(1), stage.queue.all_requests(), stage.queue.rows) == (1, 1, 6)
        await asyncio.sleep(1e-3)
        assert (stage.queue.requests(1), stage.queue.all_requests(), stage.queue.rows) == (0, 0, 4)
        late = stage.submit(rows, terms=stage.within(start_ns=MS))
        assert_answered(await in_time, rows)
        assert refusal_of(late).message == "Request timeout expired: its timeout passed in the queue"
        assert len(stage.runner.runs) == 3

    play(main, max_rows=2)


def test_queue_delay_ends_early_for_a_tight_deadline() -> None:
    async def main(stage: Stage) -> None:
        await stage.submit(rows_of(1), terms=stage.within(start_ns=4 * MS))
        await stage.submit(rows_of(2), terms=stage.within(finish_ns=6 * MS))
        assert stage.began() == [0, RUN_NS]

    play(main, queue_delay_ns=5 * MS, known_ns=RUN_NS)


@pytest.mark.parametrize(
    ("bounds", "waits"),
    [
        ({}, True),
        ({"start_ns": 50 * US}, False),
        ({"start_ns": 10 * MS}, True),
        ({"finish_ns": RUN_NS + 50 * US}, False),
        ({"finish_ns": 10 * MS}, True),
    ],
)
def test_closed_loop_wait_makes_no_queued_request_late(bounds: dict[str, int], waits: bool) -> None:
    async def main(stage: Stage) -> None:
        closed_loop = ClosedLoopWait(stage.clock() - 200 * RUN_NS, RUN_NS)
        stage.queue.shape_class((2,)).closed_loop = closed_loop
        for number in range(100):  # five callers always return within 0.6 ms
            at_ns = stage.clock() + (number - 100) * 2 * RUN_NS
            closed_loop.on_answer(at_ns, RUN_NS)
            for come_ns in (100 * US, 300 * US, 400 * US, 500 * US, 600 * US):
                closed_loop.on_arrival(1, at_ns + come_ns)
        closed_loop.on_answer(stage.clock(), RUN_NS)
        # A request without a deadline is first, so that the test covers more than the first request.
        first = stage.submit(rows_of(2), terms=Terms(1))
        await asyncio.gather(first, stage.submit(rows_of(3), terms=stage.within(**bounds, level=2)))
        assert (stage.runner.runs[-1].began_ns > stage.began_ns) == waits
        assert stage.batcher.learned().decisions.closed_loop_waits == waits

    play(main, known_ns=RUN_NS, closed_loop_wait=True)


def test_request_whose_deadline_passes_during_a_search_is_not_run_again() -> None:
    async def main(stage: Stage) -> None:
        terms = stage.within(finish_ns=RUN_NS - 1)
        late = stage.submit(rows_of(1), terms=terms, timing=(timing := Timing(stage.clock())))
        kept = stage.submit(rows_of(2))
        bad = stage.submit(rows_of(POISON))
        await asyncio.gather(late, kept, bad, return_exceptions=True)
        assert refusal_of(late).kind is ErrorKind.DEADLINE
        assert "while its batch ran again" in refusal_of(late).message
        assert timing.taken_ns > 0, "work was done for it"
        assert_answered(kept.result(), rows_of(2))
        assert all(1 not in first_values(run.parts) for run in stage.runner.runs[1:])

    play(main)


def test_higher_level_overtakes() -> None:
    async def main(stage: Stage) -> None:
        futures = [stage.submit(rows_of(0))]
        await asyncio.sleep(1e-3)
        futures += [stage.submit(rows_of(value), terms=Terms(level)) for value, level in ((1, 3), (2, 2), (3, 0))]
        await asyncio.gather(*futures)
        assert [first_values(run.parts) for run in stage.runner.runs] == [[0], [3], [2], [1]]

    play(main, max_rows=1)


def test_rows_cancelled_during_the_run_are_counted_as_wasted() -> None:
    async def main(stage: Stage) -> None:
        kept, left = stage.submit(rows_of(1)), stage.submit(rows_of(2, 3, 4))
        await asyncio.sleep(RUN_NS / 2e9)
        left.cancel()
        await kept
        assert stage.batcher.learned().decisions == Decisions(batches=1, wasted_rows=3)

    play(main)


def test_rows_of_all_pieces_of_a_cancelled_request_are_counted_as_wasted() -> None:
    async def main(stage: Stage) -> None:
        left = stage.submit(rows_of(*range(1, 11)))
        await asyncio.sleep(RUN_NS * 2.5 / 1e9)
        left.cancel()
        await stage.submit(rows_of(11))
        assert stage.batcher.learned().decisions == Decisions(batches=4, wasted_rows=6, left=2)

    play(main, max_rows=2)


def test_decisions_are_counted() -> None:
    async def main(stage: Stage) -> None:
        left = stage.submit(rows_of(1))
        left.cancel()
        await asyncio.gather(*[stage.submit(rows_of(value)) for value in (2, 3, POISON)], return_exceptions=True)
        await stage.submit(rows_of(4))
        # 3 rows, then 1 and 2, then the 2 alone, padded to 4, 2 and 2, 2 and 2; and one more
        assert stage.batcher.learned().decisions == Decisions(
            batches=6, retries=4, left=1, padding_rows=1 + 1 + 0 + 1 + 1 + 1
        )
        assert [run.bucket for run in stage.runner.runs] == [4, 2, 2, 2, 2, 2]

    play(main, buckets=(2, 4, 8))


def test_delayed_batches_are_counted() -> None:
    async def main(stage: Stage) -> None:
        await stage.submit(rows_of(1))
        assert stage.batcher.learned().decisions == Decisions(batches=1, delayed=1)

    play(main, queue_delay_ns=MS)


def test_full_queue_counts_bytes_too() -> None:
    async def main(stage: Stage) -> None:
        running = stage.submit(rows_of(0))
        await asyncio.sleep(1e-3)
        waiting = stage.submit(rows_of(1, 2))  # of two INT64 each
        with pytest.raises(ServeError, match="2 rows with 32 bytes are queued") as caught:
            stage.submit(rows_of(3))
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert stage.batcher.learned().decisions.refused_full == 1
        await asyncio.gather(running, waiting)

    play(main, max_queue_bytes=40)


def test_a_run_over_the_limit_is_the_last_on_the_loop() -> None:
    async def main(stage: Stage) -> None:
        for value in range(20):
            await stage.submit(rows_of(value))
        assert [run.is_inline for run in stage.runner.runs] == [True] + 19 * [False]
        assert (stage.batcher.learned().decisions.inline, stage.batcher.learned().decisions.inline_overruns) == (1, 1)
        assert "took 2700.0 ms" in stage.batcher.learned().off_loop_because

    play(main, run_ns=2_700 * MS, known_ns=20 * US)


def test_a_model_returns_to_the_loop_after_short_runs_on_a_worker() -> None:
    async def main(stage: Stage) -> None:
        await stage.submit(rows_of(0))
        stage.runner.latency_ns = lambda rows: 20 * US
        for value in range(TRIAL_RUNS + 20):  # some predictions include the long run
            await stage.submit(rows_of(value))
        on_loop = [run.is_inline for run in stage.runner.runs]
        assert on_loop[: TRIAL_RUNS + 1] == [True] + TRIAL_RUNS * [False]
        assert on_loop[-10:] == 10 * [True]
        assert not stage.batcher.learned().off_loop_because

    play(main, run_ns=3 * MS, known_ns=20 * US)


def test_a_failed_run_over_the_limit_is_the_last_on_the_loop() -> None:
    async def main(stage: Stage) -> None:
        for value in (POISON, 1, 2):
            await asyncio.gather(stage.submit(rows_of(value)), return_exceptions=True)
        assert [run.is_inline for run in stage.runner.runs] == [True, False, False]

    play(main, run_ns=3 * MS, known_ns=20 * US)


def test_a_model_that_has_become_slow_runs_on_its_worker_after_two_runs() -> None:
    async def main(stage: Stage) -> None:
        for value in range(20):
            await stage.submit(rows_of(value))
        assert stage.batcher.learned().decisions.inline <= 2

    play(main, run_ns=MS, known_ns=20 * US)


def test_runs_on_the_loop_hold_no_threads_of_the_device() -> None:
    async def main(stage: Stage) -> None:
        woken: list[str] = []
        other = stage.shared.share(1, lambda: woken.append("other"))
        for value in range(5):
            await stage.submit(rows_of(value))
            assert stage.shared.free_threads == 1
        assert stage.batcher.learned().decisions == Decisions(batches=5, inline=5)
        assert other.may_start()
        other.begin(100 * US)
        await stage.submit(rows_of(8))
        waiting = stage.submit(rows_of(9))
        await asyncio.sleep(1)
        assert not waiting.done(), "a model that had as much time as the run that holds the threads waits for its end"
        assert not other.may_start()  # it waits behind the first
        other.end()
        await waiting
        await asyncio.sleep(0)
        assert woken == ["other"], "and the turn is passed on"

    play(main, run_ns=50 * US, known_ns=50 * US, device_threads=1)


def test_learned_values_are_plain_numbers() -> None:
    async def main(stage: Stage) -> None:
        assert stage.batcher.learned().classes == ()
        await stage.submit(rows_of(1, width=2))
        await stage.submit(rows_of(1, 2, width=3))
        learned = stage.batcher.learned()
        assert (learned.max_rows, learned.queued_rows) == (8, 0)
        assert learned.decisions.batches == 2
        assert [one.shape for one in learned.classes] == ["(3,)", "(2,)"]
        assert [one.observations for one in learned.classes] == [1, 1]
        assert [one.latency_ms for one in learned.classes] == [{2: 2.0}, {1: 2.0}]
        assert (learned.classes[1].b_ms, learned.classes[1].error_ms) == (0.0, 0.0)
        assert learned.answer_ms == 0

    play(main)


LIMITS = RunLimits(timeout_ns=2_000 * MS, grace_ns=500 * MS)


def test_a_run_over_its_limit_is_ended_and_its_instance_runs_others() -> None:
    async def main(stage: Stage) -> None:
        stage.runner.latency_ns = lambda rows: 3600_000 * MS
        outcomes = [stage.submit(rows_of(1)), stage.submit(rows_of(2))]
        for outcome in await asyncio.gather(*outcomes, return_exceptions=True):
            assert isinstance(outcome, ServeError)
            assert outcome.kind is ErrorKind.DEADLINE
            assert outcome.message == "a run of model 'slow' was terminated after 2.0 s: its limit is 2 s"
        assert stage.now_ns == pytest.approx(2_000 * MS, abs=2 * MS)
        assert stage.runner.terminated == 1
        stage.runner.latency_ns = lambda rows: RUN_NS
        assert_answered(await stage.submit(rows_of(3)), rows_of(3))
        assert (stage.batcher.learned().decisions.run_timeouts, stage.batcher.learned().decisions.retries) == (1, 0)
        assert not stage.abandoned

    play(main, run_limits=LIMITS)


def test_run_whose_requests_are_all_cancelled_is_terminated_after_a_second() -> None:
    async def main(stage: Stage) -> None:
        stage.runner.latency_ns = lambda rows: 3600_000 * MS
        first, second = stage.submit(rows_of(1)), stage.submit(rows_of(2))
        await asyncio.sleep(0.5)
        first.cancel()
        await asyncio.sleep(0.7)
        assert stage.runner.terminated == 0, "the other request still waits"
        stage.runner.latency_ns = lambda rows: RUN_NS
        third = stage.submit(rows_of(3))
        second.cancel()
        assert_answered(await third, rows_of(3))
        assert stage.runner.terminated == 1
        assert stage.now_ns == pytest.approx(1_200 * MS, abs=2 * RUN_NS)
        decisions = stage.batcher.learned().decisions
        assert (decisions.run_timeouts, decisions.wasted_rows) == (0, 2)
        fourth = stage.submit(rows_of(4))
        stage.runner.latency_ns = lambda rows: 3600_000 * MS
        await asyncio.sleep(0.1)
        fourth.cancel()
        await asyncio.sleep(0.8)
        assert stage.runner.terminated == 1, "runs of less than a second are not worth it"
        await asyncio.sleep(0.2)
        assert stage.runner.terminated == 2
        assert not stage.abandoned

    play(main, run_limits=RunLimits())


def test_instance_with_a_cancelled_run_is_not_abandoned_before_the_limit_of_the_run() -> None:
    async def main(stage: Stage) -> None:
        stage.runner.latency_ns = lambda rows: 3600_000 * MS
        stage.runner.is_endless = True
        left = stage.submit(rows_of(1))
        await asyncio.sleep(0.1)
        left.cancel()
        await asyncio.sleep(2.3)
        assert stage.runner.terminated == 1
        assert not stage.abandoned
        await asyncio.sleep(0.2)
        assert stage.abandoned == [True]

    play(main, run_limits=LIMITS)


def test_instance_whose_run_does_not_end_is_abandoned_and_queued_requests_fail() -> None:
    async def main(stage: Stage) -> None:
        stage.runner.latency_ns = lambda rows: 3600_000 * MS
        stage.runner.is_endless = True
        first = stage.submit(rows_of(1))
        await asyncio.sleep(0.1)
        second = stage.submit(rows_of(2))
        first_outcome, second_outcome = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(first_outcome, ServeError)
        assert isinstance(second_outcome, ServeError)
        assert (first_outcome.kind, second_outcome.kind) == (ErrorKind.DEADLINE, ErrorKind.NOT_READY)
        assert second_outcome.retry_after_s == 1
        assert stage.now_ns == pytest.approx(2_500 * MS, abs=3 * MS)
        assert stage.runner.is_abandoned
        assert stage.abandoned == [True]
        with pytest.raises(ServeError, match=r"has no instance left: a run has not ended for 2\.5 s"):
            stage.submit(rows_of(3))
        await asyncio.sleep(3601)  # the run ends later
        assert stage.runner.runs
        assert (stage.batcher.learned().decisions.run_timeouts, stage.batcher.learned().decisions.abandoned) == (1, 1)

    play(main, run_limits=LIMITS)


def test_queued_requests_of_all_shapes_fail_although_the_failure_of_one_cancels_another() -> None:
    async def main(stage: Stage) -> None:
        stage.runner.is_endless = True
        outcomes = [stage.submit(rows_of(1))]
        await asyncio.sleep(0.1)
        outcomes += [stage.submit(rows_of(2, width=width)) for width in (2, 3, 4)]
        # As an ensemble cancels the steps beside a failed one.
        outcomes[1].add_done_callback(lambda _: outcomes[2].cancel())
        await asyncio.gather(*outcomes, return_exceptions=True)
        assert outcomes[2].cancelled()
        error = outcomes[3].exception()
        assert isinstance(error, ServeError)
        assert error.kind is ErrorKind.NOT_READY
        assert stage.abandoned == [True]

    play(main, run_ns=3600_000 * MS, run_limits=LIMITS)


def test_other_instances_continue_when_one_is_abandoned() -> None:
    async def main(stage: Stage) -> None:
        stuck, healthy = stage.runners[1], stage.runners[0]  # the last one is used first
        stuck.latency_ns = lambda rows: 3600_000 * MS
        stuck.is_endless = True
        lost = stage.submit(rows_of(1))
        await asyncio.sleep(3)
        assert lost.done()
        for value in range(3):
            assert_answered(await stage.submit(rows_of(value)), rows_of(value))
        assert (len(healthy.runs), stage.abandoned) == (3, [False])

    play(main, run_limits=LIMITS, instances=2)


def test_a_run_of_which_all_deadlines_have_passed_is_ended() -> None:
    async def main(stage: Stage) -> None:
        late = stage.submit(rows_of(1), terms=stage.within(1_500 * MS))
        await asyncio.gather(late, return_exceptions=True)
        assert stage.now_ns == pytest.approx(1_500 * MS, abs=3 * MS)
        with pytest.raises(ServeError, match="all its deadlines have passed"):
            await late

    play(main, run_ns=10_000 * MS)


def test_a_run_for_a_late_and_a_cancelled_request_is_ended() -> None:
    async def main(stage: Stage) -> None:
        late, left = stage.submit(rows_of(1), terms=stage.within(1_500 * MS)), stage.submit(rows_of(2))
        await asyncio.sleep(0.1)
        left.cancel()
        with pytest.raises(ServeError, match="all its deadlines have passed"):
            await late
        assert stage.now_ns == pytest.approx(1_500 * MS, abs=3 * MS)

    play(main, run_ns=10_000 * MS)


@pytest.mark.parametrize("known_s", [None, 100], ids=["first run", "known time"])
@pytest.mark.parametrize("are_cancelled", [True, False], ids=["cancelled", "late"])
def test_terminated_runs_do_not_shorten_the_limit_of_later_ones(known_s: int | None, are_cancelled: bool) -> None:
    async def main(stage: Stage) -> None:
        stage.practise()
        for value in range(80):
            terms = NO_TERMS if are_cancelled else stage.within(1_500 * MS)
            outcome = stage.submit(rows_of(value), terms=terms)
            await asyncio.sleep(0.1)
            if are_cancelled:
                outcome.cancel()
            await asyncio.sleep(2)
            assert outcome.done()
        assert stage.runner.terminated == 80
        assert_answered(await stage.submit(rows_of(80)), rows_of(80))

    play(main, run_ns=100_000 * MS, known_ns=known_s and known_s * 1000 * MS)


def test_run_with_a_request_without_a_deadline_is_not_ended() -> None:
    async def main(stage: Stage) -> None:
        hasty = stage.submit(rows_of(2), terms=stage.within(1_500 * MS))
        patient = stage.submit(rows_of(3))
        assert_answered(await patient, rows_of(3))
        assert_answered(await hasty, rows_of(2))
        assert len(stage.runner.runs) == 1

    play(main, run_ns=10_000 * MS)


def test_a_run_under_a_second_is_not_ended_for_its_deadlines() -> None:
    async def main(stage: Stage) -> None:
        assert_answered(await stage.submit(rows_of(1), terms=stage.within(100 * MS)), rows_of(1))

    play(main, run_ns=900 * MS)


def values_of_runs(stage: Stage) -> list[list[int]]:
    return [first_values(run.parts) for run in stage.runner.runs]


def test_requests_of_a_new_shape_share_a_batch_once_one_row_of_it_ran() -> None:
    """A model that rejects one row may accept several, and mix them."""

    async def main(stage: Stage) -> None:
        requests = [rows_of(1), rows_of(2), rows_of(3, 4)]
        for outputs, rows in zip(await asyncio.gather(*map(stage.submit, requests)), requests, strict=True):
            assert_answered(outputs, rows)
        assert values_of_runs(stage) == [[1], [2, 3, 4]]
        await asyncio.gather(*(stage.submit(rows_of(value, width=3)) for value in (5, 6)))
        assert values_of_runs(stage)[2:] == [[5], [6]]

    play(main, tries_one_row=True)


def test_first_request_of_a_new_shape_has_its_first_row_tried_alone_and_unpadded() -> None:
    async def main(stage: Stage) -> None:
        requests = [rows_of(1, 2, 3), rows_of(4)]
        for outputs, rows in zip(await asyncio.gather(*map(stage.submit, requests)), requests, strict=True):
            assert_answered(outputs, rows)
        assert values_of_runs(stage) == [[1], [1, 2, 3], [4]]
        assert [run.bucket for run in stage.runner.runs] == [1, 4, 4]
        assert stage.observed == [3, 1]
        assert (stage.batcher.learned().decisions.batches, stage.batcher.learned().decisions.padding_rows) == (3, 4)

    play(main, tries_one_row=True, buckets=(4, 8))


def test_request_whose_first_row_is_rejected_runs_alone_and_the_next_is_tried_again() -> None:
    async def main(stage: Stage) -> None:
        requests = [rows_of(POISON, 2), rows_of(3), rows_of(4)]
        first, *others = await asyncio.gather(*map(stage.submit, requests), return_exceptions=True)
        assert isinstance(first, ServeError)
        for outputs, rows in zip(others, requests[1:], strict=True):
            assert not isinstance(outputs, BaseException)
            assert_answered(outputs, rows)
        assert values_of_runs(stage) == [[POISON], [POISON, 2], [3], [4]]

    play(main, tries_one_row=True)


def test_request_that_runs_alone_is_neither_padded_nor_cut_nor_joined() -> None:
    async def main(stage: Stage) -> None:
        large, small = rows_of(*range(10)), rows_of(1)
        answers = await asyncio.gather(stage.submit(large, is_alone=True), stage.submit(small, is_alone=True))
        for outputs, rows in zip(answers, (large, small), strict=True):
            assert_answered(outputs, rows)
        assert [(run.rows, run.bucket) for run in stage.runner.runs] == [(10, 10), (1, 1)]

    play(main, max_rows=4, buckets=(4,), tries_one_row=True)
