"""Which axes may carry the rows: hypotheses in the order in which they are tried, and the claims that each makes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Final, TypeAlias

from ortserve.rows.graph import Declared, Model
from ortserve.rows.symbols import Number, Symbols, constant
from ortserve.rows.values import Value, free, rows

MOST_HYPOTHESES: Final = 48
_MOST_AXES: Final = 3
_MOST_GROUPS: Final = 12

Axes: TypeAlias = Mapping[str, int | None]
"""By graph input, the axis that carries the rows; None for an input without rows."""
Sizes: TypeAlias = Mapping[str, Sequence[int | None]]
"""By graph input, the sizes of a request's axes; None where the size is not known."""
Values: TypeAlias = Mapping[str, Sequence[int | float]]
"""By graph input without rows, the elements of a request, in the order of memory."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is known of the requests that a verdict is for.

    Attributes:
        sizes: Of the axes of some inputs.
        values: The elements of some small inputs without rows, in the order of memory.
    """

    sizes: Sizes = field(default_factory=dict)
    values: Values = field(default_factory=dict)


_NAME: Final = re.compile(r"\w")
_SUM: Final = re.compile(r"[A-Za-z_][\w.\-]*(?: *\+ *(?:[A-Za-z_][\w.\-]*|\d+))+")


def sum_terms(name: str) -> tuple[str | int, ...]:
    """The dimensions and numbers that a name such as ``past + current`` adds up; empty for a name that is no sum."""
    if not _SUM.fullmatch(name):
        return ()
    return tuple(int(part) if part.isdigit() else part for part in (part.strip() for part in name.split("+")))


def real_inputs(model: Model) -> list[Declared]:
    """The inputs that a request gives: initializers that may be overridden are not among them."""
    return [declared for declared in model.graph.inputs if declared.name not in model.graph.constants]


def has_choice(model: Model, sizes: Sizes) -> bool:
    """Whether an input has an axis that may carry rows."""
    return any(_choices(declared, sizes) for declared in real_inputs(model))


def hypotheses(model: Model, sizes: Sizes) -> Iterator[Axes]:
    """Axes for all inputs, lower axes first. Inputs that are declared alike have their rows along the same axis."""
    groups: dict[tuple[object, ...], list[str]] = {}
    choices: dict[tuple[object, ...], tuple[int, ...]] = {}
    fixed: dict[str, int | None] = {}
    for declared in real_inputs(model):
        axes = _choices(declared, sizes)
        if not axes:
            fixed[declared.name] = None
            continue
        key = (declared.dims, axes)
        groups.setdefault(key, []).append(declared.name)
        choices[key] = axes
    if len(groups) > _MOST_GROUPS:  # the choice of the first axis of all is the one that matters
        combinations = [tuple(axes[0] for axes in choices.values())]
    else:
        combinations = _lowest_first([choices[key] for key in groups])
    for combination in combinations:
        axes_by_name = dict(fixed)
        for axis, names in zip(combination, groups.values(), strict=True):
            axes_by_name.update(dict.fromkeys(names, axis))
        yield axes_by_name


def _lowest_first(choices: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The combinations with the lowest sums of axes."""
    found: list[tuple[int, ...]] = []
    ranked = [sorted(axes) for axes in choices]
    smallest = sum(axes[0] for axes in ranked)
    for excess in range(sum(axes[-1] - axes[0] for axes in ranked) + 1):
        found += _with_sum(ranked, smallest + excess, MOST_HYPOTHESES - len(found))
        if len(found) >= MOST_HYPOTHESES:
            break
    return found


def _with_sum(choices: Sequence[Sequence[int]], total: int, most: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for combination in product(*choices) if len(choices) <= 6 else _nearly_lowest(choices):
        if sum(combination) == total:
            found.append(combination)
            if len(found) >= most:
                break
    return found


def _nearly_lowest(choices: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Of many groups: all on their lowest axis, and those where one group is on another."""
    base = tuple(axes[0] for axes in choices)
    yield base
    for index, axes in enumerate(choices):
        for axis in axes[1:]:
            yield (*base[:index], axis, *base[index + 1 :])


def _choices(declared: Declared, sizes: Sizes) -> tuple[int, ...]:
    dims = _declared_dims(declared, sizes)
    return tuple(axis for axis, size in enumerate(dims or ()) if not isinstance(size, int))[:_MOST_AXES]


def _declared_dims(declared: Declared, sizes: Sizes) -> tuple[int | str | None, ...] | None:
    if declared.dims is None and declared.is_tensor and declared.name in sizes:
        return (None,) * len(sizes[declared.name])
    return declared.dims


class Beginning:
    """The claims about graph inputs under one hypothesis.

    Attributes:
        claims: By input.
        equal_sizes: Names of dimensions that were taken as equal, where names are believed.
        problem: Why there is no claim for an input; empty where all have one.
    """

    def __init__(self, model: Model, symbols: Symbols, axes: Axes, request: Request, *, believe_names: bool) -> None:
        self.claims: dict[str, Value] = {}
        self.problem = ""
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
        for declared in inputs:
            self._claim(declared, axes.get(declared.name), request)
        self.equal_sizes = tuple(sorted(name for name, uses in self._uses.items() if uses > 1))

    def _claim(self, declared: Declared, axis: int | None, request: Request) -> None:
        sizes = request.sizes
        dims = _declared_dims(declared, sizes)
        if not declared.is_tensor or dims is None:
            if axis is None and declared.is_tensor:
                self.claims[declared.name] = free(None, declared.dtype)
            else:
                self.problem = self.problem or f"input '{declared.name}' " + (
                    "is declared without a shape" if declared.is_tensor else "is no tensor"
                )
            return
        if axis is not None and not 0 <= axis < len(dims):
            self.problem = self.problem or f"input '{declared.name}' has no axis {axis}"
            return
        known = tuple(sizes.get(declared.name, ()))
        if len(known) != len(dims):
            known = (None,) * len(dims)
        lengths = tuple(
            1 if position == axis else self._length(size, known[position]) for position, size in enumerate(dims)
        )
        if axis is None:
            given = request.values.get(declared.name)
            elements = None if given is None else tuple(constant(Fraction(value)) for value in given)
            self.claims[declared.name] = free(lengths, declared.dtype, elements)
        else:
            self.claims[declared.name] = rows(self._symbols, lengths, axis, 1, 1, declared.dtype)

    def _length(self, size: int | str | None, known: int | None) -> Number:
        if isinstance(size, int):
            return size
        if known is not None and known > 0:
            return known
        is_name = size is not None and _NAME.match(size) is not None  # some exporters write "?"
        if size is None or not is_name or not self._believe_names or size in self._batch_names:
            return self._symbols.fresh(1)
        parts = sum_terms(size)
        if parts and not any(part in self._batch_names for part in parts):
            self._uses[size] = 2
            return self._symbols.sum(part if isinstance(part, int) else self._named(part) for part in parts)
        return self._named(size)

    def _named(self, name: str) -> Number:
        self._uses[name] = self._uses.get(name, 0) + 1
        if name not in self._atoms:
            self._atoms[name] = self._symbols.fresh(1)
        return self._atoms[name]
