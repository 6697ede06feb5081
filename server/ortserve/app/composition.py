"""The composition root: creates each object once from the options, and passes it to its users."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnxruntime
from prometheus_client import CollectorRegistry

from ortserve.app.protocol_servers import Console, ProtocolServers
from ortserve.app.watchdog import Watchdog
from ortserve.batching.response_cache import ResponseCache
from ortserve.clock import monotonic_ns
from ortserve.config.options import ServerOptions, state_folder
from ortserve.core.large_memory import MAX_KEPT_BYTES, LargeMemory
from ortserve.device.devices import DeviceRuntime, DevicesReader
from ortserve.device.nvml import GpuReader
from ortserve.device.region import are_regions_possible, open_region
from ortserve.engine.process_limits import Throttling, cpu_budget, cpu_quotas, memory_limit
from ortserve.engine.process_memory import return_large_blocks
from ortserve.engine.providers import check_names
from ortserve.example import repository_path
from ortserve.frontends.grpc.grpcio_server import GrpcioServer
from ortserve.frontends.grpc.native.server import NativeGrpcServer
from ortserve.frontends.http.console_routes import encode_event
from ortserve.frontends.http.server import HttpServer
from ortserve.frontends.load_reports import LoadReports
from ortserve.frontends.trace_headers import HttpTraces
from ortserve.registry.recording import Recordings
from ortserve.registry.registry import Registry
from ortserve.registry.state_file import StateFile
from ortserve.registry.stores.mirrors import open_repositories
from ortserve.service.access import Access, Group
from ortserve.service.busy_polling import BusyPolling, PollPolicy
from ortserve.service.codec_threads import CodecThreads
from ortserve.service.inference import InferenceService
from ortserve.service.key_files import KeyFiles
from ortserve.service.labels import LabelService
from ortserve.service.load_meter import LoadMeter
from ortserve.service.loop_turns import LoopTurns
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

_BODIES_SHARE: Final = 4
"""One part in this many of the memory is for request bodies; models, runs and answers need the rest."""

_KEPT_SHARE: Final = 4
"""One part in this many of that memory is kept for the next large bodies."""

_MAX_CODEC_THREADS: Final = 4
"""Each thread may have a process that parses JSON, which takes about 40 MB."""


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
    """Create the parts of a server. ``origins`` says where each option that is set was set.

    Raises:
        ServeError: invalid_input, with the option of an unusable file, or with an unknown execution provider.
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
        metrics.read_stores = mirrors.reading
    runtime = DeviceRuntime(options.execution_provider_libraries, global_threads=options.global_threads)
    if not options.execution_provider_libraries:  # a library without a device here hides the names of its providers
        check_names(options.execution_providers, "execution_providers")
    devices = DevicesReader(runtime.devices)
    metrics.read_devices = devices.read
    activity = LoopActivity()
    watchdog = Watchdog(asyncio.get_running_loop(), activity, monotonic_ns)
    cache = ResponseCache(options.cache_bytes) if options.cache_bytes else None
    if cache is not None:
        metrics.read_cache = cache.reading
    recordings = Recordings(options.record_dir) if options.record_dir else None
    registry = Registry(
        folders,
        options,
        metrics,
        monotonic_ns,
        runtime,
        activity,
        cache,
        recordings,
        StateFile(state_folder(options)),
        mirrors,
        memory_budget_bytes=options.memory_budget_bytes,
        gpu_memory_budget_bytes=options.gpu_memory_budget_bytes,
        on_demand_wait_s=options.on_demand_wait_s,
        is_polled=options.model_control_mode == "poll",
    )
    metrics.memory_budget_bytes = options.memory_budget_bytes
    metrics.gpu_memory_budget_bytes = options.gpu_memory_budget_bytes
    if options.memory_budget_bytes is not None:
        return_large_blocks()
    polling = _polling(options, registry)
    metrics.read_loop = watchdog.reading
    metrics.read_polls = polling.reading if polling else PollReading
    shared_memory = SharedMemory(
        is_allowed=options.allow_client_shm, open_on_device=partial(open_region, runtime.devices)
    )
    files = TraceFiles(options.trace_file, max_bytes=options.trace_max_bytes) if options.trace_file else None
    traces = TraceSettings(registry, options, files)
    turns = LoopTurns()
    models = ModelService(
        registry,
        server_name=options.server_name,
        strict_readiness=options.strict_readiness,
        extensions=_extensions(options),
        turns=turns,
    )
    recorder = (SamplingRecorder if recordings else Recorder)(
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
        recorder,
        monotonic_ns,
        max_inflight_bytes=max_inflight_bytes,
        max_json_bytes=options.max_json_bytes,
        codec_threads=codec_threads,
        shared_memory=shared_memory,
        activity=activity,
        polling=polling,
        memory=memory,
    )
    repository = RepositoryService(
        registry, mode=options.model_control_mode, load_models=options.load_model, turns=turns
    )
    labels = LabelService(registry)
    rollouts = RolloutService(registry, labels, monotonic_ns)
    metrics.read_rollouts = rollouts.readings
    management = Management(
        repository=repository,
        statistics=StatisticsService(registry, monotonic_ns, turns=turns),
        logs=LogSettings(switches),
        traces=traces,
        profiling=ProfilingService(registry, options, monotonic_ns),
        labels=labels,
        rollouts=rollouts,
    )
    console: Console | None = None
    if options.console:
        details = ServerDetails(
            options,
            origins,
            models,
            guarded=access.guards,
            runtime_version=onnxruntime.__version__,
            stalls=watchdog.reading,
            read_devices=devices.read,
            read_memory=registry.memory_use,
        )
        observation = Observation(registry, rollouts.read_all, details.live, monotonic_ns, encode=encode_event)
        console = Console(observation, ModelDetails(registry, origins), details)
    servers = ProtocolServers(
        options=options,
        metrics=metrics,
        inference=inference,
        codec_threads=codec_threads,
        management=management,
        models=models,
        shared_memory=shared_memory,
        guards=access.guards,
        certificate=certificate,
        tracing=tracing,
        http_traces=HttpTraces(tracing, "https" if certificate else "http") if tracing else None,
        load_reports=_load_reports(options, metrics),
        console=console,
    )
    return Parts(
        prometheus=prometheus,
        access=access,
        key_files=key_files,
        certificate=certificate,
        tracing=tracing,
        recordings=recordings,
        registry=registry,
        models=models,
        repository=repository,
        traces=traces,
        profiling=management.profiling,
        http=servers.http(),
        grpc=servers.grpc(),
        watchdog=watchdog,
        console=console,
    )


def _polling(options: ServerOptions, registry: Registry) -> BusyPolling | None:
    """The busy polling of the event loop; None if the loop always sleeps between requests."""
    max_ns = options.busy_poll_us * 1000
    if max_ns == 0 or options.grpc_transport == "grpcio":
        return None
    quotas = cpu_quotas()
    throttling = Throttling([quota.folder / "cpu.stat" for quota in quotas], monotonic_ns())

    def may_poll(now_ns: int) -> bool:
        return not registry.is_changing and not throttling.is_recent(now_ns)

    return BusyPolling(asyncio.get_running_loop(), monotonic_ns, PollPolicy(max_ns), may_poll)


def _tracing(options: ServerOptions, metrics: Metrics) -> Tracing | None:
    """Start the export of traces; None if no traces are exported. Raises ServeError: invalid_input."""
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
        metrics.tracing = tracing
    return tracing


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
