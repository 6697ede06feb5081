"""The choice of the next group, with a real queue and real evictions."""

import pytest

from fakes.clock import FakeClock
from fakes.inflight import inflight
from fakes.loop import VirtualTimeLoop, run_virtual
from ortserve.batching.groups import RequestGroup
from ortserve.batching.latency import MIN_OBSERVATIONS
from ortserve.batching.planner import AT_COST_OF_OTHERS, BatchPolicy
from ortserve.batching.queue import MAX_CLASSES, RequestQueue
from ortserve.batching.scheduler import Scheduler
from ortserve.batching.statistics import Decisions
from ortserve.core.inflight import CANCELLED, InflightRequest
from ortserve.core.timing import Timing
from ortserve.errors import ServeError

POLICY = BatchPolicy(8)
KNOWN = [(rows, 100.0 + 10 * rows) for rows in (1, 2, 4, 8)]


@pytest.mark.parametrize("does_enqueue", [True, False], ids=["enqueues another", "cancels another"])
def test_callback_of_an_evicted_request_does_not_change_the_batch_that_was_planned(does_enqueue: bool) -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        queue = RequestQueue(KNOWN, KNOWN)
        decisions = Decisions()
        scheduler = Scheduler(queue, decisions, loop, clock, lambda: None)
        shape_class = queue.shape_class(None)
        shape_class.batch_latency.observations = MIN_OBSERVATIONS
        now_ns = clock()

        def enqueue(rows: int, finish_by_ns: int) -> InflightRequest:
            request = inflight((), rows, Timing(0, now_ns - 1000), finish_by_ns=finish_by_ns)
            request.withdraw = scheduler.on_cancelled
            queue.push(shape_class, request, POLICY.max_rows)
            return request

        # Only a small batch is in time for the first request, and it would make all others late.
        tight = enqueue(1, now_ns + 125)
        others = [enqueue(1, now_ns + 299) for _ in range(9)]
        errors: list[BaseException] = []

        def on_settled(request: InflightRequest) -> None:
            with pytest.raises(ServeError) as caught:
                request.take_outputs()
            errors.append(caught.value)
            if does_enqueue:
                enqueue(5, now_ns + 200)
            else:
                others[0].cancel()

        tight.on_settled = on_settled
        group = scheduler.next_group(POLICY, now_ns)
        assert isinstance(group, RequestGroup)
        assert (list(group.requests), group.rows) == (others[:8], 8)
        assert AT_COST_OF_OTHERS in str(errors[0])
        assert decisions.dropped_late == 1

    run_virtual(main)


def test_class_whose_requests_a_callback_cancels_during_the_choice_is_passed_over() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        queue = RequestQueue(KNOWN, KNOWN)
        scheduler = Scheduler(queue, Decisions(), loop, clock, lambda: None)
        now_ns = clock()

        def enqueue(key: str, finish_by_ns: int | None) -> InflightRequest:
            request = inflight((), 1, Timing(0, now_ns - 1000), finish_by_ns=finish_by_ns)
            request.withdraw = scheduler.on_cancelled
            queue.push(queue.shape_class(key), request, POLICY.max_rows)
            return request

        late, cancelled, other = enqueue("a", now_ns - 1), enqueue("b", None), enqueue("c", None)
        late.on_settled = lambda _: cancelled.cancel()
        group = scheduler.next_group(POLICY, now_ns)
        assert isinstance(group, RequestGroup)
        assert list(group.requests) == [other]
        assert not queue.rows

    run_virtual(main)


def test_request_whose_first_row_ran_is_put_back_before_the_queue() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        queue = RequestQueue(KNOWN, KNOWN, tries_one_row=True)
        scheduler = Scheduler(queue, Decisions(), loop, clock, lambda: None)
        shape_class = queue.shape_class("a")
        tried = inflight((), 4, Timing(0, clock()), start_by_ns=clock() + 1000)
        queue.push(shape_class, tried, POLICY.max_rows)
        trial = scheduler.next_group(POLICY, clock())
        assert isinstance(trial, RequestGroup)
        shape_class.accepts_one_row = True
        scheduler.run_again([RequestGroup(shape_class, trial.requests, 4)])
        for number in range(MAX_CLASSES):  # evicts the class
            queue.shape_class(number)
        other = inflight((), 1, Timing(0, clock()))
        queue.push(queue.shape_class("a"), other, POLICY.max_rows)
        whole = scheduler.next_group(POLICY, clock())
        assert isinstance(whole, RequestGroup)
        scheduler.put_back(whole)
        clock.advance(2000)  # its queue timeout passes, which no longer applies
        chosen = [scheduler.next_group(POLICY, clock()) for _ in range(2)]
        assert [list(group.requests) for group in chosen if isinstance(group, RequestGroup)] == [[tried], [other]]
        assert (queue.rows, bool(queue)) == (0, False)

    run_virtual(main)


def test_requests_cancelled_during_the_choice_are_not_put_back() -> None:
    async def main(loop: VirtualTimeLoop, clock: FakeClock) -> None:
        queue = RequestQueue(KNOWN, KNOWN)
        scheduler = Scheduler(queue, Decisions(), loop, clock, lambda: None)
        shape_class = queue.shape_class(None)
        requests = [inflight((), 1, Timing(0, clock())) for _ in range(2)]
        for request in requests:
            queue.push(shape_class, request, POLICY.max_rows)
        group = scheduler.next_group(POLICY, clock())
        assert isinstance(group, RequestGroup)
        requests[0].cancel()
        scheduler.put_back(group)
        assert requests[0].state == CANCELLED
        assert (queue.rows, shape_class.requests) == (1, requests[1:])

    run_virtual(main)
