"""The verdict about a model: whether its rows are proven independent, and along which axes."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ortserve.rows.graph import Model
from ortserve.rows.hypotheses import (
    MOST_HYPOTHESES,
    Axes,
    Beginning,
    Request,
    Sizes,
    Values,
    has_choice,
    hypotheses,
    real_inputs,
)
from ortserve.rows.reading import TooLargeError, read_graph
from ortserve.rows.symbols import Symbols
from ortserve.rows.values import Kind, Value
from ortserve.rows.walk import Budget, TooMuchWorkError, Walk


class Outcome(enum.Enum):
    """What is known of the rows of a model."""

    PROVEN = "proven"
    """The batch gives each row what the row gets alone."""
    MIXED = "mixed"
    """An operator may combine rows."""
    UNKNOWN = "unknown"
    """An operator or a construct has no rule."""
    FIXED = "fixed"
    """No input has a free axis, so nothing can be batched."""


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """What the analysis of a model has found.

    Attributes:
        input_axes: By graph input, the axis that carries the rows; None for one without rows, which all requests of a
            batch must give alike. Empty where the outcome is not proven.
        output_axes: By graph output, likewise; None for one that is the same for every batch.
        equal_sizes: Names of dimensions that the proof takes as equal wherever they occur in the declared inputs, sums
            such as ``past + current`` among them. A request that breaks one of them must run alone.
        node: The node that decides, by its name or as ``operator #index``; empty where the outcome is proven.
        reason: A sentence that says how; empty where the outcome is proven.
    """

    outcome: Outcome
    input_axes: Mapping[str, int | None] = field(default_factory=dict)
    output_axes: Mapping[str, int | None] = field(default_factory=dict)
    equal_sizes: tuple[str, ...] = ()
    node: str = ""
    reason: str = ""


def prove_rows(
    path: Path,
    *,
    input_shapes: Sizes | None = None,
    input_values: Values | None = None,
) -> RowVerdict:
    """Whether the rows of a model are independent, along the first axes for which that can be proven.

    Never raises; a file that cannot be read gives unknown. Blocks on the file. Takes some 50 µs a node.

    Args:
        path: The model file.
        input_shapes: Sizes of a request's axes, for inputs whose rank or axes the file leaves open; None for an axis
            of unknown size. The verdict then holds for requests with these sizes only.
        input_values: Elements of small inputs that carry no rows, such as a rate. The verdict then holds for requests
            with these values only.
    """
    try:
        model = read_graph(path)
    except TooLargeError as failure:
        return _unknown(f"the model is not analysed: {failure}")
    if model is None:
        return _unknown("the file cannot be read as an ONNX model")
    return prove_model(model, input_shapes, input_values)


def prove_model(model: Model, sizes: Sizes | None = None, values: Values | None = None) -> RowVerdict:
    """As ``prove_rows``, for a model that was read."""
    sizes = sizes or {}
    if not has_choice(model, sizes):
        unclear = [each for each in real_inputs(model) if each.dims is None]
        if unclear:
            return _unknown(f"input '{unclear[0].name}' is declared without a shape")
        return RowVerdict(Outcome.FIXED, reason="no input has an axis of free size")
    budget = Budget()
    first: RowVerdict | None = None
    for count, axes in enumerate(hypotheses(model, sizes)):
        if count >= MOST_HYPOTHESES:
            break
        try:
            verdict = prove_axes(model, axes, sizes, values, budget)
        except TooMuchWorkError:
            break
        if verdict.outcome is Outcome.PROVEN:
            return verdict
        first = first or verdict
    return first or _unknown("the model has more nodes than are analysed")


def prove_axes(
    model: Model,
    axes: Axes,
    sizes: Sizes | None = None,
    values: Values | None = None,
    budget: Budget | None = None,
) -> RowVerdict:
    """The verdict for one hypothesis: ``axes`` has the axis of each input that carries rows.

    Names of dimensions are believed only where the proof needs them.

    Raises:
        TooMuchWorkError: ``budget`` does not suffice.
    """
    budget = budget or Budget()
    request = Request(sizes or {}, values or {})
    verdict = _judge(model, axes, request, budget, believe_names=True)
    if verdict.outcome is Outcome.PROVEN and verdict.equal_sizes:
        try:
            without = _judge(model, axes, request, budget, believe_names=False)
        except TooMuchWorkError:
            return verdict
        return without if without.outcome is Outcome.PROVEN else verdict
    return verdict


def claims(
    model: Model,
    axes: Axes,
    sizes: Sizes | None = None,
    values: Values | None = None,
    *,
    believe_names: bool = False,
) -> dict[str, Value]:
    """What one hypothesis claims of every tensor of the main graph, by name. For tests."""
    symbols = Symbols()
    beginning = Beginning(model, symbols, axes, Request(sizes or {}, values or {}), believe_names=believe_names)
    if beginning.problem:
        return {}
    return Walk(model, symbols, Budget()).run(beginning.claims)


def _judge(model: Model, axes: Axes, request: Request, budget: Budget, *, believe_names: bool) -> RowVerdict:
    symbols = Symbols()
    beginning = Beginning(model, symbols, axes, request, believe_names=believe_names)
    if beginning.problem:
        return _unknown(beginning.problem)
    names = Walk(model, symbols, budget).run(beginning.claims)
    output_axes: dict[str, int | None] = {}
    failed: list[Value] = []
    refusals: list[RowVerdict] = []
    for output in model.graph.outputs:
        value = names.get(output.name)
        if value is None:
            return _unknown(f"nothing computes output '{output.name}'")
        if value.cause is not None:
            failed.append(value)
        elif problem := _problem(value):
            refusals.append(RowVerdict(Outcome.MIXED, node=output.name, reason=f"output '{output.name}' {problem}"))
        output_axes[output.name] = value.axis if value.is_rows else None
    if failed:
        value = min(failed, key=lambda each: each.cause.order if each.cause is not None else 0)
        assert value.cause is not None
        outcome = Outcome.MIXED if value.kind is Kind.MIXED else Outcome.UNKNOWN
        return RowVerdict(outcome, node=value.cause.node, reason=value.cause.reason)
    if refusals:
        return refusals[0]
    if all(axis is None for axis in output_axes.values()):
        return RowVerdict(Outcome.MIXED, node=model.graph.outputs[0].name, reason="no output carries the rows")
    input_axes = {declared.name: axes.get(declared.name) for declared in real_inputs(model)}
    return RowVerdict(Outcome.PROVEN, input_axes, output_axes, beginning.equal_sizes)


def _problem(value: Value) -> str:
    """Why a claim does not make an output one that can be taken apart; empty where it does."""
    if value.kind is Kind.FREE:
        return ""
    if value.kind is Kind.SIZE:
        return "depends on the number of rows"
    if not value.is_plain:
        return "does not have one entry for each row"
    if value.facts.stride != 0:
        return "contains the number of the row"
    if value.facts.padding is not None:
        return "is padded to the longest row"
    return ""


def _unknown(reason: str) -> RowVerdict:
    return RowVerdict(Outcome.UNKNOWN, reason=reason)
