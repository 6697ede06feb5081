"""Sequences without models: runs wait in a list until the test settles them, in virtual time."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.clock import FakeClock
from fakes.loop import VirtualTimeLoop, run_virtual
from ortserve.batching.direct_sequences import DirectRuns, Waiting, choose_slots
from ortserve.batching.oldest_sequences import OldestRuns
from ortserve.batching.queue import Alone
from ortserve.batching.sequence_admission import SequenceLimits
from ortserve.batching.sequence_table import Sequence, SequenceTable, Strategy, enqueue, find, take_dependents
from ortserve.batching.sequences import SequenceRuns
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import CANCELLED, COMPUTED, NO_TERMS, RUNNING, InflightRequest, Terms
from ortserve.core.sequence import END, ID, READY, START, ControlTensor, SequencePart, SequenceTensors, StateTensor
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, RunTimeoutError, ServeError

MS = 1_000_000
IDLE_NS = 500 * MS


def one(value: float, dtype: Any = np.int64) -> np.ndarray:
    return np.full((1, 1), value, dtype)


TENSORS = SequenceTensors(
    (
        *tuple(ControlTensor(kind, DataType.INT32, one(0), one(1)) for kind in (START, READY, END)),
        ControlTensor(ID, DataType.UINT64, one(0, np.uint64), one(0, np.uint64)),
    ),
    (one(0),),
    (StateTensor("STATE", "NEXT", 1, (1, -1)),),
    1,
)
"""Inputs: the client's, START, READY, END, ID and the state. Outputs: the sum, and the same as the next state."""


class Stage:
    """Sequences whose runs wait in ``queue`` until the test answers them with running sums."""

    def __init__(
        self,
        loop: VirtualTimeLoop,
        clock: FakeClock,
        slots: int = 8,
        *,
        strategy: str = "oldest",
        groups: int = 1,
        limits: SequenceLimits | None = None,
        delay_ns: int = 0,
        min_utilization: float = 0.0,
        shape_class: Callable[[Arrays], Hashable] = lambda _: None,
    ) -> None:
        self.clock = clock
        self.queue: list[InflightRequest] = []
        self.shape_classes: list[object] = []
        self.terms: list[Terms] = []
        self.rejects: ServeError | None = None
        self.table = SequenceTable(slots * groups, IDLE_NS)
        limits = limits or SequenceLimits(1000, 10_000, 1000, 1_000_000)
        make_strategy: Callable[[SequenceRuns], Strategy] = partial(OldestRuns, enqueue=self.enqueue)
        if strategy == "direct":
            make_strategy = partial(
                DirectRuns,
                groups=groups,
                slots=slots,
                enqueue=self.enqueue,
                padded_rows=lambda rows: rows,
                shape_class=shape_class,
                loop=loop,
                clock=clock,
                delay_ns=delay_ns,
                min_utilization=min_utilization,
            )
        self.runs = SequenceRuns("m", TENSORS, self.table, limits, make_strategy, loop, clock)

    def enqueue(self, request: InflightRequest, shape_class: object, terms: Terms = NO_TERMS) -> None:
        if self.rejects is not None:
            raise self.rejects
        request.timing.queued_ns = self.clock()
        self.shape_classes.append(shape_class)
        self.terms.append(terms)
        request.state = 1  # queued
        self.queue.append(request)
        request.withdraw = self.queue.remove

    def submit(self, name: int | str, value: int = 1, flags: str = "", terms: Terms = NO_TERMS) -> InflightRequest:
        """``flags`` contains S for the start, E for the end, and A for a request that an ensemble sent ahead."""
        request = InflightRequest(Timing(self.clock()), (one(value),), 1)
        self.runs.submit(request, terms, SequencePart(name, "S" in flags, "E" in flags, "A" in flags))
        return request

    def take(self) -> InflightRequest:
        """Start the first run."""
        run = self.queue.pop(0)
        run.state = RUNNING
        run.withdraw = None
        run.timing.taken_ns = self.clock()
        return run

    async def answer(self) -> None:
        """Finish the first run with the model's result."""
        await asyncio.sleep(0)
        finish(self.take())
        await asyncio.sleep(0)


def finish(run: InflightRequest) -> None:
    client, start, _, _, _, state = run.inputs
    output = client + state * (1 - start)
    memory = output.copy()
    run.complete((output, memory))
    memory[:] = -1_000_000  # a later run reuses the memory of states


class Queued:
    """A request in the queue of its sequence."""

    def __init__(self, is_start: bool) -> None:
        self.is_start = is_start
        self.number = 0


@given(st.lists(st.tuples(st.sampled_from("aaalftd"), st.booleans(), st.integers(0, 20)), max_size=60))
def test_queues_of_sequences_keep_their_order(actions: list[tuple[str, bool, int]]) -> None:
    queue: deque[Queued] = deque()
    model: list[Queued] = []
    gone: list[Queued] = []
    for action, is_start, index in actions:
        index = min(index, max(0, len(model) - 1))
        if action == "a":
            model.append(Queued(is_start))
            enqueue(queue, model[-1])
        elif action == "t":
            after = index
            while after < len(model) and (is_start or not model[after].is_start):
                after += 1
            gone += model[index:after]
            assert take_dependents(queue, index, with_starts=is_start) == model[index:after]
            del model[index:after]
        elif model and action == "l":
            gone.append(model.pop(0))
            assert queue.popleft() is gone[-1]
        elif model:
            assert find(queue, model[index]) == index
            if action == "d":
                gone.append(model.pop(index))
                del queue[index]
        assert list(queue) == model
        assert all(find(queue, one) == -1 for one in gone)


def total(request: InflightRequest) -> int:
    return int(request.take_outputs()[0].sum())


def error(request: InflightRequest) -> ServeError:
    with pytest.raises(ServeError) as caught:
        request.take_outputs()
    return caught.value


def virtual(**traits: Any) -> Callable[[Callable[[Stage], Awaitable[None]]], Callable[[], None]]:
    """Run a test of a ``Stage`` with these traits in virtual time."""

    def decorate(test: Callable[[Stage], Awaitable[None]]) -> Callable[[], None]:
        async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
            await test(Stage(loop, clock, **traits))

        def run() -> None:
            run_virtual(main)

        run.__doc__ = test.__doc__
        return run

    return decorate


START_TEXT = (
    "inference request for sequence 1 to model 'm' must specify the START flag on the first request of the sequence"
)


@virtual()
async def test_one_request_of_a_sequence_runs_at_a_time_in_order(stage: Stage) -> None:
    kept = []
    first = stage.submit(1, 5, "S")
    second, third = stage.submit(1, 7), stage.submit(1, 1, "E")
    for request in (first, second, third):
        request.on_settled = lambda request: kept.append(int(request._outputs[0][0, 0]))
    assert len(stage.queue) == 1
    await stage.answer()
    assert len(stage.queue) == 1
    await stage.answer()
    await stage.answer()
    assert kept == [5, 12, 13]
    assert len(stage.table) == 0
    assert stage.runs.reading().state_bytes == 0


@virtual()
async def test_controls_show_the_place_of_each_request(stage: Stage) -> None:
    seen: list[list[int]] = []
    for flags in ("S", "", "E", "SE"):
        stage.submit(7, 1, flags)
        seen.append([int(array[0, 0]) for array in stage.queue[0].inputs[1:5]])
        await stage.answer()
    assert seen == [[1, 1, 0, 7], [0, 1, 0, 7], [0, 1, 1, 7], [1, 1, 1, 7]], "START, READY, END, ID"


@virtual()
async def test_sequences_run_beside_each_other(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    stage.submit(2, 1, "S")
    assert len(stage.queue) == 2
    with pytest.raises(ServeError, match="data-type is 'BYTES', but model 'm' expects 'UINT64'"):
        stage.submit("1", 1, "S")


@virtual()
async def test_a_failed_run_leaves_the_state_and_a_failed_start_ends_the_sequence(stage: Stage) -> None:
    for flags, ends in (("", False), ("S", True)):
        stage.submit(1, 5, "S")
        await stage.answer()
        failing, following = stage.submit(1, 100, flags), stage.submit(1, 2)
        stage.take().fail(ServeError(ErrorKind.INTERNAL, "no"))
        assert error(failing).message == "no"
        if ends:
            assert error(following).message == START_TEXT
            assert stage.runs.reading().ended["failed"] == 1
        else:
            await stage.answer()
            assert total(following) == 7


@virtual()
async def test_a_request_that_misses_its_deadline_in_the_queue_ends_the_sequence(stage: Stage) -> None:
    stage.submit(1, 5, "S")
    await stage.answer()
    late, following = stage.submit(1, 1), stage.submit(1, 2)
    stage.queue.pop().fail(ServeError(ErrorKind.DEADLINE, "late"))
    assert error(late).message == "late"
    assert error(following).message == START_TEXT


@virtual(slots=1)
async def test_requests_that_wait_for_their_turn_or_a_slot_fail_at_their_deadlines(stage: Stage) -> None:
    for has_slot in (True, False):
        first = stage.submit(1, 5, "S")
        name = 1 if has_slot else 2
        early = stage.submit(name, 1, "" if has_slot else "S")
        late = stage.submit(name, 2, "", Terms(0, stage.clock() + 100 * MS))
        behind, start = stage.submit(name, 4), stage.submit(name, 8, "SE")
        await asyncio.sleep(0.099)
        assert not late.is_settled
        await asyncio.sleep(0.002)
        assert error(late).kind is ErrorKind.DEADLINE
        assert error(behind).message == START_TEXT.replace("sequence 1", f"sequence {name}")
        if not has_slot:
            stage.submit(1, 1, "E")
        while stage.queue:
            await stage.answer()
        assert [total(request) for request in (first, early, start)] == [5, 6 if has_slot else 1, 8]
        assert len(stage.table) == 0


@virtual()
async def test_a_start_does_not_depend_on_earlier_requests(stage: Stage) -> None:
    """It runs if an earlier request of its sequence fails or is cancelled."""
    for way in ("fail", "cancel", "cancel first"):
        first = stage.submit(1, 5, "S")
        second, third, start, last = (
            stage.submit(1, value, flags) for value, flags in ((1, ""), (2, ""), (4, "S"), (8, "E"))
        )
        if way == "fail":
            stage.take().fail(ServeError(ErrorKind.INTERNAL, "no"))
            assert error(second).message == START_TEXT
        elif way == "cancel":
            second.cancel()
        else:
            first.cancel()
        assert third.is_settled
        while stage.queue:
            await stage.answer()
        assert [total(request) for request in (start, last)] == [4, 12]
        assert (first.state == COMPUTED) is (way == "cancel"), "an earlier request runs"
        assert len(stage.table) == stage.runs.waiting_rows == 0


@virtual()
async def test_a_rejected_request_can_be_sent_again_if_its_client_awaits_each_answer(stage: Stage) -> None:
    for sequence, kind in enumerate((ErrorKind.OVERLOADED, ErrorKind.NOT_READY), 1):
        stage.submit(sequence, 5, "S")
        await stage.answer()
        for is_followed in (False, True):
            stage.rejects = ServeError(kind, "full")
            rejected = stage.submit(sequence, 1)
            following = [stage.submit(sequence, 2)] if is_followed else []
            stage.rejects = None
            await asyncio.sleep(0)
            assert error(rejected).message == "full"
            assert all("must specify the START flag" in error(request).message for request in following)
            if not is_followed:
                again = stage.submit(sequence, 1)
                await stage.answer()
                assert total(again) == 6
    assert len(stage.table) == 0
    assert stage.runs.reading().ended["failed"] == 2


@pytest.mark.parametrize("strategy", ["oldest", "direct"])
@pytest.mark.parametrize("is_rejected", [True, False], ids=["rejected", "failed"])
def test_the_last_request_of_a_sequence_can_be_sent_again(strategy: str, is_rejected: bool) -> None:
    @virtual(strategy=strategy)
    async def test(stage: Stage) -> None:
        stage.submit(1, 5, "S")
        await stage.answer()
        failure = ServeError(ErrorKind.OVERLOADED if is_rejected else ErrorKind.INTERNAL, "no")
        stage.rejects = failure if is_rejected else None
        last = stage.submit(1, 1, "E")
        await asyncio.sleep(0)
        if not is_rejected:
            stage.take().fail(failure)
        await asyncio.sleep(0)
        assert error(last).message == "no"
        stage.rejects = None
        again = stage.submit(1, 1, "E")
        await stage.answer()
        assert total(again) == 6
        assert len(stage.table) == 0
        assert stage.runs.reading().ended["ended"] == 1

    test()


@virtual()
async def test_a_last_request_that_fails_keeps_no_sequence_whose_id_is_used_again(stage: Stage) -> None:
    stage.submit(1, 5, "S")
    await stage.answer()
    last, other = stage.submit(1, 1, "E"), stage.submit(1, 8, "S")
    stage.take().fail(ServeError(ErrorKind.INTERNAL, "no"))
    assert error(last).message == "no"
    assert len(stage.table) == 1
    await stage.answer()
    assert total(other) == 8


@pytest.mark.parametrize("has_run", [False, True])
def test_a_last_request_that_fails_does_not_bring_back_a_sequence_that_a_later_one_has_replaced(has_run: bool) -> None:
    @virtual()
    async def test(stage: Stage) -> None:
        stage.submit(1, 5, "S")
        await stage.answer()
        last, other = stage.submit(1, 1, "E"), stage.submit(1, 8, "SE")
        run, other_run = stage.take(), stage.take()
        if has_run:
            finish(other_run)
        run.fail(ServeError(ErrorKind.INTERNAL, "no"))
        if not has_run:
            finish(other_run)
        assert error(last).message == "no"
        assert total(other) == 8
        assert len(stage.table) == 0
        with pytest.raises(ServeError, match="must specify the START flag"):
            stage.submit(1, 1)

    test()


@virtual()
async def test_a_last_request_that_fails_while_the_model_is_unloaded_keeps_no_sequence(stage: Stage) -> None:
    stage.submit(1, 5, "S")
    await stage.answer()
    stage.submit(1, 1, "E")
    closed = asyncio.create_task(stage.runs.close())
    await asyncio.sleep(0)
    began_ns = stage.clock()
    stage.take().fail(ServeError(ErrorKind.INTERNAL, "no"))
    await closed
    assert stage.clock() - began_ns < IDLE_NS


@virtual()
async def test_a_rejected_start_begins_nothing(stage: Stage) -> None:
    stage.rejects = ServeError(ErrorKind.OVERLOADED, "full")
    stage.submit(1, 5, "S")
    await asyncio.sleep(0)
    assert len(stage.table) == 0


@virtual()
async def test_a_terminated_run_does_not_end_its_sequence(stage: Stage) -> None:
    for flags in ("S", ""):
        stage.submit(1, 1, flags)
        await stage.answer()
    stage.submit(1, 4)
    stage.take().fail(ServeError(ErrorKind.DEADLINE, "terminated"))
    following = stage.submit(1, 8)
    await stage.answer()
    assert total(following) == 10


@virtual()
async def test_a_start_receives_the_first_states(stage: Stage) -> None:
    """Whether or not the model has a control that shows the start."""
    for flags, state in (("S", 0), ("", 1), ("S", 0)):
        stage.submit(1, 1, flags)
        assert stage.queue[0].inputs[-1].tolist() == [[state]]
        await stage.answer()


@virtual()
async def test_a_request_that_cannot_run_for_lack_of_memory_leaves_no_sequence(stage: Stage) -> None:
    usual = stage.runs.strategy

    def find_no_memory(request: InflightRequest, terms: Terms) -> None:
        raise MemoryError

    stage.runs.strategy = OldestRuns(stage.runs, find_no_memory)
    first = stage.submit(1, flags="S")
    await asyncio.sleep(0)
    with pytest.raises(MemoryError):
        first.take_outputs()
    assert len(stage.table) == 0
    stage.runs.strategy = usual
    again = stage.submit(1, 5, flags="S")
    await stage.answer()
    stage.runs.strategy = OldestRuns(stage.runs, find_no_memory)
    stage.submit(1, 7)
    await asyncio.sleep(0)
    stage.runs.strategy = usual
    third = stage.submit(1, 9)
    await stage.answer()
    assert (total(again), total(third)) == (5, 14)


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("by_ensemble", [True, False])
def test_a_rejection_ends_a_sequence_whose_client_has_sent_ahead(is_ahead: bool, by_ensemble: bool) -> None:
    """Its next request may be in transit, and would run without the rejected one."""

    @virtual()
    async def run(stage: Stage) -> None:
        stage.submit(1, 5, "S")
        if is_ahead and not by_ensemble:
            stage.submit(1, 1)
        await stage.answer()
        if by_ensemble:
            stage.submit(1, 1, "A" * is_ahead)
        if is_ahead or by_ensemble:
            await stage.answer()
        assert stage.runs.is_pipelined(1) is is_ahead
        stage.rejects = ServeError(ErrorKind.OVERLOADED, "full")
        rejected = stage.submit(1, 1)
        await asyncio.sleep(0)
        stage.rejects = None
        assert error(rejected).message == "full"
        if is_ahead:
            with pytest.raises(ServeError, match="must specify the START flag"):
                stage.submit(1, 2)
            assert len(stage.table) == 0
        else:
            stage.submit(1, 2)

    run()


@virtual()
async def test_many_failing_requests_do_not_nest(stage: Stage) -> None:
    stage.submit(1, 5, "S")
    waiting = [stage.submit(1) for _ in range(900)]
    stage.rejects = ServeError(ErrorKind.INVALID_INPUT, "no")
    finish(stage.take())
    for _ in range(2000):
        await asyncio.sleep(0)
    assert {error(request).message for request in waiting} == {"no"}


@virtual()
async def test_cancelling_a_queued_request_ends_the_sequence(stage: Stage) -> None:
    for is_running in (False, True):
        first = stage.submit(1, 5, "S")
        second, third = stage.submit(1, 1), stage.submit(1, 2)
        if is_running:
            run = stage.take()
            second.cancel()
            assert error(third).kind is ErrorKind.CANCELLED
            with pytest.raises(ServeError, match="must specify the START flag"):
                stage.submit(1, 1)
            finish(run)
            assert total(first) == 5
        else:
            first.cancel()
            assert error(second).kind is error(third).kind is ErrorKind.CANCELLED
            assert not stage.queue
        assert len(stage.table) == 0
    assert stage.runs.reading().ended["cancelled"] == 2


@virtual(limits=SequenceLimits(1, 10_000, 100_000, 1 << 30))
async def test_each_request_of_a_long_queue_can_be_cancelled_in_a_short_time(stage: Stage) -> None:
    stage.submit(1, 5, "S")
    starts = [stage.submit(1, 1, "S") for _ in range(20_000)]
    last = stage.submit(1, 2, "S")
    began_s = time.thread_time()
    for request in [*starts[:10_000], *reversed(starts[10_000:])]:
        request.cancel()
    assert time.thread_time() - began_s < 1.0  # 4 s if each moves the whole queue
    assert stage.runs.waiting_rows == 1
    await stage.answer()
    await stage.answer()
    assert total(last) == 2


@virtual()
async def test_a_sequence_ends_behind_earlier_requests_if_a_later_one_is_cancelled(stage: Stage) -> None:
    requests = [stage.submit(1, value, flags) for value, flags in ((1, "S"), (2, ""), (4, ""))]
    requests[2].cancel()
    with pytest.raises(ServeError, match="START flag"):
        stage.submit(1)
    await stage.answer()
    await stage.answer()
    assert total(requests[1]) == 3
    assert len(stage.table) == 0


@virtual()
async def test_cancelling_the_running_request_advances_the_state(stage: Stage) -> None:
    first = stage.submit(1, 5, "S")
    second = stage.submit(1, 1)
    run = stage.take()
    first.cancel()
    finish(run)
    await stage.answer()
    assert first.state == CANCELLED
    assert total(second) == 6


@pytest.mark.parametrize("strategy", ["oldest", "direct"])
def test_a_sequence_ends_if_a_cancelled_run_fails(strategy: str) -> None:
    @virtual(strategy=strategy)
    async def test(stage: Stage) -> None:
        stage.submit(1, 5, "S")
        await stage.answer()
        second, third, fourth = stage.submit(1, 1), stage.submit(1, 2), stage.submit(1, 3, "S")
        await asyncio.sleep(0)
        run = stage.take()
        second.cancel()
        run.fail(ServeError(ErrorKind.REJECTED_BY_MODEL, "no"))
        assert "must specify the START flag" in error(third).message, "the client does not know that the second failed"
        await stage.answer()
        assert total(fourth) == 3

    test()


@virtual(slots=1)
async def test_a_request_that_fails_after_its_run_ends_no_sequence_that_began_since(stage: Stage) -> None:
    first = stage.submit(1, 1, "S")
    await stage.answer()
    computed_ns = stage.clock()
    await asyncio.sleep(0.001)
    again, behind = stage.submit(1, 10, "S"), stage.submit(1, 20)
    stage.runs.end(1, computed_ns)
    await stage.answer()
    await stage.answer()
    assert [total(request) for request in (first, again, behind)] == [1, 10, 30]
    for _ in range(2):  # the second time, the sequence has ended
        stage.runs.end(1, stage.clock())
        with pytest.raises(ServeError, match="START flag"):
            stage.submit(1)


@virtual(slots=1)
async def test_a_request_that_fails_after_its_run_ends_its_sequence_before_the_next_start(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    await stage.answer()
    other = stage.submit(1, 2)
    behind, again = stage.submit(1, 4), stage.submit(1, 10, "S")
    stage.runs.end(1, stage.clock())
    assert error(behind).message == START_TEXT
    await stage.answer()
    await stage.answer()
    assert [total(request) for request in (other, again)] == [3, 10]


@virtual()
async def test_the_id_is_free_as_soon_as_the_end_is_enqueued(stage: Stage) -> None:
    old = stage.submit(1, 5, "SE")
    new = stage.submit(1, 8, "S")
    assert len(stage.queue) == 2
    await stage.answer()
    await stage.answer()
    assert (total(old), total(new)) == (5, 8)


@virtual()
async def test_idle_sequences_expire_and_busy_ones_do_not(stage: Stage) -> None:
    stage.submit(1, 5, "S")
    slow = stage.submit(2, 5, "S")
    await stage.answer()
    await asyncio.sleep(0.49)
    assert len(stage.table) == 2
    await asyncio.sleep(0.02)
    assert len(stage.table) == 1
    assert stage.runs.reading().ended["expired"] == 1
    with pytest.raises(ServeError, match="must specify the START flag"):
        stage.submit(1)
    await asyncio.sleep(10)  # its run takes long
    await stage.answer()
    assert total(slow) == 5
    following = stage.submit(2, 1)
    await stage.answer()
    assert total(following) == 6


@virtual()
async def test_a_kept_sequence_does_not_keep_others_from_expiring(stage: Stage) -> None:
    kept = stage.runs.kept
    kept.keep(1, (kept,))
    for name in (1, 2):
        stage.submit(name, 1, "S")
        await stage.answer()
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.32)  # the first one is idle for 0.72 s, the second one for 0.52 s
    assert [stage.table.find(name) is None for name in (1, 2)] == [False, True]
    kept.release(1, (kept,))
    await asyncio.sleep(0.49)
    assert len(stage.table) == 1
    await asyncio.sleep(0.02)
    assert len(stage.table) == 0


@virtual(slots=1)
async def test_a_sequence_expires_although_its_timer_is_late(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    await stage.answer()
    stage.clock.advance(IDLE_NS)  # a turn of the loop takes long
    with pytest.raises(ServeError, match="must specify the START flag"):
        stage.submit(1)
    stage.submit(1, 2, "S")
    await stage.answer()
    stage.clock.advance(IDLE_NS)
    again = stage.submit(1, 4, "S")
    await stage.answer()
    assert total(again) == 4
    assert (len(stage.table), stage.runs.reading().ended["expired"]) == (1, 2)


@virtual(slots=1)
async def test_a_sequence_waits_for_a_slot_and_does_not_expire_there(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    await stage.answer()
    waiting = stage.submit(2, 5, "S")
    later = stage.submit(2, 6)
    assert not stage.queue
    await asyncio.sleep(0.4)
    stage.submit(1, 1)
    await stage.answer()
    await asyncio.sleep(0.6)  # sequence 1 expires
    await stage.answer()
    await stage.answer()
    assert (total(waiting), total(later)) == (5, 11)


@virtual(slots=1)
async def test_a_request_that_arrives_when_its_sequence_receives_a_slot_runs_behind_earlier_ones(stage: Stage) -> None:
    last, waiting = stage.submit(1, 1, "SE"), stage.submit(2, 5, "S")
    following: list[InflightRequest] = []
    last.on_settled = lambda _: following.append(stage.submit(2, 6))
    await stage.answer()
    for _ in range(2):
        await stage.answer()
    assert (total(waiting), total(following[0])) == (5, 11)


@virtual(slots=1)
async def test_the_shortest_timeout_ends_a_waiting_sequence(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    first, second, _ = (
        stage.submit(2, 5, flags, Terms(0, None, stage.clock() + timeout_ms * MS))
        for flags, timeout_ms in (("S", 300), ("", 200), ("", 400))
    )
    other = stage.submit(3, 5, "S")
    await asyncio.sleep(0.19)
    assert not second.is_settled
    await asyncio.sleep(0.02)
    text = "timeout of the corresponding sequence has been expired"
    assert error(first).message == error(second).message == text
    with pytest.raises(ServeError, match="START"):
        stage.submit(2)
    stage.submit(1, 1, "E")
    await stage.answer()
    await stage.answer()
    await stage.answer()
    assert total(other) == 5


@virtual(slots=1)
async def test_the_timeout_of_a_cancelled_request_ends_no_waiting_sequence(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    first, second = (
        stage.submit(2, 5, flags, Terms(0, None, stage.clock() + timeout_ms * MS))
        for flags, timeout_ms in (("S", 300), ("", 100))
    )
    second.cancel()
    await asyncio.sleep(0.29)
    assert not first.is_settled
    await asyncio.sleep(0.02)
    assert "has been expired" in error(first).message


@virtual(slots=1)
async def test_a_waiting_sequence_that_is_cancelled_leaves(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    terms = Terms(0, None, stage.clock() + 100 * MS)
    waiting, behind = stage.submit(2, 1, "S", terms), stage.submit(2, 1)
    waiting.cancel()
    assert error(behind).kind is ErrorKind.CANCELLED
    assert len(stage.table) == 1
    assert stage.runs.waiting_rows == 0
    await asyncio.sleep(0.2)
    assert sum(stage.runs.reading().ended.values()) == 1


@virtual(slots=1)
async def test_timeouts_end_with_the_wait_for_a_slot(stage: Stage) -> None:
    stage.submit(1, 1, "SE")
    terms = Terms(0, None, stage.clock() + 100 * MS)
    waiting = stage.submit(2, 2, "S", terms)
    await stage.answer()
    await asyncio.sleep(0)
    behind = stage.submit(2, 4, "", terms)
    assert len(stage.queue) == 1
    await asyncio.sleep(0.2)  # the sequence has a slot
    await stage.answer()
    await stage.answer()
    assert (total(waiting), total(behind)) == (2, 6)


@virtual(limits=SequenceLimits(2, 10_000, 3, 1_000_000))
async def test_sequences_and_waiting_requests_are_bounded(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    stage.submit(2, 1, "S")
    with pytest.raises(ServeError, match="max_sequences"):
        stage.submit(3, 1, "S")
    waiting = [stage.submit(1) for _ in range(3)]
    with pytest.raises(ServeError, match=r"max_queue_rows .* sequence 2 ends with its earlier") as caught:
        stage.submit(2)
    assert caught.value.kind is ErrorKind.OVERLOADED
    with pytest.raises(ServeError, match="START flag"):
        stage.submit(2)
    for _ in range(5):
        await stage.answer()
    assert total(waiting[-1]) == 4
    assert len(stage.table) == 1


@virtual(limits=SequenceLimits(9, 10_000, 100, 24))
async def test_the_bytes_of_waiting_requests_are_bounded(stage: Stage) -> None:
    """Each has 8 bytes."""
    requests = [stage.submit(1, 1, "S"), *[stage.submit(1) for _ in range(3)]]
    with pytest.raises(ServeError, match="3 requests with 24 bytes wait for their sequences"):
        stage.submit(1)
    for _ in requests:
        await stage.answer()
    assert total(requests[-1]) == 4


@virtual(slots=1, limits=SequenceLimits(9, 10_000, 1, 1_000_000))
async def test_a_start_that_may_not_wait_begins_nothing(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    stage.submit(2, 1, "S")
    with pytest.raises(ServeError, match="max_queue_rows"):
        stage.submit(3, 1, "S")
    assert (len(stage.table), stage.runs.waiting_rows) == (2, 1)
    assert stage.runs.reading().ended["failed"] == 1


@virtual(limits=SequenceLimits(9, 20, 9, 1_000_000))
async def test_states_are_bounded_at_the_start(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    stage.submit(2, 1, "S")
    with pytest.raises(ServeError, match="max_state_bytes") as caught:
        stage.submit(3, 1, "S")
    assert caught.value.kind is ErrorKind.OVERLOADED


@virtual(limits=SequenceLimits(9, 100, 9, 1_000_000))
async def test_a_state_that_grows_beyond_the_bound_ends_its_own_sequence(stage: Stage) -> None:
    other = stage.submit(2, 3, "S")
    await stage.answer()
    large = stage.submit(1, 1, "S")
    behind = stage.submit(1, 1)
    stage.take().complete((one(1), np.zeros((1, 100))))
    assert total(large) == 1
    assert error(behind).message == START_TEXT
    assert total(other) == 3
    assert stage.runs.reading().ended["evicted"] == 1
    assert stage.runs.reading().state_bytes == 8


@virtual()
async def test_a_drain_refuses_new_sequences_until_the_others_have_ended(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    await stage.answer()
    stage.runs.begin_drain()
    with pytest.raises(ServeError, match="Server is stopping") as caught:
        stage.submit(2, 1, "S")
    assert caught.value.kind is ErrorKind.NOT_READY
    waiting = asyncio.create_task(stage.runs.wait_until_empty())
    last = stage.submit(1, 1, "E")
    await asyncio.sleep(0)
    assert not waiting.done()
    await stage.answer()
    await waiting
    assert total(last) == 2


@virtual(slots=1)
async def test_closing_runs_what_waits(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    behind = stage.submit(1, 2)
    waiting = stage.submit(2, 5, "S")
    arrived_ns = stage.clock()
    closing = asyncio.create_task(stage.runs.close())
    for _ in range(3):
        await asyncio.sleep(0.01)
        await stage.answer()
    await closing
    assert (total(behind), total(waiting)) == (3, 5)
    assert waiting.timing.queued_ns == arrived_ns, "the wait for its turn counts"
    assert stage.runs.reading().ended["unloaded"] == 2


@virtual(slots=4, strategy="direct")
async def test_direct_keeps_each_sequence_in_its_row(stage: Stage) -> None:
    firsts = [stage.submit(name, name, "S") for name in (1, 2, 3, 4)]
    await stage.answer()
    assert [total(request) for request in firsts] == [1, 2, 3, 4]
    last = stage.submit(4, 10)
    await asyncio.sleep(0)
    run = stage.take()
    assert run.inputs[2].ravel().tolist() == [0, 0, 0, 1]  # READY
    assert run.inputs[0].ravel().tolist() == [0, 0, 0, 10]
    assert run.inputs[4].ravel().tolist() == [0, 0, 0, 4]
    finish(run)
    second = stage.submit(2, 10)
    await stage.answer()
    assert (total(last), total(second)) == (14, 12)


@virtual(slots=4, strategy="direct")
async def test_direct_runs_a_failed_batch_again_row_by_row(stage: Stage) -> None:
    requests = [stage.submit(name, name, "S") for name in (1, 2, 3)]
    await asyncio.sleep(0)
    stage.take().fail(ServeError(ErrorKind.INTERNAL, "together"))
    requests.append(stage.submit(4, 4, "S"))
    await asyncio.sleep(0)
    assert len(stage.queue) == 1, "one run of a group at a time"
    await stage.answer()
    await asyncio.sleep(0)
    stage.take().fail(ServeError(ErrorKind.INTERNAL, "alone"))
    await stage.answer()
    await stage.answer()
    assert [total(requests[index]) for index in (0, 2, 3)] == [1, 3, 4]
    assert error(requests[1]).message == "alone"


@virtual(slots=4, strategy="direct", groups=2)
async def test_direct_spreads_sequences_over_groups(stage: Stage) -> None:
    for name in (1, 2, 3):
        stage.submit(name, name, "S")
    await asyncio.sleep(0)
    assert [run.inputs[0].ravel().tolist() for run in stage.queue] == [[1, 3], [2]]
    assert len(set(stage.shape_classes)) == 2, "so that they do not run together"


@virtual(slots=4, strategy="direct", delay_ns=400 * MS, min_utilization=0.5)
async def test_direct_waits_for_a_share_of_the_slots(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    await asyncio.sleep(0.39)
    assert not stage.queue
    await asyncio.sleep(0.02)
    await stage.answer()
    stage.submit(1, 1)
    stage.submit(2, 1, "S")
    await asyncio.sleep(0)
    assert stage.queue[0].rows == 2


@pytest.mark.parametrize(
    ("slots", "share", "least"), [(10, np.float32(0.3), 3), (5, np.float32(0.8), 4), (100, 0.07, 7), (3, 0.34, 2)]
)
def test_direct_starts_with_the_configured_share_of_its_slots(slots: int, share: float, least: int) -> None:
    @virtual(slots=slots, strategy="direct", delay_ns=100 * MS, min_utilization=float(share))
    async def run(stage: Stage) -> None:
        for name in range(1, least + 1):
            assert not stage.queue
            stage.submit(name, 1, "S")
            await asyncio.sleep(0.001)
        assert len(stage.queue) == 1

    run()


@virtual(slots=4, strategy="direct")
async def test_requests_that_wait_in_their_slots_count_as_waiting(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    await asyncio.sleep(0)
    run = stage.take()
    assert stage.runs.waiting_rows == 0
    second, _, _ = stage.submit(2, 1, "S"), stage.submit(3, 1, "S"), stage.submit(1, 1)
    assert stage.runs.waiting_rows == 3
    second.cancel()
    finish(run)
    await stage.answer()
    assert stage.runs.waiting_rows == 0


@virtual(slots=4, strategy="direct")
async def test_direct_takes_a_cancelled_request_out_of_its_slot(stage: Stage) -> None:
    first, second = stage.submit(1, 1, "S"), stage.submit(2, 2, "S")
    first.cancel()
    await stage.answer()
    assert total(second) == 2
    assert len(stage.table) == 1
    running = stage.submit(2, 5)
    await asyncio.sleep(0)
    run = stage.take()
    running.cancel()
    finish(run)
    following = stage.submit(2, 1)
    await stage.answer()
    assert total(following) == 8


@pytest.mark.parametrize("strategy", ["oldest", "direct"])
def test_an_output_that_is_no_next_state_fails_its_request_only(strategy: str) -> None:
    """A state without exactly one row would shift the states of other sequences in the next batch."""

    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        stage = Stage(loop, clock, strategy=strategy)
        stage.submit(1, 5, "S")
        stage.submit(2, 7, "S")
        await asyncio.sleep(0)
        while stage.queue:
            await stage.answer()
        wrong = stage.submit(1, 1)
        await asyncio.sleep(0)
        stage.take().complete((one(6), np.array([[1], [2]])))
        text = "output 'NEXT' cannot be the next state: input 'STATE' expects [1,-1], got [2,1]"
        assert (error(wrong).kind, error(wrong).message) == (ErrorKind.INTERNAL, text)
        following = stage.submit(1, 2)
        await stage.answer()
        assert total(following) == 7

    run_virtual(main)


@virtual(slots=4, strategy="direct", delay_ns=10_000 * MS, min_utilization=1)
async def test_direct_delays_no_batch_while_it_closes(stage: Stage) -> None:
    request, behind = stage.submit(1, 1, "S"), stage.submit(1, 2)
    began_ns = stage.clock()
    closing = asyncio.create_task(stage.runs.close())
    for _ in range(2):
        await asyncio.sleep(0.01)
        await stage.answer()
    await closing
    assert (total(request), total(behind)) == (1, 3)
    assert stage.clock() - began_ns < 100 * MS


@virtual(slots=4, strategy="direct")
async def test_direct_fails_requests_if_the_rows_of_outputs_cannot_be_told_apart(stage: Stage) -> None:
    requests = [stage.submit(name, name, "S") for name in (1, 2)]
    await asyncio.sleep(0)
    for _ in range(3):  # together, then each alone
        run = stage.take()
        run.complete((np.zeros((run.rows + 1, 1)), np.zeros((run.rows + 1, 1))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not stage.queue:
            break
    assert all(error(request).kind is ErrorKind.INTERNAL for request in requests)


@virtual(slots=4, strategy="direct")
async def test_direct_answers_requests_whose_batch_cannot_be_formed(stage: Stage) -> None:
    requests = [InflightRequest(Timing(0), (row,), 1) for row in (one(1), one(1)[np.newaxis])]
    for name, request in enumerate(requests, 1):
        stage.runs.submit(request, NO_TERMS, SequencePart(name, True, False))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert all(request.is_settled for request in requests)
    later = stage.submit(3, 4, "S")
    await stage.answer()
    assert total(later) == 4
    misfit = InflightRequest(Timing(0), (one(1)[np.newaxis],), 1)
    beside = stage.submit(4, 1, "S")
    stage.runs.submit(misfit, NO_TERMS, SequencePart(3, False, False))
    following = [stage.submit(3, value) for value in (10, 20)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert misfit.is_settled
    assert beside.is_settled
    assert not any(request.is_settled for request in following)
    for _ in following:
        await stage.answer()
        assert len(stage.queue) <= 1
    assert [total(request) for request in following] == [14, 34]


@virtual(slots=4, strategy="direct")
async def test_direct_runs_no_request_whose_deadline_has_passed(stage: Stage) -> None:
    stage.submit(1, 1, "S")
    stage.submit(2, 2, "S")
    await stage.answer()
    stage.submit(1, 1)
    await asyncio.sleep(0)
    run = stage.take()
    late, behind = stage.submit(2, 4, "", Terms(0, stage.clock() + 100 * MS)), stage.submit(2, 8)
    await asyncio.sleep(0.2)
    finish(run)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (error(late).kind, error(behind).kind) == (ErrorKind.DEADLINE, ErrorKind.INVALID_INPUT)
    other = stage.submit(1, 1)
    await stage.answer()
    assert total(other) == 3


@virtual(slots=4, strategy="direct")
async def test_direct_batches_have_the_latest_deadline_of_their_requests(stage: Stage) -> None:
    for name, by_ns in ((1, 10 * MS), (2, 30 * MS), (3, 20 * MS)):
        stage.submit(name, name, "S", Terms(0, stage.clock() + by_ns))
    latest_ns = stage.clock() + 30 * MS
    await stage.answer()
    stage.submit(1, 1, "", Terms(0, stage.clock() + 10 * MS))
    stage.submit(2, 1)
    await stage.answer()
    assert [terms.answer_by_ns for terms in stage.terms] == [latest_ns, None]


@virtual(slots=4, strategy="direct")
async def test_direct_does_not_run_requests_again_after_a_run_over_its_limit(stage: Stage) -> None:
    requests = [stage.submit(name, name, "S") for name in (1, 2)]
    await stage.answer()
    late = [stage.submit(name, 10) for name in (1, 2)]
    await asyncio.sleep(0)
    stage.take().fail(RunTimeoutError("too long"))
    assert [(error(request).kind, error(request).message) for request in late] == [(ErrorKind.DEADLINE, "too long")] * 2
    following = stage.submit(2, 100)
    await stage.answer()
    assert (total(requests[1]), total(following)) == (2, 102)


def test_direct_runs_a_request_alone_if_its_shape_class_says_so() -> None:
    """Padding rows beside it would be other rows, too, and a trial of the first row would try one of these."""

    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        keys: dict[int, Hashable] = {7: Alone(), 8: Alone()}
        stage = Stage(
            loop, clock, 4, strategy="direct", shape_class=lambda inputs: keys.get(int(inputs[0][0, 0]), "shared")
        )
        requests = [stage.submit(name, value, "S") for name, value in ((1, 1), (2, 7), (3, 8), (4, 2))]
        for _ in range(3):
            await stage.answer()
        assert [total(request) for request in requests] == [1, 7, 8, 2]
        assert stage.shape_classes == [(0, "shared"), keys[7], keys[8]]

    run_virtual(main)


def test_the_oldest_request_decides_the_shape_of_a_batch() -> None:
    ready = {0: Waiting("b", 5), 1: Waiting("a", 3), 3: Waiting("a", 9)}
    assert choose_slots(ready, 1, 0, 10) == ([1, 3], None)
    assert choose_slots(ready, 4, 100, 10) == ([], 103)
    assert choose_slots(ready, 4, 100, 103) == ([1, 3], None)
    assert choose_slots(ready, 3, 100, 10) == ([1, 3], None)


def test_slots_are_given_lowest_first_and_to_the_first_that_waits() -> None:
    table = SequenceTable(3, IDLE_NS)
    made = [Sequence(name, None, (), 0) for name in range(1, 6)]
    for sequence in made:
        table.add(sequence)
    assert [sequence.slot for sequence in made] == [0, 1, 2, -1, -1]
    table.close(made[1])
    assert table.remove(made[1]) is made[3]
    assert made[3].slot == 1
    table.close(made[4])
    assert table.remove(made[4]) is None
    for sequence in (made[2], made[0]):
        table.close(sequence)
        table.remove(sequence)
    again = Sequence(9, None, (), 0)
    table.add(again)
    assert again.slot == 0


MANY = 5000


@virtual(slots=MANY, limits=SequenceLimits(MANY, MANY * 1000, MANY, MANY * 1000))
async def test_many_sequences_end_in_several_turns_of_the_loop(stage: Stage) -> None:
    for ends_by_close in (False, True):
        for name in range(1, MANY + 1):
            stage.submit(name, 1, "S")
            finish(stage.take())
        if ends_by_close:
            ending = asyncio.create_task(stage.runs.close())
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(IDLE_NS / 1e9 + 0.0012)
        assert MANY - 1000 <= len(stage.table) < MANY
        await asyncio.sleep(0.1)
        assert len(stage.table) == 0
    await ending


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4), st.sampled_from(["", "", "", "S", "S", "E", "SE"])),
        st.tuples(st.sampled_from(["begin", "begin", "finish", "finish", "fail"]), st.integers(0, 7), st.just("")),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just("")),
        st.tuples(st.just("deadline"), st.integers(1, 4), st.sampled_from(["", "", "S", "E"])),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, 1, 300]), st.just("")),
    ),
    min_size=5,
    max_size=80,
)


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(STEPS, st.sampled_from(["oldest", "direct"]), st.integers(1, 3), st.integers(1, 2))
def test_no_state_ever_reaches_another_sequence(steps: list[Any], strategy: str, slots: int, groups: int) -> None:
    """Every value is a different power of two, so that an output shows the requests that it sums."""

    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        stage = Stage(loop, clock, slots, strategy=strategy, groups=groups)
        sent: list[tuple[int, str, int, InflightRequest]] = []
        outputs: dict[int, int] = {}
        ran: list[int] = []
        running: list[InflightRequest] = []

        def settle(run: InflightRequest, fails: bool) -> None:
            if fails:
                run.fail(ServeError(ErrorKind.INTERNAL, "no"))
                return
            is_real = run.inputs[2].ravel().astype(bool)
            assert not run.inputs[0].ravel()[~is_real].any(), "padding is zero"
            ran.extend(int(value) for value in run.inputs[0].ravel()[is_real])
            finish(run)

        for kind, number, flags in steps:
            if kind in ("submit", "deadline") and len(sent) < 60:
                value = 1 << len(sent)
                terms = NO_TERMS if kind == "submit" else Terms(0, stage.clock() + 2 * MS)
                if "S" not in flags and stage.table.find(number) is None:
                    with pytest.raises(ServeError, match="START flag"):
                        stage.submit(number, value, flags)
                    continue
                request = stage.submit(number, value, flags, terms)
                request.on_settled = lambda request, value=value: outputs.update(
                    {value: total(request)} if request.state == COMPUTED else {}
                )
                sent.append((number, flags, value, request))
            elif kind == "begin" and stage.queue:
                running.append(stage.take())
            elif kind in ("finish", "fail") and running:
                settle(running.pop(number % len(running)), kind == "fail")
            elif kind == "cancel" and sent:
                sent[number % len(sent)][3].cancel()
            elif kind == "wait":
                await asyncio.sleep(number / 1000)
        closing = asyncio.create_task(stage.runs.close())
        while not closing.done():
            await asyncio.sleep(0)
            while running:
                settle(running.pop(), False)
            while stage.queue:
                settle(stage.take(), False)
        states: dict[int, int] = {}
        for name, flags, value, request in sent:
            assert request.is_settled
            if "S" in flags and value not in outputs and request.state != CANCELLED:
                assert error(request).kind in (ErrorKind.INTERNAL, ErrorKind.DEADLINE)
            if value in ran:
                states[name] = value + (0 if "S" in flags else states[name])
                assert outputs.get(value, states[name]) == states[name]
            else:
                assert value not in outputs
        reading = stage.runs.reading()
        assert (reading.active, reading.waiting, reading.state_bytes, stage.runs.waiting_rows) == (0, 0, 0, 0)
        assert len(ran) == len(set(ran)), "no request runs twice"

    run_virtual(main)
