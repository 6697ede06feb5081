"""The composition root: options become objects here, and are started, drained and stopped in order."""

import asyncio
import gc
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import onnxruntime
import uvloop
from prometheus_client import CollectorRegistry

from ortserve import __version__
from ortserve.clock import monotonic_ns
from ortserve.config.options import ServerOptions
from ortserve.engine.cpu_budget import cpu_budget
from ortserve.engine.device.readings import devices_reader
from ortserve.engine.runtime import Runtime
from ortserve.errors import ServeError
from ortserve.example import repository_path
from ortserve.frontends.exposure import is_loopback, open_to_everybody
from ortserve.frontends.grpc.calls import SERVICE_NAME, Calls
from ortserve.frontends.grpc.configuration_calls import ConfigurationCalls
from ortserve.frontends.grpc.health_calls import HealthCalls
from ortserve.frontends.grpc.infer_calls import InferCalls
from ortserve.frontends.grpc.infer_stream import InferStreamCalls
from ortserve.frontends.grpc.metadata_calls import MetadataCalls
from ortserve.frontends.grpc.native.limits import ENCODINGS, connection_limits
from ortserve.frontends.grpc.native.server import NativeGrpcServer
from ortserve.frontends.grpc.reflection_calls import REFLECTION_SERVICES, ReflectionCalls
from ortserve.frontends.grpc.repository_calls import RepositoryCalls
from ortserve.frontends.grpc.router import Router
from ortserve.frontends.grpc.server import GrpcServer
from ortserve.frontends.grpc.settings_calls import SettingsCalls
from ortserve.frontends.grpc.shared_memory_calls import SharedMemoryCalls
from ortserve.frontends.grpc.statistics_calls import StatisticsCalls
from ortserve.frontends.grpc.streams import Streams
from ortserve.frontends.http.answers import refusal
from ortserve.frontends.http.control import make_control_app
from ortserve.frontends.http.exchange import Lane
from ortserve.frontends.http.generate_route import make_generate_router
from ortserve.frontends.http.health import HealthFromThreads
from ortserve.frontends.http.infer_route import InferRoute
from ortserve.frontends.http.lane import UVICORN, lane_fits
from ortserve.frontends.http.limits import http_limits
from ortserve.frontends.http.server import HttpServer, RestApp
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.tls.transport import TlsEntrance
from ortserve.registry.registry import Registry
from ortserve.service.access import Access, Group, Guard
from ortserve.service.inference import InferenceService
from ortserve.service.key_files import KeyFiles
from ortserve.service.load import LoadMeter
from ortserve.service.log_settings import LogSettings
from ortserve.service.management import Management
from ortserve.service.models import EXTENSIONS, ModelService
from ortserve.service.repository import RepositoryService
from ortserve.service.shared_memory import SYSTEM_SHARED_MEMORY, SharedMemory
from ortserve.service.statistics import StatisticsService
from ortserve.service.trace_settings import TRACE, TraceSettings
from ortserve.service.trace_writing import TraceWriter
from ortserve.telemetry.exposition import MetricsServer
from ortserve.telemetry.logs import LogSwitches, configure_logging, log_event
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.trace_files import TraceFiles
from ortserve.telemetry.tracing import Tracing, start_tracing
from ortserve.telemetry.triton_metrics import TritonMetrics

if TYPE_CHECKING:
    from ortserve.frontends.tls.server_certificate import ServerCertificate

logger: Final = logging.getLogger(__name__)

_SWITCH_INTERVAL_S: Final = 0.00005
"""How long the event loop may keep the interpreter lock while a worker waits for it. At Python's 5 ms a worker stood
0.8 ms behind the answers of its last batch before it could begin the next, and fewer rows a second were served
(``loadtests/batched_compute.py``). Where runs happen on the loop itself nobody waits for it."""


def run(options: ServerOptions) -> int:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once.

    Returns:
        The exit status: 0 after a complete drain, 1 when the server could not start.
    """
    switches = configure_logging(options.log_level, options.access_log, options.log_format)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(options, switches))
        except ServeError as error:
            log_event(logger, logging.ERROR, "the server cannot start", reason=error.message)
            return 1
    return 0


async def _serve(options: ServerOptions, switches: LogSwitches) -> None:
    server = Server(options, switches)
    asked_to_stop = _catch_signals()
    try:
        await server.start()
        loading = asyncio.create_task(server.load(), name="load")
        stopping = asyncio.create_task(asked_to_stop.wait(), name="signals")
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()  # a repository that cannot be read ends the server
        watching = asyncio.create_task(server.watch(), name="watch")
        await stopping
        loading.cancel()
        watching.cancel()
        await server.drain()
    finally:
        await server.stop()


def _tracing(options: ServerOptions, metrics: Metrics) -> Tracing | None:
    """Raises ServeError: invalid_input."""
    tracing = start_tracing(
        os.environ,
        endpoint=options.otlp_endpoint,
        protocol=options.otlp_protocol,
        sample_ratio=options.otlp_sample_ratio,
        service_name=options.otlp_service_name,
        default_service_name=options.server_name,
        clock=monotonic_ns,
    )
    if tracing is not None:
        metrics.set_tracing(tracing)
    return tracing


def _key_paths(options: ServerOptions) -> dict[Group, Path]:
    """The files of the groups that are guarded."""
    paths = {
        Group.INFER: options.infer_keys_file,
        Group.METADATA: options.metadata_keys_file,
        Group.CONTROL: options.control_keys_file,
        Group.METRICS: options.metrics_keys_file,
    }
    return {group: path for group, path in paths.items() if path is not None}


def _lane(
    inference: InferenceService,
    options: ServerOptions,
    guard: Guard | None,
    tracing: Tracing | None,
    load_reports: LoadReports | None,
) -> Lane | None:
    if not options.http_lane:
        return None
    if not lane_fits():
        log_event(
            logger, logging.WARNING, "the HTTP lane is off", reason="uvicorn is another version", expected=UVICORN
        )
        return None
    return Lane(
        inference,
        max_body_bytes=options.max_body_bytes,
        compression_min_bytes=options.compression_min_bytes,
        clock=monotonic_ns,
        guard=guard,
        tracing=tracing,
        load_reports=load_reports,
    )


def _extensions(options: ServerOptions) -> tuple[str, ...]:
    """What the server says of itself that it can."""
    chosen = {SYSTEM_SHARED_MEMORY: options.allow_client_shm, TRACE: options.trace_file is not None}
    return (*EXTENSIONS, *(extension for extension, is_on in chosen.items() if is_on))


def _certificate(options: ServerOptions, metrics: Metrics) -> "ServerCertificate | None":
    if options.tls_cert_file is None or options.tls_key_file is None:
        return None
    # Here, because it imports a large library that nothing else needs.
    from ortserve.frontends.tls.certificate import TlsFiles
    from ortserve.frontends.tls.server_certificate import ServerCertificate

    files = TlsFiles(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)
    return ServerCertificate(files, options.tls_min_version, metrics)


def _catch_signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the next one has its default effect again."""
    loop = asyncio.get_running_loop()
    caught = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        caught.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    return caught


class Server:
    """A whole server: its parts, and the order in which they come up and go down. Loop thread only."""

    def __init__(self, options: ServerOptions, switches: LogSwitches) -> None:
        repositories = [*options.repositories, *([repository_path()] if options.example else [])]
        prometheus = CollectorRegistry()
        metrics = Metrics(prometheus, onnxruntime_version=onnxruntime.__version__)
        if options.triton_metrics:
            TritonMetrics(prometheus, metrics)
        self._options = options
        self._prometheus = prometheus
        self._tracing = _tracing(options, metrics)
        self._key_files = KeyFiles(_key_paths(options))
        self._access = Access(_key_paths(options), self._key_files.keyring(), on_refusal=metrics.unauthorized)
        self._following_keys: asyncio.Task[None] | None = None
        self._load_reports: LoadReports | None = None
        if options.load_reports != "never":
            meter = LoadMeter(metrics, processors=cpu_budget(), clock=monotonic_ns)
            self._load_reports = LoadReports(meter, is_always=options.load_reports == "always")
        runtime = Runtime(options.execution_provider_libraries, global_threads=options.global_threads)
        metrics.set_devices_source(devices_reader(runtime.devices))
        self._registry = Registry(repositories, options, metrics, monotonic_ns, runtime)
        self._shared_memory = SharedMemory(is_allowed=options.allow_client_shm)
        files = TraceFiles(options.trace_file, max_bytes=options.trace_max_bytes) if options.trace_file else None
        self._traces = TraceSettings(self._registry, options, files)
        self._models = ModelService(
            self._registry,
            server_name=options.server_name,
            strict_readiness=options.strict_readiness,
            extensions=_extensions(options),
        )
        inference = InferenceService(
            self._registry,
            metrics,
            monotonic_ns,
            max_inflight_bytes=options.max_inflight_bytes,
            shared_memory=self._shared_memory,
            trace_writer=TraceWriter(self._traces, monotonic_ns) if files else None,
        )
        self._repository = RepositoryService(
            self._registry, mode=options.model_control_mode, load_models=options.load_model
        )
        management = Management(
            self._repository,
            StatisticsService(self._registry, monotonic_ns),
            LogSettings(switches),
            self._traces,
        )
        control = make_control_app(
            self._models,
            management,
            self._shared_memory,
            title=options.server_name,
            version=__version__,
            max_body_bytes=options.max_body_bytes,
            guarded=self._access.guards,
        )
        control.include_router(
            make_generate_router(
                inference,
                self._models,
                max_body_bytes=options.max_body_bytes,
                clock=monotonic_ns,
                tracing=self._tracing,
                load_reports=self._load_reports,
            )
        )
        rest = RestApp(
            InferRoute(
                inference,
                max_body_bytes=options.max_body_bytes,
                compression_min_bytes=options.compression_min_bytes,
                clock=monotonic_ns,
                tracing=self._tracing,
                load_reports=self._load_reports,
            ),
            control,
            self._access.guards,
        )
        self._lane = _lane(inference, options, self._access.guards.get(Group.INFER), self._tracing, self._load_reports)
        self._certificate = _certificate(options, metrics)
        self._renewing: asyncio.Task[None] | None = None
        self._http = HttpServer(
            rest,
            self._lane,
            host=options.host,
            port=options.http_port,
            limits=http_limits(options, idle_timeout_s=options.idle_timeout_s),
            max_connection_age_s=options.http_max_connection_age_s,
            on_refusal=partial(metrics.rejected, ""),
            tls=self._entrance("http", options.http_max_connections),
        )
        streams = Streams(options.grpc_max_streams)
        metrics.set_streams_source(lambda: streams.open_count)
        self._grpc = self._grpc_server(inference, management, streams)
        self._metrics: MetricsServer | None = None

    def _grpc_server(
        self, inference: InferenceService, management: Management, streams: Streams
    ) -> GrpcServer | NativeGrpcServer:
        options = self._options
        router = Router(self._calls(inference, management, streams), self._access.guards)
        if options.grpc_transport == "grpcio":
            return GrpcServer(
                router,
                streams,
                options,
                host=options.host,
                port=options.grpc_port,
                max_body_bytes=options.max_body_bytes,
                credentials=self._certificate.grpc_credentials() if self._certificate else None,
                handshake_timeout_s=options.tls_handshake_timeout_s if self._certificate else None,
            )
        return NativeGrpcServer(
            router.find,
            {f"/{SERVICE_NAME}/ModelInfer": InferCalls(inference, self._tracing, self._load_reports).begin},
            streams,
            inference.hold,
            connection_limits(options, max_message_bytes=options.max_body_bytes),
            host=options.host,
            port=options.grpc_port,
            clock=monotonic_ns,
            encoding=ENCODINGS[options.grpc_response_compression],
            guards=router.guards,
            tls=self._entrance("grpc", options.grpc_max_connections, alpn="h2"),
        )

    def _entrance(
        self, port: Literal["http", "grpc"], max_handshakes: int, *, alpn: str | None = None
    ) -> TlsEntrance | None:
        if self._certificate is None:
            return None
        return TlsEntrance(
            self._certificate.context_of(port),
            port=port,
            handshake_timeout_s=self._options.tls_handshake_timeout_s,
            max_handshakes=max_handshakes,
            alpn=alpn,
        )

    def _calls(self, inference: InferenceService, management: Management, streams: Streams) -> list[Calls]:
        """Everything that is answered over gRPC."""
        options = self._options
        calls: list[Calls] = [
            InferCalls(inference, self._tracing, self._load_reports),
            InferStreamCalls(
                inference,
                streams,
                max_requests=options.grpc_stream_requests,
                max_bytes=options.grpc_stream_bytes,
                tracing=self._tracing,
                load_reports=self._load_reports,
            ),
            MetadataCalls(self._models),
            ConfigurationCalls(self._models),
            RepositoryCalls(management.repository),
            StatisticsCalls(management.statistics),
            SettingsCalls(management.logs, management.traces),
            SharedMemoryCalls(self._shared_memory),
        ]
        services = (SERVICE_NAME, HealthCalls.service, *REFLECTION_SERVICES)
        calls.append(HealthCalls(self._models, streams, services))
        calls.extend(ReflectionCalls(service, streams, services) for service in REFLECTION_SERVICES)
        return calls

    async def start(self) -> None:
        """Listen on all ports. Health answers from now on, models as they are loaded.

        Raises:
            ServeError: conflict, naming the option of an address that cannot be listened on.
        """
        host = self._options.host
        certificate = self._certificate
        self._metrics = MetricsServer(
            self._prometheus,
            host,
            self._options.metrics_port,
            health=HealthFromThreads(self._models, asyncio.get_running_loop()).answer,
            refuse=partial(refusal, self._access.guards.get(Group.METRICS)),
            tls=certificate.context_of("metrics") if certificate and self._options.tls_metrics else None,
            handshake_timeout_s=self._options.tls_handshake_timeout_s,
        )
        if certificate is not None:
            self._renewing = asyncio.create_task(certificate.watch(), name="certificate")
        following = self._key_files.follow(self._access, self._options.keys_poll_s)
        self._following_keys = asyncio.create_task(following, name="keys")
        ports = {"http": await self._http.start(), "grpc": await self._grpc.start(), "metrics": self._metrics.port}
        for protocol, port in ports.items():
            way: dict[str, object] = {"lane": self._lane is not None} if protocol == "http" else {}
            if certificate is not None and (protocol != "metrics" or self._options.tls_metrics):
                is_mutual = certificate.asks_clients and protocol != "metrics"
                way = {"tls": "mutual" if is_mutual else "server"} | way
            log_event(logger, logging.INFO, "listening", protocol=protocol, host=host, port=port, **way)
        if is_open := open_to_everybody(
            host,
            self._access.guards,
            loads_models=self._options.model_control_mode == "explicit",
            shares_memory=self._options.allow_client_shm,
        ):
            told = "what has no keys is open to everybody who reaches this address"
            log_event(logger, logging.WARNING, told, host=host, open=", ".join(is_open))
        if self._access.guards and certificate is None and not is_loopback(host):
            told = "keys travel in plain text, unless something in front of the server encrypts"
            log_event(logger, logging.WARNING, told, host=host)

    async def load(self) -> None:
        """Load all models.

        Raises:
            ServeError: invalid_input, when a repository cannot be read.
        """
        await self._repository.start()
        # What start-up made will live as long as the process: the garbage collector need not look at it again.
        gc.collect()
        gc.freeze()
        log_event(logger, logging.INFO, "loading is over", ready=self._models.is_ready())

    async def watch(self) -> None:
        """Follow the repositories for as long as the server runs, where its mode is to."""
        await self._repository.watch(self._options.repository_poll_s)

    async def drain(self) -> None:
        """Turn readiness off, wait for load balancers to notice, then finish what was admitted."""
        options = self._options
        self._models.begin_exit()
        log_event(logger, logging.INFO, "draining", delay_s=options.drain_delay_s, timeout_s=options.drain_timeout_s)
        self._http.begin_drain()
        await asyncio.sleep(options.drain_delay_s)
        await asyncio.gather(self._http.stop(options.drain_timeout_s), self._grpc.stop(options.drain_timeout_s))
        await self._registry.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close, options.otlp_flush_timeout_s)
        log_event(logger, logging.INFO, "drained")

    async def stop(self) -> None:
        """Close what is still open; after ``drain`` that is the metrics port, which shows the drain to its end."""
        await asyncio.gather(self._http.stop(0), self._grpc.stop(0))
        self._traces.close()
        if self._renewing is not None:
            self._renewing.cancel()
        if self._following_keys is not None:
            self._following_keys.cancel()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
