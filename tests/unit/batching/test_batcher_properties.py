"""Properties of batchers in all schedules of arrivals, cancellations, failures and closes, in virtual time.

A schedule is a function of its seed. ``ORTSERVE_TEST_SCHEDULES`` is the number of schedules, 100,000 in ``make fuzz``;
``ORTSERVE_TEST_SEED`` is the first seed, so that a failing schedule can run alone.
"""

import asyncio
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

import numpy as np
import pytest

from fakes.clock import FakeClock
from fakes.inflight import Outcome, submit
from fakes.loop import VirtualTimeLoop, run_virtual
from fakes.runner import POISON, FakeRun, FakeRunner, answer
from ortserve.batching.admission import QueueLimits
from ortserve.batching.batch_runs import BatchRuns
from ortserve.batching.batcher import Batcher
from ortserve.batching.inline_runs import InlineBudget, InlineRuns
from ortserve.batching.latency import MIN_OBSERVATIONS
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import MIN_DUE_NS, RequestQueue
from ortserve.batching.row_checks import RowChecks
from ortserve.batching.run_limits import MIN_LATE_RUN_NS, RunLimits
from ortserve.batching.shared_threads import SharedThreads
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import Terms
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError

SCHEDULES = int(os.environ.get("ORTSERVE_TEST_SCHEDULES", "750"))
FIRST_SEED = int(os.environ.get("ORTSERVE_TEST_SEED", "0"))
BLOCKS = 20

US = 1_000
MS = 1_000_000
TIMER_ROUNDING_NS = 2
PLENTY = 4096

SIGNATURE = ModelSignature(
    (TensorSpec("x", DataType.INT64, (-1, -1)),),
    tuple(TensorSpec(name, DataType.INT64, (-1,)) for name in ("y", "sum", "size")),
)


def answer_and(size: Callable[[np.ndarray], int]) -> Callable[[np.ndarray], Arrays]:
    """Like ``answer``, with another output that only the row checks compare."""
    return lambda rows: (*answer(rows), np.full(len(rows), size(rows)))


Belief = Literal["right", "none", "too long", "too short"]
BELIEFS: Sequence[Belief] = ("right", "none", "too long", "too short")


@dataclass(frozen=True, slots=True)
class Model:
    """A model and the predictions of its batcher.

    Latency of n rows is ``base_ns + n * row_ns``. The predictions of a practised model count as based on enough runs
    from the start.
    """

    policy: BatchPolicy
    limits: QueueLimits
    instances: int
    threads: int
    base_ns: int
    row_ns: int
    belief: Belief
    is_practised: bool
    close_ns: int | None
    depth: int = 1
    checks: Literal["", "agree", "differ"] = ""
    """Whether its rows are checked, and the result."""
    run_limits: RunLimits | None = None
    endless: int = 0
    """Number of instances whose runs cannot be terminated."""

    def latency_ns(self, rows: int) -> int:
        return self.base_ns + rows * self.row_ns


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request; all times but ``at_ns`` are relative to its arrival."""

    model: int
    at_ns: int
    rows: np.ndarray
    level: int = 0
    finish_within_ns: int | None = None
    start_within_ns: int | None = None
    cancel_after_ns: int | None = None
    cancels: int | None = None
    """Index of an arrival that is cancelled when this one fails, as an ensemble cancels the steps beside a failed
    one."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The models, and the arrivals of requests."""

    models: Sequence[Model]
    device_threads: int
    arrivals: Sequence[Arrival]


@dataclass(slots=True, eq=False)
class Caller:
    """One request with its outcomes, and the time of the first."""

    arrival: Arrival
    is_piece_wise: bool
    timing: Timing = field(default_factory=lambda: Timing(0))
    terms: Terms = field(default_factory=Terms)
    outcomes: list[Arrays | ServeError | Literal["cancelled"]] = field(default_factory=list)
    settled_ns: int = 0
    outcome: Outcome | None = None
    """None for a request in pieces."""
    runs: list[FakeRun] = field(default_factory=list)
    """Its runs, in the order of their starts."""

    @property
    def is_poisoned(self) -> bool:
        return bool((self.arrival.rows == POISON).any())

    @property
    def error(self) -> ServeError | None:
        return self.outcomes[0] if isinstance(self.outcomes[0], ServeError) else None

    @property
    def width(self) -> int:
        return int(self.arrival.rows.shape[1])


@dataclass(frozen=True, slots=True)
class Play:
    """One model's part of a finished schedule; ``runs`` are those of all its instances in the order of their starts."""

    model: Model
    is_alone: bool
    device_threads: int
    callers: Sequence[Caller]
    runs: Sequence[FakeRun]
    batcher: Batcher
    begin_ns: int
    closing_ns: int | None
    closed_ns: int
    found: int = 0
    """Number of completed row checks."""


def draw_schedule(seed: int) -> Schedule:
    draw = random.Random(seed)
    pick = draw.choice
    models = [_draw_model(draw) for _ in range(pick([1, 1, 1, 2]))]
    poison_share = pick([0, 0, 0, 0.03, 0.3, 1])
    cancel_share = pick([0, 0, 0.1, 0.6, 1])
    deadline_share = pick([0, 0, 0.3, 1])
    start_share = pick([0, 0, 0.3])
    large_share = pick([0, 0, 0.1])
    levels = pick([1, 1, 3])
    widths = range(2, 2 + pick([1, 1, 2, 4]))
    gap_ns = pick([0, 10 * US, 300 * US, 3 * MS])
    at_ns = 0
    first_row = 1
    arrivals = []
    for _ in range(draw.randint(1, pick([6, 12, 30]))):
        if draw.random() < 0.6:  # otherwise in the same iteration of the loop as the previous one
            at_ns += draw.randint(0, 2 * gap_ns)
        to = draw.randrange(len(models))
        model = models[to]
        max_rows = model.policy.max_rows
        rows = draw.randint(1, pick([1, 1, max_rows]))
        if draw.random() < large_share:
            rows = draw.randint(max_rows, 4 * max_rows)
        # Each row of a schedule is unique: its number, followed by noise.
        width = pick(widths)
        array = np.empty((rows, width), np.int64)
        array[:] = range(width)
        array[:, 0] = range(first_row, first_row + rows)
        first_row += rows
        if draw.random() < poison_share:
            array[draw.randrange(rows), -1] = POISON
        full_ns = model.latency_ns(max_rows)
        arrivals.append(
            Arrival(
                to,
                at_ns,
                array,
                draw.randint(0, levels),
                _draw_bound(draw, full_ns) if draw.random() < deadline_share else None,
                _draw_bound(draw, full_ns) if draw.random() < start_share else None,
                draw.randint(0, pick([1, MS, 10 * MS])) if draw.random() < cancel_share else None,
            )
        )
    return Schedule(models, pick([1, 2, 3]), arrivals)


def _draw_model(draw: random.Random) -> Model:
    pick = draw.choice
    max_rows = pick([1, 2, 3, 4, 8, 16])
    buckets = pick([(), (), (max_rows,), (1, 2, 4, 8, 16), (2, 5, 16)])
    return Model(
        BatchPolicy(
            max_rows,
            pick([0, 0, 0, 200 * US, 5 * MS]),
            preferred_rows=pick([(), (), (2,), (2, 3)]),
            buckets=buckets,
            closed_loop_wait=draw.random() < 0.1,
        ),
        QueueLimits(pick([4, 40, PLENTY, PLENTY]), pick([200, *[2**30] * 4])),
        instances=pick([1, 1, 2, 3]),
        threads=pick([1, 1, 2, 4]),
        base_ns=pick([20 * US, 150 * US, 2 * MS]),
        row_ns=pick([0, 5 * US, 300 * US]),
        belief=pick(BELIEFS),
        is_practised=draw.random() < 0.5,
        close_ns=draw.randint(0, 20 * MS) if draw.random() < 0.3 else None,
    )


def _draw_bound(draw: random.Random, full_ns: int) -> int:
    """An absolute bound that has passed, is tight, or is generous."""
    return draw.choice([-draw.randint(1, MS), draw.randint(0, 3 * full_ns), draw.randint(full_ns, 8 * full_ns), 10**9])


class Theatre:
    """Runs a schedule: the batchers with their fakes, and callers that record their outcomes."""

    def __init__(self, schedule: Schedule, loop: VirtualTimeLoop, clock: FakeClock) -> None:
        self.schedule = schedule
        self.loop = loop
        self.clock = clock
        self.begin_ns = clock()
        self.shared = SharedThreads(schedule.device_threads, loop)
        self.inline = InlineBudget(loop)
        self.violations: list[str] = []
        self.waiting = len(schedule.arrivals)
        self.all_settled = asyncio.Event()
        self.queues = [self._make_queue(model, schedule) for model in schedule.models]
        self.runners = [
            [self._make_runner(model, is_endless=number < model.endless) for number in range(model.instances)]
            for model in schedule.models
        ]
        self.observed: list[list[int]] = [[] for _ in schedule.models]
        self.differed_ns: list[int | None] = [None for _ in schedule.models]
        self.checks = [RowChecks(SIGNATURE, clock) if model.checks else None for model in schedule.models]
        self.batchers = [self._make_batcher(index, model) for index, model in enumerate(schedule.models)]
        self.callers = [
            Caller(arrival, len(arrival.rows) > schedule.models[arrival.model].policy.max_rows)
            for arrival in schedule.arrivals
        ]

    async def play(self) -> list[Play]:
        models = self.schedule.models
        for caller in self.callers:
            self.loop.call_at((self.begin_ns + caller.arrival.at_ns) / 1e9, self._arrive, caller)
        closings = [self.loop.create_task(self._close(index)) for index in range(len(models))]
        await self.all_settled.wait()
        times = [await closing for closing in closings]
        plays = []
        for index, model in enumerate(models):
            for runner in self.runners[index]:
                self.violations += runner.violations
            runs = sorted((run for runner in self.runners[index] for run in runner.runs), key=lambda run: run.began_ns)
            callers = [caller for caller in self.callers if caller.arrival.model == index]
            requests_runs = self._without_checks(index, runs)
            _note_runs(callers, requests_runs)
            if model.run_limits is None:  # otherwise a run may be terminated just as it ends
                assert sorted(self.observed[index]) == sorted(run.rows for run in requests_runs if not run.has_failed)
            assert (self.queues[index].rows, self.queues[index].nbytes, bool(self.queues[index])) == (0, 0, False)
            plays.append(
                Play(
                    model,
                    len(models) == 1,
                    self.schedule.device_threads,
                    callers,
                    requests_runs,
                    self.batchers[index],
                    self.begin_ns,
                    *times[index],
                    sum(checks.counts.values()) if (checks := self.checks[index]) is not None else 0,
                )
            )
        assert self.shared.free_threads == self.schedule.device_threads
        assert not self.violations, self.violations
        return plays

    def _without_checks(self, index: int, runs: Sequence[FakeRun]) -> Sequence[FakeRun]:
        """The runs of requests, without those of checks. A check repeats rows that ran without a failure."""
        checks = self.checks[index]
        if checks is None:
            return runs
        done: set[int] = set()
        kept: list[FakeRun] = []
        for run in runs:
            rows = {int(row) for part in run.parts for row in part[:, 0]}
            if rows & done:
                assert len(run.parts) == 1
            else:
                kept.append(run)
                done |= set() if run.has_failed else rows
        differed_ns = self.differed_ns[index]
        counts = checks.counts
        # Two runs find a difference; the second one may not have started.
        assert len(runs) - len(kept) in {counts["agreed"] + 2 * counts["differed"] + more for more in (0, 1)}
        assert bool(counts["differed"]) is (differed_ns is not None)
        assert not counts["not_deterministic"] + counts["failed"]
        assert differed_ns is None or all(len(run.parts) == 1 for run in kept if run.began_ns > differed_ns)
        return kept

    def _differ(self, index: int) -> None:
        assert self.differed_ns[index] is None, "a difference is reported once"
        self.differed_ns[index] = self.clock()

    def _make_queue(self, model: Model, schedule: Schedule) -> RequestQueue:
        factor = {"right": 1.0, "too long": 100.0, "too short": 0.01}.get(model.belief)
        known = [(rows, factor * model.latency_ns(rows)) for rows in (1, 2, 4, 8, 16)] if factor else []
        queue = RequestQueue(known, known)
        for arrival in schedule.arrivals:
            shape_class = queue.shape_class(arrival.rows.shape[1])
            if model.is_practised:
                shape_class.batch_latency.observations = MIN_OBSERVATIONS
        return queue

    def _make_runner(self, model: Model, *, is_endless: bool) -> FakeRunner:
        def latency_ns(rows: int) -> int:
            if abs(self.shared.free_threads) > self.schedule.device_threads:
                self.violations.append(f"{self.shared.free_threads} threads are free")
            return model.latency_ns(rows)

        compute = answer_and(len) if model.checks == "differ" else answer_and(lambda rows: 0)
        runner = FakeRunner(self.loop, self.clock, latency_ns, compute, depth=model.depth)
        runner.is_endless = is_endless
        return runner

    def _make_batcher(self, index: int, model: Model) -> Batcher:
        runs = BatchRuns(
            self.runners[index],
            model.policy,
            self.queues[index],
            shared=self.shared,
            threads=model.threads,
            inline=InlineRuns(self.inline) if model.depth == 1 else None,
            loop=self.loop,
            clock=self.clock,
            observe_batch=lambda rows, *_: self.observed[index].append(rows),
            depth=model.depth,
            run_limits=model.run_limits,
            row_checks=self.checks[index],
            on_difference=lambda _: self._differ(index),
        )
        return Batcher(runs, model.limits, self.clock)

    def _arrive(self, caller: Caller) -> None:
        arrival = caller.arrival
        rows = arrival.rows
        now_ns = self.clock()
        caller.terms = Terms(
            arrival.level,
            None if arrival.finish_within_ns is None else now_ns + arrival.finish_within_ns,
            None if arrival.start_within_ns is None else now_ns + arrival.start_within_ns,
        )
        batcher = self.batchers[arrival.model]
        args = (batcher, (rows,), len(rows), rows.shape[1], caller.timing, caller.terms)
        try:
            outcome = caller.outcome = submit(*args)
        except ServeError as error:
            self._settle(caller, error)
            return
        outcome.add_done_callback(lambda outcome: self._settle(caller, _outcome(outcome)))
        if arrival.cancel_after_ns is not None:
            self.loop.call_later(arrival.cancel_after_ns / 1e9, outcome.cancel)

    def _settle(self, caller: Caller, outcome: Arrays | ServeError | Literal["cancelled"]) -> None:
        caller.outcomes.append(outcome)
        caller.settled_ns = self.clock()
        if caller.arrival.cancels is not None and not isinstance(outcome, tuple):
            other = self.callers[caller.arrival.cancels].outcome
            if other is not None:
                other.cancel()
        self.waiting -= 1
        if self.waiting == 0:
            self.all_settled.set()

    async def _close(self, index: int) -> tuple[int | None, int]:
        """Close the batcher. Returns the times of its begin, None if requests could not notice it, and of its end."""
        close_ns = self.schedule.models[index].close_ns
        if close_ns is None:
            await self.all_settled.wait()
            await asyncio.sleep(100_000)  # long after all runs, when no request waits any more
            assert self.queues[index].rows == 0
        else:
            await asyncio.sleep(close_ns / 1e9)
        closing_ns = self.clock()
        await self.batchers[index].close()
        return None if close_ns is None else closing_ns, self.clock()


def _outcome(outcome: Outcome) -> Arrays | ServeError | Literal["cancelled"]:
    if outcome.cancelled():
        return "cancelled"
    error = outcome.exception()
    if error is None:
        return outcome.result()[:2]
    assert isinstance(error, ServeError)
    return error


def _note_runs(callers: Sequence[Caller], runs: Sequence[FakeRun]) -> None:
    owners = {int(row): caller for caller in callers for row in caller.arrival.rows[:, 0]}
    for run in runs:
        for caller in {owners[row]: None for part in run.parts for row in (int(part[0, 0]),)}:
            caller.runs.append(run)


def play(schedule: Schedule) -> list[Play]:
    return run_virtual(lambda loop, clock: _play(schedule, loop, clock))


async def _play(schedule: Schedule, loop: VirtualTimeLoop, clock: FakeClock) -> list[Play]:
    return await Theatre(schedule, loop, clock).play()


@pytest.mark.timeout(max(120, SCHEDULES // 100))
@pytest.mark.parametrize("block", range(BLOCKS))
def test_promises_hold_in_every_schedule(block: int) -> None:
    for seed in range(FIRST_SEED + block, FIRST_SEED + SCHEDULES, BLOCKS):
        try:
            for one in play(draw_schedule(seed)):
                for check in CHECKS:
                    check(one)
        except BaseException as error:
            error.add_note(f"ORTSERVE_TEST_SEED={seed} ORTSERVE_TEST_SCHEDULES=1")
            raise


def test_promises_hold_where_instances_take_two_batches_at_a_time() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SCHEDULES // 20):
        schedule = draw_schedule(seed)
        models = [replace(model, depth=2) for model in schedule.models]
        try:
            for one in play(replace(schedule, models=models)):
                for check in CHECKS_OF_ANSWERS:
                    check(one)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("checks", ["agree", "differ"])
@pytest.mark.parametrize("depth", [1, 2])
def test_promises_hold_where_rows_are_checked(checks: Literal["agree", "differ"], depth: int) -> None:
    found = 0
    for seed in range(FIRST_SEED, FIRST_SEED + SCHEDULES // 20):
        schedule = draw_schedule(seed)
        models = [replace(model, depth=depth, checks=checks) for model in schedule.models]
        try:
            for one in play(replace(schedule, models=models)):
                for check in CHECKS_OF_CHECKED:
                    check(one)
                found += one.found
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert found > SCHEDULES // 200, "most schedules have no batch of several requests, and some must"


@pytest.mark.parametrize("depth", [1, 2])
def test_promises_hold_where_runs_take_seconds_and_are_terminated(depth: int) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SCHEDULES // 5):
        draw = random.Random(seed)
        schedule = slow_schedule(draw_schedule(seed), depth, draw)
        try:
            for one in play(schedule):
                for check in CHECKS_OF_TERMINATED:
                    check(one)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def slow_schedule(schedule: Schedule, depth: int, draw: random.Random) -> Schedule:
    """The schedule with all times a thousand times as long, limits of runs, and requests that cancel others."""
    models = []
    for model in schedule.models:
        limit_ns = draw.choice([None, 1000 * model.latency_ns(draw.choice([1, 2, 16]))])
        models.append(
            replace(
                model,
                depth=depth,
                base_ns=1000 * model.base_ns,
                row_ns=1000 * model.row_ns,
                close_ns=None if model.close_ns is None else 1000 * model.close_ns,
                run_limits=RunLimits(limit_ns, draw.choice([100 * MS, 5_000 * MS])),
                endless=draw.choice([0, 0, 1, model.instances]),
            )
        )
    arrivals = [
        replace(
            arrival,
            at_ns=1000 * arrival.at_ns,
            finish_within_ns=None if arrival.finish_within_ns is None else 1000 * arrival.finish_within_ns,
            start_within_ns=None if arrival.start_within_ns is None else 1000 * arrival.start_within_ns,
            cancel_after_ns=None if arrival.cancel_after_ns is None else 1000 * arrival.cancel_after_ns,
            cancels=draw.randrange(len(schedule.arrivals)) if draw.random() < 0.6 else None,
        )
        for arrival in schedule.arrivals
    ]
    return replace(schedule, models=models, arrivals=arrivals)


def check_each_request_is_settled_once(one: Play) -> None:
    assert [len(caller.outcomes) for caller in one.callers] == [1] * len(one.callers)


def check_each_request_gets_its_own_answer(one: Play) -> None:
    for caller in one.callers:
        outcome = caller.outcomes[0]
        if isinstance(outcome, tuple):
            assert not caller.is_poisoned
            wanted = answer(caller.arrival.rows)
            assert len(outcome) == len(wanted)
            assert all(map(np.array_equal, outcome, wanted))
        elif outcome == "cancelled":
            assert caller.arrival.cancel_after_ns is not None or one.model.run_limits is not None


def check_failures_have_a_cause(one: Play) -> None:
    """A valid request never fails because of others."""
    for caller in one.callers:
        error = caller.error
        if error is None:
            continue
        if error.kind is ErrorKind.INTERNAL:
            assert error.message == "a row is poisoned"
            assert any(len(run.parts) == 1 for run in caller.runs if run.has_failed), (
                "the error of a run of several may quote another request"
            )
            assert caller.timing.taken_ns > 0
            assert caller.is_poisoned
        elif error.kind is ErrorKind.NOT_READY:
            assert one.closing_ns is not None
            assert not caller.runs
        elif not caller.is_piece_wise:
            assert not caller.runs or "while its batch ran again" in error.message


def check_rejections_have_a_cause(one: Play) -> None:
    """Requests without limits are rejected by a full queue only; predictions reject after enough runs, if not idle."""
    for caller in one.callers:
        error, terms = caller.error, caller.terms
        if error is None or error.kind not in (ErrorKind.OVERLOADED, ErrorKind.DEADLINE):
            continue
        if error.kind is ErrorKind.OVERLOADED:
            assert error.retry_after_s is not None
            assert 0 < error.retry_after_s < math.inf
        else:
            assert error.retry_after_s is None
        message = error.message
        if message.startswith("Exceeds maximum queue size"):
            assert one.model.limits.rows < PLENTY or one.model.limits.nbytes < 2**30
            assert waiting_at(one, caller, caller.settled_ns), "an empty queue accepts any request"
        elif "its timeout passed" in message:
            assert terms.start_by_ns is not None
            assert terms.start_by_ns < caller.settled_ns
        elif "its deadline came too close" in message:
            assert terms.answer_by_ns is not None
            for_answer_ns = (terms.answer_by_ns - caller.timing.queued_ns) / 2  # the maximum
            assert terms.answer_by_ns <= caller.settled_ns + for_answer_ns
        elif "met: 0.0 ms are left" in message:
            assert terms.answer_by_ns is not None
            # A twentieth of a millisecond, which is formatted as 0.0.
            assert terms.answer_by_ns <= caller.settled_ns + MS // 20
        else:  # rejected by prediction
            assert terms.answer_by_ns is not None
            succeeded = [run for run in one.runs if run.ended_ns <= caller.settled_ns and not run.has_failed]
            own = sum(run.parts[0].shape[1] == caller.width for run in succeeded)
            assert one.model.is_practised or own >= MIN_OBSERVATIONS
            if message.startswith("deadline cannot be met"):
                is_busy = running_at(one, caller.settled_ns) == one.model.instances
                assert is_busy or waiting_at(one, caller, caller.settled_ns)
            else:
                assert "can no longer be met, after waiting" in message
                assert caller.settled_ns > caller.timing.queued_ns


def check_batches(one: Play) -> None:
    for run in one.runs:
        assert 1 <= run.rows <= one.model.policy.max_rows
        assert run.bucket == one.model.policy.bucket_for(run.rows)


def check_no_request_starts_too_late(one: Play) -> None:
    for caller in one.callers:
        if caller.runs and not caller.is_piece_wise:
            terms = caller.terms
            assert terms.start_by_ns is None or caller.runs[0].began_ns <= terms.start_by_ns
            assert terms.answer_by_ns is None or caller.runs[-1].began_ns <= terms.answer_by_ns


def check_late_requests_are_evicted_in_time(one: Play) -> None:
    """They are not only evicted when a batch reaches them. Runs on the loop delay evictions."""
    if not one.is_alone or any(run.is_inline for run in one.runs):
        return
    for caller in one.callers:
        terms = caller.terms
        bounds = [by_ns for by_ns in (terms.start_by_ns, terms.answer_by_ns) if by_ns is not None]
        if bounds and not caller.runs and not caller.is_piece_wise:
            assert caller.settled_ns <= max(min(bounds), caller.timing.queued_ns) + MS + TIMER_ROUNDING_NS


def check_order(one: Play) -> None:
    """In a shape class higher levels run first, then earlier arrivals, except for deadlines within ``MIN_DUE_NS``."""
    ran = [caller for caller in one.callers if caller.runs and not caller.is_piece_wise]
    for first, second in combinations(ran, 2):
        if first.width != second.width:
            continue
        for a, b in ((first, second), (second, first)):
            if goes_before(a, b) and a.timing.queued_ns < b.runs[0].began_ns:
                assert a.runs[0].began_ns <= b.runs[0].began_ns


def goes_before(a: Caller, b: Caller) -> bool:
    level_a, level_b = a.terms.level or 1, b.terms.level or 1
    by_a, by_b = a.terms.answer_by_ns, b.terms.answer_by_ns
    if level_a != level_b:
        return level_a < level_b
    if a.timing.queued_ns < b.timing.queued_ns:
        return by_b is None or (by_a is not None and by_a <= by_b)
    return by_a is not None and by_a < b.timing.queued_ns + MIN_DUE_NS and (by_b is None or by_a < by_b)


def check_no_request_waits_for_an_idle_instance(one: Play) -> None:
    """After the queue delay, all usable instances are busy until one of them takes the request."""
    model = one.model
    if not one.is_alone or model.policy.closed_loop_wait:
        return
    capacity = min(model.instances, one.device_threads // min(model.threads, one.device_threads))
    for caller in one.callers:
        if not caller.runs or caller.is_piece_wise:
            continue
        due_ns = caller.timing.queued_ns + model.policy.queue_delay_ns + TIMER_ROUNDING_NS
        taken_ns = caller.runs[0].began_ns
        ends = [run.ended_ns for run in one.runs if due_ns < run.ended_ns < taken_ns]
        for moment_ns in (due_ns, *ends):
            if moment_ns < taken_ns:
                running = [run for run in one.runs if run.began_ns <= moment_ns < run.ended_ns]
                assert len(running) >= capacity or any(run.is_inline for run in running), (
                    "a run on the loop delays the start"
                )


def check_searches_are_short(one: Play) -> None:
    """A failed batch of n requests costs at most 2·⌈log2 n⌉ more runs with one failing request, else 4·⌈log2 n⌉ + n."""
    first_of: dict[int, int] = {}
    retries: dict[int, int] = {}
    for index, run in enumerate(one.runs):
        rows = [int(part[0, 0]) for part in run.parts]
        origins = {first_of.get(row, index) for row in rows}
        assert len(origins) == 1, "only failed requests run again, and only with requests of the same failed batch"
        first_of |= dict.fromkeys(rows, min(origins))
        if index not in origins:
            retries[min(origins)] = retries.get(min(origins), 0) + 1
    for index, count in retries.items():
        failed = one.runs[index]
        assert failed.has_failed
        halvings = (len(failed.parts) - 1).bit_length()
        assert count <= (2 * halvings if len(failing_rows(failed)) == 1 else 4 * halvings + len(failed.parts))


def check_close(one: Play) -> None:
    closing_ns = one.closing_ns
    if closing_ns is None:
        return
    assert all(run.ended_ns <= one.closed_ns for run in one.runs)
    for caller in one.callers:
        assert caller.timing.queued_ns <= closing_ns, "a new request was admitted"
        if one.begin_ns + caller.arrival.at_ns > closing_ns and caller.outcomes[0] != "cancelled":
            assert caller.error is not None
            assert caller.error.kind is ErrorKind.NOT_READY


def check_decisions_are_counted(one: Play) -> None:
    decisions = one.batcher.learned().decisions
    assert decisions.batches == len(one.runs)
    assert decisions.inline == sum(run.is_inline for run in one.runs)
    assert decisions.padding_rows == sum(run.bucket - run.rows for run in one.runs)
    messages = [caller.error.message for caller in one.callers if caller.error is not None]
    assert decisions.refused_full == sum(message.startswith("Exceeds") for message in messages)
    assert decisions.refused_late == sum(message.startswith("deadline cannot be met") for message in messages)
    if not any(caller.is_piece_wise for caller in one.callers):
        assert decisions.dropped_late == sum(message.startswith("Request timeout expired") for message in messages)
        left = sum(caller.outcomes[0] == "cancelled" and not caller.runs for caller in one.callers)
        assert decisions.left == left


def check_runs_without_callers_end_after_a_second(one: Play) -> None:
    if one.model.endless:
        return
    for run in one.runs:
        callers = [caller for caller in one.callers if any(own is run for own in caller.runs)]
        if not run.is_inline and all(caller.outcomes[0] == "cancelled" for caller in callers):
            last_ns = max(caller.settled_ns for caller in callers)
            assert run.ended_ns <= max(last_ns, run.began_ns + MIN_LATE_RUN_NS) + MS


def running_at(one: Play, at_ns: int) -> int:
    return sum(run.began_ns <= at_ns < run.ended_ns for run in one.runs)


def waiting_at(one: Play, new: Caller, at_ns: int) -> list[Caller]:
    """The requests that may have been queued then, except ``new``."""
    return [
        caller
        for caller in one.callers
        if caller is not new
        and 0 < caller.timing.queued_ns <= at_ns
        and caller.settled_ns >= at_ns
        and (caller.is_piece_wise or not caller.runs or caller.runs[0].began_ns >= at_ns)
    ]


def failing_rows(run: FakeRun) -> list[np.ndarray]:
    return [part for part in run.parts if (part == POISON).any()]


CHECKS = (
    check_each_request_is_settled_once,
    check_each_request_gets_its_own_answer,
    check_failures_have_a_cause,
    check_rejections_have_a_cause,
    check_batches,
    check_no_request_starts_too_late,
    check_late_requests_are_evicted_in_time,
    check_order,
    check_no_request_waits_for_an_idle_instance,
    check_searches_are_short,
    check_close,
    check_decisions_are_counted,
)


CHECKS_OF_ANSWERS = (
    check_each_request_is_settled_once,
    check_each_request_gets_its_own_answer,
    check_failures_have_a_cause,
    check_batches,
    check_searches_are_short,
    check_close,
)
"""All checks but those of start times: with two batches at a time, one is chosen before the previous one ends."""


CHECKS_OF_TERMINATED = (
    check_each_request_is_settled_once,
    check_each_request_gets_its_own_answer,
    check_batches,
    check_runs_without_callers_end_after_a_second,
)


CHECKS_OF_CHECKED = (
    check_each_request_is_settled_once,
    check_each_request_gets_its_own_answer,
    check_failures_have_a_cause,
    check_batches,
    check_close,
)
"""All checks but the bound on searches: once requests run alone, a search does not halve batches."""
