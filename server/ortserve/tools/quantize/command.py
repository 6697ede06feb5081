"""The command ``ortserve quantize``."""

import argparse
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ortserve.core.agreement import ErrorBound, parse_bound
from ortserve.engine.child_process import ObjectInChild
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.model_file.graph import Model
from ortserve.model_file.reading import model_nbytes, read_model
from ortserve.tools.command import FAILED, OK, Outcome
from ortserve.tools.compare.measure import SYNTHETIC_NOTE
from ortserve.tools.console import progress
from ortserve.tools.destination import Delivered, check_destination, deliver, staged_model
from ortserve.tools.doctor.machine import Files as MachineFiles
from ortserve.tools.doctor.machine import read_memory, read_processors
from ortserve.tools.opening import read_graph
from ortserve.tools.provenance import external_files, make_provenance
from ortserve.tools.quantize.making import LARGE_NBYTES
from ortserve.tools.quantize.plan import check_source, choose_settings, consequences, left_out
from ortserve.tools.quantize.presentation import present
from ortserve.tools.quantize.result import QuantizedOperator, QuantizeResult, Settings
from ortserve.tools.quantize.search import Tried, find_nodes
from ortserve.tools.quantize.workbench import Workbench
from ortserve.tools.report import bytes_text
from ortserve.tools.speed import Speed, Timed, compare_speed
from ortserve.tools.staging import staging_folder
from ortserve.tools.subject import Subject, find_model

_LIMIT_S: Final = 3600.0
_MEMORY_FACTOR: Final = 3
"""Memory that the library needs for a model, in sizes of its weights. The measured peak is 3.1; a third of that in mode
``weights``."""
_DISK_FACTOR: Final = 3
"""Disk space in sizes of the weights: for the prepared model, a copy that the library makes, and quantized models."""
_CALIBRATION_SHARE: Final = 0.5
"""Share of the time limit for calibration. The search uses the rest."""
_DEFAULT_BOUND: Final = ErrorBound("cosine", 0.02)
_DEFAULT_BOUND_OF_LABELS: Final = ErrorBound("accuracy", 0.005)


def run(given: argparse.Namespace) -> Outcome:
    """Quantize a model. Raises ServeError."""
    source = find_model(given.model)
    check_destination(given, source)
    bounds = _bounds(given)
    model = read_graph(source.path)
    settings = choose_settings(given, model, read_processors(MachineFiles()).instruction_sets)
    check_source(model, str(source.path))
    result: QuantizeResult | None = None
    error: OSError | None = None
    try:
        with staged_model(given, source) as target:
            result = _quantize(given, source, model, settings, bounds, target)
            if not result.missed:
                result = replace(result, delivered=_deliver(given, source, target, result))
    except OSError as failure:
        if result is None:
            raise
        error = failure  # what the search found is worth more than the file
    return Outcome(result, present(result), FAILED if result.missed else OK, error)


def _deliver(given: argparse.Namespace, source: Subject, target: Path, result: QuantizeResult) -> Delivered:
    provenance = make_provenance(
        source,
        target,
        arguments=given.command_line,
        notes=[note for note in result.notes if note != SYNTHETIC_NOTE],
        agreement=result.agreement,
        inputs=result.inputs,
        speed=result.speed,
        figures={"mode": result.settings.mode, "floating_nodes": float(len(result.floating))},
    )
    return deliver(target, source, provenance, given)


def _bounds(given: argparse.Namespace) -> list[ErrorBound]:
    """The bounds of errors. Checks that samples and labels suit them and the mode.

    Raises:
        ServeError: invalid_input: samples or labels are missing, or do not suit the mode.
    """
    if given.mode != "static" and given.calibration is not None:
        raise invalid_input(
            f"--calibration: expected --mode static, got {given.mode}; --inputs gives samples for the comparison"
        )
    if given.mode == "static" and given.calibration is None:
        raise invalid_input("--mode static: expected --calibration DATA.npz with samples of real inputs")
    if given.labels is not None and given.inputs is None and given.calibration is None:
        raise invalid_input(
            "--labels: expected --inputs or --calibration to be given, too, with the samples that the labels describe"
        )
    bounds = [parse_bound(text) for text in given.max_error]
    if given.labels is None and any(bound.measure == "accuracy" for bound in bounds):
        raise invalid_input("--max-error accuracy: expected --labels, too")
    return bounds or [_DEFAULT_BOUND if given.labels is None else _DEFAULT_BOUND_OF_LABELS]


def _quantize(
    given: argparse.Namespace,
    source: Subject,
    model: Model,
    settings: Settings,
    bounds: Sequence[ErrorBound],
    target: Path,
) -> QuantizeResult:
    """Write the best model that the search finds to ``target``, and collect its evidence."""
    source_nbytes = model_nbytes(source.path, model)
    _check_room(source_nbytes, target.parent)
    tried: list[Tried] = []
    deadline, left = time.monotonic() + given.minutes * 60, 0
    with (
        staging_folder(target.parent) as folder,
        progress("reading the samples") as step,
        ObjectInChild(_LIMIT_S, Workbench, source, given, settings) as workbench,
    ):
        step(0, "preparing the model")
        ready = workbench.call(Workbench.prepare, folder, source_nbytes, given.exclude)
        nodes, path = ready.candidates.nodes, folder / "trial" / target.name
        if settings.mode == "static":
            step(0, f"calibrating with {ready.calibration}")
            left = workbench.call(Workbench.calibrate, _CALIBRATION_SHARE * (deadline - time.monotonic()))

        def attempt(names: tuple[str, ...]) -> Tried:
            """Make and compare a model. It replaces the last one on the disk."""
            step(0, f"{len(names)} of {len(nodes)} nodes quantized")
            shutil.rmtree(path.parent, ignore_errors=True)
            tried.append(workbench.call(Workbench.attempt, names, path))
            return tried[-1]

        found = find_nodes(
            nodes,
            bounds,
            attempt,
            lambda: time.monotonic() > deadline,
            max_trials=given.trials,
            always_rank=given.rank,
        )
        best = found.best if tried[-1] is found.best else attempt(found.best.nodes)
        if best.agreement is None:
            raise ServeError(ErrorKind.INTERNAL, f"no quantized model can run: {best.problem}")
        lost = workbench.call(Workbench.batching_lost, path)
        for file in (path, *external_files(path)):
            file.chmod(source.path.stat().st_mode)  # the library makes external data readable for the owner only
            file.rename(target.parent / file.name)
    missed = best.excess(bounds)
    speeds: Sequence[Speed | None] = (None, None)
    if given.seconds and not missed:
        timed = Timed(source, "cpu")
        speeds = compare_speed([timed, timed.at(target)], ready.feeds, seconds=given.seconds)
    made = read_model(target)
    nbytes = model_nbytes(target, made)
    notes = [*ready.notes, *left_out(model, settings)]
    if lost_inputs := ready.feeds[0].keys() - {one.name for one in made.graph.inputs}:
        notes.append(f"requests can no longer replace the weights {', '.join(sorted(lost_inputs))}, which were inputs")
    notes += consequences(settings, nbytes / source_nbytes, speeds[1], lost)
    if left:
        notes.append(f"calibration ran out of time and left out {left} of the samples; raise --minutes to use them")
    if problem := next((one.problem for one in tried if one.problem), ""):
        notes.append(f"some of the tried models cannot run: {problem}")
    if not found.is_complete:
        notes.append("some nodes were ranked in groups or not at all; raise --trials or --minutes to rank each node")
    every, quantized = Counter(nodes.values()), Counter(nodes[name] for name in best.nodes)
    return QuantizeResult(
        model=source.name,
        path=str(source.path),
        settings=settings,
        bounds=tuple(map(str, bounds)),
        missed=missed,
        source_nbytes=source_nbytes,
        nbytes=nbytes,
        operators=tuple(QuantizedOperator(name, quantized[name], every[name] - quantized[name]) for name in every),
        floating=(*ready.candidates.excluded, *(name for name in nodes if name not in best.nodes)),
        ranked_by=found.measure,
        ranking=found.parts,
        trials=found.trials,
        calibration=ready.calibration,
        inputs=ready.inputs,
        agreement=best.agreement,
        source_speed=speeds[0],
        speed=speeds[1],
        notes=tuple(notes),
        delivered=None,
    )


def _check_room(nbytes: int, folder: Path) -> None:
    """Reject large models for which memory or disk space cannot suffice.

    Raises:
        ServeError: internal, with the needed and the available bytes.
    """
    if nbytes < LARGE_NBYTES // 4:
        return
    for factor, there, kind in (
        (_MEMORY_FACTOR, read_memory(MachineFiles()).free_bytes, "of memory"),
        (_DISK_FACTOR, shutil.disk_usage(folder).free, f"on the disk of {folder.parent}"),
    ):
        if there < factor * nbytes:
            needed = f"expected {bytes_text(factor * nbytes)} {kind}, got {bytes_text(there)}"
            raise ServeError(ErrorKind.INTERNAL, f"the model has {bytes_text(nbytes)}: {needed}")
