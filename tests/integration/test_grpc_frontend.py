"""The gRPC frontend on a real socket, called by grpc and by the unmodified client library."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from fakes.service import FakeInferenceService, FakeModelService
from grpc_frontends import LONG_S, MAX_BODY_BYTES, Frontend, frontend
from ortserve._pb import grpc_service_pb2 as pb
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.grpcio_server import GrpcioServer
from ortserve.frontends.grpc.native.server import NativeGrpcServer
from ortserve.service.gate import BodyAdmission, Reservation
from transports import ON_BOTH_TRANSPORTS

pytestmark = ON_BOTH_TRANSPORTS


@pytest.fixture
def inference() -> FakeInferenceService:
    return FakeInferenceService()


@pytest.fixture
def models() -> FakeModelService:
    return FakeModelService()


@pytest.fixture
async def server(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> AsyncIterator[GrpcioServer | NativeGrpcServer]:
    server = Frontend(inference, models, grpc_transport).server
    yield server
    await server.stop(0)


@pytest.fixture
async def address(server: GrpcioServer | NativeGrpcServer) -> str:
    return f"127.0.0.1:{await server.start()}"


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


async def call(channel: grpc.aio.Channel, method: str, data: bytes, *, timeout_s: float = LONG_S) -> bytes:
    """Send bytes and return bytes, so that the server receives exactly what the test sends."""
    send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    send = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    return await send(data, timeout=timeout_s)


async def failure(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, method, data)
    return caught.value


def infer_request(model: str = "double", version: str = "") -> bytes:
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    message.raw_input_contents.append(np.array([1, 2], np.float32).tobytes())
    message.inputs.add(name="IN0", datatype="FP32", shape=[1, 2])
    return message.SerializeToString()


async def test_unmodified_client_reads_health_and_metadata(address: str) -> None:
    def ask() -> None:
        with triton.InferenceServerClient(address) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("double")
            assert client.is_model_ready("double", "1")
            assert not client.is_model_ready("double", "2")
            assert not client.is_model_ready("absent")
            server = client.get_server_metadata()
            assert (server.name, server.version) == ("ortserve", "1.2.3")
            assert list(server.extensions) == ["binary_tensor_data", "parameters"]
            model = client.get_model_metadata("double", as_json=True)
            assert model["inputs"] == [{"name": "IN0", "datatype": "FP32", "shape": ["-1", "4"]}]
            assert model["outputs"] == [{"name": "OUT0", "datatype": "FP32", "shape": ["-1", "4"]}]
            assert (model["versions"], model["platform"]) == (["1"], "onnxruntime_onnx")

    await asyncio.to_thread(ask)


class FailingService(FakeInferenceService):
    """Raises an exception other than ServeError once, in the named step."""

    step = ""

    def _fail(self, step: str) -> None:
        if self.step == step:
            self.step = ""
            raise MemoryError("/secret/path")

    def receive(self, *arguments: Any, **named: Any) -> Any:
        self._fail("receive")
        return super().receive(*arguments, **named)

    @property
    def admission(self) -> BodyAdmission:
        service = self

        class FailingAdmission(BodyAdmission):
            def reserve(self, size: int) -> Reservation:
                service._fail("reserve")
                return super().reserve(size)

        return FailingAdmission("grpc", self.gate, self.body_rejected, max_body_bytes=2**31)

    def start(self, *arguments: Any) -> None:
        self._fail("start")
        super().start(*arguments)

    def _answer(self, *arguments: Any) -> Any:
        answer: Any = super()._answer(*arguments)
        if self.step == "answer":
            self.step = ""
            return "an answer that cannot be joined with its headers"
        return answer


@pytest.mark.parametrize("step", ["receive", "reserve", "start", "answer"])
async def test_every_fault_reaches_the_client_and_keeps_the_connection(
    step: str, models: FakeModelService, grpc_transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    if grpc_transport == "grpcio" and step in ("receive", "answer"):
        pytest.skip("grpc answers for what happens outside of the calls")
    inference = FailingService()
    inference.step = step
    async with frontend(inference, models, grpc_transport) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "ModelInfer", infer_request(), timeout_s=10)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(caught.value.details())
        assert await call(channel, "ModelInfer", infer_request())
        assert inference.gate.held_bytes == 0
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
async def test_unmodified_client_infers(address: str, compression: str | None) -> None:
    numbers = np.arange(8, dtype=np.float32).reshape(2, 4)
    strings = np.array([["a", "ü"]], dtype=object)

    def ask() -> None:
        with triton.InferenceServerClient(address) as client:
            inputs = [triton.InferInput("A", [2, 4], "FP32"), triton.InferInput("B", [1, 2], "BYTES")]
            inputs[0].set_data_from_numpy(numbers)
            inputs[1].set_data_from_numpy(strings)
            result = client.infer(
                "double",
                inputs,
                request_id="42",
                priority=1,
                parameters={"custom": 1},
                compression_algorithm=compression,
                outputs=[triton.InferRequestedOutput("OUT1"), triton.InferRequestedOutput("OUT0")],
            )
            np.testing.assert_array_equal(result.as_numpy("OUT0"), numbers * 2)
            assert result.as_numpy("OUT1").tolist() == [[b"aa", "üü".encode()]]
            response = result.get_response()
            assert (response.id, response.model_name, response.model_version) == ("42", "double", "1")
            assert [output.name for output in response.outputs] == ["OUT1", "OUT0"]

    await asyncio.to_thread(ask)


CLIENT_PROGRAM = """
import sys
import numpy as np
import tritonclient.grpc as triton
with triton.InferenceServerClient(sys.argv[1]) as client:
    tensor = triton.InferInput("A", [3], "INT16")
    tensor.set_data_from_numpy(np.array([1, -2, 3], np.int16))
    assert client.infer("double", [tensor]).as_numpy("OUT0").tolist() == [2, -4, 6]
    try:
        client.infer("absent", [tensor])
    except triton.InferenceServerException as error:
        print(error.status(), error.message())
"""


async def test_unmodified_client_in_a_process_of_its_own_infers_and_gets_errors(address: str) -> None:
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT_PROGRAM, address, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await client.communicate()
    assert client.returncode == 0, err.decode()
    assert out.decode().strip() == "StatusCode.NOT_FOUND Request for unknown model: 'absent' is not found"


@pytest.mark.parametrize(
    "method", ["ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"]
)
async def test_garbage_is_an_invalid_argument(channel: grpc.aio.Channel, method: str) -> None:
    error = await failure(channel, method, b"\xff\xff\xff")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"the request is not a valid message of type inference.{method}Request"


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("ModelReady", pb.ModelReadyRequest(name="double", version="1st").SerializeToString()),
        ("ModelMetadata", pb.ModelMetadataRequest(name="double", version="1st").SerializeToString()),
        ("ModelInfer", infer_request(version="1st")),
    ],
)
async def test_version_that_is_not_a_number_is_an_invalid_argument(
    channel: grpc.aio.Channel, method: str, data: bytes
) -> None:
    error = await failure(channel, method, data)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        "failed to get model version from specified version string '1st' (details: stol), "
        "version should be an integral value > 0 or a label"
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/inference.GRPCInferenceService/Nonsense", "unknown method 'Nonsense' of service"),
        ("/tensorflow.serving.PredictionService/Predict", "the inference service is 'inference.GRPCInferenceService'"),
        ("/", "unknown method '/'"),
    ],
)
async def test_unknown_call_is_unimplemented_with_a_reason(channel: grpc.aio.Channel, path: str, text: str) -> None:
    one: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await one(b"", timeout=LONG_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert text in (caught.value.details() or "")
    many: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    stream = many(timeout=LONG_S)
    assert (await stream.code(), await stream.details()) == (caught.value.code(), caught.value.details())


async def test_draining_server_is_not_ready(channel: grpc.aio.Channel, models: FakeModelService) -> None:
    models.ready = False
    answer = pb.ServerReadyResponse.FromString(await call(channel, "ServerReady", b""))
    assert not answer.ready


async def test_overload_answer_has_retry_pushback(channel: grpc.aio.Channel, inference: FakeInferenceService) -> None:
    inference.failures["busy"] = ServeError(ErrorKind.OVERLOADED, "queue is full", retry_after_s=0.0123)
    error = await failure(channel, "ModelInfer", infer_request("busy"))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "queue is full"
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "13"


async def test_answer_carries_its_own_timing(channel: grpc.aio.Channel) -> None:
    send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    send = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    answering = send(infer_request(), timeout=LONG_S)
    await answering
    phases = "decode;dur=1.000, queue;dur=2.000, stage;dur=3.000, compute;dur=4.000, encode;dur=5.000"
    assert dict(await answering.trailing_metadata())["server-timing"] == phases


async def test_client_deadline_reaches_the_service(channel: grpc.aio.Channel, inference: FakeInferenceService) -> None:
    await call(channel, "ModelInfer", infer_request(), timeout_s=LONG_S)
    assert inference.received[0].timeout_ns is not None
    assert inference.received[0].timeout_ns == pytest.approx(LONG_S * 1e9, rel=0.05)  # grpc rounds up, and time passes
    send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    send = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    await send(infer_request())
    assert inference.received[1].timeout_ns is None


async def test_full_body_limit_rejects_a_call_and_is_empty_afterwards(
    channel: grpc.aio.Channel, inference: FakeInferenceService
) -> None:
    request = infer_request("held")
    inference.gate.max_bytes = len(request)
    running = asyncio.create_task(call(channel, "ModelInfer", request))
    await inference.held.wait()
    error = await failure(channel, "ModelInfer", infer_request())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_inflight_bytes" in (error.details() or "")
    assert inference.refused == [ErrorKind.OVERLOADED]
    inference.release.set()
    await running
    await call(channel, "ModelInfer", infer_request())
    assert inference.gate.held_bytes == 0


@pytest.mark.parametrize("letter", ["x", "ü", "\n"])
async def test_long_message_is_cut_rather_than_lost(
    channel: grpc.aio.Channel, inference: FakeInferenceService, letter: str
) -> None:
    inference.failures["wordy"] = ServeError(ErrorKind.NOT_READY, letter * 50_000)
    error = await failure(channel, "ModelInfer", infer_request("wordy"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    details = error.details()
    assert details is not None
    assert 500 < len(details) < 5000
    assert set(details) == {letter}


async def test_internal_error_hides_its_details(
    channel: grpc.aio.Channel, models: FakeModelService, caplog: pytest.LogCaptureFixture
) -> None:
    models.fault = RuntimeError("/secret/path")
    error = await failure(channel, "ServerMetadata", b"")
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "internal error"
    assert "/secret/path" in caplog.text


async def test_request_over_the_body_limit_is_resource_exhausted_and_one_under_it_is_served(
    channel: grpc.aio.Channel,
) -> None:
    def padded(size: int) -> bytes:
        message = pb.ModelInferRequest(model_name="double", raw_input_contents=[bytes(size)])
        message.inputs.add(name="IN0", datatype="UINT8", shape=[size])
        return message.SerializeToString()

    error = await failure(channel, "ModelInfer", padded(MAX_BODY_BYTES))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_BODY_BYTES) in (error.details() or "")
    await call(channel, "ModelInfer", padded(MAX_BODY_BYTES - 100))


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_message_inflating_past_the_body_limit_is_rejected(
    channel: grpc.aio.Channel, inference: FakeInferenceService, compression: grpc.Compression
) -> None:
    send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    send = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    small = infer_request()
    await send(small, timeout=LONG_S, compression=compression)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(small + bytes(50 * MAX_BODY_BYTES), timeout=LONG_S, compression=compression)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "ecompressed message larger than max" in (caught.value.details() or "")
    assert len(inference.received) == 1


async def test_client_disconnect_cancels_its_request(
    channel: grpc.aio.Channel, inference: FakeInferenceService
) -> None:
    running = asyncio.create_task(call(channel, "ModelInfer", infer_request("held")))
    await inference.held.wait()
    running.cancel()
    await asyncio.wait_for(inference.cancelled.wait(), LONG_S)


async def test_deadline_of_the_client_cancels_its_request(
    channel: grpc.aio.Channel, inference: FakeInferenceService
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, "ModelInfer", infer_request("held"), timeout_s=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(inference.cancelled.wait(), LONG_S)


async def test_stop_finishes_the_running_call_and_rejects_others(
    server: GrpcioServer | NativeGrpcServer, channel: grpc.aio.Channel, address: str, inference: FakeInferenceService
) -> None:
    running = asyncio.create_task(call(channel, "ModelInfer", infer_request("held")))
    await inference.held.wait()
    stopping = asyncio.create_task(server.stop(LONG_S))
    await wait_until_refused(address)
    assert not stopping.done()
    inference.release.set()
    answer = pb.ModelInferResponse.FromString(await running)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [2, 4]
    await asyncio.wait_for(stopping, LONG_S)


async def wait_until_refused(address: str) -> None:
    """Wait until the port is closed, which happens some iterations of the loop after the stop."""
    host, port = address.split(":")
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:  # refused, or reset during the close
                return
            writer.close()
            await writer.wait_closed()


async def test_stop_cancels_calls_past_the_grace_period(
    server: GrpcioServer | NativeGrpcServer, channel: grpc.aio.Channel, inference: FakeInferenceService
) -> None:
    running = asyncio.create_task(call(channel, "ModelInfer", infer_request("held")))
    await inference.held.wait()
    await asyncio.wait_for(server.stop(0.01), LONG_S)
    assert inference.cancelled.is_set()
    with pytest.raises(grpc.aio.AioRpcError):
        await running


async def test_port_in_use_is_an_error_that_names_it(
    inference: FakeInferenceService, models: FakeModelService, address: str, grpc_transport: str
) -> None:
    port = int(address.split(":")[1])
    second = Frontend(inference, models, grpc_transport, port=port).server
    with pytest.raises(ServeError, match=f"grpc_port: cannot listen on 127.0.0.1:{port}: .*in use"):
        await second.start()
    await second.stop(0)


async def test_ipv6_address_is_served(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    server = Frontend(inference, models, grpc_transport, host="::1").server
    port = await server.start()
    async with grpc.aio.insecure_channel(f"[::1]:{port}") as channel:
        answer = await call(channel, "ServerLive", b"")
    assert pb.ServerLiveResponse.FromString(answer).live
    await server.stop(0)


async def test_calls_past_the_stream_limit_wait_in_the_client(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport, grpc_max_connection_calls=1) as (front, channel):
        running = asyncio.create_task(call(channel, "ModelInfer", infer_request("held")))
        await inference.held.wait()
        waiting = asyncio.create_task(call(channel, "ModelInfer", infer_request()))
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(front.address, options=options) as another:
            await call(another, "ModelInfer", infer_request())
        assert len(inference.received) == 2
        inference.release.set()
        await asyncio.gather(running, waiting)
    assert len(inference.received) == 3


async def test_expired_connection_finishes_its_calls_and_the_client_reconnects(
    inference: FakeInferenceService, models: FakeModelService, grpc_transport: str
) -> None:
    async with frontend(inference, models, grpc_transport, grpc_max_connection_age_s=0.1) as (_, channel):
        running = asyncio.create_task(call(channel, "ModelInfer", infer_request("held")))
        await inference.held.wait()
        async with asyncio.timeout(LONG_S):
            while channel.get_state() is grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await call(channel, "ModelInfer", infer_request())
        assert not running.done()
        inference.release.set()
        await running
