"""Looks at the models that steps have made, in a process of its own: its size, its errors, and roughly its speed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort

from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import choose_provider
from ortserve.errors import invalid_input
from ortserve.tools.agreement import Agreement, AgreementMeter
from ortserve.tools.compare.measure import BATCH, common_rows, measure_agreement
from ortserve.tools.inputs import choose_inputs
from ortserve.tools.inspect.content import all_nodes, count_operators
from ortserve.tools.inspect.placement import open_optimized
from ortserve.tools.opening import OpenModel
from ortserve.tools.optimize.files import nbytes_of
from ortserve.tools.optimize.recognition import almost_fused, fused_operators, sizes_of, types_of
from ortserve.tools.optimize.result import AlmostFused, Shape
from ortserve.tools.signatures import signature_differences
from ortserve.tools.speed import Timed

_ROUNDS: Final = 15
_BLOCK_S: Final = 0.02
_MOST_SECONDS: Final = 4.0
_DIFFERENT_INPUTS: Final = 4
_HALF: Final = frozenset({onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
_UNKNOWN: Final = "No Op registered"
"""Fusions put operators into ONNX's own domain that only ONNX Runtime knows; it checks the graph itself."""
_STANDARD: Final = frozenset({"", "ai.onnx", "ai.onnx.ml"})

Kind: TypeAlias = Literal["same", "outputs", "sizes"]
"""What a step may change for callers: nothing, which outputs there are, or the sizes of dimensions."""

_Feeds: TypeAlias = tuple[list[np.ndarray], list[np.ndarray]]
"""Inputs of a run of both models, each in its own form."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a model is like.

    Attributes:
        shape: Its size.
        operators: Its operators in the file, with their numbers.
        fused: Operators of the graph that runs that stand for several others.
        almost: What is left in pieces there.
        domains: Operator sets besides ONNX's own of operators in the file.
    """

    shape: Shape
    operators: dict[str, int]
    fused: dict[str, int]
    almost: tuple[AlmostFused, ...]
    domains: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourceLook:
    """What plans need to know of the source.

    Attributes:
        look: What it is like.
        types: Model types for fusions.
        sizes: Heads and hidden size; 0 and 0 if they are not known.
        has_half: Whether it computes with numbers of 16 bits already.
        provider: The execution provider.
    """

    look: Look
    types: tuple[str, ...]
    sizes: tuple[int, int]
    has_half: bool
    provider: str


@dataclass(frozen=True, slots=True)
class Checked:
    """A model beside the one that it must agree with.

    Attributes:
        look: What it is like.
        agreement: Of the outputs.
        ratio: Time of a run of the other model divided by that of this one.
    """

    look: Look
    agreement: Agreement
    ratio: float


def look_at_source(model: Timed) -> SourceLook:
    """Check a model by ``onnx``, open it, and look at it.

    Raises:
        ServeError: invalid_input: the checker or ONNX Runtime refuses it.
    """
    opened, look = _open_and_look(model)
    _, simplified = open_optimized(model.subject, opened.choice.name, level="basic")
    has_half = any(value.dtype in _HALF for value in simplified.values.values())
    return SourceLook(look, types_of(opened.graph), sizes_of(simplified), has_half, opened.choice.name)


class Checker:
    """Compares models with one that it keeps open."""

    def __init__(self, reference: Timed, inputs: Path | None) -> None:
        """Open the model that others must agree with.

        Args:
            reference: The model.
            inputs: Samples; None for synthetic ones.

        Raises:
            ServeError: The model does not open, or the inputs do not fit.
        """
        ort.set_default_logger_severity(4)
        self._first: Final = reference.open()
        self._inputs: Final = choose_inputs(self._first, inputs)

    def check(self, candidate: Timed, kind: Kind) -> Checked:
        """Compare a model.

        Args:
            candidate: The model.
            kind: What may differ for callers. If dimensions have other sizes, only synthetic inputs fit both.

        Raises:
            ServeError: The model is not valid, has another interface, or rejects the inputs.
        """
        first = self._first
        opened, look = _open_and_look(candidate)
        for problem in signature_differences(first.signature, opened.signature, may_narrow=kind == "sizes"):
            if kind != "outputs" or not problem.endswith("got none"):
                raise invalid_input(problem)
        if kind == "sizes":
            agreement, feeds = _compare_sizes(first, opened)
            return Checked(look, agreement, _ratio(first, opened, feeds))
        agreement = measure_agreement(first, opened, self._inputs)
        rows = common_rows(first, opened, BATCH)
        feeds = []
        for number in range(_DIFFERENT_INPUTS):
            arrays = self._inputs.take(rows, number)
            by_name = dict(zip((spec.name for spec in first.signature.inputs), arrays, strict=True))
            chosen = [by_name[spec.name] for spec in opened.signature.inputs]
            feeds.append((first.for_model(arrays), opened.for_model(chosen)))
        return Checked(look, agreement, _ratio(first, opened, feeds))


def _open_and_look(model: Timed) -> tuple[OpenModel, Look]:
    ort.set_default_logger_severity(4)
    path = model.subject.path
    _check_file(path)
    provider = model.provider or choose_provider(model.subject.options.execution_providers).name
    opened, optimized = open_optimized(model.subject, provider)
    operators = count_operators(opened.graph)
    run = sum(1 for _ in all_nodes(optimized.model)) if optimized.is_saved else None
    look = Look(
        Shape(sum(operators.values()), run, nbytes_of(path)),
        operators,
        fused_operators({}, count_operators(optimized.model)),
        tuple(almost_fused(optimized.model, opened.graph)),
        tuple(sorted({node.domain for node in all_nodes(opened.graph)} - _STANDARD)),
    )
    return opened, look


def _check_file(path: Path) -> None:
    try:
        onnx.checker.check_model(path)
    except (onnx.checker.ValidationError, OSError, ValueError, RuntimeError) as error:
        text = without_paths(str(error)).strip().splitlines() or [type(error).__name__]
        if _UNKNOWN in text[0]:
            return
        raise invalid_input(f"{path.name}: the model fails the checker of onnx: {text[0][:300]}") from None


def _compare_sizes(first: OpenModel, second: OpenModel) -> tuple[Agreement, list[_Feeds]]:
    """Compare outputs for inputs that both accept as they are."""
    inputs, names = choose_inputs(second), [spec.name for spec in second.signature.inputs]
    meter = AgreementMeter([spec.name for spec in second.signature.outputs])
    feeds: list[_Feeds] = []
    for number in range(_DIFFERENT_INPUTS):
        arrays = second.for_model(inputs.take(BATCH, number))
        by_name = dict(zip(names, arrays, strict=True))
        feeds.append(([by_name[spec.name] for spec in first.signature.inputs], arrays))
        try:
            expected, got = first.runner().run(feeds[-1][0]), second.runner().run(arrays)
        except ORT_ERRORS as error:
            raise invalid_input(f"a run failed: {without_paths(str(error))}") from None
        meter.add(expected, got, 1)
    return meter.result(), feeds


def _ratio(first: OpenModel, second: OpenModel, feeds: Sequence[_Feeds]) -> float:
    """The ratio of the shortest times of short blocks of runs, which take turns.

    On the CPU it is processor time. Other work on the machine only lengthens that, so the shortest ones are compared.
    """
    clock = time.process_time if second.choice.name == CPU else time.perf_counter
    runs = (first.runner().run, second.runner().run)

    def seconds(side: int, count: int) -> float:
        began = clock()
        for number in range(count):
            runs[side](feeds[number % len(feeds)][side])
        return max(1e-9, clock() - began) / count

    shortest = [min(seconds(side, 1), seconds(side, 1)) for side in (0, 1)]
    counts = [max(1, round(_BLOCK_S / one)) for one in shortest]
    until = time.monotonic() + _MOST_SECONDS
    for number in range(2 * _ROUNDS):
        side = (number + number // 2) % 2
        shortest[side] = min(shortest[side], seconds(side, counts[side]))
        if number % 2 and time.monotonic() > until:
            break
    return shortest[0] / shortest[1]
