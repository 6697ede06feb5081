"""ModelStreamInfer on a real socket, called through raw channels: order, errors, limits and ends."""

import asyncio
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from hpack import Encoder

from fakes.service import FakeInferenceService, FakeModelService
from grpc_frontends import LONG_S, Frontend, frontend, infer_request, open_stream, read, read_answer, wait_until
from ortserve._pb import grpc_service_pb2 as pb
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import SERVICE_NAME
from ortserve.frontends.grpc.native import frames

# Streams need flow control in both directions, which TLS must preserve.
pytestmark = pytest.mark.parametrize("grpc_transport", ["grpcio", "native", "native over TLS"])


@pytest.fixture
def inference() -> FakeInferenceService:
    return FakeInferenceService()


@pytest.fixture
def models() -> FakeModelService:
    return FakeModelService()


@pytest.fixture(autouse=True)
def _server_logs_no_faults(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test here makes the server log a fault."""
    yield
    messages = [record.getMessage() for record in caplog.get_records("call")]
    # This message is the client's: grpc.aio has one poller for all loops and may pass an event to a loop that has
    # ended.
    assert [message for message in messages if "PollerCompletionQueue._handle_events" not in message] == []


def is_final(answer: pb.ModelStreamInferResponse) -> bool:
    return answer.infer_response.parameters["triton_final_response"].bool_param


async def test_answers_keep_request_order_when_a_later_one_finishes_first(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport) as (_, channel):
        stream = open_stream(channel)
        await stream.write(infer_request("held", "first"))
        await asyncio.wait_for(inference.held.wait(), LONG_S)
        await stream.write(infer_request("double", "second"))
        await stream.done_writing()
        await wait_until(lambda: len(inference.received) == 2)  # the second runs concurrently with the first
        inference.release.set()
        answers = [await read_answer(stream), await read_answer(stream)]
        assert await read(stream) is None
        assert await stream.code() is grpc.StatusCode.OK
    assert [answer.infer_response.id for answer in answers] == ["first", "second"]
    for answer in answers:
        assert answer.error_message == ""
        assert is_final(answer)
        assert np.frombuffer(answer.infer_response.raw_output_contents[0], np.float32).tolist() == [2, 4]


async def test_request_error_names_its_request_and_the_stream_continues(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    inference.failures["busy"] = ServeError(ErrorKind.OVERLOADED, "queue is full", retry_after_s=1)
    async with frontend(inference, models, grpc_transport) as (_, channel):
        stream = open_stream(channel)
        for data in (infer_request("busy", "1"), b"\xff", infer_request("absent", "3"), infer_request("double", "4")):
            await stream.write(data)
        await stream.done_writing()
        answers = [await read_answer(stream) for _ in range(4)]
        assert await read(stream) is None
        assert await stream.code() is grpc.StatusCode.OK
    assert [answer.error_message for answer in answers] == [
        "queue is full",
        "the request is not a valid message of type inference.ModelInferRequest",
        "Request for unknown model: 'absent' is not found",
        "",
    ]
    assert [answer.infer_response.id for answer in answers] == ["1", "", "3", "4"]
    assert [answer.infer_response.model_name for answer in answers] == ["busy", "", "absent", "double"]
    assert all(map(is_final, answers))
    assert [len(answer.infer_response.outputs) for answer in answers] == [0, 0, 0, 1]


async def test_strict_mode_ends_the_stream_with_the_first_error(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    inference.failures["busy"] = ServeError(ErrorKind.OVERLOADED, "queue is full", retry_after_s=2)
    async with frontend(inference, models, grpc_transport) as (_, channel):
        stream = open_stream(channel, metadata=(("triton_grpc_error", "true"),))
        for model in ("held", "busy", "absent"):
            await stream.write(infer_request(model))
        await wait_until(lambda: len(inference.received) == 3)
        inference.release.set()
        assert (await read_answer(stream)).error_message == ""
        assert await read(stream) is None
        assert (await stream.code(), await stream.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
        assert dict(await stream.trailing_metadata())["grpc-retry-pushback-ms"] == "2000"


async def test_empty_final_response_parameter_is_accepted(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    message = pb.ModelInferRequest.FromString(infer_request())
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    async with frontend(inference, models, grpc_transport) as (_, channel):
        stream = open_stream(channel)
        await stream.write(message.SerializeToString())
        await stream.done_writing()
        answer = await read_answer(stream)
        assert await read(stream) is None
    assert len(answer.infer_response.outputs) == 1
    assert is_final(answer)


async def test_stream_without_requests_ends_with_ok(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport) as (_, channel):
        stream = open_stream(channel)
        await stream.done_writing()
        assert await read(stream) is None
        assert await stream.code() is grpc.StatusCode.OK


async def test_disconnect_cancels_unanswered_requests(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport) as (front, channel):
        stream = open_stream(channel)
        await stream.write(infer_request("held"))
        await asyncio.wait_for(inference.held.wait(), LONG_S)
        stream.cancel()
        await asyncio.wait_for(inference.cancelled.wait(), LONG_S)
        await until_all_have_ended(front)
    assert inference.gate.held_bytes == 0


async def test_stream_deadline_applies_to_its_requests(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport) as (front, channel):
        stream = open_stream(channel, timeout_s=0.3)
        await stream.write(infer_request("held"))
        assert await read(stream) is None
        assert await stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(inference.cancelled.wait(), LONG_S)
        await until_all_have_ended(front)
        timeout_ns = inference.received[0].timeout_ns
        assert timeout_ns is not None
        assert 0 < timeout_ns <= 0.31e9
        unhurried = open_stream(channel, timeout_s=None)
        await unhurried.write(infer_request())
        await read_answer(unhurried)
        assert inference.received[1].timeout_ns is None


async def test_stream_reads_no_requests_past_its_unanswered_limit(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport, grpc_stream_requests=3) as (_, channel):
        stream = open_stream(channel)
        for number in range(10):
            await stream.write(infer_request("held", str(number)))
        await stream.done_writing()
        await wait_until(lambda: len(inference.received) == 3)
        # Another call completes, and no waiting request is read meanwhile.
        other = open_stream(channel)
        await other.write(infer_request("double"))
        await read_answer(other)
        assert len(inference.received) == 4
        inference.release.set()
        assert [(await read_answer(stream)).infer_response.id for _ in range(10)] == [str(n) for n in range(10)]
        assert await read(stream) is None


async def test_client_that_sends_without_reading_is_paused(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    size = 20_000
    async with frontend(inference, models, grpc_transport, grpc_stream_bytes=200_000) as (front, channel):
        stream = open_stream(channel)

        async def send() -> None:
            for _ in range(2000):
                await stream.write(infer_request(size=size))  # 80 kB in each direction

        sending = asyncio.create_task(send())
        probe = open_stream(channel)
        taken = -1
        while taken < len(inference.received):  # until there is no progress while twenty others are answered
            taken = len(inference.received) + 20
            for _ in range(20):
                await probe.write(infer_request())
                await read_answer(probe)
        assert not sending.done()
        # grpc's own windows hold some megabytes; without a bound, all 160 MB would be in the process.
        assert len(inference.received) * size * 4 < 40_000_000
        stream.cancel()
        probe.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until_all_have_ended(front)


async def test_full_body_limit_rejects_the_request_not_the_stream(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    inference.gate.max_bytes = len(infer_request("held"))
    async with frontend(inference, models, grpc_transport) as (_, channel):
        stream = open_stream(channel)
        await stream.write(infer_request("held"))
        await stream.write(infer_request("double"))
        await stream.done_writing()
        await wait_until(lambda: len(inference.received) == 2)
        inference.release.set()
        answers = [await read_answer(stream), await read_answer(stream)]
    assert answers[0].error_message == ""
    assert "max_inflight_bytes" in answers[1].error_message
    assert inference.refused == [ErrorKind.OVERLOADED]
    assert inference.gate.held_bytes == 0


async def test_streams_past_the_limit_are_rejected(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport, grpc_max_streams=1) as (front, channel):
        first = open_stream(channel)
        await first.write(infer_request())
        await read_answer(first)
        second = open_stream(channel)
        assert await read(second) is None
        assert await second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc_max_streams" in await second.details()
        await first.done_writing()
        assert await read(first) is None
        await until_all_have_ended(front)
        third = open_stream(channel)
        await third.write(infer_request())
        await read_answer(third)


async def test_stream_whose_request_is_on_its_way_is_not_replaced(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    if grpc_transport != "native":
        pytest.skip("grpcio does not tell that a part of a message has arrived; TLS changes nothing here")
    message = infer_request(size=1000)
    head = [(":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE_NAME}/ModelStreamInfer")]
    block = Encoder().encode([*head, (":authority", "x"), ("te", "trailers"), ("content-type", "application/grpc")])
    data = b"\0" + len(message).to_bytes(4, "big") + message
    async with frontend(inference, models, grpc_transport, grpc_max_streams=1) as (front, channel):
        host, port = front.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frames.PREFACE + frames.settings({}))
        writer.write(frames.header_block(1, block, frames.MIN_FRAME_SIZE, is_end=False))
        writer.write(frames.frame(frames.DATA, 0, 1, data[:100]))
        await wait_until(lambda: front.streams.open_count == 1)
        other = open_stream(channel)
        assert await read(other) is None
        assert "got one more" in await other.details()
        writer.write(frames.frame(frames.DATA, frames.END_STREAM, 1, data[100:]))
        received = b""
        while b"grpc-status" not in received:
            received += (part := await reader.read(2**16))
            assert part
        assert len(inference.received) == 1
        writer.close()


async def test_drain_answers_read_requests_and_ends_the_stream_as_unavailable(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport) as (front, channel):
        idle = open_stream(channel)
        await idle.write(infer_request())
        await read_answer(idle)
        busy = open_stream(channel)
        await busy.write(infer_request("held"))
        await asyncio.wait_for(inference.held.wait(), LONG_S)
        stopping = asyncio.create_task(front.server.stop(LONG_S))
        assert await read(idle) is None
        assert await idle.code() is grpc.StatusCode.UNAVAILABLE
        assert "the server is shutting down" in await idle.details()
        assert not stopping.done()
        inference.release.set()
        assert (await read_answer(busy)).error_message == ""
        assert await read(busy) is None
        assert await busy.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(stopping, LONG_S)


async def test_drain_ends_a_half_closed_stream_with_ok(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport) as (front, channel):
        stream = open_stream(channel)
        await stream.write(infer_request("held"))
        await stream.done_writing()
        await asyncio.wait_for(inference.held.wait(), LONG_S)
        probe = open_stream(channel)  # once this stream was answered, the end of the first had been read as well
        await probe.write(infer_request())
        await read_answer(probe)
        stopping = asyncio.create_task(front.server.stop(LONG_S))
        assert await read(probe) is None
        inference.release.set()
        assert (await read_answer(stream)).error_message == ""
        assert await read(stream) is None
        assert await stream.code() is grpc.StatusCode.OK
        await asyncio.wait_for(stopping, LONG_S)


async def test_client_that_never_reads_is_disconnected_at_the_drain_timeout(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport, grpc_stream_bytes=200_000) as (front, channel):
        stream = open_stream(channel)

        async def send() -> None:
            for _ in range(2000):
                await stream.write(infer_request(size=20_000))

        sending = asyncio.create_task(send())
        await wait_until(lambda: len(inference.received) > 10)
        await asyncio.wait_for(front.server.stop(0.05), LONG_S)
        await until_all_have_ended(front)
        stream.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_oversized_request_ends_the_stream_with_resource_exhausted(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport, max_body_bytes=1000) as (front, channel):
        stream = open_stream(channel)
        await stream.write(infer_request(size=1000))
        assert await read(stream) is None
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until_all_have_ended(front)


async def until_all_have_ended(front: Frontend) -> None:
    await wait_until(lambda: front.streams.open_count == 0)
