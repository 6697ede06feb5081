"""An in-flight request: settled once, by callbacks that are called before the settling returns."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from ortserve.core.batch import Arrays
from ortserve.core.inflight import CANCELLED, COMPUTED, DONE, FAILED, QUEUED, RECEIVED, InflightRequest, fail_in_turns
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError

OUTPUTS: Arrays = (np.arange(3),)
ERROR = ServeError(ErrorKind.INTERNAL, "the run failed")

SETTLED: dict[int, Callable[[InflightRequest], bool]] = {
    COMPUTED: lambda request: request.complete(OUTPUTS),
    FAILED: lambda request: request.fail(ERROR),
    CANCELLED: lambda request: request.cancel(),
}


def inflight() -> InflightRequest:
    return InflightRequest(Timing(0))


def outcome(request: InflightRequest) -> object:
    """The outputs, or the raised error."""
    try:
        return request.take_outputs()
    except ServeError as error:
        return error
    except asyncio.CancelledError:
        return "cancelled"


OUTCOMES = {COMPUTED: OUTPUTS, FAILED: ERROR, CANCELLED: "cancelled"}


@pytest.mark.parametrize("state", SETTLED)
def test_callback_is_called_once_before_the_settling_returns_and_needs_no_loop(state: int) -> None:
    request, seen = inflight(), list[object]()
    request.on_settled = lambda given: seen.append((given, given.state, outcome(given)))
    assert (request.state, request.is_settled) == (RECEIVED, False)
    assert SETTLED[state](request)
    assert seen == [(request, state, OUTCOMES[state])]
    assert request.is_settled
    for settle in (SETTLED[COMPUTED], SETTLED[FAILED]):
        assert not settle(request)
    assert (len(seen), request.state) == (1, state)


def test_outputs_are_taken_once_and_not_before_they_are_there() -> None:
    request = inflight()
    with pytest.raises(asyncio.InvalidStateError):
        request.take_outputs()
    request.complete(OUTPUTS)
    assert request.take_outputs() is OUTPUTS
    with pytest.raises(asyncio.InvalidStateError):
        request.take_outputs()


def test_cancelled_request_is_withdrawn_and_its_outputs_are_dropped() -> None:
    queued, computed, done = inflight(), inflight(), inflight()
    withdrawn: list[InflightRequest] = []
    for request in (queued, computed, done):
        request.state = QUEUED
        request.withdraw = withdrawn.append
    computed.complete(OUTPUTS)
    done.complete(OUTPUTS)
    done.state = DONE
    assert [request.cancel() for request in (queued, computed, done)] == [True, True, False]
    assert withdrawn == [queued]
    assert [outcome(request) for request in (queued, computed, done)] == ["cancelled", "cancelled", OUTPUTS]
    assert not queued.cancel()


@pytest.mark.parametrize("is_settled_before", [True, False])
async def test_tasks_wait_for_it(is_settled_before: bool) -> None:
    good, bad = inflight(), inflight()

    async def wait(request: InflightRequest) -> Arrays:
        return await request

    def settle() -> None:
        good.complete(OUTPUTS)
        bad.fail(ERROR)

    if is_settled_before:
        settle()
    tasks = [asyncio.create_task(wait(request)) for request in (good, bad)]
    await asyncio.sleep(0)
    if not is_settled_before:
        settle()
    assert await tasks[0] is OUTPUTS
    with pytest.raises(ServeError) as caught:
        await tasks[1]
    assert caught.value is ERROR


async def test_it_is_cancelled_with_a_task_that_waits_for_it() -> None:
    request = inflight()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(request, 0.001)
    assert request.state == CANCELLED


async def test_task_that_is_cancelled_at_the_same_time_is_not_woken() -> None:
    request = inflight()

    async def wait() -> Arrays:
        return await request

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    request.complete(OUTPUTS)  # before the task is notified of its cancellation
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_it_is_settled_by_a_task_and_cancels_it() -> None:
    async def give(outputs: Arrays) -> Arrays:
        return outputs

    async def raise_error() -> Arrays:
        raise ERROR

    async def wait_for_ever() -> Arrays:
        await asyncio.Event().wait()
        raise AssertionError

    given, failed, cancelled, ended = (inflight() for _ in range(4))
    given.settle_by(give(OUTPUTS))
    failed.settle_by(raise_error())
    task = cancelled.settle_by(wait_for_ever())
    other = ended.settle_by(wait_for_ever())
    assert await given is OUTPUTS
    with pytest.raises(ServeError, match="the run failed"):
        await failed
    cancelled.cancel()
    other.cancel()
    # The caller did not cancel the request and still waits.
    with pytest.raises(ServeError, match="the request was cancelled"):
        await ended
    assert task.cancelled()


def test_callback_that_raises_is_logged_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    request = inflight()
    request.on_settled = lambda _: 1 / 0
    assert request.complete(OUTPUTS)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_error_of_many_keeps_no_frames_of_those_that_raised_it() -> None:
    depths = []
    for request in [inflight() for _ in range(3)]:
        request.fail(ERROR)
        with pytest.raises(ServeError) as caught:
            request.take_outputs()
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


@pytest.mark.parametrize(
    ("start_by_ns", "finish_by_ns", "expires_ns"),
    [(None, None, None), (5, None, 5), (None, 7, 7), (5, 7, 5), (7, 5, 5)],
)
def test_it_expires_at_the_earlier_of_its_bounds(
    start_by_ns: int | None, finish_by_ns: int | None, expires_ns: int | None
) -> None:
    request = inflight()
    request.start_by_ns, request.finish_by_ns = start_by_ns, finish_by_ns
    assert request.expires_ns == expires_ns


async def test_many_requests_fail_over_several_turns_of_the_loop() -> None:
    requests = [inflight() for _ in range(50)]
    withdrawn: list[InflightRequest] = []
    for request in requests:
        request.withdraw = withdrawn.append
    fail_in_turns(requests, ERROR)
    requests[40].cancel()
    counts = []
    while not all(request.is_settled for request in requests):
        counts.append(sum(request.state == FAILED for request in requests))
        await asyncio.sleep(0)
    assert counts == [16, 32, 47]
    assert requests[40].state == CANCELLED
    assert not withdrawn, "they have left their queue already"
