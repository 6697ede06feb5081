"""Open streams: their limit, the idle one that a new one replaces, and the end of waiting work at a drain."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.streams import OpenStream, Streams

MINUTE_NS = 60_000_000_000


class Port:
    """Streams in virtual time."""

    def __init__(self, max_open: int) -> None:
        self.now_ns = 1
        self.evictions = 0
        self.streams = Streams(max_open, lambda: self.now_ns, self.count)

    def count(self) -> None:
        self.evictions += 1


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(streams: Streams, stack: ExitStack) -> OpenStream:
    return stack.enter_context(streams.open(is_inference=True))


async def waiting(stream: OpenStream) -> asyncio.Task[bool]:
    """Let a stream wait for its caller."""
    task = asyncio.create_task(stream.wait(asyncio.Event().wait()))
    await asyncio.sleep(0)
    return task


async def seven() -> int:
    return 7


@pytest.mark.parametrize("is_inference", [True, False])
def test_stream_past_the_limit_is_overloaded_until_another_ends(is_inference: bool) -> None:
    streams = Port(2).streams
    with streams.open(is_inference=is_inference):
        with streams.open(is_inference=is_inference):
            assert streams.open_count == 2
            problem = "grpc_max_streams: expected at most 2 open streams, got one more"
            with pytest.raises(ServeError, match=problem) as caught:
                streams.open(is_inference=is_inference).__enter__()
            assert caught.value.kind is ErrorKind.OVERLOADED
            assert caught.value.retry_after_s is not None
        with streams.open(is_inference=is_inference):
            pass
    assert streams.open_count == 0


async def test_new_stream_replaces_the_longest_idle_one(stack: ExitStack) -> None:
    port = Port(2)
    streams = [opened(port.streams, stack) for _ in range(2)]
    tasks = [await waiting(stream) for stream in streams]
    opened(port.streams, stack)
    with pytest.raises(ServeError, match="this idle one was closed for a new one") as caught:
        await tasks[0]
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert (tasks[1].done(), port.evictions, port.streams.open_count) == (False, 1, 2)
    tasks[1].cancel()


async def test_stream_with_requests_is_replaced_only_after_a_minute_without_one(stack: ExitStack) -> None:
    port = Port(1)
    stream = opened(port.streams, stack)
    task = await waiting(stream)
    stream.on_request()
    port.now_ns += 2 * MINUTE_NS
    with pytest.raises(ServeError, match="got one more"):
        opened(port.streams, stack)
    stream.on_answer()
    port.now_ns += MINUTE_NS - 1
    with pytest.raises(ServeError, match="got one more"):
        opened(port.streams, stack)
    port.now_ns += 1
    opened(port.streams, stack)
    with pytest.raises(ServeError, match="closed for a new one"):
        await task


async def test_stream_with_an_unread_message_is_not_replaced(stack: ExitStack) -> None:
    port, unread = Port(1), [True]
    stream = stack.enter_context(port.streams.open(is_inference=True, has_unread=lambda: bool(unread)))
    task = await waiting(stream)
    port.now_ns += 2 * MINUTE_NS
    with pytest.raises(ServeError, match="got one more"):
        opened(port.streams, stack)
    unread.clear()
    opened(port.streams, stack)
    with pytest.raises(ServeError, match="closed for a new one"):
        await task


async def test_streams_without_inference_take_no_places_of_it_and_are_not_replaced(stack: ExitStack) -> None:
    port = Port(1)
    task = await waiting(stack.enter_context(port.streams.open(is_inference=False)))
    opened(port.streams, stack)
    port.now_ns += 2 * MINUTE_NS
    with pytest.raises(ServeError, match="got one more"):
        stack.enter_context(port.streams.open(is_inference=False))
    assert (task.done(), port.streams.open_count) == (False, 2)
    task.cancel()


async def test_result_of_the_work_is_returned(stack: ExitStack) -> None:
    assert await opened(Port(1).streams, stack).wait(seven()) == 7


async def test_work_that_fails_raises_its_error(stack: ExitStack) -> None:
    async def fail() -> None:
        raise ServeError(ErrorKind.INVALID_INPUT, "no")

    with pytest.raises(ServeError, match="no"):
        await opened(Port(1).streams, stack).wait(fail())


async def test_drain_cancels_waiting_and_later_work(stack: ExitStack) -> None:
    streams = Port(2).streams
    first, second = opened(streams, stack), opened(streams, stack)
    task = await waiting(first)
    streams.begin_drain()
    for work in (task, second.wait(asyncio.Event().wait())):
        with pytest.raises(ServeError, match="the server is shutting down") as caught:
            await work
        assert caught.value.kind is ErrorKind.NOT_READY


async def test_cancelled_work_does_not_count_as_a_drain(stack: ExitStack) -> None:
    async def notice() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await opened(Port(1).streams, stack).wait(notice())


async def test_cancelled_stream_cancels_its_work(stack: ExitStack) -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    stream = asyncio.create_task(opened(Port(1).streams, stack).wait(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    await asyncio.wait_for(cancelled.wait(), 60)
