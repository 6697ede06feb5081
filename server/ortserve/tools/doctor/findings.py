"""Decides which findings of the catalog apply to the facts. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ortserve.engine.distributions import runtime_problem
from ortserve.engine.process_limits import SPARE_FILES
from ortserve.engine.provider_options import CPU, CUDA, GPU_PROVIDERS, TENSORRT
from ortserve.registry.catalog import ON_DEMAND, UNLOADED
from ortserve.registry.load.row_axes import JOINED
from ortserve.tools.doctor.catalog import finding
from ortserve.tools.doctor.result import (
    NOT_LOADED,
    GpuFacts,
    Memory,
    ModelCheck,
    Processors,
    RuntimeFacts,
    ServerFacts,
    Steadiness,
    System,
)
from ortserve.tools.report import Finding, Level, bytes_text

_DOT_PRODUCTS: Final = ("avx512_vnni", "avx_vnni", "asimddp")
_MIN_CUDA: Final = (13, 0)
_CAPABILITIES: Final = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
"""Compute capabilities with kernels in onnxruntime-gpu 1.31. A GPU also runs kernels of an earlier minor version."""
_SOON_DAYS: Final = 21
_EVENTS: Final = {
    "execution provider passed over": "provider_passed_over",
    "option has no effect": "option_without_effect",
    "nodes are left to the CPU": "nodes_on_cpu",
    "requests run one at a time": "not_batched",
    "rows run together because the configuration says so": "batched_against_evidence",
}
"""Kinds of findings by the beginning of a warning of the load."""
_COUNTS: Final = {
    "event_loop_stalls": "stalls of the event loop",
    "run_timeouts": "batches terminated at their time limit",
    "abandoned_runs": "runs that never ended",
    "out_of_memory": "batches that ran out of memory",
    "rows_depend": "answers that depended on the other requests of their batch",
}
"""Metrics that should be 0. The kinds of their findings have the same names."""
_LEFT_OUT: Final = {NOT_LOADED, f"UNAVAILABLE: {UNLOADED}", f"UNAVAILABLE: {ON_DEMAND}"}
"""States of versions that do not serve because a caller or an option wants it so."""


def find_in_processors(found: Processors) -> Iterator[Finding]:
    """Findings in instruction sets, quota, cores, NUMA and frequency."""
    sets, model = found.instruction_sets, found.model or "the processor"
    if not sets.get("avx2", True):
        yield finding("no_avx2", f"{model} has no AVX2")
    products = [name for name in _DOT_PRODUCTS if name in sets]
    if products and not any(sets[name] for name in products):
        yield finding(
            "no_int8_dot_product", f"{model} has no instructions for dot products of bytes ({' or '.join(products)})"
        )
    if found.quota is not None and found.quota < len(found.allowed):
        seen = f"a quota of {found.quota:g} processors, while {len(found.allowed)} are visible"
        yield finding("small_cpu_quota" if found.quota < 1 else "cpu_quota", seen)
    if found.throttled_periods:
        yield finding("cpu_throttled", f"the CPU quota was used up in {found.throttled_periods:,} periods so far")
    if found.cores and found.online and found.online > found.cores:
        yield finding("shared_cores", f"{found.online} logical processors share {found.cores} cores")
    if len(found.numa_nodes) > 1:
        sizes = ", ".join(f"{len(allowed)} on node {node}" for node, allowed in found.numa_nodes.items())
        yield finding("numa", f"the allowed processors are on several NUMA nodes: {sizes}")
    if found.governor not in (None, "performance", "schedutil"):
        yield finding("frequency_governor", f"the frequency governor is {found.governor}")


def find_in_memory(found: Memory) -> Iterator[Finding]:
    """Findings in memory limits and huge pages."""
    limit, used = found.limit_bytes, found.used_bytes
    if limit and used and used > 0.85 * limit:
        yield finding("memory_near_limit", f"the cgroup uses {bytes_text(used)} of {bytes_text(limit)}")
    if found.killed_processes:
        yield finding("processes_killed", f"the kernel killed {found.killed_processes} processes for lack of memory")
    if found.huge_pages == found.huge_pages_defrag == "always":
        yield finding("huge_pages_defrag", "transparent huge pages and their defragmentation are set to always")
    if found.huge_pages == "never":
        yield finding("no_huge_pages", "transparent huge pages are off")
    if found.shared_bytes and found.shared_bytes <= 64 * 1024**2:
        yield finding("small_shared_memory", f"shared memory has {bytes_text(found.shared_bytes)}")


def find_in_system(found: System, connections: int) -> Iterator[Finding]:
    """Findings in limits and environment. ``connections`` is the limit of connections by the server's options."""
    files = found.open_files_hard  # the server raises its soft limit to it
    if files is not None and files < connections + SPARE_FILES:
        allowed = f"the options allow {connections:,} connections"
        yield finding("few_open_files", f"the server may open {files:,} files (hard limit), and {allowed}")
    if idle := [name for name in found.environment if name.startswith(("OMP_", "KMP_", "GOMP_"))]:
        yield finding("variables_without_effect", f"{', '.join(idle)} set", *idle)
    own = [name for name in found.environment if name.startswith("ORT_") and name != "ORT_DISABLE_TELEMETRY"]
    if own:
        yield finding("runtime_variables", f"{', '.join(f'{name}={found.environment[name]}' for name in own)}", *own)


def find_in_steadiness(found: Steadiness) -> Iterator[Finding]:
    """Findings in the noise of the processors."""
    if found.spread > 1.5:
        seen = f"work of {found.median_ms:.1f} ms took {found.spread:.1f} times as long at the 99th percentile"
        yield finding("unsteady_processors", seen)
    if found.slowest > 1.3:
        yield finding(
            "unequal_processors", f"the slowest processor takes {found.slowest:.1f} times as long as the fastest"
        )
    if found.stolen > 0.02:
        yield finding("stolen_time", f"the hypervisor gave {found.stolen:.0%} of the processor time to others")
    if found.throttled_periods:
        yield finding("cpu_throttled", f"the CPU quota was used up {found.throttled_periods} times under full load")


def find_in_runtime(found: RuntimeFacts) -> Iterator[Finding]:
    """Findings in distributions, execution providers and GPUs."""
    if problem := runtime_problem(found.distributions):
        yield finding("runtime_distributions", problem)
    for trial in found.providers:
        missing = [name for name, says in trial.libraries.items() if "cannot open" in says]
        if trial.is_usable and missing:
            yield finding("missing_library", f"{trial.name} does not find {', '.join(missing)}", *missing)
        elif trial.is_offered and not trial.is_usable:
            has_gpu = bool(found.gpus) or trial.name not in GPU_PROVIDERS
            kind = "provider_unusable" if has_gpu else "provider_without_gpu"
            # onnxruntime-gpu always has the provider for TensorRT, and few install TensorRT.
            level: Level | None = "advice" if trial.name == TENSORRT and missing else None
            yield finding(kind, f"{trial.name} cannot be used: {trial.problem}", *missing, level=level)
    if found.gpu_problem.startswith("CUDA_VISIBLE_DEVICES"):
        yield finding("gpus_hidden", found.gpu_problem)
    if any(trial.name == CUDA and trial.is_offered for trial in found.providers):
        for gpu in found.gpus:
            yield from _find_in_gpu(gpu)
    elif found.gpus:
        names = ", ".join(gpu.name for gpu in found.gpus)
        yield finding("gpu_unused", f"the installed ONNX Runtime has no CUDA execution provider for {names}")


def _find_in_gpu(gpu: GpuFacts) -> Iterator[Finding]:
    if gpu.cuda is not None and _version(gpu.cuda) < _MIN_CUDA:
        yield finding("old_driver", f"driver {gpu.driver} of {gpu.name} supports CUDA {gpu.cuda}")
    if gpu.capability is not None:
        major, minor = _version(gpu.capability)
        if not any(major == known and least <= minor for known, least in _CAPABILITIES):
            yield finding("unsupported_gpu", f"{gpu.name} has compute capability {gpu.capability}")
    if gpu.memory_bytes and gpu.used_bytes and gpu.used_bytes > 0.5 * gpu.memory_bytes:
        seen = f"{bytes_text(gpu.used_bytes)} of {bytes_text(gpu.memory_bytes)} of {gpu.name} are in use"
        yield finding("gpu_memory_in_use", seen)


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return (int(major), int(minor or 0))


def find_in_models(models: Sequence[ModelCheck], budget: int | None, free_bytes: int) -> Iterator[Finding]:
    """Findings in each model and in all models together.

    Args:
        models: The checks of all versions.
        budget: Threads that the server may keep busy; None to allow any number.
        free_bytes: Memory that the server may take.
    """
    if not models:
        yield finding("empty_repository", "the repository has no models")
    for model in models:
        label = model.label
        if model.problem:
            yield finding("model_fails", f"{label}: {model.problem}", label)
        if model.skipped:
            yield finding("model_not_checked", f"{label} was not loaded: {model.skipped}", label)
        for event in model.events:
            beginning, _, reason = event.partition(": ")
            if reason != JOINED:  # ragged inputs require batched: true, and no change would end this warning
                yield finding(_EVENTS.get(beginning, "load_warning"), f"{label}: {event}", label)
        threads = model.instances * (model.threads or 0)
        if budget is not None and threads > budget and model.execution_provider == CPU:
            seen = f"{label}: {model.instances} instances of {model.threads} threads, for {budget} processors"
            yield finding("too_many_threads", seen, label)
    memory = sum(model.memory_bytes or 0 for model in models)
    if memory > 0.8 * free_bytes:
        seen = f"loading the models took {bytes_text(memory)}, and {bytes_text(free_bytes)} are free"
        yield finding("little_memory", seen, level="problem" if memory > free_bytes else None)


def find_in_server(found: ServerFacts) -> Iterator[Finding]:
    """Findings in health, models, keys, TLS and metrics of a server."""
    if not found.live:
        yield finding("not_live", "the server is not live")
    elif not found.ready:
        yield finding("not_ready", "the server is live, but not ready")
    for label, state in (found.models or {}).items():
        if not state.startswith("READY") and state not in _LEFT_OUT:
            yield finding("model_not_ready", f"{label} is {state}", label)
    if found.certificate_problem:
        yield finding("untrusted_certificate", f"the certificate is not trusted here: {found.certificate_problem}")
    if found.certificate_expires_s is not None:
        yield from find_in_expiry(found.certificate_expires_s)
    if found.reach != "loopback":
        seen, has_keys = f"the server is on a {found.reach} address", found.reach == "public"
        yield from find_in_exposure(
            seen, has_tls=found.tls, has_control_keys=not found.control_is_open, has_keys=has_keys
        )
    if found.metrics is not None:
        yield from _find_in_metrics(found.metrics)


def find_in_expiry(seconds: float) -> Iterator[Finding]:
    """A finding if the certificate, which expires in ``seconds``, has expired or soon expires."""
    days = seconds / 86_400
    if days < _SOON_DAYS:
        seen = f"the certificate expires in {days:.0f} days" if days >= 0 else f"it expired {-days:.0f} days ago"
        yield finding("certificate_expires", seen, level="problem" if days < 0 else None)


def find_in_exposure(seen: str, *, has_tls: bool, has_control_keys: bool, has_keys: bool) -> Iterator[Finding]:
    """Findings about an exposed server. ``seen`` describes the exposure; plain text is worse if it may carry keys."""
    if not has_tls:
        yield finding("plain_text", f"{seen}, without TLS", level="problem" if has_keys else None)
    if not has_control_keys:
        yield finding("open_control", f"{seen}, and control calls need no key")


def _find_in_metrics(metrics: Mapping[str, float]) -> Iterator[Finding]:
    used, limit = metrics.get("open_files", 0), metrics.get("most_open_files", 0)
    if limit and used > 0.8 * limit:
        yield finding("open_files_near_limit", f"{used:,.0f} of {limit:,.0f} open files are in use")
    if (saturation := metrics.get("saturation", 0)) > 0.8:
        seen = f"a model receives {saturation:.0%} of the rows that it can compute"
        yield finding("saturated", seen, level="problem" if saturation > 1 else None)
    requests, rejected = metrics.get("requests", 0), metrics.get("rejected_requests", 0)
    if rejected > 0.01 * (requests + rejected):
        yield finding("rejected_requests", f"{rejected:,.0f} requests were rejected, {requests:,.0f} reached a model")
    for kind, what in _COUNTS.items():
        if count := metrics.get(kind, 0):
            yield finding(kind, f"{what}: {count:,.0f}")
