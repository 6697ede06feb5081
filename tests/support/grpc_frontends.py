"""The gRPC frontend in the test's own process, with fake services, and channels that send raw bytes."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, TypeAlias

import grpc
import numpy as np
import trustme

from fakes.service import FakeInferenceService, FakeModelService
from ortserve._pb import grpc_service_pb2 as pb
from ortserve.clock import monotonic_ns
from ortserve.config.options import ServerOptions
from ortserve.frontends.grpc.calls import SERVICE_NAME, Calls
from ortserve.frontends.grpc.grpcio_server import GrpcioServer
from ortserve.frontends.grpc.infer_calls import InferCalls
from ortserve.frontends.grpc.infer_stream import InferStreamCalls
from ortserve.frontends.grpc.management_calls import SharedMemoryCalls
from ortserve.frontends.grpc.model_calls import ModelCalls
from ortserve.frontends.grpc.native.dispatcher import CallDispatcher
from ortserve.frontends.grpc.native.server import NativeGrpcServer
from ortserve.frontends.grpc.router import Router, max_message_bytes
from ortserve.frontends.grpc.standard_calls import REFLECTION_SERVICES, HealthCalls, ReflectionCalls
from ortserve.frontends.grpc.streams import Streams
from ortserve.frontends.tls.transport import TlsPort
from ortserve.service.shared_memory import SharedMemory

OVER_TLS: Final = " over TLS"
MAX_BODY_BYTES: Final = 100_000
LONG_S: Final = 60.0
"""Upper bound of waits; only failing tests reach it."""

Stream: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class Frontend:
    """All calls on fake services, on a separate port; ``transport`` as in ``--grpc-transport``, or ``native over TLS``.

    ``streams`` are the open streams; ``address`` is the listening address.
    """

    def __init__(
        self,
        inference: FakeInferenceService,
        models: FakeModelService,
        transport: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body_bytes: int = MAX_BODY_BYTES,
        **options: Any,
    ) -> None:
        chosen = ServerOptions(host=host, grpc_port=port, max_body_bytes=max_body_bytes, **options)
        self.streams = new_streams(chosen.grpc_max_streams)
        services = (SERVICE_NAME, HealthCalls.service, *REFLECTION_SERVICES)
        service: Any = inference
        any_models: Any = models
        infer = InferCalls(service, inference.admission)
        calls: list[Calls] = [
            infer,
            InferStreamCalls(
                service,
                inference.admission,
                self.streams,
                max_requests=chosen.grpc_stream_requests,
                max_bytes=chosen.grpc_stream_bytes,
            ),
            ModelCalls(any_models),
            SharedMemoryCalls(SharedMemory(is_allowed=True)),
            HealthCalls(any_models, self.streams, services),
            *(ReflectionCalls(service, self.streams, services) for service in REFLECTION_SERVICES),
        ]
        router = Router(calls)
        self.server: GrpcioServer | NativeGrpcServer
        self.has_tls = transport.endswith(OVER_TLS)
        if transport == "grpcio":
            self.server = GrpcioServer(router, self.streams, chosen)
        else:
            dispatcher = CallDispatcher(
                router.find,
                {f"/{SERVICE_NAME}/ModelInfer": infer.begin},
                inference.gate,
                max_quick_bytes=max_body_bytes,
                max_message_bytes=partial(max_message_bytes, max_body_bytes=max_body_bytes),
                compression=chosen.grpc_response_compression,
            )
            self.server = NativeGrpcServer(
                dispatcher,
                self.streams,
                chosen,
                clock=monotonic_ns,
                max_unsent_bytes=chosen.grpc_unsent_bytes or 2**30,
                on_cut_answer=_count_nothing,
                on_connection_error=_count_nothing,
                on_rejected=_count_nothing,
                on_evicted=lambda: None,
                tls=TlsPort(
                    lambda: _tls().context, port="grpc", handshake_timeout_s=LONG_S, max_handshakes=8, alpn="h2"
                )
                if self.has_tls
                else None,
            )
        self.address = ""

    async def start(self) -> None:
        self.address = f"127.0.0.1:{await self.server.start()}"


def new_streams(max_open: int) -> Streams:
    """Open streams that count no evictions."""
    return Streams(max_open, monotonic_ns, lambda: None)


def _count_nothing(_label: object) -> None:
    pass


@dataclass(frozen=True)
class _Tls:
    """A certificate in the form that the native transport expects, and its authority."""

    authority: bytes
    context: ssl.SSLContext


@cache
def _tls() -> _Tls:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return _Tls(authority.cert_pem.bytes(), context)


@asynccontextmanager
async def frontend(
    inference: FakeInferenceService, models: FakeModelService, transport: str, **options: Any
) -> AsyncIterator[tuple[Frontend, grpc.aio.Channel]]:
    """Start a frontend and open a channel to it; ``options`` are arguments of ``Frontend``."""
    front = Frontend(inference, models, transport, **options)
    await front.start()
    try:
        options_of_channel = (("grpc.use_local_subchannel_pool", 1),)
        if front.has_tls:
            trust = grpc.ssl_channel_credentials(_tls().authority)
            opened = grpc.aio.secure_channel(front.address, trust, options_of_channel)
        else:
            opened = grpc.aio.insecure_channel(front.address, options_of_channel)
        async with opened as channel:
            yield front, channel
        # The server may not have read yet that the channel is closed, and would report its open streams.
        await wait_until(lambda: front.streams.open_count == 0)
    finally:
        await front.server.stop(0)
        await wait_until(lambda: front.streams.open_count == 0)  # its tasks must not outlive the loop


def open_stream(
    channel: grpc.aio.Channel,
    path: str = f"/{SERVICE_NAME}/ModelStreamInfer",
    *,
    timeout_s: float | None = LONG_S,
    metadata: tuple[tuple[str, str], ...] = (),
) -> Stream:
    """Open a stream of bytes in both directions."""
    call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    return call(timeout=timeout_s, metadata=metadata)


async def wait_until(claim: Callable[[], bool]) -> None:
    """Let the loop run until the claim holds."""
    async with asyncio.timeout(LONG_S):
        while not claim():  # noqa: ASYNC110  # the server has no event for every number
            await asyncio.sleep(0)


async def read(stream: Stream) -> bytes | None:
    """The next message; None at the end of the stream, whatever its status."""
    try:
        data: object = await stream.read()
    except grpc.aio.AioRpcError:
        return None
    return data if isinstance(data, bytes) else None


async def read_answer(stream: Stream) -> pb.ModelStreamInferResponse:
    """The next answer of an inference stream; fails at its end."""
    data = await read(stream)
    assert data is not None, "the stream has ended"
    return pb.ModelStreamInferResponse.FromString(data)


def infer_request(model: str = "double", request_id: str = "", size: int = 2) -> bytes:
    """A request whose input counts from 1 to ``size``."""
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    message.raw_input_contents.append(np.arange(1, size + 1, dtype=np.float32).tobytes())
    message.inputs.add(name="IN0", datatype="FP32", shape=[1, size])
    return message.SerializeToString()
