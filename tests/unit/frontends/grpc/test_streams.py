"""Open streams: their limit, and the end of waiting work at a drain."""

import asyncio

import pytest

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.streams import Streams


async def seven() -> int:
    return 7


def test_stream_past_the_limit_is_overloaded_until_another_ends() -> None:
    streams = Streams(2)
    with streams.open():
        with streams.open():
            assert streams.open_count == 2
            problem = "grpc_max_streams: expected at most 2 open streams, got one more"
            with pytest.raises(ServeError, match=problem) as caught:
                streams.open().__enter__()
            assert caught.value.kind is ErrorKind.OVERLOADED
            assert caught.value.retry_after_s is not None
        with streams.open():
            pass
    assert streams.open_count == 0


async def test_result_of_the_work_is_returned() -> None:
    assert await Streams(1).until_drain(seven()) == 7


async def test_work_that_fails_raises_its_error() -> None:
    async def fail() -> None:
        raise ServeError(ErrorKind.INVALID_INPUT, "no")

    with pytest.raises(ServeError, match="no"):
        await Streams(1).until_drain(fail())


async def test_drain_cancels_waiting_and_later_work() -> None:
    streams = Streams(1)
    waiting = asyncio.create_task(streams.until_drain(asyncio.Event().wait()))
    await asyncio.sleep(0)
    streams.begin_drain()
    for work in (waiting, streams.until_drain(asyncio.Event().wait())):
        with pytest.raises(ServeError, match="the server is shutting down") as caught:
            await work
        assert caught.value.kind is ErrorKind.NOT_READY


async def test_cancelled_work_does_not_count_as_a_drain() -> None:
    async def notice() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await Streams(1).until_drain(notice())


async def test_cancelled_stream_cancels_its_work() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    stream = asyncio.create_task(Streams(1).until_drain(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    await asyncio.wait_for(cancelled.wait(), 60)
