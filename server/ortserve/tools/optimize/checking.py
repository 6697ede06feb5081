"""Examines models and compares them: size, errors, and roughly their speed. Runs in the process of a step."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort

from ortserve.core.agreement import Agreement
from ortserve.engine.ort_errors import without_paths
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import choose_provider
from ortserve.errors import invalid_input
from ortserve.model_file.graph import all_nodes
from ortserve.tools.compare.arguments import BATCH
from ortserve.tools.compare.measure import common_rows, measure_agreement
from ortserve.tools.inputs import choose_inputs
from ortserve.tools.inspect.content import nodes_by_operator
from ortserve.tools.inspect.placement import open_optimized
from ortserve.tools.opening import OpenModel
from ortserve.tools.optimize.files import nbytes_of
from ortserve.tools.optimize.recognition import almost_fused, fused_operators, sizes_of
from ortserve.tools.optimize.result import AlmostFused, Shape
from ortserve.tools.signatures import signature_differences
from ortserve.tools.speed import Timed

_ROUNDS: Final = 15
_BLOCK_S: Final = 0.02
_MAX_SECONDS: Final = 4.0
_DIFFERENT_INPUTS: Final = 4
_HALF: Final = frozenset({onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
_UNKNOWN: Final = "No Op registered"
"""Error of onnx's checker that is ignored. Fusions add operators to ONNX's own domain that only ONNX Runtime has, and
that checks the graph itself."""
_STANDARD: Final = frozenset({"", "ai.onnx", "ai.onnx.ml"})

Kind: TypeAlias = Literal["same", "outputs", "sizes"]
"""The change of the interface that a step may make: none, fewer outputs, or sizes of dimensions."""


@dataclass(frozen=True, slots=True)
class Look:
    """Properties of a model.

    Attributes:
        shape: Size of the model.
        inputs: Names of the inputs.
        operators: Numbers of nodes in the file, by operator.
        fused: Numbers of fused operators in the graph that runs.
        almost: Patterns that are not fused in the graph that runs.
        domains: Operator sets besides ONNX's own of operators in the file.
        provider: The execution provider that runs the model.
        sizes: Heads and hidden size of the attentions of a source; 0 and 0 if they are not known.
        has_half: Whether a source already computes with 16 bits.
    """

    shape: Shape
    inputs: tuple[str, ...]
    operators: dict[str, int]
    fused: dict[str, int]
    almost: tuple[AlmostFused, ...]
    domains: tuple[str, ...]
    provider: str
    sizes: tuple[int, int] = (0, 0)
    has_half: bool = False


@dataclass(frozen=True, slots=True)
class Checked:
    """A model, compared with the one that it must agree with.

    Attributes:
        look: Properties of the model.
        agreement: Agreement of the outputs.
        ratio: Time of a run of the other model divided by the time of this one.
    """

    look: Look
    agreement: Agreement
    ratio: float


def look_at_source(model: Timed, inputs: Path | None, folder: Path, *, tries_inputs: bool) -> Look:
    """Check a model by ``onnx``, open it, and find its properties.

    Args:
        model: The source.
        inputs: Samples for the checks; None for synthetic ones.
        folder: Folder for temporary files, which may stay there.
        tries_inputs: Whether the inputs must fit the source.

    Raises:
        ServeError: invalid_input: the checker or ONNX Runtime rejects the model, or the model rejects the inputs.
    """
    tempfile.tempdir = str(folder)
    opened, look = _open_and_look(model)
    if tries_inputs:
        choose_inputs(opened, inputs)
    _, simplified = open_optimized(model.subject, opened.choice.name, level="basic")
    has_half = any(value.dtype in _HALF for value in simplified.values.values())
    return replace(look, sizes=sizes_of(simplified), has_half=has_half)


def check(reference: Timed, path: Path, kind: Kind, file: Path | None) -> Checked:
    """Compare a model with the one that it must agree with.

    Args:
        reference: The model that it is compared with, and how to open both.
        path: File of the model.
        kind: The change of the interface that is allowed.
        file: Samples, which fit the sizes of the model and have the inputs of the reference; None for synthetic ones.

    Raises:
        ServeError: The model is not valid, has another interface, or rejects the inputs.
    """
    opened, look = _open_and_look(reference.at(path))
    first = reference.open()
    for problem in signature_differences(first.signature, opened.signature, may_narrow=kind == "sizes"):
        if kind != "outputs" or not problem.endswith("got none"):
            raise invalid_input(problem)
    if kind == "sizes":  # inputs of the new sizes fit both models
        first = replace(first, signature=opened.signature)
    opened = opened.with_rows_of(first.signature)
    inputs = choose_inputs(opened if kind == "sizes" else first, file)
    rows = common_rows(first, opened, BATCH)
    names = [spec.name for spec in first.signature.inputs]
    order = [names.index(spec.name) for spec in opened.signature.inputs]
    samples = [inputs.take(rows, number) for number in range(_DIFFERENT_INPUTS)]
    feeds = (
        [first.for_model(arrays) for arrays in samples],
        [opened.for_model([arrays[index] for index in order]) for arrays in samples],
    )
    return Checked(look, measure_agreement(first, opened, inputs), _ratio(first, opened, feeds))


def _open_and_look(model: Timed) -> tuple[OpenModel, Look]:
    ort.set_default_logger_severity(4)
    path = model.subject.path
    _check_file(path)
    provider = model.provider or choose_provider(model.subject.options.execution_providers).name
    opened, optimized = open_optimized(model.subject, provider)
    operators = nodes_by_operator(opened.graph)
    run = sum(1 for _ in all_nodes(optimized.model)) if optimized.is_saved else None
    look = Look(
        shape=Shape(sum(operators.values()), run, nbytes_of(path)),
        inputs=tuple(spec.name for spec in opened.signature.inputs),
        operators=operators,
        fused=fused_operators({}, nodes_by_operator(optimized.model)),
        almost=tuple(almost_fused(optimized.model, opened.graph)),
        domains=tuple(sorted({node.domain for node in all_nodes(opened.graph)} - _STANDARD)),
        provider=opened.choice.name,
    )
    return opened, look


def _check_file(path: Path) -> None:
    try:
        onnx.checker.check_model(path)
    except (onnx.checker.ValidationError, OSError, ValueError, RuntimeError) as error:
        text = without_paths(str(error)).strip().splitlines() or [type(error).__name__]
        if _UNKNOWN not in text[0]:
            raise invalid_input(f"{path}: the model fails the checker of onnx: {text[0][:300]}") from None


def _ratio(first: OpenModel, second: OpenModel, feeds: Sequence[Sequence[list[np.ndarray]]]) -> float:
    """The ratio of the shortest times of a run, from short blocks of runs of both models in turn.

    On the CPU, times are processor times. Other work on the machine only lengthens them, so the shortest ones count.
    """
    clock = time.process_time if second.choice.name == CPU else time.perf_counter
    runs = (first.runner().run, second.runner().run)

    def seconds(side: int, count: int) -> float:
        began = clock()
        for number in range(count):
            runs[side](feeds[side][number % _DIFFERENT_INPUTS])
        return max(1e-9, clock() - began) / count

    shortest = [min(seconds(side, 1), seconds(side, 1)) for side in (0, 1)]
    counts = [max(1, round(_BLOCK_S / one)) for one in shortest]
    until = time.monotonic() + _MAX_SECONDS
    for number in range(2 * _ROUNDS):
        side = (number + number // 2) % 2
        shortest[side] = min(shortest[side], seconds(side, counts[side]))
        if number % 2 and time.monotonic() > until:
            break
    return shortest[0] / shortest[1]
