"""Chooses operands for the steps of random graphs."""

import random
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

import numpy as np
from onnx import TensorProto, helper

from rows.growing import BOOL, FLOAT, INT64, ROWS, GrowingGraph, Runs, Unsuitable

TEXTS: Final = ("red", "green", "blue", "a b c", "")
KINDS: Final[Mapping[int, float]] = {FLOAT: 8, INT64: 4, BOOL: 1, TensorProto.UINT8: 1}
"""The element types of inputs, and their frequencies."""


class Grower:
    """Chooses operands for steps."""

    def __init__(self, rng: random.Random, graph: GrowingGraph) -> None:
        self.rng = rng
        self.graph = graph

    def add_inputs(self, kinds: Mapping[int, float] = KINDS) -> None:
        rng = self.rng
        names = {"L": rng.randint(1, 5), "M": rng.randint(1, 4)}
        for index in range(rng.randint(1, 3)):
            rank = rng.choices((1, 2, 3, 4), (1, 4, 5, 3))[0]
            axis = rng.choices((0, 1, 2, None), (12, 2, 1, 2 if index else 0))[0]
            axis = min(axis, rank - 1) if axis is not None else None
            dims: list[int | str | None] = [rng.choice(("L", "M", None, 1, 2, 2, 3, 4, 4, 6)) for _ in range(rank)]
            shape = [
                dim if isinstance(dim, int) else names[dim] if isinstance(dim, str) else rng.randint(1, 5)
                for dim in dims
            ]
            if axis is not None:
                dims[axis] = rng.choice(("N", "N", f"unknown_{index}", None))
                shape[axis] = 1
            kind = rng.choices([*kinds], [*kinds.values()])[0]
            exact = rng.random() < 0.7
            rows: Runs = [self._values(kind, shape, exact, row) for row in range(ROWS)]
            if axis is None:
                rows = [rows[-1]] * ROWS
            self.graph.add_input(kind, dims, axis, rows)

    def pick(self, kinds: str = "f", *, least_rank: int = 0, most_rank: int = 6, exact: bool = False) -> str:
        """A tensor of some kinds, preferably a late one with rows.

        Raises:
            Unsuitable: There is no such tensor.
        """
        names = [
            name
            for name, runs in self.graph.values.items()
            if name[0] != "w"
            and runs[-1] is not None
            and self.graph.alone(name).dtype.kind in kinds
            and least_rank <= self.graph.alone(name).ndim <= most_rank
            and self.graph.alone(name).dtype != np.uint64
        ]
        if not names:
            raise Unsuitable
        late = names[len(names) // 2 :]
        for _ in range(3):
            name = self.rng.choice(late if self.rng.random() < 0.6 else names)
            if self.graph.rows_axis(name) is not None or self.rng.random() < 0.3:
                break
        if exact and not self.graph.is_exact(name):
            raise Unsuitable
        return name

    def axis_of(self, name: str, *, rarely_rows: bool = True) -> int:
        """An axis, usually not that of the rows."""
        rank = len(self.graph.shape(name))
        if not rank:
            raise Unsuitable
        axis = self.rng.randrange(rank)
        rows = self.graph.rows_axis(name)
        if rarely_rows and axis == rows and rank > 1 and self.rng.random() < 0.85:
            axis = (axis + self.rng.randrange(1, rank)) % rank
        return axis

    def sign(self, axis: int, name: str) -> int:
        """The axis, or the same axis counted from the end."""
        return axis - len(self.graph.shape(name)) if self.rng.random() < 0.3 else axis

    def weight(self, *shape: int, low: int = -3, high: int = 3) -> str:
        numbers = [self.rng.randint(low, high) for _ in range(prod(shape))]
        return self.graph.add_weight(np.array(numbers, np.float32).reshape(shape))

    def real(self, number: float) -> str:
        return self.graph.add_weight(np.array(number, np.float32))

    def partner(self, name: str) -> str:
        """A second operand of an element-wise operator, of the same type."""
        graph, rng = self.graph, self.rng
        alone, shape = graph.alone(name), graph.shape(name)
        draw = rng.random()
        if draw < 0.35:
            tail = list(shape[rng.randint(0, len(shape)) :])
            tail = [length if rng.random() < 0.6 else 1 for length in tail]
            if draw < 0.03 and len(tail) == len(shape) and tail:
                tail[rng.randrange(len(tail))] = 3
            numbers = [rng.randint(-2, 3) for _ in range(prod(tail))]
            return graph.add_weight(np.array(numbers).astype(alone.dtype).reshape(tail))
        names = []
        for other, runs in graph.values.items():
            if runs[-1] is not None and other[0] != "w" and graph.alone(other).dtype == alone.dtype:
                try:
                    np.broadcast_shapes(shape, graph.shape(other))
                except ValueError:
                    continue
                names.append(other)
        if not names:
            raise Unsuitable
        return rng.choice(names)

    def size(self, name: str, axis: int) -> str:
        """A vector of one element: the length of an axis, as exporters write it."""
        graph, rng = self.graph, self.rng
        if graph.opset >= 15 and rng.random() < 0.3:
            return graph.add("Shape", name, start=axis, end=axis + 1)
        shape = graph.add("Shape", name)
        if rng.random() < 0.5:
            return graph.add("Gather", shape, graph.add_ints(axis), axis=0)
        if rng.random() < 0.5:
            scalar = graph.add("Gather", shape, graph.add_scalar(axis), axis=0)
            return self.unsqueeze(scalar, [0])
        return graph.add("Slice", shape, graph.add_ints(axis), graph.add_ints(axis + 1), graph.add_ints(0))

    def scalar(self, vector: str) -> str:
        """Reshape a vector of one element to a scalar."""
        return self.graph.add("Reshape", vector, self.graph.add_weight(np.array([], np.int64)))

    def unsqueeze(self, name: str, axes: Sequence[int]) -> str:
        if self.graph.opset < 13:
            return self.graph.add("Unsqueeze", name, axes=list(axes))
        return self.graph.add("Unsqueeze", name, self.graph.add_ints(*axes))

    def vector(self, parts: Sequence[str]) -> str:
        return self.graph.add("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]

    def length(self, name: str, axis: int) -> str:
        """An element of a target shape: a constant, or computed if the axis has rows."""
        if axis == self.graph.rows_axis(name) or self.rng.random() < 0.4:
            return self.size(name, axis)
        return self.graph.add_ints(self.graph.shape(name)[axis])

    def numbered(self, like: str) -> str:
        """The numbers of a tensor's rows, as recent exporters compute them."""
        axis = self.graph.rows_axis(like)
        count = self.scalar(self.size(like, self.axis_of(like) if axis is None else axis))
        return self.graph.add("Range", self.graph.add_scalar(0), count, self.graph.add_scalar(1))

    def numbers(self) -> str:
        """A vector or a scalar computed from shapes, if there is one."""
        names = [
            name
            for name, runs in self.graph.values.items()
            if name[0] == "t" and runs[-1] is not None and self.graph.alone(name).dtype == np.int64
            and self.graph.alone(name).ndim < 2 and self.graph.alone(name).size < 6
        ]  # fmt: skip
        if not names:
            raise Unsuitable
        return self.rng.choice(names)

    def _values(self, kind: int, shape: Sequence[int], exact: bool, row: int) -> np.ndarray:
        most = 9 if row == ROWS - 1 else 4
        count = prod(shape)
        if kind == FLOAT and not exact:
            return np.array([self.rng.gauss(0, most / 3) for _ in range(count)], np.float32).reshape(shape)
        if kind == TensorProto.STRING:
            return np.array([self.rng.choice(TEXTS) for _ in range(count)], object).reshape(shape)
        low = 0 if kind in (BOOL, TensorProto.UINT8) else self.rng.choice((0, -most))
        high = 1 if kind == BOOL else most
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        return np.array([self.rng.randint(low, high) for _ in range(count)]).astype(dtype).reshape(shape)
