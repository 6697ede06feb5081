"""The servers of both protocols, created from shared parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from ortserve.clock import monotonic_ns
from ortserve.config.options import ServerOptions
from ortserve.engine.process_limits import memory_limit
from ortserve.frontends.grpc.calls import SERVICE_NAME, Calls
from ortserve.frontends.grpc.grpcio_server import GrpcioServer
from ortserve.frontends.grpc.infer_calls import InferCalls
from ortserve.frontends.grpc.infer_stream import InferStreamCalls
from ortserve.frontends.grpc.management_calls import ManagementCalls, SharedMemoryCalls
from ortserve.frontends.grpc.model_calls import ModelCalls
from ortserve.frontends.grpc.native.dispatcher import CallDispatcher
from ortserve.frontends.grpc.native.server import NativeGrpcServer
from ortserve.frontends.grpc.router import Router, max_message_bytes
from ortserve.frontends.grpc.standard_calls import REFLECTION_SERVICES, HealthCalls, ReflectionCalls
from ortserve.frontends.grpc.streams import Streams
from ortserve.frontends.http.asgi_exchange import AsgiEndpoint
from ortserve.frontends.http.console_routes import console_routes
from ortserve.frontends.http.context import ConnectionContext
from ortserve.frontends.http.control_app import add_routes, make_control_app
from ortserve.frontends.http.embeddings_routes import embeddings_routes
from ortserve.frontends.http.generate_routes import generate_routes
from ortserve.frontends.http.infer_exchange import InferEndpoint
from ortserve.frontends.http.server import HttpServer
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.tls.transport import TlsPort
from ortserve.frontends.trace_headers import HttpTraces
from ortserve.frontends.unsent_answers import UnsentBudget
from ortserve.service.access import Group, Guard
from ortserve.service.codec_threads import CodecThreads
from ortserve.service.gate import BodyAdmission
from ortserve.service.inference import InferenceService
from ortserve.service.management import Management
from ortserve.service.model_details import ModelDetails
from ortserve.service.models import ModelService
from ortserve.service.observation import Observation
from ortserve.service.server_details import ServerDetails
from ortserve.service.shared_memory import SharedMemory
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from ortserve.frontends.tls.certificate import ServerCertificate

_UNSENT_SHARE: Final = 8
"""One part in this many of the memory is for the unsent answers of a protocol."""

_MOST_UNSENT_BYTES: Final = 2**30


@dataclass(frozen=True, slots=True)
class Console:
    """The services behind the console: live data, and descriptions of versions and of the server."""

    observation: Observation
    models: ModelDetails
    server: ServerDetails


@dataclass(frozen=True, slots=True)
class ProtocolServers:
    """Creates the servers of both protocols from shared parts."""

    options: ServerOptions
    metrics: Metrics
    inference: InferenceService
    codec_threads: CodecThreads
    management: Management
    models: ModelService
    shared_memory: SharedMemory
    guards: Mapping[Group, Guard]
    certificate: "ServerCertificate | None"
    tracing: Tracing | None
    http_traces: HttpTraces | None
    load_reports: LoadReports | None
    console: Console | None

    def http(self) -> HttpServer:
        options = self.options
        infer = InferEndpoint(
            self.inference,
            max_body_bytes=options.max_body_bytes,
            compression_min_bytes=options.compression_min_bytes,
            clock=monotonic_ns,
            guard=self.guards.get(Group.INFER),
            traces=self.http_traces,
            load_reports=self.load_reports,
        )
        control = make_control_app(
            self.models,
            self.management,
            self.shared_memory,
            infer.admission,
            self.codec_threads.read_load,
            title=options.server_name,
            guarded=self.guards,
        )
        add_routes(control, generate_routes(infer, self.models))
        add_routes(control, embeddings_routes(infer, self.models, self.codec_threads.read_json))
        if (console := self.console) is not None:
            add_routes(control, console_routes(console.observation, console.models, console.server))
        context = ConnectionContext(
            options,
            on_rejected=partial(self.metrics.rejected, ""),
            budget=UnsentBudget("http_unsent_bytes", _unsent_limit(options.http_unsent_bytes), monotonic_ns),
            on_cut_answer=self.metrics.http_cut_answer,
            on_evicted=partial(self.metrics.evicted_idle, "http_connection"),
        )
        return HttpServer(
            infer,
            AsgiEndpoint(control, self.guards),
            context,
            tls=self._tls_port("http", options.http_max_connections),
        )

    def grpc(self) -> GrpcioServer | NativeGrpcServer:
        options = self.options
        streams = Streams(options.grpc_max_streams, monotonic_ns, partial(self.metrics.evicted_idle, "grpc_stream"))
        self.metrics.read_streams = lambda: streams.open_count
        inference = self.inference
        admission = BodyAdmission(
            "grpc", inference.gate, inference.recorder.body_rejected, max_body_bytes=options.max_body_bytes
        )
        infer = InferCalls(inference, admission, self.tracing, self.load_reports)
        router = Router(self._calls(infer, admission, streams), self.guards)
        if options.grpc_transport == "grpcio":
            credentials = self.certificate.grpc_credentials() if self.certificate else None
            return GrpcioServer(router, streams, options, credentials)
        dispatcher = CallDispatcher(
            router.find,
            {f"/{SERVICE_NAME}/ModelInfer": infer.begin},
            inference.gate,
            max_quick_bytes=options.max_body_bytes,
            max_message_bytes=partial(max_message_bytes, max_body_bytes=options.max_body_bytes),
            compression=options.grpc_response_compression,
            guards=router.guards,
        )
        return NativeGrpcServer(
            dispatcher,
            streams,
            options,
            clock=monotonic_ns,
            max_unsent_bytes=_unsent_limit(options.grpc_unsent_bytes),
            on_cut_answer=self.metrics.grpc_cut_answer,
            on_connection_error=self.metrics.grpc_connection_error,
            on_rejected=partial(self.metrics.rejected, ""),
            on_evicted=partial(self.metrics.evicted_idle, "grpc_connection"),
            tls=self._tls_port("grpc", options.grpc_max_connections, alpn="h2"),
        )

    def _tls_port(
        self, port: Literal["http", "grpc"], max_handshakes: int, *, alpn: str | None = None
    ) -> TlsPort | None:
        if self.certificate is None:
            return None
        return TlsPort(
            self.certificate.context_of(port),
            port=port,
            handshake_timeout_s=self.options.tls_handshake_timeout_s,
            max_handshakes=max_handshakes,
            alpn=alpn,
        )

    def _calls(self, infer: InferCalls, admission: BodyAdmission, streams: Streams) -> list[Calls]:
        """The handlers of all RPCs."""
        options = self.options
        calls: list[Calls] = [
            infer,
            InferStreamCalls(
                self.inference,
                admission,
                streams,
                max_requests=options.grpc_stream_requests,
                max_bytes=options.grpc_stream_bytes,
                tracing=self.tracing,
                load_reports=self.load_reports,
            ),
            ModelCalls(self.models),
            ManagementCalls(self.management, admission),
            SharedMemoryCalls(self.shared_memory),
        ]
        services = (SERVICE_NAME, HealthCalls.service, *REFLECTION_SERVICES)
        calls.append(HealthCalls(self.models, streams, services))
        calls.extend(ReflectionCalls(service, streams, services) for service in REFLECTION_SERVICES)
        return calls


def _unsent_limit(chosen: int | None) -> int:
    """The limit of the unsent answers of a protocol, ``chosen`` by its option or by the memory."""
    return chosen or min(_MOST_UNSENT_BYTES, memory_limit() // _UNSENT_SHARE)
