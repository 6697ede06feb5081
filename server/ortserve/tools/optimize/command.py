"""The command ``ortserve optimize``."""

import argparse
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import onnx
import onnxruntime as ort

from ortserve.core.agreement import WITHOUT_LABELS, parse_bound
from ortserve.engine.child_process import call_in_child
from ortserve.errors import ServeError, invalid_input
from ortserve.tools.command import Outcome
from ortserve.tools.compare.measure import compare_models
from ortserve.tools.compare.result import CompareResult
from ortserve.tools.console import ShowProgress, progress
from ortserve.tools.destination import Delivered, check_destination, deliver, staged_model
from ortserve.tools.optimize import precision, steps
from ortserve.tools.optimize.arguments import DEFAULT_STEPS, FP32_BOUND, HALF_BOUND
from ortserve.tools.optimize.checking import Look, look_at_source
from ortserve.tools.optimize.files import data_file, nbytes_of, pack, prepare
from ortserve.tools.optimize.findings import find
from ortserve.tools.optimize.pipeline import ASKED_FOR, LIMIT_S, Draft, Make, Step, run_steps
from ortserve.tools.optimize.presentation import present
from ortserve.tools.optimize.recognition import fused_operators
from ortserve.tools.optimize.result import OptimizeResult
from ortserve.tools.provenance import make_provenance
from ortserve.tools.speed import Timed
from ortserve.tools.staging import staging_folder
from ortserve.tools.subject import Subject, find_model

_FUSABLE: Final = frozenset({"Softmax", "Erf", "Tanh", "Sqrt", "Gelu", "LayerNormalization", "RMSNormalization"})
"""Every pattern of a fusion contains at least one of these operators."""


def run(given: argparse.Namespace) -> Outcome:
    """Optimize a model. Raises ServeError."""
    if given.max_error is not None:
        given.max_error = parse_bound(given.max_error, measures=WITHOUT_LABELS)
    if given.opset is not None and given.opset > (newest := onnx.defs.onnx_opset_version()):
        raise invalid_input(f"--opset: expected an integer from 1 to {newest}, got '{given.opset}'")
    source = find_model(given.model)
    check_destination(given, source)
    result: OptimizeResult | None = None
    error: OSError | None = None
    try:
        with (
            progress("reading the model") as step,
            staged_model(given, source) as staged,
            staging_folder(staged.parent) as folder,
        ):
            copy = folder / "source" / staged.name
            try:
                result, draft = optimize(given, source, folder, copy, step)
            except ServeError as failure:
                raise ServeError(failure.kind, failure.message.replace(str(copy), str(source.path))) from None
            if draft.full_disk is not None:
                raise draft.full_disk
            result = _deliver(given, source, staged, result, draft)
    except OSError as failure:
        if result is None:
            raise
        error = failure  # what the steps found is worth more than the file
    return Outcome(result, present(result), error=error)


def optimize(
    given: argparse.Namespace, source: Subject, folder: Path, base: Path, show: ShowProgress
) -> tuple[OptimizeResult, Draft]:
    """Run the steps, and compare the resulting model with the source.

    Args:
        given: The arguments.
        source: The model.
        folder: Folder for the files of the steps.
        base: File for a copy of the source. The files of the steps have its name.
        show: Called before each step, with its number and name.

    Returns:
        The result, and the model that it describes.

    Raises:
        ServeError: The model or an argument is wrong, or a requested step fails or exceeds its bound.
    """
    opening = Timed(source, given.provider, given.threads)
    files = folder / "steps"
    base.parent.mkdir()
    files.mkdir()
    call_in_child(LIMIT_S, prepare, source.path, base)
    start = opening.at(base)
    look = partial(look_at_source, tries_inputs=not given.dim)  # inputs may fit only with these sizes
    before = call_in_child(LIMIT_S, look, start, given.inputs, folder)
    planned = list(plan(given, before, opening))
    draft = run_steps(Draft(base, before, start, given.inputs), planned, files, show)
    show(len(planned), "comparing with the source")
    compared = _compare(given, draft)
    if not any(step.is_kept and step.reason == ASKED_FOR for step in draft.steps):
        # For equal models, one of 40 intervals lies below 1: measure again.
        if compared.speed and compared.speed.is_slower:
            compared = _compare(given, draft)
        if compared.speed and compared.speed.is_slower:
            why = "the resulting model is slower than the source"
            dropped = tuple(replace(step, is_kept=False, reason=why) if step.is_kept else step for step in draft.steps)
            draft = Draft(base, before, start, given.inputs, dropped)
            compared = _compare(given, draft)
    result = OptimizeResult(
        model=source.name,
        path=str(source.path),
        provider=before.provider,
        runtime=ort.__version__,
        before=before.shape,
        after=draft.look.shape,
        steps=draft.steps,
        fused=fused_operators(before.operators, draft.look.operators),
        run_fused=draft.look.fused,
        almost_fused=draft.look.almost,
        bound=str(given.max_error or (HALF_BOUND if before.has_half or given.precision else FP32_BOUND)),
        inputs=compared.inputs,
        agreement=compared.agreement,
        source_speed=compared.reference_speed,
        speed=compared.speed,
        domains=draft.look.domains,
        findings=tuple(find(before, draft, compared, given.level, given.precision)),
    )
    return result, draft


def plan(given: argparse.Namespace, source: Look, opening: Timed) -> Iterator[Step]:
    """The steps in their order.

    Dimensions are set first, because the samples of ``--inputs`` fit the new dimensions. Fusions precede the clean-up,
    which removes the shape computations that fusions recognize attentions by.
    """
    bound = given.max_error or (HALF_BOUND if source.has_half else FP32_BOUND)
    if given.dim or given.name_dim:
        make = partial(steps.set_dimensions, fixed=dict(given.dim), named=dict(given.name_dim))
        yield Step("dimensions", {"": make}, bound, is_requested=True, kind="sizes")
    if given.outputs:
        make = partial(steps.keep_outputs, names=given.outputs)
        yield Step("outputs", {"": make}, bound, is_requested=True, kind="outputs")
    if given.opset:
        yield Step("opset", {"": partial(steps.set_opset, opset=given.opset)}, bound, is_requested=True)
    if "fusions" not in given.skip and _FUSABLE & source.operators.keys():
        yield Step("fusions", dict(_fusions(given, source)), bound)
    for name, clean in zip(DEFAULT_STEPS[1:], (steps.fold, steps.slim, steps.share_weights), strict=True):
        if name not in given.skip:
            yield Step(name, {"": clean}, bound)
    if given.precision:
        bound = given.max_error or HALF_BOUND
        convert = partial(precision.convert, name=given.precision, bound=bound, opening=opening)
        yield Step("precision", {"": convert}, bound, is_requested=True, takes_inputs=True)
    if given.level:
        save = partial(steps.save_optimized, level=given.level, opening=opening, has_data=given.external_data)
        yield Step("level", {"": save}, bound, is_requested=True)


def _fusions(given: argparse.Namespace, source: Look) -> Iterator[tuple[str, Make]]:
    heads, hidden = given.heads or source.sizes[0], given.hidden or source.sizes[1]
    types = (given.model_type,) if given.model_type else ("vit", "bert") if "Conv" in source.operators else ("bert",)
    for kind in types:
        sizes = f", {heads} heads, hidden size {hidden}" if heads else ""
        make = partial(steps.fuse_by_transformers, kind=kind, heads=heads, hidden=hidden)
        yield f"onnxruntime.transformers (type {kind}{sizes})", make
    yield "onnxscript", steps.fuse_by_onnxscript


def _compare(given: argparse.Namespace, draft: Draft) -> CompareResult:
    """Compare the model with the source. The speed of a copy is that of the source, so it is not measured."""
    seconds = given.seconds if any(step.is_kept for step in draft.steps) else 0.0
    return compare_models(draft.reference, draft.reference.at(draft.model), draft.inputs, seconds=seconds)


def _deliver(
    given: argparse.Namespace, source: Subject, staged: Path, result: OptimizeResult, draft: Draft
) -> OptimizeResult:
    """Write the model to its destination. Returns the result with its size there, and the destination."""
    if given.external_data or data_file(draft.model).exists():
        call_in_child(LIMIT_S, pack, draft.model, staged)
    else:
        shutil.copyfile(draft.model, staged)
    result = replace(result, after=replace(result.after, nbytes=nbytes_of(staged)))
    kept = [step.name for step in draft.steps if step.is_kept]
    notes: list[str] = []
    if not kept:
        if given.output is not None:
            notes.append(f"{given.output} is a copy of the source, because no step improved the model")
        if given.publish is not None:
            given.publish = None
            notes.append("nothing is published, because no step improved the model")
        if given.output is None:
            return replace(result, delivered=Delivered(notes=tuple(notes)))
    provenance = make_provenance(
        source,
        staged,
        arguments=given.command_line,
        notes=[finding.seen for finding in result.findings if finding.kind in ("not_portable", "runtime_operators")],
        agreement=result.agreement,
        inputs=result.inputs,
        speed=result.speed,
        figures={"steps": ", ".join(kept) or "none", "nodes": float(result.after.nodes)},
        libraries=draft.libraries,
    )
    delivered = deliver(staged, source, provenance, given)
    return replace(result, delivered=replace(delivered, notes=(*notes, *delivered.notes)))
