"""Whether the rows of a model are independent: the verdict of the loader, and a further trial on the loaded model."""

from typing import Any, Final

from ortserve.clock import monotonic_ns
from ortserve.engine.provider_options import CPU
from ortserve.registry.load.batch_sizes import MAX_SWEPT_ROWS, RunBounds, WorkerRuns
from ortserve.registry.load.loaded_model import LoadedModel, describe_properties
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.load.progress import Progress
from ortserve.registry.load.row_axes import Grounds
from ortserve.registry.load.row_trial import RowTrial, TrialOutcome
from ortserve.tools.console import ShowProgress
from ortserve.tools.inspect.result import Rows
from ortserve.tools.subject import Subject

_TRIAL_S: Final = 2.0
_MAX_WARMUP_S: Final = 5.0
_ROUNDING: Final = "as the graph keeps rows apart, this is rounding, which changes with the number of rows"


def load_and_try(subject: Subject, step: ShowProgress, *, captures: bool) -> tuple[Rows, str, LoadedModel]:
    """Load a model as the server does, try its rows alone and together, and free it.

    The text is the evidence of the trials against a configuration that has rows run together; empty without any.

    Args:
        subject: The model on disk.
        step: Receives the current activity.
        captures: Whether to capture graphs.

    Raises:
        ServeError: The server could not serve the model.
    """
    changes: dict[str, Any] = {"warmup_s": min(subject.options.warmup_s, _MAX_WARMUP_S), "instances": 1}
    if captures:
        changes["graph_replay"] = True
    options = subject.options.model_copy(update=changes)
    step(0, "loading the model as the server does")
    loaded = load_model(subject.path, subject.name, options, subject.folder)
    try:
        step(0, "running rows alone and together")
        outcome = _try_rows(loaded)
        is_configured = loaded.signature.is_batched and loaded.rows.grounds is Grounds.CONFIGURED
        against = loaded.warm_up.rows_depend or (outcome.problem if outcome else "")
        return _describe_rows(loaded, outcome), against if is_configured else "", loaded
    finally:
        loaded.close()


def _try_rows(loaded: LoadedModel) -> TrialOutcome | None:
    """Run rows alone and in batches. Returns None if requests run alone, or the model rejects synthetic inputs.

    The load tries rows only if the graph does not prove their independence, so it may not know their drift.
    """
    found = loaded.warm_up
    if not loaded.signature.is_batched or found.inputs is None or not found.latencies:
        return None
    now_ns = monotonic_ns()
    trial = RowTrial(
        WorkerRuns(loaded.instances[0], RunBounds(Progress(monotonic_ns))),
        found.inputs,
        (),
        max_rows=min(max(found.max_rows, found.latencies[-1].rows), MAX_SWEPT_ROWS),
        row_ns=found.latencies[0].least_ns,
        is_coarse=loaded.execution_provider != CPU,
        stop_ns=now_ns + int(_TRIAL_S * 1e9),
        ends_ns=now_ns + int(2 * _TRIAL_S * 1e9),
    )
    return trial.run()


def _describe_rows(loaded: LoadedModel, outcome: TrialOutcome | None) -> Rows:
    found = loaded.warm_up
    because = describe_properties(loaded, found.max_rows)["batching"]
    verdict = loaded.rows.grounds.value if loaded.signature.is_batched else "alone"
    trial = f"none: {found.rejection}" if found.rejection else found.tried
    drift = None
    if outcome is not None:
        trial = outcome.problem or outcome.extent
        if outcome.drift or not outcome.problem:
            drift = max(outcome.drift, found.drift)
        if outcome.drift and outcome.problem and loaded.rows.grounds is Grounds.PROVEN:
            trial = f"a row alone and among others differs by {drift:.1e}, beyond the tolerance; {_ROUNDING}"
    return Rows(verdict, because, trial, drift, found.max_rows if loaded.signature.is_batched else 1)
