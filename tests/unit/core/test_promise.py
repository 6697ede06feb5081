"""Outputs that will be there: as a future, but that callbacks are called by whoever settles it."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from ortserve.core.batch import Arrays
from ortserve.core.promise import Outputs, Promise
from ortserve.errors import ErrorKind, ServeError

OUTPUTS: Arrays = (np.arange(3),)
ERROR = ServeError(ErrorKind.INTERNAL, "the run failed")

SETTLED: dict[str, Callable[[Outputs], object]] = {
    "outputs": lambda promise: promise.set_result(OUTPUTS),
    "error": lambda promise: promise.set_exception(ERROR),
    "cancelled": lambda promise: promise.cancel(),
}


def outcome(promise: Outputs) -> object:
    """Outputs, or what is raised in their place."""
    try:
        return promise.result()
    except ServeError as error:
        return error
    except asyncio.CancelledError:
        return "cancelled"


@pytest.mark.parametrize("settle", SETTLED.values(), ids=SETTLED)
def test_callbacks_are_called_in_order_before_the_settling_returns_and_no_loop_is_needed(
    settle: Callable[[Outputs], object],
) -> None:
    promise, called = Promise(), list[object]()
    promise.add_done_callback(lambda given: called.append((1, given, outcome(given))))
    promise.add_done_callback(lambda given: called.append((2, given, outcome(given))))
    settle(promise)
    assert called == [(1, promise, outcome(promise)), (2, promise, outcome(promise))]
    promise.add_done_callback(lambda _: called.append(3))
    assert called[2:] == [3]


@pytest.mark.parametrize("settle", SETTLED.values(), ids=SETTLED)
def test_it_tells_the_same_as_a_future_of_asyncios(settle: Callable[[Outputs], object]) -> None:
    async def main() -> None:
        told = []
        for one in (Promise(), asyncio.get_running_loop().create_future()):
            assert (one.done(), one.cancelled()) == (False, False)
            for ask in (one.result, one.exception):
                with pytest.raises(asyncio.InvalidStateError):
                    ask()
            settle(one)
            error = None if one.cancelled() else one.exception()
            told.append((one.done(), one.cancelled(), one.cancel(), outcome(one), error))
            if one.cancelled():
                with pytest.raises(asyncio.CancelledError):
                    one.exception()
        assert told[0] == told[1]

    asyncio.run(main())


@pytest.mark.parametrize("is_settled_before", [True, False])
def test_tasks_wait_for_it(is_settled_before: bool) -> None:
    async def main() -> None:
        good, bad = Promise(), Promise()

        def settle() -> None:
            good.set_result(OUTPUTS)
            bad.set_exception(ERROR)

        async def wait(promise: Promise) -> Arrays:
            return await promise

        if is_settled_before:
            settle()
        tasks = [asyncio.create_task(wait(promise)) for promise in (good, good, bad)]
        await asyncio.sleep(0)
        if not is_settled_before:
            settle()
        assert await tasks[0] is await tasks[1] is OUTPUTS
        with pytest.raises(ServeError) as caught:
            await tasks[2]
        assert caught.value is ERROR

    asyncio.run(main())


def test_it_is_cancelled_with_a_task_that_waits_for_it() -> None:
    async def main() -> None:
        promise, called = Promise(), list[bool]()
        promise.add_done_callback(lambda given: called.append(given.cancelled()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(promise, 0.001)
        assert promise.cancelled()
        assert called == [True]
        with pytest.raises(asyncio.CancelledError):
            promise.result()

    asyncio.run(main())


def test_task_that_left_is_not_woken() -> None:
    async def main() -> None:
        promise = Promise()

        async def wait() -> Arrays:
            return await promise

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        promise.set_result(OUTPUTS)  # before the task knows that it is cancelled
        with pytest.raises(asyncio.CancelledError):
            await task
        assert promise.result() is OUTPUTS

    asyncio.run(main())


def test_callback_that_fails_harms_neither_the_next_nor_who_settles(caplog: pytest.LogCaptureFixture) -> None:
    promise, called = Promise(), list[Promise]()
    promise.add_done_callback(lambda _: 1 / 0)
    promise.add_done_callback(called.append)
    promise.set_result(OUTPUTS)
    assert called == [promise]
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_error_of_many_keeps_nothing_of_who_asked() -> None:
    promises = [Promise() for _ in range(3)]
    for promise in promises:
        promise.set_exception(ERROR)
    depths = []
    for promise in promises * 2:
        with pytest.raises(ServeError) as caught:
            promise.result()
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1
