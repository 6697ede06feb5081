"""The quota of one stream, in requests and in bytes, and its share of a turn of the event loop."""

import asyncio
from typing import Any

import grpc
import pytest

from fakes.service import FakeInferenceService
from grpc_frontends import infer_request, new_streams
from ortserve.frontends.grpc.infer_stream import InferStreamCalls, StreamQuota


def has_room(quota: StreamQuota) -> bool:
    """Whether a reader would continue without waiting."""
    waiting = quota.wait()
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False


async def test_quota_limits_unanswered_requests() -> None:
    quota = StreamQuota(max_requests=2, max_bytes=1000)
    quota.reserve(10)
    assert has_room(quota)
    quota.reserve(10)
    assert not has_room(quota)
    quota.exchange(10, 10)
    assert not has_room(quota), "the answer is not sent yet"
    quota.release(10)
    assert has_room(quota)


async def test_quota_limits_held_bytes_of_both_directions() -> None:
    quota = StreamQuota(max_requests=10, max_bytes=100)
    quota.reserve(60)
    assert has_room(quota)
    quota.reserve(40)
    assert not has_room(quota)
    quota.exchange(60, 10)
    assert has_room(quota)
    quota.exchange(40, 90)
    assert not has_room(quota)
    quota.release(90)
    assert has_room(quota)
    quota.release(10)
    assert (quota.requests, quota.held_bytes) == (0, 0)


async def test_empty_quota_admits_a_request_of_any_size() -> None:
    quota = StreamQuota(max_requests=1, max_bytes=1)
    assert has_room(quota)
    quota.reserve(1_000_000)
    assert not has_room(quota)


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_reader_resumes_below_the_limit(is_waiting: bool) -> None:
    quota = StreamQuota(max_requests=1, max_bytes=100)
    quota.reserve(1)
    reader = asyncio.create_task(quota.wait())
    if is_waiting:
        await asyncio.sleep(0)
        assert not reader.done()
    quota.release(1)
    await reader


class HastyCaller:
    """Has sent all of its requests already, and reads every answer at once."""

    def __init__(self, count: int) -> None:
        self._messages = [infer_request()] * count
        self.written = 0

    async def read(self) -> Any:
        return self._messages.pop() if self._messages else grpc.aio.EOF

    async def write(self, message: bytes) -> None:
        self.written += 1

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    def set_trailing_metadata(self, metadata: tuple[()]) -> None:
        assert metadata == ()


async def test_other_callers_are_served_between_the_requests_of_a_stream() -> None:
    count, most = 200, 20
    inference: Any = FakeInferenceService()
    caller = HastyCaller(count)
    calls: Any = InferStreamCalls(inference, inference.admission, new_streams(1), max_requests=256, max_bytes=2**30)
    serving = asyncio.ensure_future(calls.handlers()["ModelStreamInfer"].stream_stream(None, caller))
    while not serving.done():
        begun, answered = len(inference.received), caller.written
        await asyncio.sleep(0)
        assert len(inference.received) - begun <= most
        assert caller.written - answered <= most
    await serving
    assert caller.written == count
