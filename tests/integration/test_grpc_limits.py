"""Bounds on the cost of gRPC clients on both transports: connections, metadata, messages and held memory."""

import asyncio
import gc
import gzip
import re
import tracemalloc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from fakes.service import FakeInferenceService, FakeModelService
from grpc_frontends import LONG_S, Frontend, frontend, infer_request, read_answer, wait_until
from ortserve.codecs.grpc_wire import varint
from ortserve.config.option_groups import GrpcOptions
from ortserve.frontends.grpc.calls import SERVICE_NAME
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.header_blocks import literal
from ortserve.frontends.grpc.router import SMALL_MESSAGE_BYTES
from ortserve.service.gate import BodyGate
from raw_grpc import end_of_call
from transports import ON_BOTH_TRANSPORTS

LIVE = f"/{SERVICE_NAME}/ServerLive"
INFER = f"/{SERVICE_NAME}/ModelInfer"
MIB = 1024 * 1024


class PeakMemory:
    """The largest growth of this process since the start, including all libraries."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak, see proc(5)
        self._begun = self._peak()

    def by_bytes(self) -> int:
        return self._peak() - self._begun

    def _peak(self) -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024


@pytest.fixture
async def front(grpc_transport: str) -> AsyncIterator[Frontend]:
    """A frontend that accepts three connections."""
    async with frontend(FakeInferenceService(), FakeModelService(), grpc_transport, grpc_max_connections=3) as (
        front,
        _,
    ):
        yield front


async def ask(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> bytes:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(LIVE)
    return await call(b"", timeout=LONG_S, metadata=metadata)


async def begin_stream(channel: grpc.aio.Channel) -> None:
    """Begin a call that stays open, and wait until it is answered."""
    call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE_NAME}/ModelStreamInfer")
    stream = call(timeout=LONG_S)
    await stream.write(infer_request())
    assert isinstance(await stream.read(), bytes)


async def is_answered(front: Frontend) -> bool:
    """Whether a new client becomes ready; a client that was rejected once stays unready although it is connected."""
    async with open_channel(front) as channel:
        try:
            await ask(channel)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    return True


def open_channel(front: Frontend) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(front.address, options=(("grpc.use_local_subchannel_pool", 1),))


@ON_BOTH_TRANSPORTS
async def test_connection_past_the_limit_is_rejected_until_another_closes(front: Frontend) -> None:
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(open_channel(front)) for _ in range(3)]
        for channel in others:
            await begin_stream(channel)
        async with open_channel(front) as beyond:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(beyond)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for channel in others:
            await ask(channel)
        await others[0].close()
        async with asyncio.timeout(LONG_S):
            while not await is_answered(front):
                pass  # the server has not yet noticed that the other client is gone


@ON_BOTH_TRANSPORTS
@pytest.mark.parametrize(
    "metadata",
    [(("large", "x" * 17_000),), (("large", "x" * 60_000),), tuple((f"key-{number}", "x") for number in range(600))],
    ids=["large", "very large", "many"],
)
async def test_metadata_over_16_kib_is_rejected(front: Frontend, metadata: tuple[tuple[str, str], ...]) -> None:
    async with open_channel(front) as channel:
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{SERVICE_NAME}/ModelStreamInfer"
        )
        stream = call(timeout=LONG_S)
        await stream.write(infer_request())
        assert isinstance(await stream.read(), bytes)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, metadata)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stream.write(infer_request())
        assert isinstance(await stream.read(), bytes)  # other streams of the connection continue
        stream.cancel()


@ON_BOTH_TRANSPORTS
async def test_metadata_just_under_16_kib_is_accepted_repeatedly(front: Frontend) -> None:
    async with open_channel(front) as channel:
        for _ in range(20):
            await ask(channel, (("large", "x" * 15_500),))


@ON_BOTH_TRANSPORTS
async def test_white_space_around_metadata_values_is_accepted(front: Frontend) -> None:
    async with open_channel(front) as channel:
        await ask(channel, (("a", " x"), ("b", "x  "), ("c", " ")))


@ON_BOTH_TRANSPORTS
async def test_thousands_of_simultaneous_calls_are_all_answered(front: Frontend) -> None:
    async with open_channel(front) as channel:
        assert len(await asyncio.gather(*(ask(channel) for _ in range(5_000)))) == 5_000


@ON_BOTH_TRANSPORTS
async def test_unused_streams_keep_no_other_stream_away(grpc_transport: str) -> None:
    inference, models = FakeInferenceService(), FakeModelService()
    async with frontend(inference, models, grpc_transport) as (front, channel):
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{SERVICE_NAME}/ModelStreamInfer"
        )
        most = GrpcOptions().grpc_max_streams
        streams = [call(timeout=LONG_S) for _ in range(most)]
        await wait_until(lambda: front.streams.open_count == most)
        later = call(timeout=LONG_S)
        await later.write(infer_request())
        await read_answer(later)
        await asyncio.wait([asyncio.ensure_future(stream.code()) for stream in streams], return_when="FIRST_COMPLETED")
        ended = [stream for stream in streams if stream.done()]
        assert [await stream.code() for stream in ended] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert await ended[0].details() == (
            f"grpc_max_streams: expected at most {most} open streams, this idle one was closed for a new one"
        )
        await ask(channel)
        for stream in streams:
            stream.cancel()


SMALL_CALLS = [
    LIVE,
    f"/{SERVICE_NAME}/ServerMetadata",
    f"/{SERVICE_NAME}/SystemSharedMemoryStatus",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
]


@ON_BOTH_TRANSPORTS
@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.parametrize("path", SMALL_CALLS)
async def test_calls_without_tensors_reject_large_messages(
    front: Frontend, path: str, compression: grpc.Compression
) -> None:
    async with open_channel(front) as channel:
        for size, is_refused in ((SMALL_MESSAGE_BYTES + 1, True), (SMALL_MESSAGE_BYTES, False)):
            call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
            # An unknown field, so that the bytes are a valid message of every type.
            message = b"\xfa\x7f" + varint(size - 5) + bytes(size - 5)
            answers = call(message, timeout=LONG_S, compression=compression)
            if is_refused:
                assert await answers.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "larger than such a call takes: expected at most 65536 bytes" in await answers.details()
            else:
                assert await answers.read() is not grpc.aio.EOF
            answers.cancel()


@ON_BOTH_TRANSPORTS
async def test_decompression_bomb_allocates_no_memory(front: Frontend) -> None:
    bomb = gzip.compress(bytes(48 * MIB), 9)
    sent = b"\x01" + len(bomb).to_bytes(4, "big") + bomb
    grown = PeakMemory()
    end = await asyncio.to_thread(end_of_call, front.address, INFER, sent, {"grpc-encoding": "gzip"})
    assert end["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert "ecompressed message larger than max" in end["grpc-message"]
    assert grown.by_bytes() < 16 * MIB


async def test_concurrent_decompression_bombs_stay_within_the_memory_limit() -> None:
    size, count, threads = 32 * MIB, 20, 8
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(threads))
    inference = FakeInferenceService(gate=BodyGate(8 * MIB))
    bomb = gzip.compress(b"\xff" * size, 9)
    sent = b"\x01" + len(bomb).to_bytes(4, "big") + bomb
    async with frontend(inference, FakeModelService(), "native", max_body_bytes=size) as (front, _):
        with ThreadPoolExecutor(count) as callers:
            tracemalloc.start()
            try:
                arguments = (front.address, INFER, sent, {"grpc-encoding": "gzip"})
                ends = await asyncio.gather(
                    *(loop.run_in_executor(callers, end_of_call, *arguments) for _ in range(count))
                )
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
    assert sum("max_inflight_bytes" in end["grpc-message"] for end in ends) >= count // 2
    assert inference.gate.held_bytes == 0
    # The held bytes, a step in each thread, and the last message alone, both in parts and whole.
    assert peak < (8 + 4 * threads) * MIB + 2 * size + MIB


@pytest.mark.parametrize(("announced", "sent", "calls"), [(3_900_000, 100_000, 90), (60 * MIB, 1_200_000, 30)])
async def test_announced_message_counts_only_received_bytes(announced: int, sent: int, calls: int) -> None:
    block = b"\x83\x86" + literal(b":path", INFER.encode()) + literal(b"content-type", b"application/grpc")
    begun = b"\0" + announced.to_bytes(4, "big") + bytes(sent)
    step = frames.MIN_FRAME_SIZE
    parts = [begun[begin : begin + step] for begin in range(0, len(begun), step)]
    inference = FakeInferenceService(gate=BodyGate(2**30))
    async with frontend(inference, FakeModelService(), "native", max_body_bytes=64 * MIB) as (front, _):
        host, _, port = front.address.rpartition(":")
        grown = PeakMemory()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(frames.PREFACE + frames.settings({}))
        for stream_id in range(1, 2 * calls, 2):
            writer.write(frames.header_block(stream_id, block, step, is_end=False))
            writer.writelines([frames.frame(frames.DATA, 0, stream_id, part) for part in parts])
            await writer.drain()
        await wait_until(lambda: inference.gate.held_bytes == calls * sent)
        # Each call may have started a page of 2 MiB, and this process also holds some of the sent bytes.
        assert grown.by_bytes() < calls * (2 * sent + 2 * MIB * (announced > 4 * MIB)) + 16 * MIB
        writer.close()
        await wait_until(lambda: inference.gate.held_bytes == 0)


async def test_unread_answer_times_out_and_releases_its_memory() -> None:
    request = infer_request(size=10_000)
    sent = b"\x00" + len(request).to_bytes(4, "big") + request
    async with frontend(FakeInferenceService(), FakeModelService(), "native", grpc_send_timeout_s=0.2) as (
        front,
        channel,
    ):
        end = await asyncio.to_thread(end_of_call, front.address, INFER, sent, window=0)
        assert end["grpc-status"] == str(grpc.StatusCode.CANCELLED.value[0])
        assert end["grpc-message"].startswith("grpc_send_timeout_s: the caller read nothing of the answer")
        await ask(channel)


@ON_BOTH_TRANSPORTS
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_rejected_messages_leave_no_reference_cycles(grpc_transport: str, method: str) -> None:
    size = 4_000_000
    garbage = b"\xff" * size
    inference, models = FakeInferenceService(), FakeModelService()
    async with frontend(inference, models, grpc_transport, max_body_bytes=size) as (_, channel):
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE_NAME}/{method}")

        async def refuse() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(garbage, timeout=LONG_S, metadata=(("triton_grpc_error", "true"),))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        await refuse()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(8):
                await refuse()
            left = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.enable()
    assert left < 2.5 * size  # one call may still be ending on either side
