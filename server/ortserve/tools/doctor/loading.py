"""Loading the models of a repository as the server would, in a process of its own that may crash or hang.

``python -m ortserve.tools.doctor.loading`` reads what to load from standard input, as JSON, and writes a line of JSON
behind ``verdict: `` per model. Nothing is written to disk: settings that write files are removed first.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ortserve.clock import monotonic_ns
from ortserve.config.model import LoadOptions, ModelOptions
from ortserve.config.session import provider_parts
from ortserve.device.devices import DeviceRuntime
from ortserve.errors import ServeError
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.repository.source import ModelSource, read_sources
from ortserve.tools.doctor.result import LoadEvent, ModelCheck
from ortserve.tools.doctor.trial import VERDICT
from ortserve.tools.report import bytes_text

MODULE: Final = "ortserve.tools.doctor.loading"
_ENDING_S: Final = 5.0
_WRITING_ENTRIES: Final = ("ep.context_", "session.collect_node_memory_stats_to_file", "session.optimized_model_")
_WRITING_OPTIONS: Final = ("cache", "dump", "context", "build_log")


@dataclass(frozen=True, slots=True)
class ToLoad:
    """What the other process shall load.

    Attributes:
        repository: The folder.
        defaults: The server's options for every model, as JSON.
        libraries: Of plug-in execution providers.
        global_threads: As the server's option.
        names: Models and versions.
    """

    repository: str
    defaults: dict[str, Any]
    libraries: Sequence[str]
    global_threads: bool
    names: Sequence[tuple[str, int]]


def list_models(sources: Sequence[ModelSource]) -> list[ModelCheck]:
    """The versions to serve, with the problems that their files and configurations show."""
    found = []
    for source in sources:
        events = tuple(LoadEvent("option has no effect", reason) for reason in source.without_effect)
        if source.problem or not source.versions:
            found.append(ModelCheck(source.name, problem=source.problem or "it has no versions", events=events))
        for number, version in sorted(source.versions.items()):
            nbytes = sum(size for _, _, _, size, _ in version.fingerprints)
            options = version.configuration.options
            check = ModelCheck(source.name, number, version.problem, "", events, instances=options.instances)
            found.append(replace(check, files_bytes=nbytes))
    return found


def without_room(models: Sequence[ModelCheck], free_bytes: int | None) -> list[ModelCheck]:
    """The models, with those marked as skipped whose files alone do not fit into memory. Pure."""
    checked = []
    for model in models:
        needed = model.instances * (model.files_bytes or 0)
        if free_bytes is not None and needed > free_bytes:
            seen = f"its {model.instances} instances need {bytes_text(needed)}, and {bytes_text(free_bytes)} are free"
            model = replace(model, skipped=seen)
        checked.append(model)
    return checked


def load_all(
    models: Sequence[ModelCheck], wanted: ToLoad, *, seconds: float, step: Callable[[int, str], None]
) -> list[ModelCheck]:
    """Load all models without a problem, one after the other, each for at most ``seconds``.

    A model on which the process crashes or hangs has that as its problem; the others are loaded by another process.
    """
    results = list(models)
    places = {(each.name, each.version): i for i, each in enumerate(models) if not each.problem and not each.skipped}
    waiting = list(places)
    while waiting:
        names = [(name, version) for name, version in waiting if version is not None]
        step(len(places) - len(waiting), "loading {} {}".format(*waiting[0]))
        for verdict in _run_child(replace(wanted, names=names), seconds):
            place = places[waiting.pop(0)]
            events = tuple(LoadEvent(**event) for event in verdict.pop("events", ()))
            results[place] = replace(results[place], **verdict, events=(*results[place].events, *events))
            if not waiting:
                break
            step(len(places) - len(waiting), "loading {} {}".format(*waiting[0]))
    return results


def _run_child(wanted: ToLoad, seconds: float) -> Generator[dict[str, Any], None, None]:
    """The verdicts, ending with one about a model that the process did not survive."""
    command = [sys.executable, "-m", MODULE]
    with subprocess.Popen(  # noqa: S603 - this interpreter and module
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that trials of its own end with it
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        last: list[str] = []
        reader = threading.Thread(target=_keep_last_line, args=(child, last), daemon=True)
        reader.start()
        timer, is_over = threading.Timer(seconds, _kill, (child,)), False
        try:
            with suppress(BrokenPipeError), child.stdin:  # it may end before it has read everything
                child.stdin.write(json.dumps(asdict(wanted)))
            while True:
                timer = threading.Timer(seconds, _kill, (child,))
                timer.daemon = True
                timer.start()
                line = next((line for line in child.stdout if line.startswith(VERDICT)), "")
                is_over = not timer.is_alive()
                timer.cancel()
                if not line:
                    break
                yield json.loads(line.removeprefix(VERDICT))
            with suppress(subprocess.TimeoutExpired):
                child.wait(_ENDING_S)
        finally:
            timer.cancel()
            _kill(child)
        child.wait()
        reader.join(1)
    if is_over:
        yield {"skipped": f"loading took more than {seconds:g} s"}
    else:
        yield {"problem": f"the process that loaded it ended with status {child.returncode}: {' '.join(last)[:500]}"}


def _keep_last_line(child: subprocess.Popen[str], last: list[str]) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        last[:] = [line.strip()]


def _kill(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


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


def load_one(
    path: Path, name: str, options: ModelOptions, folder: Path | None, runtime: DeviceRuntime
) -> dict[str, Any]:
    """Load a model and free it again. Returns the fields of ``ModelCheck`` that this tells."""
    handler = _Events()
    logging.getLogger("ortserve").addHandler(handler)
    began_ns, before = monotonic_ns(), _resident_bytes()
    try:
        loaded = load_model(path, name, without_files(options), monotonic_ns, folder, runtime)
    except ServeError as error:
        return {"problem": error.message, "events": [asdict(event) for event in handler.events]}
    finally:
        logging.getLogger("ortserve").removeHandler(handler)
    latencies = loaded.warm_up.latencies
    found = {
        "events": [asdict(event) for event in handler.events],
        "execution_provider": loaded.execution_provider,
        "threads": loaded.run_threads,
        "load_s": (monotonic_ns() - began_ns) / 1e9,
        "memory_bytes": max(0, _resident_bytes() - before),
        "row_ms": latencies[0].run_ns / 1e6 if latencies else None,
    }
    for instance in loaded.instances:
        instance.close()
    return found


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def main() -> None:
    """Load what standard input says."""
    wanted = ToLoad(**json.load(sys.stdin))
    defaults = LoadOptions.model_validate(wanted.defaults)
    libraries = tuple(map(Path, wanted.libraries))
    sources = {source.name: source for source in read_sources([Path(wanted.repository)], defaults)}
    runtime = DeviceRuntime(libraries, global_threads=wanted.global_threads)
    for name, number in wanted.names:
        version = sources[name].versions[number]
        verdict = load_one(version.path, name, version.configuration.options, version.folder, runtime)
        sys.stdout.write(f"\n{VERDICT}{json.dumps(verdict)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
