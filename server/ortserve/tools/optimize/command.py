"""The command ``ortserve optimize``."""

import argparse
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import onnxruntime as ort

from ortserve.errors import ServeError
from ortserve.tools.agreement import ErrorBound, parse_bound
from ortserve.tools.apart import call_apart
from ortserve.tools.command import Outcome, ToolParser, run_tool
from ortserve.tools.compare.measure import SECONDS, compare_models
from ortserve.tools.compare.result import CompareResult
from ortserve.tools.console import Step as Progress
from ortserve.tools.console import progress
from ortserve.tools.destination import Delivered, add_destination, check_destination, deliver, staged_model
from ortserve.tools.optimize import cleanup, fusions, interface, level, precision
from ortserve.tools.optimize.checking import SourceLook, look_at_source
from ortserve.tools.optimize.files import data_file, nbytes_of, pack, prepare
from ortserve.tools.optimize.findings import find
from ortserve.tools.optimize.pipeline import ASKED_FOR, LIMIT_S, Attempt, Step, Work, run_steps
from ortserve.tools.optimize.presentation import present
from ortserve.tools.optimize.recognition import fused_operators
from ortserve.tools.optimize.result import OptimizeResult
from ortserve.tools.provenance import make_provenance
from ortserve.tools.speed import Timed
from ortserve.tools.staging import staging_folder
from ortserve.tools.subject import Subject, find_model

_DESCRIPTION: Final = """
Make a model faster or smaller by steps that are each compared with it, and drop those that gain nothing or change its
outputs. Without options for steps: fusions and clean-up, which keep inputs, outputs and datatypes.
"""
_DEFAULTS: Final = ("fusions", "fold", "slim", "share")
_FUSABLE: Final = frozenset({"Softmax", "Erf", "Tanh", "Sqrt", "Gelu", "LayerNormalization", "RMSNormalization"})
"""Operators that every pattern of a fusion has at least one of."""
_FP32, _HALF = ErrorBound("relative", 1e-4), ErrorBound("relative", 0.01)
"""Largest errors without ``--max-error``, and the one of models with numbers of 16 bits."""
_LEVELS: Final = ("basic", "extended", "layout", "all")


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser("optimize", _DESCRIPTION, page_flags=("--page",))
    parser.add_argument("model", metavar="MODEL", help="model.onnx, or REPOSITORY/name[/version]")
    add_destination(parser)
    add = parser.add_argument_group("steps").add_argument
    text = "Leave out a step that is done without being asked for; may be repeated."
    add("--skip", action="append", default=[], choices=_DEFAULTS, help=text)
    add("--outputs", type=_names, metavar="A,B", help="Keep only these outputs, and what they need.")
    text = "Name a free dimension of an input or output; may be repeated."
    add("--name-dim", action="append", default=[], type=_named, metavar="TENSOR:AXIS=NAME", help=text)
    text = "Fix a named dimension; may be repeated."
    add("--dim", action="append", default=[], type=_fixed, metavar="NAME=SIZE", help=text)
    add("--opset", type=_positive, metavar="N", help="Convert the standard operators to this opset.")
    text = "Type for onnxruntime.transformers, found from the operators if it is not given."
    add("--model-type", choices=fusions.TYPES, metavar="TYPE", help=f"{text} One of {', '.join(fusions.TYPES)}.")
    add("--heads", type=_positive, metavar="N", help="Heads of its attentions, found if not given.")
    add("--hidden", type=_positive, metavar="N", help="Width of its attentions, found if not given.")
    text = "Compute with 16 bits, but for the nodes that need fp32. Gains time on GPUs only."
    add("--precision", choices=tuple(precision.PRECISIONS), help=text)
    text = "Save the graph as ONNX Runtime optimizes it on this machine, for machines like it."
    add("--level", choices=_LEVELS, help=text)
    add("--external-data", action="store_true", help="Write weights beside the model, as over 2 GB in any case.")
    add = parser.add_argument_group("checks").add_argument
    text = f"Largest error against the source, MEASURE one of max, relative, cosine, top1 ({_FP32}; 16 bits: {_HALF})."
    add("--max-error", type=_bound, metavar="[MEASURE=]NUMBER", help=text)
    add("--inputs", type=Path, metavar="DATA.npz", help="Samples that judge the model, instead of synthetic inputs.")
    add("--provider", metavar="NAME", help="Execution provider that runs the models: cpu, cuda, …")
    add("--threads", type=_positive, metavar="N", help="Threads of a run.")
    add("--seconds", type=float, default=SECONDS, metavar="S", help=f"For the final measurement of speed ({SECONDS}).")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    given = build_parser().parse_args(arguments)
    given.command_line = ("optimize", *arguments)
    return run_tool("optimize", _run, given)


def _run(given: argparse.Namespace) -> Outcome:
    source = find_model(given.model)
    check_destination(given, source)
    with ExitStack() as stack:
        step = stack.enter_context(progress("reading the model"))
        staged = stack.enter_context(staged_model(given, source))
        folder = stack.enter_context(staging_folder(staged.parent))
        result = optimize(given, source, folder, staged, step)
    return Outcome(result, present(result))


def optimize(
    given: argparse.Namespace, source: Subject, folder: Path, staged: Path, progress: Progress
) -> OptimizeResult:
    """Optimize a model and deliver it.

    Args:
        given: The arguments.
        source: The model.
        folder: For the files of the steps.
        staged: As in ``deliver``.
        progress: Told which step is done.

    Raises:
        ServeError: The model or an argument is wrong, or a step that was asked for cannot be done within its bound.
    """
    opening = Timed(source, given.provider, given.threads)
    base = folder / "source" / staged.name
    base.parent.mkdir()
    call_apart(LIMIT_S, prepare, source.path, base)
    start = replace(opening, subject=replace(source, path=base))
    before = call_apart(LIMIT_S, look_at_source, start)
    steps = list(plan(given, before, opening))
    total = folder / "steps"
    total.mkdir()
    work = run_steps(start, before.look, steps, total, given.inputs, progress)
    progress(len(steps), "comparing with the source")
    compared = _compare(given, work, start)
    is_asked = any(step.is_kept and step.reason == ASKED_FOR for step in work.steps)
    if not is_asked and _is_slower(compared):  # one of 40 intervals of equal models lies below 1: measure again
        compared = _compare(given, work, start)
    if not is_asked and _is_slower(compared):
        why = "the model as a whole is slower than the source"
        dropped = tuple(replace(step, is_kept=False, reason=why) if step.is_kept else step for step in work.steps)
        work = Work(base, before.look, start, dropped)
        compared = _compare(given, work, start)
    _stage(work.model, staged, is_external=given.external_data)
    after = replace(work.look.shape, nbytes=nbytes_of(staged))
    findings = find(before, work, compared, given.level, given.precision, source)
    result = OptimizeResult(
        model=source.name,
        path=str(source.path),
        provider=before.provider,
        runtime=ort.__version__,
        before=before.look.shape,
        after=after,
        steps=work.steps,
        fused=fused_operators(before.look.operators, work.look.operators),
        run_fused=work.look.fused,
        almost_fused=work.look.almost,
        bound=str(given.max_error or (_HALF if before.has_half or given.precision else _FP32)),
        inputs=compared.inputs,
        agreement=compared.agreement,
        source_speed=compared.reference_speed,
        speed=compared.speed,
        domains=work.look.domains,
        findings=findings,
    )
    return replace(result, delivered=_deliver(given, source, staged, result, work.libraries))


def plan(given: argparse.Namespace, source: SourceLook, opening: Timed) -> Iterator[Step]:
    """The steps in their order.

    Fusions come before the clean-up, which removes the shape computations by which they recognize attentions.
    """
    bound = given.max_error or (_HALF if source.has_half else _FP32)
    if given.outputs:
        yield Step("outputs", (Attempt(interface.keep_outputs, (given.outputs,)),), bound, True, "outputs")
    if given.dim or given.name_dim:
        dims = (dict(given.dim), dict(given.name_dim))
        yield Step("dimensions", (Attempt(interface.set_dimensions, dims),), bound, True, "sizes")
    if given.opset:
        yield Step("opset", (Attempt(interface.set_opset, (given.opset,)),), bound, True)
    if "fusions" not in given.skip and _FUSABLE & source.look.operators.keys():
        sizes = (given.heads or source.sizes[0], given.hidden or source.sizes[1])
        types = (given.model_type,) if given.model_type else source.types
        attempts = [Attempt(fusions.fuse_by_transformers, (kind, *sizes)) for kind in types]
        yield Step("fusions", (*attempts, Attempt(fusions.fuse_by_onnxscript)), bound)
    for name, make in zip(_DEFAULTS[1:], (cleanup.fold, cleanup.slim, cleanup.share_weights), strict=True):
        if name not in given.skip:
            yield Step(name, (Attempt(make),), bound)
    if given.precision:
        bound = given.max_error or _HALF
        convert = Attempt(precision.convert, (given.precision, bound, opening, given.inputs))
        yield Step("precision", (convert,), bound, True)
    if given.level:
        save = Attempt(level.save_optimized, (given.level, opening, given.external_data))
        yield Step("level", (save,), bound, True)


def _compare(given: argparse.Namespace, work: Work, start: Timed) -> CompareResult:
    candidate = replace(start, subject=replace(start.subject, path=work.model))
    return compare_models(work.reference, candidate, given.inputs, seconds=given.seconds)


def _is_slower(compared: CompareResult) -> bool:
    return compared.speed is not None and compared.speed.is_slower


def _stage(model: Path, staged: Path, *, is_external: bool) -> None:
    if is_external or data_file(model).exists():
        call_apart(LIMIT_S, pack, model, staged)
    else:
        shutil.copyfile(model, staged)


def _deliver(
    given: argparse.Namespace, source: Subject, staged: Path, result: OptimizeResult, libraries: Collection[str]
) -> Delivered:
    if given.output is None and not any(step.is_kept for step in result.steps):
        return Delivered(notes=("nothing is published, because no step made the model better",))
    kept = [step.name for step in result.steps if step.is_kept]
    provenance = make_provenance(
        source,
        staged,
        arguments=given.command_line,
        notes=[finding.seen for finding in result.findings if finding.kind in ("not_portable", "runtime_operators")],
        agreement=result.agreement,
        inputs=result.inputs,
        speed=result.speed,
        figures={"steps": ", ".join(kept) or "none", "nodes": float(result.after.nodes)},
        libraries=libraries,
    )
    return deliver(staged, source, provenance, given)


def _bound(text: str) -> ErrorBound:
    try:
        bound = parse_bound(text)
    except ServeError as error:
        raise argparse.ArgumentTypeError(error.message.removeprefix("--max-error: ")) from None
    if bound.measure == "accuracy":
        raise argparse.ArgumentTypeError("expected a measure without labels, got accuracy")
    return bound


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if not names:
        raise argparse.ArgumentTypeError(f"expected names of outputs, got {text!r}")
    return names


def _fixed(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name or not size.isdecimal() or not 0 < int(size) < 1 << 31:
        raise argparse.ArgumentTypeError(f"expected NAME=SIZE with a size from 1, got {text!r}")
    return name, int(size)


def _named(text: str) -> tuple[tuple[str, int], str]:
    match = re.fullmatch(r"(.+):(\d+)=(.+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected TENSOR:AXIS=NAME, got {text!r}")
    return (match[1], int(match[2])), match[3]


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"expected an integer from 1, got {text!r}")
    return int(text)
