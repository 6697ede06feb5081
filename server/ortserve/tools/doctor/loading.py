"""Loading the models of a repository as the server would, in a process of its own that may crash or hang.

Nothing is written to disk: settings that write files are removed first.
"""

import logging
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final

import psutil

from ortserve.clock import monotonic_ns
from ortserve.config.model import LoadOptions, ModelOptions
from ortserve.config.options import ServerOptions
from ortserve.config.session import provider_parts
from ortserve.device.devices import DeviceRuntime
from ortserve.errors import ServeError
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.repository.source import VersionSource, read_sources
from ortserve.tools.apart import Failure, run_apart
from ortserve.tools.console import progress
from ortserve.tools.doctor.result import ModelCheck
from ortserve.tools.report import bytes_text

_WRITING_ENTRIES: Final = ("ep.context_", "session.collect_node_memory_stats_to_file", "session.optimized_model_")
_WRITING_OPTIONS: Final = ("cache", "dump", "context", "build_log")


def check_models(repository: Path, options: ServerOptions, free_bytes: int, limit_s: float) -> list[ModelCheck]:
    """Load all versions whose files and configurations have no problem, one after the other.

    Args:
        repository: The folder of models.
        options: Of the server.
        free_bytes: A model whose files do not fit is not loaded.
        limit_s: For each model. One that crashes or hangs does not stop the others.
    """
    defaults = LoadOptions(**{name: getattr(options, name) for name in LoadOptions.model_fields})
    checks: list[ModelCheck] = []
    to_load: list[tuple[ModelCheck, VersionSource]] = []
    for source in read_sources([repository], defaults):
        events = tuple(f"option has no effect: {reason}" for reason in source.without_effect)
        if source.problem or not source.versions:
            checks.append(ModelCheck(source.name, problem=source.problem or "it has no versions", events=events))
        for number, version in sorted(source.versions.items()):
            instances = version.configuration.options.instances
            nbytes = sum(size for _, _, _, size, _ in version.fingerprints)
            check = ModelCheck(source.name, number, version.problem, "", events, None, instances, None, nbytes)
            if not check.problem and instances * nbytes <= free_bytes:
                to_load.append((check, version))
                continue
            needed = f"{instances} instances need {bytes_text(instances * nbytes)}, {bytes_text(free_bytes)} are free"
            checks.append(check if check.problem else replace(check, skipped=needed))
    libraries, shared = tuple(options.execution_provider_libraries), options.global_threads
    results = run_apart(partial(load_one, libraries=libraries, global_threads=shared), to_load, limit_s)
    with progress("loading models", len(to_load)) as step:
        for number, (check, _) in enumerate(to_load):
            step(number, f"loading {check.label}")
            result = next(results)
            checks.append(_failed(check, result) if isinstance(result, Failure) else result)
    return sorted(checks, key=lambda check: (check.name, check.version or 0))


def _failed(check: ModelCheck, failure: Failure) -> ModelCheck:
    reason = f"the process that loaded it {failure.reason}"
    return replace(check, skipped=reason) if failure.is_late else replace(check, problem=reason)


def without_files(options: ModelOptions) -> ModelOptions:
    """The options without settings that let ONNX Runtime or an execution provider write files. Pure."""
    session = options.session
    entries = {key: value for key, value in session.entries.items() if not key.startswith(_WRITING_ENTRIES)}
    providers = []
    for wish in options.execution_providers:
        name, given = provider_parts(wish)
        kept = {key: value for key, value in given.items() if not any(word in key for word in _WRITING_OPTIONS)}
        providers.append({name: kept} if kept else name)
    session = session.model_copy(update={"entries": entries, "optimized_model_file": None})
    return options.model_copy(update={"session": session, "execution_providers": tuple(providers)})


class _Events(logging.Handler):
    """Collects the warnings of a load."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.events: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = {key: value for key, value in getattr(record, "fields", {}).items() if key != "model"}
        reason = fields.pop("reason", "")
        more = ", ".join(f"{key} {value}" for key, value in fields.items())
        self.events.append(f"{record.getMessage()}: {'; '.join(map(str, filter(None, (reason, more))))}")


def load_one(
    item: tuple[ModelCheck, VersionSource], *, libraries: tuple[Path, ...], global_threads: bool
) -> ModelCheck:
    """Load a version in this process and free it again. Returns what is known with what this shows."""
    check, version = item
    handler, process = _Events(), psutil.Process()
    logging.getLogger("ortserve").addHandler(handler)
    began_ns, before_bytes = monotonic_ns(), process.memory_info().rss
    options, runtime = without_files(version.configuration.options), _device_runtime(libraries, global_threads)
    try:
        loaded = load_model(version.path, check.name, options, monotonic_ns, version.folder, runtime)
    except ServeError as error:
        return replace(check, problem=error.message, events=(*check.events, *handler.events))
    finally:
        logging.getLogger("ortserve").removeHandler(handler)
    latencies = loaded.warm_up.latencies
    check = replace(
        check,
        events=(*check.events, *handler.events),
        execution_provider=loaded.execution_provider,
        threads=loaded.run_threads,
        load_s=(monotonic_ns() - began_ns) / 1e9,
        memory_bytes=max(0, process.memory_info().rss - before_bytes),
        row_ms=latencies[0].run_ns / 1e6 if latencies else None,
    )
    for instance in loaded.instances:
        instance.close()
    return check


@cache
def _device_runtime(libraries: tuple[Path, ...], global_threads: bool) -> DeviceRuntime:
    """ONNX Runtime's environment, of which a process has one."""
    return DeviceRuntime(libraries, global_threads=global_threads)
