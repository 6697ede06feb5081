"""The verdict about a model: whether its rows are proven independent, and along which axes.

A hypothesis assigns the axes that may carry the rows. Hypotheses are tried one after another.
"""

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final, TypeAlias

from ortserve.model_file.graph import Declared, Dims, Model, names_read
from ortserve.rows.number import MAX_TERMS, SIZE_BITS, N, Number
from ortserve.rows.symbols import Symbols
from ortserve.rows.values import Kind, Value, free, rows
from ortserve.rows.walk import Walk
from ortserve.rows.work_budget import TooMuchWorkError, WorkBudget

MAX_HYPOTHESES: Final = 48
"""Maximum number of hypotheses that are tried for a model."""
_MAX_AXES: Final = 3
"""Number of free axes of an input, from the first on, that may carry rows."""
_MAX_COMBINED_GROUPS: Final = 6
"""Maximum number of groups of inputs whose axes are combined freely."""
_MAX_GROUPS: Final = 12
"""Maximum number of groups of which one may have its rows on a higher axis than the lowest. A group consists of the
inputs with equal declarations."""

Axes: TypeAlias = Mapping[str, int | None]
"""The axis that carries the rows, by graph input; None for an input without rows."""

_NAME: Final = re.compile(r"\w")
_SUM: Final = re.compile(r"[A-Za-z_][\w.\-]*(?: *\+ *(?:[A-Za-z_][\w.\-]*|\d{1,18}))+")


def sum_terms(name: str) -> tuple[str | int, ...]:
    """The dimensions and numbers in a name such as ``past + current``; empty for any other name or a long sum."""
    if not 0 < name.count("+") < MAX_TERMS or not _SUM.fullmatch(name):
        return ()
    return tuple(int(part) if part.isdigit() else part for part in (part.strip() for part in name.split("+")))


def real_inputs(model: Model) -> list[Declared]:
    """The inputs that a request must contain: those without an initializer."""
    return [declared for declared in model.graph.inputs if declared.name not in model.graph.constants]


def has_choice(model: Model) -> bool:
    """Whether an input has an axis that may carry rows."""
    return any(map(_choices, real_inputs(model)))


def hypotheses(model: Model) -> Iterator[Axes]:
    """Yield axes for all inputs, lower axes first, at most ``MAX_HYPOTHESES`` times.

    Inputs with equal declarations have the rows on the same axis.
    """
    groups: dict[tuple[Dims | None, tuple[int, ...]], list[str]] = {}
    fixed: dict[str, int | None] = {}
    for declared in real_inputs(model):
        axes = _choices(declared)
        if not axes:
            fixed[declared.name] = None
            continue
        groups.setdefault((declared.dims, axes), []).append(declared.name)
    for combination in _lowest_first([axes for _, axes in groups]):
        axes_by_name = dict(fixed)
        for axis, names in zip(combination, groups.values(), strict=True):
            axes_by_name.update(dict.fromkeys(names, axis))
        yield axes_by_name


def _lowest_first(choices: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The combinations of axes with the lowest sums, in ascending order; for very many groups only the first one."""
    if len(choices) > _MAX_GROUPS:
        return [tuple(axes[0] for axes in choices)]
    combinations = product(*choices) if len(choices) <= _MAX_COMBINED_GROUPS else _nearly_lowest(choices)
    return sorted(combinations, key=sum)[:MAX_HYPOTHESES]


def _nearly_lowest(choices: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Combinations for many groups: all groups on their lowest axis, or all but one."""
    base = tuple(axes[0] for axes in choices)
    yield base
    for index, axes in enumerate(choices):
        for axis in axes[1:]:
            yield (*base[:index], axis, *base[index + 1 :])


def _choices(declared: Declared) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(declared.dims or ()) if not isinstance(size, int))[:_MAX_AXES]


class InitialClaims:
    """The claims about graph inputs under one hypothesis.

    Attributes:
        claims: The claims, by input.
        equal_sizes: Names of dimensions that are assumed equal wherever they occur. Empty without ``believe_names``.
        problem: The reason why an input has no claim; empty if all inputs have claims.
    """

    def __init__(self, model: Model, symbols: Symbols, axes: Axes, *, believe_names: bool) -> None:
        self.claims: dict[str, Value] = {}
        self._symbols = symbols
        self._atoms: dict[str, Number] = {}
        self._uses: dict[str, int] = {}
        self._believe_names = believe_names
        inputs = real_inputs(model)
        self._batch_names = {
            str(declared.dims[axis])
            for declared in inputs
            if (axis := axes.get(declared.name)) is not None and declared.dims and -1 < axis < len(declared.dims)
        }
        problems = [self._claim(declared, axes.get(declared.name)) for declared in inputs]
        self.problem = next(filter(None, problems), "")
        self.equal_sizes = tuple(sorted(name for name, uses in self._uses.items() if uses > 1))

    def _claim(self, declared: Declared, axis: int | None) -> str:
        """Add the claim about an input. Returns the reason why it has none; empty if it has one."""
        dims = declared.dims
        if not declared.is_tensor:
            return f"input '{declared.name}' is not a tensor"
        if dims is None and axis is None:
            self.claims[declared.name] = free(None, declared.dtype)
            return ""
        if dims is None:
            return f"input '{declared.name}' is declared without a shape"
        if axis is not None and not 0 <= axis < len(dims):
            return f"input '{declared.name}' has no axis {axis}"
        lengths = tuple(1 if position == axis else self._length(size) for position, size in enumerate(dims))
        for position, (name, length) in enumerate(zip(dims, lengths, strict=True)):
            if isinstance(name, str):
                self._symbols.declare(name, N if position == axis else length)
        if axis is None:
            self.claims[declared.name] = free(lengths, declared.dtype)
        else:
            self.claims[declared.name] = rows(self._symbols, lengths, axis, dtype=declared.dtype)
        return ""

    def _length(self, size: int | str | None) -> Number:
        if isinstance(size, int):
            return size
        is_name = size is not None and _NAME.match(size) is not None  # some exporters write "?"
        if size is None or not is_name:
            return self._symbols.fresh(1, "")
        if not self._believe_names or size in self._batch_names:
            return self._symbols.fresh(1, size)
        parts = sum_terms(size)
        if parts and not any(part in self._batch_names for part in parts):
            self._uses[size] = 2
            return self._symbols.sum(part if isinstance(part, int) else self._named(part) for part in parts)
        return self._named(size)

    def _named(self, name: str) -> Number:
        self._uses[name] = self._uses.get(name, 0) + 1
        if name not in self._atoms:
            self._atoms[name] = self._symbols.fresh(1, name)
        return self._atoms[name]


class Outcome(enum.Enum):
    """The outcome of the analysis of a model's rows."""

    PROVEN = "proven"
    """In a batch, each row has the same result as alone."""
    MIXED = "mixed"
    """An operator may combine rows."""
    UNKNOWN = "unknown"
    """An operator or a construct has no rule."""
    FIXED = "fixed"
    """No input has a free axis, so nothing can be batched."""


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """The result of the analysis of a model.

    Attributes:
        input_axes: The axis that carries the rows, by graph input; None for an input without rows, in which all
            requests of a batch must agree. Empty if the outcome is not proven.
        output_axes: The axis that carries the rows, by graph output; None for an output that does not depend on the
            rows. Empty if the outcome is not proven.
        equal_sizes: Names of dimensions that the proof assumes equal wherever they occur in the declared inputs, also
            sums such as ``past + current``. A request in which such sizes differ must run alone.
        fixed_sizes: Sizes that the proof assumes for dimensions of the declared inputs, by name. A request with another
            size must run alone.
        longest_axis: The proof assumes that no axis of an input has more entries. A request with more must run alone.
        node: The node that prevents the proof, by name or as ``operator #index``; empty if the outcome is proven.
        reason: The reason; empty if the outcome is proven.
    """

    outcome: Outcome
    input_axes: Mapping[str, int | None] = field(default_factory=dict)
    output_axes: Mapping[str, int | None] = field(default_factory=dict)
    equal_sizes: tuple[str, ...] = ()
    fixed_sizes: tuple[tuple[str, int], ...] = ()
    longest_axis: int = 1 << SIZE_BITS
    node: str = ""
    reason: str = ""


def why_not_analysed(model: Model) -> str:
    """Why the graph of a file cannot be analysed; empty if it can."""
    if not model.is_readable or model.has_invalid_names:
        return "the file cannot be read as an ONNX model"
    return f"the model is not analysed: {model.too_large}" if model.too_large else ""


def prove_model(model: Model, *, has_equal_rows: bool = False) -> RowVerdict:
    """Try to prove that the rows of a model are independent, along the first axes for which the proof succeeds.

    Axes along which a request may have several numbers of rows do not count, unless ``has_equal_rows`` says that no
    request has. Never raises an error.
    """
    if because := why_not_analysed(model):
        return _unknown(because)
    if not has_choice(model):
        unclear = [each for each in real_inputs(model) if each.dims is None]
        if unclear:
            return _unknown(f"input '{unclear[0].name}' is declared without a shape")
        return RowVerdict(Outcome.FIXED, reason="no input has an axis of free size")
    budget = WorkBudget()
    first: RowVerdict | None = None
    for axes in hypotheses(model):
        try:
            verdict = prove_axes(model, axes, budget)
        except TooMuchWorkError as failure:
            return first or _unknown(f"the model is not analysed: {failure}")
        if verdict.outcome is Outcome.PROVEN:
            if has_equal_rows or not (because := _why_unequal(model, axes)):
                return verdict
            verdict = _unknown(because)
        first = first or verdict
    assert first is not None
    return first


def prove_axes(model: Model, axes: Axes, budget: WorkBudget | None = None) -> RowVerdict:
    """The verdict for one hypothesis: ``axes`` holds the axis of each input that carries rows.

    Dimensions of the same name are assumed equal only if the proof needs it.

    Raises:
        TooMuchWorkError: The analysis needs more than ``budget``.
    """
    budget = budget or WorkBudget()
    verdict = _judge(model, axes, budget, believe_names=True)
    if verdict.outcome is Outcome.PROVEN and verdict.equal_sizes:
        try:
            without = _judge(model, axes, budget, believe_names=False)
        except TooMuchWorkError:
            return verdict
        return without if without.outcome is Outcome.PROVEN else verdict
    return verdict


def _why_unequal(model: Model, axes: Axes) -> str:
    """Why the inputs of a request may differ in their number of rows; empty if nothing says so.

    They may if they form groups such that no tensor depends on two, and no name of their rows occurs in all groups.
    """
    carriers = [declared for declared in real_inputs(model) if axes.get(declared.name) is not None]
    names = [_row_name(declared, axes) for declared in carriers]
    if len(set(names) - {""}) < 2:
        return ""
    depends = {declared.name: 1 << index for index, declared in enumerate(carriers)}  # sets of inputs, as bits
    groups = list(depends.values())
    for node in model.graph.nodes:
        needed = 0
        for name in names_read(node):
            needed |= depends.get(name, 0)
        depends.update(dict.fromkeys(node.outputs, needed))
        joined = [group for group in groups if group & needed]
        if len(joined) > 1:
            groups = [*(group for group in groups if not group & needed), sum(joined)]
    by_group = [{name: index for index, name in enumerate(names) if name and group >> index & 1} for group in groups]
    named = [inputs_by_name for inputs_by_name in by_group if inputs_by_name]
    if len(named) < 2 or set.intersection(*map(set, named)):
        return ""
    (one, first), (other, second) = (next(iter(inputs_by_name.items())) for inputs_by_name in named[:2])
    return (
        f"no node needs both inputs '{carriers[first].name}' and '{carriers[second].name}', so their dimensions "
        f"'{one}' and '{other}' may differ"
    )


def _row_name(declared: Declared, axes: Axes) -> str:
    """The name of the axis with the rows; empty if it has none, or one that an exporter made of the input's name."""
    axis, dims = axes.get(declared.name), declared.dims or ()
    name = dims[axis] if axis is not None and axis < len(dims) else None
    if not isinstance(name, str) or not _NAME.match(name):
        return ""
    return "" if name.startswith(("unk__", f"{declared.name}_dynamic_axes_")) else name


def claims(model: Model, axes: Axes, *, believe_names: bool = False) -> dict[str, Value]:
    """The claims of one hypothesis about all tensors of the main graph, by name. Tests compare them with results."""
    symbols = Symbols()
    initial = InitialClaims(model, symbols, axes, believe_names=believe_names)
    if initial.problem:
        return {}
    return Walk(model, symbols, WorkBudget()).run(initial.claims)


def _judge(model: Model, axes: Axes, budget: WorkBudget, *, believe_names: bool) -> RowVerdict:
    symbols = Symbols()
    budget.take_graph(model.graph)
    initial = InitialClaims(model, symbols, axes, believe_names=believe_names)
    if initial.problem:
        return _unknown(initial.problem)
    names = Walk(model, symbols, budget).run(initial.claims)
    output_axes: dict[str, int | None] = {}
    failed: list[Value] = []
    refusals: list[RowVerdict] = []
    for output in model.graph.outputs:
        value = names.get(output.name)
        if value is None:
            return _unknown(f"no node computes output '{output.name}'")
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
        first = next(iter(output_axes), "")  # the file may declare no outputs
        return RowVerdict(Outcome.MIXED, node=first, reason="no output has an axis with the rows")
    if name := symbols.confused_name():
        return _unknown(f"a Reshape may take a wrong size, because several sizes are called '{name}'")
    input_axes = {declared.name: axes.get(declared.name) for declared in real_inputs(model)}
    fixed_sizes = tuple(sorted(symbols.fixed_sizes.items()))
    return RowVerdict(
        Outcome.PROVEN,
        input_axes,
        output_axes,
        equal_sizes=initial.equal_sizes,
        fixed_sizes=fixed_sizes,
        longest_axis=1 << symbols.size_bits,
    )


def _problem(value: Value) -> str:
    """The reason why an output with this claim cannot be split into rows; empty if it can."""
    if value.kind is Kind.FREE:
        return ""
    if value.kind is Kind.SIZE:
        return "depends on the number of rows"
    if not value.is_plain:
        return "does not have one entry for each row"
    if value.facts.stride != 0:
        return "contains the index of each row in the batch"
    if value.facts.padding is not None:
        return "has padding that depends on the longest row of the batch"
    return ""


def _unknown(reason: str) -> RowVerdict:
    return RowVerdict(Outcome.UNKNOWN, reason=reason)
