"""The composition root: creates each object once from the options, and passes it to its users."""

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import onnxruntime
from prometheus_client import CollectorRegistry

from ortserve import __version__
from ortserve.app.busy_polling import make_busy_polling
from ortserve.app.watchdog import Watchdog
from ortserve.batching.response_cache import ResponseCache
from ortserve.clock import monotonic_ns
from ortserve.config.options import ServerOptions
from ortserve.core.large_memory import MAX_KEPT_BYTES, LargeMemory
from ortserve.device.devices import DeviceRuntime, DevicesReader
from ortserve.device.nvml import GpuReader
from ortserve.device.region import are_regions_possible, open_region
from ortserve.engine.process_limits import cpu_budget, memory_limit
from ortserve.example import repository_path
from ortserve.frontends.grpc.calls import SERVICE_NAME, Calls
from ortserve.frontends.grpc.grpcio_server import GrpcioServer
from ortserve.frontends.grpc.infer_calls import InferCalls
from ortserve.frontends.grpc.infer_stream import InferStreamCalls
from ortserve.frontends.grpc.management_calls import ManagementCalls, SharedMemoryCalls
from ortserve.frontends.grpc.model_calls import ModelCalls
from ortserve.frontends.grpc.native.limits import RESPONSE_ENCODINGS, connection_limits
from ortserve.frontends.grpc.native.server import NativeGrpcServer
from ortserve.frontends.grpc.router import Router
from ortserve.frontends.grpc.standard_calls import REFLECTION_SERVICES, HealthCalls, ReflectionCalls
from ortserve.frontends.grpc.streams import Streams
from ortserve.frontends.http.asgi_exchange import AsgiEndpoint
from ortserve.frontends.http.connection import ConnectionContext
from ortserve.frontends.http.console_routes import console_routes, encode_event
from ortserve.frontends.http.control_app import make_control_app
from ortserve.frontends.http.generate_routes import generate_routes
from ortserve.frontends.http.infer_exchange import InferEndpoint
from ortserve.frontends.http.limits import http_limits
from ortserve.frontends.http.server import HttpServer
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.tls.transport import TlsPort
from ortserve.frontends.trace_headers import HttpTraces
from ortserve.registry.recording import Recordings
from ortserve.registry.registry import Registry
from ortserve.registry.state_file import DEFAULT_FOLDER, StateFile
from ortserve.registry.stores.mirrors import open_repositories
from ortserve.service.access import Access, Group, Guard
from ortserve.service.codec_threads import CodecThreads
from ortserve.service.gate import BodyAdmission
from ortserve.service.inference import InferenceService
from ortserve.service.key_files import KeyFiles
from ortserve.service.labels import LabelService
from ortserve.service.load import LoadMeter
from ortserve.service.management import LogSettings, Management, StatisticsService
from ortserve.service.model_details import ModelDetails
from ortserve.service.models import EXTENSIONS, ModelService
from ortserve.service.observation import Observation
from ortserve.service.profiling import ProfilingService
from ortserve.service.recorder import Recorder, SamplingRecorder
from ortserve.service.repository import RepositoryService
from ortserve.service.rollout.control import RolloutService
from ortserve.service.server_details import ServerDetails
from ortserve.service.shared_memory import CUDA_SHARED_MEMORY, SYSTEM_SHARED_MEMORY, SharedMemory
from ortserve.service.trace_settings import TRACE, TraceSettings, TraceWriter
from ortserve.telemetry.logs import AccessLog, LogSwitches
from ortserve.telemetry.machine import CpuReader
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import LoopActivity, PollReading
from ortserve.telemetry.statistics import TritonMetrics
from ortserve.telemetry.trace_export import start_tracing
from ortserve.telemetry.trace_files import TraceFiles
from ortserve.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from ortserve.frontends.tls.certificate import ServerCertificate

logger: Final = logging.getLogger(__name__)

_BODIES_SHARE: Final = 4
"""One part in this many of the memory is for request bodies; models, runs and answers need the rest."""

_KEPT_SHARE: Final = 4
"""One part in this many of that memory is kept for the next large bodies."""

_MAX_CODEC_THREADS: Final = 4
"""Each thread may have a process that parses JSON, which takes about 40 MB."""


@dataclass(frozen=True, slots=True)
class Console:
    """The parts of the console."""

    observation: Observation
    models: ModelDetails
    server: ServerDetails


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that a server starts and stops. None of them listens yet.

    Attributes:
        prometheus: The registry of all metrics.
        access: Access control, with the keys of ``key_files``.
        certificate: None for plain text.
        tracing: None if no traces are exported.
        recordings: None if no requests are recorded.
        watchdog: The watchdog of the event loop.
        console: None without a console.
    """

    prometheus: CollectorRegistry
    access: Access
    key_files: KeyFiles
    certificate: "ServerCertificate | None"
    tracing: Tracing | None
    recordings: Recordings | None
    registry: Registry
    models: ModelService
    repository: RepositoryService
    traces: TraceSettings
    profiling: ProfilingService
    http: HttpServer
    grpc: GrpcioServer | NativeGrpcServer
    watchdog: Watchdog
    console: Console | None


def compose(options: ServerOptions, switches: LogSwitches, origins: Mapping[str, str]) -> Parts:
    """Create the parts of a server. ``origins`` are those of the options that are set.

    Raises:
        ServeError: invalid_input, with the option of an unusable file.
    """
    prometheus = CollectorRegistry()
    metrics = Metrics(prometheus, onnxruntime_version=onnxruntime.__version__)
    if options.triton_metrics:
        TritonMetrics(prometheus, metrics, read_gpus=GpuReader(os.environ).read, read_cpu=CpuReader(monotonic_ns).read)
    tracing = _tracing(options, metrics)
    certificate = _certificate(options, metrics)
    key_files = KeyFiles(_key_paths(options))
    access = Access(_key_paths(options), key_files.keyring(), on_refusal=metrics.unauthorized)
    repositories = [*options.repositories, *([repository_path()] if options.example else [])]
    folders, mirrors = open_repositories(repositories, options, options, monotonic_ns)
    if mirrors is not None:
        metrics.set_stores_source(mirrors.reading)
    runtime = DeviceRuntime(options.execution_provider_libraries, global_threads=options.global_threads)
    devices = DevicesReader(runtime.devices)
    metrics.set_devices_source(devices.read)
    activity = LoopActivity()
    watchdog = Watchdog(asyncio.get_running_loop(), activity, monotonic_ns)
    cache = ResponseCache(options.cache_bytes) if options.cache_bytes else None
    if cache is not None:
        metrics.set_cache_source(cache.reading)
    recordings = Recordings(options.record_dir) if options.record_dir else None
    state = StateFile(_state_folder(options))
    registry = Registry(folders, options, metrics, monotonic_ns, runtime, activity, cache, recordings, state, mirrors)
    polling = make_busy_polling(options, registry)
    metrics.set_loop_sources(watchdog.reading, polling.reading if polling else PollReading)
    shared_memory = SharedMemory(
        is_allowed=options.allow_client_shm, open_on_device=partial(open_region, runtime.devices)
    )
    files = TraceFiles(options.trace_file, max_bytes=options.trace_max_bytes) if options.trace_file else None
    traces = TraceSettings(registry, options, files)
    models = ModelService(
        registry,
        server_name=options.server_name,
        strict_readiness=options.strict_readiness,
        extensions=_extensions(options),
    )
    accounts = (SamplingRecorder if recordings else Recorder)(
        metrics,
        monotonic_ns,
        trace_writer=TraceWriter(traces, monotonic_ns) if files else None,
        access_log=AccessLog(switches, options.log_format) if options.access_log else None,
    )
    max_inflight_bytes = options.max_inflight_bytes or memory_limit() // _BODIES_SHARE
    memory = LargeMemory(min(MAX_KEPT_BYTES, max_inflight_bytes // _KEPT_SHARE))
    codec_threads = CodecThreads(min(_MAX_CODEC_THREADS, max(2, cpu_budget())), memory)
    inference = InferenceService(
        registry,
        accounts,
        monotonic_ns,
        max_inflight_bytes=max_inflight_bytes,
        max_json_bytes=options.max_json_bytes,
        codec_threads=codec_threads,
        shared_memory=shared_memory,
        activity=activity,
        polling=polling,
        memory=memory,
    )
    repository = RepositoryService(registry, mode=options.model_control_mode, load_models=options.load_model)
    labels = LabelService(registry)
    rollouts = RolloutService(registry, labels, monotonic_ns)
    metrics.set_rollouts_source(rollouts.readings)
    management = Management(
        repository,
        StatisticsService(registry, monotonic_ns),
        LogSettings(switches),
        traces,
        ProfilingService(registry, options, monotonic_ns),
        labels,
        rollouts,
    )
    console = _console(options, origins, registry, models, watchdog, access, devices)
    frontends = _Frontends(
        options,
        metrics,
        inference,
        codec_threads,
        management,
        models,
        shared_memory,
        access.guards,
        certificate,
        tracing,
        HttpTraces(tracing, "https" if certificate else "http") if tracing else None,
        _load_reports(options, metrics),
        console,
    )
    return Parts(
        prometheus,
        access,
        key_files,
        certificate,
        tracing,
        recordings,
        registry,
        models,
        repository,
        traces,
        management.profiling,
        frontends.http(),
        frontends.grpc(),
        watchdog,
        console,
    )


@dataclass(frozen=True, slots=True)
class _Frontends:
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
        control = make_control_app(
            self.models,
            self.management,
            self.shared_memory,
            self._load_admission("http"),
            self.codec_threads.read_load,
            title=options.server_name,
            version=__version__,
            guarded=self.guards,
        )
        control.include_router(
            generate_routes(
                self.inference,
                self.models,
                max_body_bytes=options.max_body_bytes,
                clock=monotonic_ns,
                traces=self.http_traces,
                load_reports=self.load_reports,
            )
        )
        if (console := self.console) is not None:
            control.include_router(console_routes(console.observation, console.models, console.server))
        infer = InferEndpoint(
            self.inference,
            max_body_bytes=options.max_body_bytes,
            compression_min_bytes=options.compression_min_bytes,
            clock=monotonic_ns,
            guard=self.guards.get(Group.INFER),
            traces=self.http_traces,
            load_reports=self.load_reports,
        )
        context = ConnectionContext(
            http_limits(options, idle_timeout_s=options.idle_timeout_s, max_body_bytes=options.max_body_bytes),
            max_age_s=options.http_max_connection_age_s,
            on_rejected=partial(self.metrics.rejected, ""),
        )
        return HttpServer(
            infer,
            AsgiEndpoint(control, self.guards),
            context,
            host=options.host,
            port=options.http_port,
            tls=self._tls_port("http", options.http_max_connections),
        )

    def grpc(self) -> GrpcioServer | NativeGrpcServer:
        options = self.options
        streams = Streams(options.grpc_max_streams)
        self.metrics.set_streams_source(lambda: streams.open_count)
        inference = self.inference
        admission = BodyAdmission(
            "grpc", inference.hold, inference.count_refused_body, max_body_bytes=options.max_body_bytes
        )
        infer = InferCalls(inference, admission, self.tracing, self.load_reports)
        router = Router(self._calls(infer, admission, streams), self.guards)
        if options.grpc_transport == "grpcio":
            return GrpcioServer(
                router,
                streams,
                options,
                host=options.host,
                port=options.grpc_port,
                max_body_bytes=options.max_body_bytes,
                credentials=self.certificate.grpc_credentials() if self.certificate else None,
                handshake_timeout_s=options.tls_handshake_timeout_s if self.certificate else None,
            )
        return NativeGrpcServer(
            router.find,
            {f"/{SERVICE_NAME}/ModelInfer": infer.begin},
            streams,
            inference.hold,
            connection_limits(options, max_message_bytes=options.max_body_bytes),
            host=options.host,
            port=options.grpc_port,
            clock=monotonic_ns,
            on_cut_answer=self.metrics.cut_answer,
            on_connection_error=self.metrics.connection_error,
            encoding=RESPONSE_ENCODINGS[options.grpc_response_compression],
            guards=router.guards,
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

    def _load_admission(self, protocol: str) -> BodyAdmission:
        """Of the bodies that load models. They are no requests of a model, so rejected ones are not counted."""
        return BodyAdmission(protocol, self.inference.hold, None, max_body_bytes=self.options.max_body_bytes)

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
            ManagementCalls(self.management, self._load_admission("grpc")),
            SharedMemoryCalls(self.shared_memory),
        ]
        services = (SERVICE_NAME, HealthCalls.service, *REFLECTION_SERVICES)
        calls.append(HealthCalls(self.models, streams, services))
        calls.extend(ReflectionCalls(service, streams, services) for service in REFLECTION_SERVICES)
        return calls


def _state_folder(options: ServerOptions) -> Path | None:
    """Where the server keeps what calls change; None if it has no place for it."""
    if options.state_dir is not None:
        return options.state_dir
    first = next((folder for folder in options.repositories if isinstance(folder, Path)), None)
    return None if first is None else first / DEFAULT_FOLDER


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


def _console(
    options: ServerOptions,
    origins: Mapping[str, str],
    registry: Registry,
    models: ModelService,
    watchdog: Watchdog,
    access: Access,
    devices: DevicesReader,
) -> Console | None:
    if not options.console:
        return None
    server = ServerDetails(
        options,
        origins,
        models,
        guarded=access.guards,
        runtime_version=onnxruntime.__version__,
        processors=cpu_budget(),
        memory_limit_bytes=memory_limit(),
        stalls=watchdog.reading,
        read_devices=devices.read,
    )
    observation = Observation(registry, server.live, monotonic_ns, encode=encode_event)
    return Console(observation, ModelDetails(registry, origins), server)


def _key_paths(options: ServerOptions) -> dict[Group, Path]:
    """The key files of the groups that need keys."""
    paths = {
        Group.INFER: options.infer_keys_file,
        Group.METADATA: options.metadata_keys_file,
        Group.CONTROL: options.control_keys_file,
        Group.METRICS: options.metrics_keys_file,
    }
    return {group: path for group, path in paths.items() if path is not None}


def _load_reports(options: ServerOptions, metrics: Metrics) -> LoadReports | None:
    if options.load_reports == "never":
        return None
    meter = LoadMeter(metrics, processors=cpu_budget(), clock=monotonic_ns)
    return LoadReports(meter, is_always=options.load_reports == "always")


def _extensions(options: ServerOptions) -> tuple[str, ...]:
    """The protocol extensions in the server's metadata."""
    chosen = {
        SYSTEM_SHARED_MEMORY: options.allow_client_shm,
        CUDA_SHARED_MEMORY: options.allow_client_shm and are_regions_possible(),
        TRACE: options.trace_file is not None,
    }
    return (*EXTENSIONS, *(extension for extension, is_on in chosen.items() if is_on))


def _certificate(options: ServerOptions, metrics: Metrics) -> "ServerCertificate | None":
    if options.tls_cert_file is None or options.tls_key_file is None:
        return None
    # Imported here, because it imports a large library that nothing else needs.
    from ortserve.frontends.tls.certificate import ServerCertificate, TlsFiles

    files = TlsFiles(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file)
    return ServerCertificate(files, options.tls_min_version, metrics)
