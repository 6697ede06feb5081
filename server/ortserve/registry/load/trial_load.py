"""Loads a version in another process first. If it crashes or hangs ONNX Runtime there, the server is not affected."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.config.session import provider_parts
from ortserve.device.devices import DeviceRuntime
from ortserve.engine.child_process import Failure, run_in_child
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.load.progress import Progress

_LIMIT_S: Final = 3600.0
"""Time limit of the whole load. Its runs have their own limit, ``warmup_run_timeout_s``."""
_NICE: Final = 10
"""Nice level of the other process: requests have priority."""
_FIRST_KILLED: Final = "1000"
"""If memory runs out, the kernel ends the process with the highest score: not the server."""
_WRITING_ENTRIES: Final = ("ep.context_", "session.collect_node_memory_stats_to_file", "session.optimized_model_")
_WRITING_OPTIONS: Final = ("cache", "dump", "context", "build_log")


@dataclass(frozen=True, slots=True)
class TrialLoad:
    """The arguments of ``load_model`` and of ``DeviceRuntime``, for another process."""

    path: Path
    name: str
    options: ModelOptions
    folder: Path | None
    libraries: tuple[Path, ...]
    global_threads: bool


def try_load(trial: TrialLoad, progress: Progress) -> None:
    """Load a version in another process with all checks of a load, and free it there. Blocks.

    Raises:
        ServeError: The error of the load there; invalid_input, if the process crashed or took too long; overloaded, if
            it could not be started.
        LoadCancelledError: The load was cancelled.
    """
    progress.begin("loading it in another process first")
    try:
        with progress.killing() as children:
            (outcome,) = run_in_child(_load, [trial], _LIMIT_S, children)
    except OSError as error:
        message = f"trial_load: no other process could be started: {error.strerror}"
        raise ServeError(ErrorKind.OVERLOADED, message) from None
    progress.check()
    if isinstance(outcome, Failure):
        raise invalid_input(f"trial_load: the process that loaded it {outcome.reason}")
    if outcome is not None:
        raise outcome


def _load(trial: TrialLoad) -> ServeError | None:
    """Load the version in this process. Returns the error of the load."""
    os.nice(_NICE)
    with suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text(_FIRST_KILLED)
    runtime = DeviceRuntime(trial.libraries, global_threads=trial.global_threads)
    options = trial_options(trial.options)
    try:
        loaded = load_model(trial.path, trial.name, options, trial.folder, runtime)
    except ServeError as error:
        return error
    loaded.close()
    return None


def trial_options(options: ModelOptions) -> ModelOptions:
    """Options of a load that does not serve: nothing writes a file, and no trial precedes it. Pure."""
    session = options.session
    entries = {key: value for key, value in session.entries.items() if not key.startswith(_WRITING_ENTRIES)}
    providers = []
    for wish in options.execution_providers:
        name, given = provider_parts(wish)
        kept = {key: value for key, value in given.items() if not any(word in key for word in _WRITING_OPTIONS)}
        providers.append({name: kept} if kept else name)
    session = session.model_copy(update={"entries": entries, "optimized_model_file": None})
    changes = {"session": session, "execution_providers": tuple(providers), "trial_load": False}
    return options.model_copy(update=changes)
