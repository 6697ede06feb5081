"""Loads the models of a repository as the server would, in processes of their own that may crash or hang.

Nothing is written to disk: settings that write files are removed first.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import psutil

from ortserve.batching.response_cache import ResponseCache
from ortserve.clock import monotonic_ns
from ortserve.config.model import LoadOptions
from ortserve.config.options import ServerOptions
from ortserve.config.rollout import why_without_effect
from ortserve.core.version_names import STABLE
from ortserve.device.devices import DeviceRuntime
from ortserve.engine.child_process import Failure, run_in_children
from ortserve.engine.process_limits import cpu_budget
from ortserve.engine.process_memory import give_back_freed, return_large_blocks
from ortserve.engine.provider_options import CPU
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.catalog import Catalog
from ortserve.registry.draining import Draining
from ortserve.registry.ensemble_sources import members_of, reject_cycles
from ortserve.registry.load.assembly import WITHOUT_CACHE, Assembly
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.load.trial_load import trial_options
from ortserve.registry.repository.source import ModelSource, VersionSource, read_sources
from ortserve.registry.residency.ledger import HostLedger
from ortserve.registry.residency.memory_room import MemoryRoom
from ortserve.registry.version_loader import VersionLoader
from ortserve.registry.versions import Versions
from ortserve.telemetry.metrics import unread_metrics
from ortserve.tools.console import progress
from ortserve.tools.doctor.result import ModelCheck
from ortserve.tools.doctor.runtime import run_tiny
from ortserve.tools.report import bytes_text


@dataclass(frozen=True, slots=True)
class LoadItem:
    """A version to load. ``members`` has all models that an ensemble contains, each after its own members."""

    check: ModelCheck
    version: VersionSource
    source: ModelSource
    members: tuple[ModelSource, ...] = ()


def check_models(
    repository: Path, options: ServerOptions, free_bytes: int, limit_s: float, *, only: str | None = None, jobs: int = 1
) -> list[ModelCheck]:
    """Load all versions whose files and configurations have no problem.

    Args:
        repository: The folder of models.
        options: Options of the server.
        free_bytes: Free memory. A model whose files do not fit is not loaded.
        limit_s: Time limit of each load. A model that crashes or hangs does not stop the others.
        only: Name of the only model to check, with its members if it is an ensemble; None for all.
        jobs: Number of processes that load concurrently.

    Raises:
        ServeError: invalid_input, if the repository cannot be read or has no model of the name ``only``.
    """
    defaults = LoadOptions(**{name: getattr(options, name) for name in LoadOptions.model_fields})
    sources = {source.name: source for source in reject_cycles(read_sources([repository], defaults), {})}
    if only is not None and only not in sources:
        known = ", ".join(sources) or "none"
        raise invalid_input(f"--model {only}: expected a model of {repository}, which has {known}")
    chosen = sources.values() if only is None else (*_members(sources[only], sources), sources[only])
    checks: list[ModelCheck] = []
    to_load: list[LoadItem] = []
    for source in chosen:
        checks += _check_references(source)
        for check, version in _check_versions(source, options, free_bytes):
            if check.problem or check.skipped:
                checks.append(check)
            else:
                to_load.append(LoadItem(check, version, source, _members(source, sources)))
    libraries, shared = tuple(options.execution_provider_libraries), options.global_threads
    work = partial(load_one, libraries=libraries, global_threads=shared, cache_bytes=options.cache_bytes)
    with progress("loading models", len(to_load)) as step:
        for number, (item, result) in enumerate(run_in_children(work, to_load, limit_s, jobs)):
            step(number + 1, f"loaded {item.check.label}")
            checks.append(_failed(item.check, result) if isinstance(result, Failure) else result)
    return sorted(checks, key=lambda check: (check.name, check.version or 0))


def _check_references(source: ModelSource) -> Iterator[ModelCheck]:
    """The problems of a model itself, and of the versions that its labels and its rollout name."""
    if source.problem or not source.versions:
        yield ModelCheck(source.name, problem=source.problem or "it has no versions", events=_without_effect(source))
    named = {f"labels.{label}": number for label, number in source.labels.items()}
    if source.rollout is not None and source.versions:
        named["rollout.candidate"] = source.rollout.candidate
    for key, number in named.items():
        if number not in source.versions:
            problem = f"{key}: expected a version that is in the repository, got {number}"
            yield ModelCheck(source.name, number, problem)


def _without_effect(source: ModelSource) -> tuple[str, ...]:
    """The events of options of a model that have no effect."""
    reasons = list(source.without_effect)
    rollout = source.rollout
    if rollout is not None and rollout.candidate in source.versions:
        reasons.append(why_without_effect(rollout, source.name, source.labels.get(STABLE)))
    return tuple(f"option has no effect: {reason}" for reason in reasons if reason)


def _check_versions(
    source: ModelSource, options: ServerOptions, free_bytes: int
) -> Iterator[tuple[ModelCheck, VersionSource]]:
    """Each version of a model, with its check before the load: its problem, or why memory does not suffice for it."""
    for number, version in sorted(source.versions.items()):
        own, events = version.configuration.options, _without_effect(source)
        # An ensemble is assembled as a whole, which reports this.
        if own.response_cache and not options.cache_bytes and own.ensemble is None:
            events += (f"option has no effect: {WITHOUT_CACHE}",)
        check = ModelCheck(
            source.name,
            number,
            version.problem,
            events=events,
            instances=own.instances,
            files_bytes=version.file_bytes,
        )
        needed_bytes = own.instances * version.file_bytes
        if not check.problem and needed_bytes > free_bytes:
            needed = f"{own.instances} instances need {bytes_text(needed_bytes)}, {bytes_text(free_bytes)} are free"
            check = replace(check, skipped=needed)
        yield check, version


def _members(source: ModelSource, sources: Mapping[str, ModelSource]) -> tuple[ModelSource, ...]:
    """All models that an ensemble contains, directly or indirectly, each after its own members. There are no cycles."""
    found: dict[str, ModelSource] = {}
    for name in members_of(source):
        if (member := sources.get(name)) is not None:
            found |= {one.name: one for one in (*_members(member, sources), member)}
    return tuple(found.values())


def _failed(check: ModelCheck, failure: Failure) -> ModelCheck:
    reason = f"the process that loaded it {failure.reason}"
    return replace(check, skipped=reason) if failure.is_late else replace(check, problem=reason)


class _Events(logging.Handler):
    """Collects the warnings about one model while it is loaded, without those about members of an ensemble."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._name = name
        self.events: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.WARNING:  # the failed load of an ensemble, which the result reports
            return
        fields = dict(getattr(record, "fields", {}))
        if str(fields.pop("model", self._name)).partition("/")[0] != self._name:
            return
        reason = fields.pop("reason", "")
        more = ", ".join(f"{key} {value}" for key, value in fields.items())
        self.events.append(f"{record.getMessage()}: {'; '.join(map(str, filter(None, (reason, more))))}")


def load_one(item: LoadItem, *, libraries: tuple[Path, ...], global_threads: bool, cache_bytes: int = 0) -> ModelCheck:
    """Load a version in this process and free it. Returns the check with the results of the load."""
    check, version = item.check, item.version
    handler, process = _Events(check.name), psutil.Process()
    logging.getLogger("ortserve").addHandler(handler)
    return_large_blocks()
    options, runtime = trial_options(version.configuration.options), _device_runtime(libraries, global_threads)
    give_back_freed()  # the memory of the previous version
    began_ns, before_bytes = monotonic_ns(), process.memory_info().rss
    loaded: LoadedModel | None = None
    try:
        if options.ensemble is not None:
            golden = asyncio.run(_load_ensemble(item, runtime, cache_bytes))
        else:
            loaded = load_model(version.path, check.name, options, version.folder, runtime)
            golden = loaded.golden
    except ServeError as error:
        return replace(check, problem=error.message, events=(*check.events, *handler.events))
    finally:
        logging.getLogger("ortserve").removeHandler(handler)
    check = replace(
        check,
        events=(*check.events, *handler.events),
        load_s=(monotonic_ns() - began_ns) / 1e9,
        memory_bytes=max(0, process.memory_info().rss - before_bytes),
        golden=golden,
    )
    if loaded is None:
        return check
    latencies = loaded.warm_up.latencies
    loaded.close()
    return replace(
        check,
        execution_provider=loaded.execution_provider,
        threads=loaded.run_threads,
        row_ms=latencies[0].run_ns / 1e6 if latencies else None,
    )


async def _load_ensemble(item: LoadItem, runtime: DeviceRuntime, cache_bytes: int) -> str:
    """Load the members and the ensemble. Returns how well its golden samples agree; empty without any.

    Raises:
        ServeError: invalid_input: the ensemble or a member cannot be served.
    """
    catalog, ledger, metrics = Catalog(), HostLedger(), unread_metrics()
    draining = Draining(catalog, ledger, metrics)
    room = MemoryRoom(catalog, ledger, draining, monotonic_ns, metrics.residency)
    cache = ResponseCache(cache_bytes) if cache_bytes else None
    assembly = Assembly(asyncio.get_running_loop(), monotonic_ns, processors=cpu_budget(), cache=cache)
    loader = VersionLoader(catalog, ledger, assembly, monotonic_ns, runtime)
    versions = Versions(catalog, room, loader, draining, metrics, monotonic_ns)
    reason = ""
    try:
        for source in (*item.members, item.source):
            trial = replace(source, versions={number: _trial_of(one) for number, one in source.versions.items()})
            for record in versions.announce(trial, trial.versions):
                reason = await versions.load(record)
                if reason and source is not item.source:
                    reason = f"its member {source.name}/{record.version} cannot be served: {reason}"
                if reason:
                    raise invalid_input(reason)
        served = catalog.find(item.check.name, str(item.check.version))
        return served.properties.get("golden", "")
    finally:
        await draining.close()
        loader.close()


def _trial_of(version: VersionSource) -> VersionSource:
    """The source of a load that writes no file."""
    configuration = version.configuration
    return replace(version, configuration=replace(configuration, options=trial_options(configuration.options)))


@cache
def _device_runtime(libraries: tuple[Path, ...], global_threads: bool) -> DeviceRuntime:
    """The environment of ONNX Runtime. A process has only one.

    A tiny model has run in it, because the first session takes memory that belongs to no model.
    """
    runtime = DeviceRuntime(libraries, global_threads=global_threads)
    run_tiny(CPU, has_global_threads=global_threads)
    return runtime
