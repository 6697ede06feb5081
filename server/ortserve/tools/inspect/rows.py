"""Whether the rows of a model are independent: the loader's verdict, and a trial of its own on the loaded model."""

from dataclasses import dataclass, replace
from typing import Any, Final

from ortserve.clock import monotonic_ns
from ortserve.engine.provider_options import CPU
from ortserve.registry.load.batch_sizes import DEFAULT_BOUNDS, MAX_SWEPT_ROWS, WorkerRuns
from ortserve.registry.load.coordination import Progress
from ortserve.registry.load.device_batches import DeviceBatches
from ortserve.registry.load.loaded_model import LoadedModel, describe_properties
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.load.row_trial import RowTrial, TrialOutcome
from ortserve.tools.console import Step
from ortserve.tools.inspect.result import Replay, Rows
from ortserve.tools.subject import Subject

_TRIAL_S: Final = 2.0
_LONGEST_WARMUP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load of the model found.

    Attributes:
        rows: Whether rows are independent.
        nodes: Nodes by execution provider, as the server's metadata tell them.
        provider: The execution provider that the load chose.
        on_device: Batch sizes on buffers of a device, and those that are replayed.
    """

    rows: Rows
    nodes: dict[str, int]
    provider: str
    on_device: DeviceBatches


def load_and_try(subject: Subject, step: Step, *, captures: bool) -> Loaded:
    """Load a model as the server does, try its rows alone and together, and free it.

    Args:
        subject: The model on disk.
        step: Receives what is being done.
        captures: Whether to capture graphs.

    Raises:
        ServeError: The server could not serve the model.
    """
    changes: dict[str, Any] = {"warmup_s": min(subject.options.warmup_s, _LONGEST_WARMUP_S), "instances": 1}
    if captures:
        changes["graph_replay"] = True
    options = subject.options.model_copy(update=changes)
    progress = Progress(monotonic_ns)
    step(0, "loading the model as the server does")
    loaded = load_model(subject.path, subject.name, options, monotonic_ns, subject.folder, progress=progress)
    try:
        step(0, "running rows alone and together")
        outcome = _try_rows(loaded)
        return Loaded(_rows(loaded, outcome), dict(loaded.nodes), loaded.execution_provider, loaded.on_device)
    finally:
        for instance in loaded.instances:
            instance.close()


def with_captures(replay: Replay, loaded: Loaded) -> Replay:
    """The conditions of a provider together with the captures of a load on it."""
    sizes = loaded.on_device.replayed
    because = loaded.on_device.no_replay_because or loaded.on_device.no_buffers_because
    if loaded.provider != replay.provider or not (sizes or because):
        return replay
    return replace(replay, source="capture", possible=bool(sizes), captured=list(sizes), because=because)


def _try_rows(loaded: LoadedModel) -> TrialOutcome | None:
    """Run rows alone and among others; None if each request runs alone, or the model rejects synthetic inputs."""
    found = loaded.warm_up
    if not loaded.signature.is_batched or found.inputs is None or not found.latencies:
        return None
    now_ns = monotonic_ns()
    trial = RowTrial(
        WorkerRuns(loaded.instances[0], DEFAULT_BOUNDS),
        found.inputs,
        (),
        max_rows=min(max(found.max_rows, found.latencies[-1].rows), MAX_SWEPT_ROWS),
        row_ns=found.latencies[0].least_ns,
        is_coarse=loaded.execution_provider != CPU,
        stop_ns=now_ns + int(_TRIAL_S * 1e9),
        ends_ns=now_ns + int(2 * _TRIAL_S * 1e9),
        clock=monotonic_ns,
    )
    return trial.run()


def _rows(loaded: LoadedModel, outcome: TrialOutcome | None) -> Rows:
    found = loaded.warm_up
    because = describe_properties(loaded, found.max_rows)["batching"]
    verdict = loaded.rows.grounds.value if loaded.signature.is_batched else "alone"
    tried = f"none: {found.rejection}" if found.rejection else found.tried
    if outcome is not None:
        tried = outcome.problem or outcome.extent
    drift = max(outcome.drift, found.drift) if outcome is not None and not outcome.problem else None
    return Rows(verdict, because, drift, tried, found.max_rows, loaded.unbounded_because)
