"""The command ``ortserve quantize``."""

import argparse
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.model_file.graph import UNREADABLE, Model
from ortserve.model_file.reading import read_model
from ortserve.tools.agreement import ErrorBound, parse_bound
from ortserve.tools.apart import ObjectApart
from ortserve.tools.command import FAILED, OK, Outcome, ToolParser, run_tool
from ortserve.tools.compare.measure import SYNTHETIC_NOTE
from ortserve.tools.console import Step, progress
from ortserve.tools.destination import add_destination, check_destination, deliver, staged_model
from ortserve.tools.doctor.machine import Files as MachineFiles
from ortserve.tools.doctor.machine import read_memory, read_processors
from ortserve.tools.provenance import external_files, make_provenance
from ortserve.tools.quantize.making import LARGE_NBYTES, Prepared
from ortserve.tools.quantize.plan import (
    MODES,
    Candidates,
    Wish,
    check_source,
    choose_settings,
    consequences,
    find_candidates,
    left_out,
    needed_opset,
)
from ortserve.tools.quantize.presentation import present
from ortserve.tools.quantize.result import NodeCost, QuantizedOperator, QuantizeResult, Settings
from ortserve.tools.quantize.samples import Files
from ortserve.tools.quantize.search import Part, Tried, find_nodes
from ortserve.tools.quantize.workbench import Workbench
from ortserve.tools.report import bytes_text
from ortserve.tools.speed import Speed, Timed, compare_speed
from ortserve.tools.staging import staging_folder
from ortserve.tools.subject import Subject, find_model

_DESCRIPTION: Final = """
Make a quantized model, and prove what it costs and gains: its outputs are compared with those of MODEL, and nodes that
cost too much stay in floating point. Nothing is written if the errors exceed --max-error.
"""
_LIMIT_S: Final = 3600.0
_MEMORY_FACTOR: Final = 3
"""The library's peak, measured: 3.1 times the weights; a third of that for weights only."""
_DISK_FACTOR: Final = 3
"""The prepared model, a copy that the library makes, and quantized ones."""
_DEFAULT_BOUND: Final = ErrorBound("cosine", 0.02)
_DEFAULT_BOUND_OF_LABELS: Final = ErrorBound("accuracy", 0.005)


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    given = _parser().parse_args(arguments)
    given.command_line = ("quantize", *arguments)
    return run_tool("quantize", _run, given)


def _parser() -> ToolParser:
    parser = ToolParser("quantize", _DESCRIPTION, page_flags=("--page",))
    parser.add_argument("model", metavar="MODEL", help="model.onnx, or REPOSITORY/name[/version]")
    add_destination(parser)
    add = parser.add_argument_group("quantization; defaults are those that are fast on this processor").add_argument
    text = "Integer weights and activations, with ranges of each run or from calibration; or only weights."
    add("--mode", choices=MODES, required=True, help=text)
    add("--bits", type=int, choices=(4, 8), help="Bits of weights in mode weights (4).")
    add("--block", type=int, metavar="N", help="Weights that share a scale in mode weights (32).")
    text = "Samples for mode static: an .npz by input, or a folder of such files, as a server records them."
    add("--calibration", type=Path, metavar="DATA.npz", help=text)
    text = "How ranges come from values: all of them (minmax), or without rare ones."
    add("--calibrator", choices=("minmax", "entropy", "percentile"), help=text)
    channel = parser.add_mutually_exclusive_group()
    text = "A scale for each channel of a weight (default), or one for all."
    channel.add_argument("--per-channel", action="store_true", default=None, help=text)
    channel.add_argument("--per-tensor", dest="per_channel", action="store_false", default=None, help="See above.")
    add("--activations", choices=("uint8", "int8", "uint16", "int16"), help="Type of activations in mode static.")
    add("--weights", choices=("int8", "uint8"), help="Type of weights.")
    text = "Weights of 7 bits, which processors without VNNI need (auto)."
    add("--reduce-range", choices=("auto", "on", "off"), default="auto", help=text)
    add("--ops", type=_names, default=(), metavar="MatMul,Conv", help="Quantize only these operators.")
    add("--exclude", type=_names, action="extend", default=[], metavar="NODE,…", help="Leave these in floating point.")
    add = parser.add_argument_group("comparison with MODEL").add_argument
    text = (
        "Largest error: of max, relative, cosine, top1 or accuracy; may be repeated (cosine=0.02; with labels "
        "accuracy=0.005)."
    )
    add("--max-error", action="append", default=[], metavar="[MEASURE=]NUMBER", help=text)
    text = "Samples to compare; without them a part of the calibration samples, or synthetic ones."
    add("--inputs", type=Path, metavar="DATA.npz", help=text)
    text = "Of the samples of --inputs, or without them of --calibration: integers or texts."
    add("--labels", type=Path, metavar="LABELS.npy", help=text)
    text = "Most samples for calibration, and for the comparison (256)."
    add("--samples", type=_count, default=256, metavar="N", help=text)
    add("--rank", action="store_true", help="Rank the nodes by their cost also if all can be quantized.")
    add("--trials", type=_count, default=60, metavar="N", help="Most models for the ranking (60).")
    add("--minutes", type=_duration, default=10.0, metavar="N", help="Time limit of the search (10).")
    add("--seconds", type=_duration, default=4.0, metavar="N", help="For the measurement of speed; 0 for none (4).")
    return parser


def _run(given: argparse.Namespace) -> Outcome:
    source = find_model(given.model)
    check_destination(given, source)
    wish = _wish(given)
    bounds = [parse_bound(text) for text in given.max_error]
    bounds = bounds or [_DEFAULT_BOUND_OF_LABELS if given.labels is not None else _DEFAULT_BOUND]
    model = read_model(source.path)
    if model is UNREADABLE:
        raise invalid_input(f"{source.path}: expected an ONNX model, it is not one or is truncated")
    settings = choose_settings(wish, model, read_processors(MachineFiles()).instruction_sets)
    check_source(model, str(source.path))
    with staged_model(given, source) as target:
        result = _quantize(given, source, model, settings, bounds, target)
        if not result.missed:
            result = _deliver(given, source, target, result)
    return Outcome(result, present(result), FAILED if result.missed else OK)


def _quantize(
    given: argparse.Namespace,
    source: Subject,
    model: Model,
    settings: Settings,
    bounds: Sequence[ErrorBound],
    target: Path,
) -> QuantizeResult:
    """Make the best model that can be found at ``target``, and collect its evidence."""
    source_nbytes = sum(file.stat().st_size for file in (source.path, *external_files(source.path)))
    _check_room(source_nbytes, target.parent)
    files = Files(given.calibration, given.inputs, given.labels, given.samples)
    with (
        staging_folder(target.parent) as folder,
        progress("reading the samples") as step,
        ObjectApart(_LIMIT_S, Workbench, source, files, settings) as workbench,
    ):
        opened = workbench.call(Workbench.opened)
        step(0, "preparing the model")
        prepared = workbench.call(Workbench.prepare, folder, needed_opset(settings), source_nbytes)
        candidates = find_candidates(
            read_model(prepared.path), settings, prepared.dtypes, given.exclude, str(source.path)
        )
        if settings.mode == "static":
            step(0, f"calibrating with {opened.calibration}")
            workbench.call(Workbench.calibrate, prepared)
        bench = _Bench(workbench, prepared, candidates, folder / "trial" / target.name, step)
        deadline = time.monotonic() + given.minutes * 60
        found = find_nodes(
            candidates.nodes,
            bounds,
            bench.attempt,
            lambda: time.monotonic() > deadline,
            most_trials=given.trials,
            always_rank=given.rank,
        )
        best = bench.attempt(found.best.nodes) if bench.last != found.best.nodes else found.best
        if best.agreement is None:
            raise ServeError(ErrorKind.INTERNAL, f"no quantized model can run: {best.problem}")
        lost = workbench.call(Workbench.batching_lost, bench.path)
        for file in bench.path.parent.iterdir():
            file.chmod(source.path.stat().st_mode)  # external data is written for its owner only
            file.replace(target.parent / file.name)
    missed = best.excess(bounds)
    speeds: Sequence[Speed | None] = (None, None)
    if given.seconds and not missed:
        timed = [Timed(source, "cpu"), Timed(replace(source, path=target), "cpu")]
        speeds = compare_speed(timed, opened.feeds, seconds=given.seconds)
    notes = [*opened.notes, *prepared.notes, *left_out(model, settings), *consequences(settings, speeds[1], lost)]
    if bench.problem:
        notes.append(f"with some nodes quantized the model cannot run: {bench.problem}")
    if not found.is_complete:
        notes.append("nodes were ranked in groups or not at all: more --trials or --minutes rank them one by one")
    return QuantizeResult(
        model=source.name,
        path=str(source.path),
        settings=settings,
        bounds=tuple(map(str, bounds)),
        missed=missed,
        source_nbytes=source_nbytes,
        nbytes=sum(file.stat().st_size for file in target.parent.iterdir()),
        operators=_operators(candidates, best),
        floating=(*candidates.excluded, *(name for name in candidates.nodes if name not in best.nodes)),
        ranked_by=found.measure,
        ranking=tuple(_cost(part, candidates, best) for part in found.parts),
        trials=found.trials,
        calibration=opened.calibration if settings.mode == "static" else "",
        inputs=opened.inputs,
        agreement=best.agreement,
        source_speed=speeds[0],
        speed=speeds[1],
        notes=tuple(notes),
        delivered=None,
    )


class _Bench:
    """Makes models one after the other at one path, each over the last."""

    def __init__(
        self, workbench: ObjectApart[Workbench], prepared: Prepared, candidates: Candidates, path: Path, step: Step
    ) -> None:
        self._workbench: Final = workbench
        self._prepared: Final = prepared
        self._candidates: Final = candidates
        self._step: Final = step
        self._trials = 0
        self.path: Final = path
        self.last: tuple[str, ...] = ()
        self.problem = ""

    def attempt(self, names: tuple[str, ...]) -> Tried:
        """Make the model with these nodes quantized and compare it."""
        self._trials += 1
        nodes = {name: self._candidates.nodes[name] for name in names}
        self._step(0, f"model {self._trials}: {len(nodes)} of {len(self._candidates.nodes)} nodes quantized")
        shutil.rmtree(self.path.parent, ignore_errors=True)
        self.last = names
        tried = self._workbench.call(Workbench.attempt, self._prepared, nodes, self._candidates, self.path)
        self.problem = self.problem or tried.problem
        return tried


def _deliver(given: argparse.Namespace, source: Subject, target: Path, result: QuantizeResult) -> QuantizeResult:
    figures: dict[str, float | str] = {"mode": result.settings.mode, "floating_nodes": float(len(result.floating))}
    provenance = make_provenance(
        source,
        target,
        arguments=given.command_line,
        notes=[note for note in result.notes if note != SYNTHETIC_NOTE],
        agreement=result.agreement,
        inputs=result.inputs,
        speed=result.speed,
        figures=figures,
    )
    return replace(result, delivered=deliver(target, source, provenance, given))


def _check_room(nbytes: int, folder: Path) -> None:
    """Refuse large models for which memory or disk cannot suffice.

    Raises:
        ServeError: What is needed and what there is.
    """
    if nbytes < LARGE_NBYTES // 4:
        return
    memory = read_memory(MachineFiles())
    limits = [memory.available_bytes]
    if memory.limit_bytes is not None and memory.used_bytes is not None:
        limits.append(memory.limit_bytes - memory.used_bytes)
    disk = shutil.disk_usage(folder).free
    for needed, there, kind in (
        (_MEMORY_FACTOR * nbytes, min(limits), "of memory"),
        (_DISK_FACTOR * nbytes, disk, f"on the disk of {folder.parent}"),
    ):
        if there < needed:
            raise ServeError(
                ErrorKind.INTERNAL,
                f"the model has {bytes_text(nbytes)}: expected {bytes_text(needed)} {kind}, got {bytes_text(there)}",
            )


def _operators(candidates: Candidates, best: Tried) -> tuple[QuantizedOperator, ...]:
    total = Counter(candidates.nodes.values())
    quantized = Counter(candidates.nodes[name] for name in best.nodes)
    return tuple(QuantizedOperator(name, quantized[name], total[name] - quantized[name]) for name in total)


def _cost(part: Part, candidates: Candidates, best: Tried) -> NodeCost:
    operators = dict.fromkeys(candidates.nodes[name] for name in part.nodes)
    return NodeCost(part.nodes, tuple(operators), part.error, all(name in best.nodes for name in part.nodes))


def _wish(given: argparse.Namespace) -> Wish:
    if given.mode != "static" and given.calibration is not None:
        raise invalid_input(f"--calibration: expected --mode static, got {given.mode}; --inputs are compared")
    if given.mode == "static" and given.calibration is None:
        raise invalid_input("--mode static: expected --calibration DATA.npz with samples of real inputs")
    labelled: Path | None = given.inputs or given.calibration
    if given.labels is not None and (labelled is None or labelled.is_dir()):
        raise invalid_input("--labels: expected --inputs or --calibration, too, a file whose samples they belong to")
    return Wish(
        mode=given.mode,
        bits=given.bits,
        block=given.block,
        calibrator=given.calibrator,
        per_channel=given.per_channel,
        activations=given.activations,
        weights=given.weights,
        reduce_range=given.reduce_range,
        operators=given.ops,
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return names


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 1_000_000:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 1000000, got {text!r}")


def _duration(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) <= 10_000:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number from 0 to 10000, got {text!r}")
