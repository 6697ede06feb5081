"""Loading the models of a repository as the server would, in a process of its own that may crash or hang.

Nothing is written to disk: settings that write files are removed first.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import psutil

from ortserve.clock import monotonic_ns
from ortserve.config.model import ModelOptions
from ortserve.config.session import provider_parts
from ortserve.device.devices import DeviceRuntime
from ortserve.errors import ServeError
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.repository.source import ModelSource
from ortserve.tools.doctor.apart import Failure, run_apart
from ortserve.tools.doctor.result import LoadEvent, ModelCheck
from ortserve.tools.report import bytes_text

_WRITING_ENTRIES: Final = ("ep.context_", "session.collect_node_memory_stats_to_file", "session.optimized_model_")
_WRITING_OPTIONS: Final = ("cache", "dump", "context", "build_log")


@dataclass(frozen=True, slots=True)
class ToLoad:
    """A model to load.

    Attributes:
        check: What is known so far.
        path: Of the model.
        folder: As in ``VersionSource``.
        options: Its configuration.
        libraries: Of plug-in execution providers.
        global_threads: As the server's option.
    """

    check: ModelCheck
    path: Path
    folder: Path | None
    options: ModelOptions
    libraries: tuple[Path, ...] = ()
    global_threads: bool = False


def check_models(
    sources: Sequence[ModelSource],
    *,
    libraries: tuple[Path, ...],
    global_threads: bool,
    free_bytes: int,
    limit_s: float,
    step: Callable[[float, str], None],
) -> list[ModelCheck]:
    """Load all versions whose files and configurations have no problem, one after the other.

    Args:
        sources: The models.
        libraries: Of plug-in execution providers.
        global_threads: As the server's option.
        free_bytes: A model whose files do not fit is not loaded.
        limit_s: For each model. One that crashes or hangs does not stop the others.
        step: Called with the number of loaded models, and what is being done.
    """
    known: list[ModelCheck] = []
    to_load: list[ToLoad] = []
    for source in sources:
        events = tuple(LoadEvent("option has no effect", reason) for reason in source.without_effect)
        if source.problem or not source.versions:
            known.append(ModelCheck(source.name, problem=source.problem or "it has no versions", events=events))
        for number, version in sorted(source.versions.items()):
            nbytes = sum(size for _, _, _, size, _ in version.fingerprints)
            options = version.configuration.options
            check = ModelCheck(source.name, number, version.problem, "", events, None, options.instances, None, nbytes)
            check = replace(check, skipped=_no_room(check, free_bytes))
            if check.problem or check.skipped:
                known.append(check)
            else:
                to_load.append(ToLoad(check, version.path, version.folder, options, libraries, global_threads))
    loaded = load_all(to_load, limit_s, lambda number: step(number, f"loading {to_load[number].check.label}"))
    return sorted((*known, *loaded), key=lambda check: (check.name, check.version or 0))


def _no_room(check: ModelCheck, free_bytes: int) -> str:
    needed = check.instances * check.files_bytes
    if needed <= free_bytes:
        return ""
    return f"its {check.instances} instances need {bytes_text(needed)}, and {bytes_text(free_bytes)} are free"


def load_all(models: Sequence[ToLoad], limit_s: float, step: Callable[[int], None]) -> Iterator[ModelCheck]:
    """What loading each model shows. ``step`` is called with the number of the model before it is loaded."""
    results = run_apart(load_one, models, limit_s)
    for number, model in enumerate(models):
        step(number)
        result = next(results)
        if isinstance(result, Failure):
            reason = f"the process that loaded it {result.reason}"
            late, ended = (reason, "") if result.is_late else ("", reason)
            result = replace(model.check, skipped=late, problem=ended)
        yield result


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
        self.events: list[LoadEvent] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = {key: value for key, value in getattr(record, "fields", {}).items() if key != "model"}
        reason = fields.pop("reason", "")
        more = ", ".join(f"{key} {value}" for key, value in fields.items())
        self.events.append(LoadEvent(record.getMessage(), "; ".join(map(str, filter(None, (reason, more))))))


def load_one(model: ToLoad) -> ModelCheck:
    """Load a model in this process and free it again."""
    handler, process = _Events(), psutil.Process()
    logging.getLogger("ortserve").addHandler(handler)
    began_ns, before_bytes = monotonic_ns(), process.memory_info().rss
    options, runtime = without_files(model.options), _device_runtime(model.libraries, model.global_threads)
    try:
        loaded = load_model(model.path, model.check.name, options, monotonic_ns, model.folder, runtime)
    except ServeError as error:
        return replace(model.check, problem=error.message, events=(*model.check.events, *handler.events))
    finally:
        logging.getLogger("ortserve").removeHandler(handler)
    latencies = loaded.warm_up.latencies
    check = replace(
        model.check,
        events=(*model.check.events, *handler.events),
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
