"""Finds the axes along which inputs of a model may be empty without unwritten tensors or a crash of ONNX Runtime.

ONNX Runtime 1.31.1 does not compare the shape of an empty tensor with those of the other tensors that Concat joins.
From ``[0, 2]`` and ``[3, 2]`` along axis 1, it makes ``[3, 4]`` and writes only half of it. The rest is earlier content
of the memory, such as inputs of other requests. An empty tensor is correct if it is empty along the axis of the Concat,
as the past of a decoder is before the first token. ONNX Runtime does not write products over an axis of length 0,
either, if they are quantized, or, before 1.32, of a vector or joined with a Transpose. RoiAlign reads beyond an image
without pixels.
Attention without heads, or with heads of size 0, ends the process, and so do a few other operators on some empty axes.
A Conv with an empty kernel does not return, and a ConvInteger does not write its output. Quantized sums and products of
elements crash on several threads. InstanceNormalization of FP16 writes to unmapped memory for images without pixels.
The searches, which generate text, read the word in front of a prompt of length 0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ortserve.model_file.graph import (
    FLOAT16,
    Graph,
    Model,
    Node,
    Tensor,
    all_nodes,
    graphs_of,
    is_plain_product,
    names_read,
)
from ortserve.rows import Atom, Sizes, Value, atoms_of, has_atom

_JOINS: Final = frozenset({"Concat", "ConcatFromSequence", "QLinearConcat"})
_QUANTIZED_PRODUCTS: Final = {"QGemm": 3, "QLinearMatMul": 3} | dict.fromkeys(
    ("DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat"), 1
)
_PRODUCTS: Final = {"MatMul": 1, "Gemm": 1} | _QUANTIZED_PRODUCTS
"""Products of matrices, with the index of the second one. The first two are quantized behind DequantizeLinear."""
_COMPUTED_PRODUCTS: Final = frozenset({"FusedMatMul", "MatMul"})
"""Products that are not quantized, of which some are not written, or end the process, before ONNX Runtime 1.32."""
_KERNELS: Final = {"Conv": 1, "ConvInteger": 1, "FusedConv": 1, "QLinearConv": 3}
"""Convolutions, with the place of the kernel."""
_QUANTIZED_TERMS: Final = frozenset({"QLinearAdd", "QLinearMul"})
_TERMS: Final = frozenset({"Add", "Mul"})
"""Operators on elements that ONNX Runtime quantizes behind DequantizeLinear."""
_OF_BOXES: Final = frozenset({"MaxRoiPool", "RoiAlign"})
"""Operators whose first input is images, with the height and width on axes 2 and 3."""
_SEARCHES: Final = frozenset({"BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"})
"""Operators that generate text by a decoder, which is a graph. Their inputs must not be empty."""
_IN_PLACE: Final = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Slice", "Split"})
"""Operators whose output has the axes of their first input, and is empty if that input is empty."""
_ENDING_TRANSPOSES: Final = (
    _JOINS | _PRODUCTS.keys() | {"Conv", "Einsum", "Gather", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"}
)
"""Operators past which a Transpose is not joined with a product."""
_WITH_PAST: Final = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention"})
"""Operators that check the shape of their past before they append to it. The past follows their first three inputs."""
_JOINED_BY_CONCAT: Final = 25
"""Since this operator set, Attention of ONNX is a function in ONNX Runtime 1.32.0. It joins the past by a Concat."""

_HEADS: Final = {4: 1, 3: 2}
"""The axis of the heads in queries, keys and values, by number of axes. With three axes, the last has all heads."""
_LAST_AXIS: Final = {"LinearAttention": 3, "MoE": 1, "QMoE": 1, "RotaryEmbedding": 1}
"""Operators that divide by the last axis of their first inputs, with the number of these inputs."""

_Seeds: TypeAlias = "dict[_Axis, int | None]"
"""The axes of inputs that can make a tensor empty, each with the axis along which the tensor is then empty, or None if
that axis is unknown."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of an input of the model."""

    input: str
    axis: int


def find_empty_axes(
    model: Model, sizes: Callable[[], Sizes], *, computes_empty: bool
) -> Mapping[str, frozenset[int]] | None:
    """The axes along which each input may be empty. None if no node has a problem with empty tensors.

    An axis is left out if an empty tensor may reach a Concat along another axis, a quantized product of matrices that
    are not weights, or an operator that crashes. An input without a declared shape has no axes. In a graph that is too
    large for ``find_sizes``, axes that reach a product of computed matrices are left out, too. Operators that fail in
    ONNX Runtime 1.31.1 count for later versions, except those that ``computes_empty`` is about.

    Args:
        model: The model.
        sizes: Returns what ``rows.find_sizes`` finds with ``keeps_targets``. Called only if a node has a problem.
        computes_empty: Whether the execution provider computes products of empty tensors that are not quantized, and
            blocks of empty tensors (``engine.corrections.empty_checks.computes_empty``).
    """
    if not any(_may_fail_on_empty(node, model.graph.constants, computes_empty) for node in all_nodes(model)):
        return None
    paths = _Paths(model, sizes(), computes_empty)
    paths.follow(model.graph.nodes, dict(model.graph.constants))
    return {
        declared.name: frozenset(
            axis for axis in range(len(declared.dims or ())) if _Axis(declared.name, axis) not in paths.wrong
        )
        for declared in model.graph.inputs
    }


class _Paths:
    """Follows empty tensors from the inputs of a model through its nodes."""

    def __init__(self, model: Model, sizes: Sizes, computes_empty: bool) -> None:
        self._functions = model.functions
        self._opset = model.opsets.get("", _JOINED_BY_CONCAT)
        self._computes_empty = computes_empty
        self._tensors = sizes.tensors
        self._known: Mapping[str, Value] = self._tensors.get(id(model.graph), {})
        """What is known about the tensors of the graph that is followed, if no input is empty."""
        self._names: dict[_Axis, str | _Axis] = {}
        """The names of axes. Axes of one name are empty together."""
        self._atoms: dict[str | _Axis, set[Atom]] = {}
        """The symbols of the sizes of the axes with a name."""
        self._seeds: dict[str, _Seeds] = {}
        self._ranks: dict[str, int] = {}
        self._weights: set[str] = set()
        """Names of tensors that are computed from constants only."""
        self._dequantized: set[str] = set()
        self._transposed: set[str] = set()
        """Names of tensors whose first or last axis was moved, which ONNX Runtime may do as late as in a product."""
        self._moved: set[str] = set()
        """Those of them whose rows were moved. Products of them divide by the number of rows."""
        self._joined: set[str] = set()
        """Names of tensors that depend on a join, and are empty only if several inputs are."""
        self.wrong: set[_Axis] = set()
        """Axes along which an input must not be empty."""
        for declared in model.graph.inputs:
            dims = declared.dims or ()
            self._ranks[declared.name] = len(dims)
            value = self._known.get(declared.name)
            for axis, size in enumerate(dims):
                seed = _Axis(declared.name, axis)
                self._names[seed] = size if isinstance(size, str) else seed
                atoms = self._atoms.setdefault(self._names[seed], set())
                atoms.update(atoms_of(value.dims[axis]) if value is not None and value.dims is not None else ())
            self._seeds[declared.name] = {
                _Axis(declared.name, axis): axis for axis, size in enumerate(dims) if not isinstance(size, int)
            }

    def follow(self, nodes: Sequence[Node], constants: dict[str, Tensor]) -> None:
        """Follow the nodes of a graph. ``constants`` are the tensors that the nodes can read."""
        for node in nodes:
            value = node.attributes.get("value")
            if node.op == "Constant" and isinstance(value, Tensor):
                constants[node.outputs[0]] = value
            if all(not name or name in constants or name in self._weights for name in names_read(node)):
                self._weights.update(node.outputs)
            if node.op == "DequantizeLinear":
                self._dequantized.add(node.outputs[0])
            if node.op == "Transpose" and _moves_ends(node):
                self._transposed.update(node.outputs)
            if node.op == "Transpose" and _moves_rows(node):
                self._moved.update(node.outputs)
            if node.op not in _ENDING_TRANSPOSES:
                given = {name for name in node.inputs if name not in constants and name not in self._weights}
                for moved in (self._transposed, self._moved):
                    moved.update(node.outputs if given and moved.issuperset(given) else ())
            read = self._all_of(names_read(node))
            if not read:
                continue
            if (
                self._is_unwritten_product(node, constants)
                or self._is_term(node)
                or _crashes_anywhere(node, self._computes_empty)
            ):
                self.wrong |= read.keys()
                continue
            for name, axis in self._crashing_axes(node, constants):
                self.wrong |= {
                    seed
                    for seed, at in self._all_of([name]).items()
                    if axis is None or (at == axis if at is not None else self._may_be_along(name, axis, seed))
                }
            if kernel := _kernel_of(node):
                self.wrong |= self._all_of([kernel]).keys()
            graphs = list(graphs_of([node]))
            if node.op == "If":
                for graph in graphs:
                    self._follow_branch(node, graph, constants)
            elif graphs or (node.domain, node.op, node.overload) in self._functions:
                self.wrong |= read.keys()  # not followed, because the tensors have other names inside
                self._put(node, dict.fromkeys(read))
            elif node.op in _JOINS:
                self._join(node)
            elif node.op not in ("Shape", "Size"):
                self._pass_on(node, read, constants)

    def _is_unwritten_product(self, node: Node, constants: Mapping[str, Tensor]) -> bool:
        at = _PRODUCTS.get(node.op)
        if at is None or len(node.inputs) <= at or node.inputs[at] in self._weights or node.inputs[at] in constants:
            return False
        is_unquantized = not self._computes_empty and node.op == "MatMul"
        has_vector = is_unquantized and any(self._rank(name) in (1, None) for name in node.inputs)
        has_moved = is_unquantized and not self._moved.isdisjoint(node.inputs)
        return has_vector or has_moved or _is_quantized(node) or self._dequantized.issuperset(node.inputs[:2])

    def _is_term(self, node: Node) -> bool:
        """Whether a node is a sum or product of quantized elements."""
        return node.op in _TERMS and self._dequantized.issuperset(node.inputs)

    def _rank(self, name: str) -> int | None:
        value = self._known.get(name)
        return self._ranks.get(name, len(value.dims) if value is not None and value.dims is not None else None)

    def _may_be_along(self, name: str, axis: int, seed: _Axis) -> bool:
        """Whether a tensor may be empty along an axis if an input is: if its size follows from that of the input."""
        value = self._known.get(name)
        if value is None or value.dims is None:
            return True
        atoms = self._atoms[self._names[seed]]
        places = [at for at, size in enumerate(value.dims) if has_atom(size, atoms.__contains__)]
        return axis in places or not places

    def _crashing_axes(self, node: Node, constants: Mapping[str, Tensor]) -> Iterator[tuple[str, int | None]]:
        """Inputs of a node, each with an axis along which it must not be empty, or None if that axis is unknown."""
        equation = node.attributes.get("equation")
        if isinstance(equation, str) and "->" in equation and "." not in equation:
            terms, _, kept = equation.replace(" ", "").partition("->")
            for name, term in zip(node.inputs, terms.split(","), strict=False):
                is_single = not (is_plain_product(equation) or len(node.inputs) == 1 or name in self._joined)
                yield from ((name, axis) for axis, letter in enumerate(term) if is_single or letter not in kept)
        elif isinstance(equation, str) and len(node.inputs) > 1:
            is_plain = is_plain_product(equation)
            for place, name in enumerate(node.inputs):  # the sum is over the last axis, or the second to last
                rank = self._rank(name) if is_plain else None
                if is_plain or name not in self._joined:
                    yield name, None if rank is None else rank - 1 - place
        has_turned = node.op == "FusedMatMul" or not self._transposed.isdisjoint(node.inputs)
        if not self._computes_empty and node.op in _COMPUTED_PRODUCTS and has_turned:
            for name, turned, last in zip(node.inputs, ("transA", "transB"), (1, 2), strict=False):
                summed = 3 - last if node.attributes.get(turned) else last  # counted from the end
                rank = self._rank(name)
                yield name, None if rank is None else rank - summed
        for name in node.inputs[:3] if node.op in _WITH_PAST else ():
            rank = self._rank(name)
            yield name, None if rank is None else _HEADS.get(rank, -1)
        if node.op == "Attention" and not node.domain and any(node.inputs[4:6]) and self._opset >= _JOINED_BY_CONCAT:
            yield from ((name, axis) for name in node.inputs[4:6] for axis in (0, 1, 3))
            for name in node.inputs[1:3]:
                rank = self._rank(name)
                yield from ((name, axis) for axis in (0, None if rank is None else rank - 1))
        if node.op in _OF_BOXES:
            yield from ((node.inputs[0], axis) for axis in (2, 3))
        if node.op == "InstanceNormalization" and _may_be_half(node, constants, self._known):
            rank = self._rank(node.inputs[0])
            yield from ((node.inputs[0], axis) for axis in ([None] if rank is None else range(2, rank)))
        for name in node.inputs[: _LAST_AXIS.get(node.op, 0)]:
            rank = self._rank(name)
            yield name, None if rank is None else rank - 1

    def _follow_branch(self, node: Node, graph: Graph, constants: dict[str, Tensor]) -> None:
        outer = self._seeds, self._ranks, self._known
        self._seeds, self._ranks = dict(self._seeds), dict(self._ranks)  # the other branch may use the same names
        self._known = self._tensors.get(id(graph), {})
        self.follow(graph.nodes, constants | dict(graph.constants))
        outputs = [self._all_of([output.name]) for output in graph.outputs]
        self._seeds, self._ranks, self._known = outer
        for name, seeds in zip(node.outputs, outputs, strict=False):
            self._seeds[name] = self._seeds.get(name, {}) | dict.fromkeys(seeds)

    def _join(self, node: Node) -> None:
        """Check that empty inputs of a join are empty along its axis. If all inputs may be empty, so may the output."""
        axis = node.attributes.get("axis", 0)
        columns: list[_Seeds] = []
        names = node.inputs[2::3] if node.op == "QLinearConcat" else node.inputs  # without scales and zero points
        for name in names:
            seeds = self._all_of([name])
            along = axis if isinstance(axis, int) and axis >= 0 else None
            if isinstance(axis, int) and axis < 0 and name in self._ranks:
                along = axis + self._ranks[name]
            right: _Seeds = {
                seed: at
                for seed, at in seeds.items()
                if node.op != "ConcatFromSequence" and at is not None and at == along
            }
            self.wrong |= seeds.keys() - right.keys()
            columns.append(right)
        if all(columns):
            merged: _Seeds = {}
            for right in columns:
                merged |= right
            self._put(node, merged, self._ranks.get(names[0]))
            self._joined.update(node.outputs)

    def _pass_on(self, node: Node, read: _Seeds, constants: Mapping[str, Tensor]) -> None:
        if node.op in _WITH_PAST:
            read = self._all_of(node.inputs[:3])
        if not self._joined.isdisjoint(node.inputs):
            self._joined.update(node.outputs)
        passed: _Seeds = dict.fromkeys(read)
        places, rank = self._moves(node, constants) or ({}, None)
        for seed, at in self._all_of(node.inputs[:1]).items():
            passed[seed] = None if at is None else places.get(at)
        self._put(node, passed, rank)

    def _moves(self, node: Node, constants: Mapping[str, Tensor]) -> tuple[dict[int, int], int] | None:
        """The position of each axis of the first input in the outputs, and the outputs' rank; None if unknown."""
        rank = self._ranks.get(node.inputs[0])
        if rank is None or node.domain:
            return None
        axes = list(range(rank))
        if node.op in _IN_PLACE:
            return dict(zip(axes, axes, strict=True)), rank
        if node.op == "Transpose":
            order = node.attributes.get("perm") or tuple(reversed(axes))
            if isinstance(order, tuple):
                return {axis: place for place, axis in enumerate(order) if isinstance(axis, int)}, rank
        if node.op == "Gather" and node.inputs[1] in constants and constants[node.inputs[1]].dims is not None:
            added = len(constants[node.inputs[1]].dims or ()) - 1
            at = node.attributes.get("axis", 0)
            if isinstance(at, int):
                at %= max(1, rank)
                return {axis: axis if axis < at else axis + added for axis in axes if axis != at}, rank + added
        if node.op in ("Squeeze", "Unsqueeze") and (chosen := _axes_of(node, constants)):
            if node.op == "Squeeze":
                kept = [axis for axis in axes if axis not in {one % rank for one in chosen}]
                return {axis: place for place, axis in enumerate(kept)}, len(kept)
            wide = rank + len(chosen)
            free = [place for place in range(wide) if place not in {one % wide for one in chosen}]
            return dict(zip(axes, free, strict=False)), wide
        return None

    def _all_of(self, names: Iterable[str]) -> _Seeds:
        seeds: _Seeds = {}
        for name in names:
            seeds |= self._seeds.get(name, {})
        return {seed: at for seed, at in seeds.items() if seed not in self.wrong}

    def _put(self, node: Node, seeds: _Seeds, rank: int | None = None) -> None:
        for name in node.outputs:
            if name and seeds:
                self._seeds[name] = seeds
                if rank is not None:
                    self._ranks[name] = rank


def _may_fail_on_empty(node: Node, constants: Mapping[str, Tensor], computes_empty: bool) -> bool:
    """Whether a node may have a problem with empty tensors."""
    if kernel := _kernel_of(node):
        return kernel not in constants
    if node.op in _COMPUTED_PRODUCTS:
        return not computes_empty and (node.op == "FusedMatMul" or constants.keys().isdisjoint(node.inputs))
    if node.op == "InstanceNormalization":
        return _may_be_half(node, constants, {})
    failing = _JOINS | _WITH_PAST | _LAST_AXIS.keys() | _OF_BOXES | _SEARCHES | {"Einsum"}
    return node.op in failing or _is_quantized(node) or _crashes_anywhere(node, computes_empty)


def _may_be_half(normalization: Node, constants: Mapping[str, Tensor], known: Mapping[str, Value]) -> bool:
    """Whether an InstanceNormalization may be one of FP16. Its scale has the type of its first input."""
    scale, value = constants.get(normalization.inputs[1]), known.get(normalization.inputs[0])
    return (scale.dtype if scale is not None else value.dtype if value is not None else 0) in (0, FLOAT16)


def _kernel_of(node: Node) -> str:
    """The kernel of a convolution that must not have an empty one; empty for other nodes."""
    at = _KERNELS.get(node.op, len(node.inputs))
    return node.inputs[at] if at < len(node.inputs) else ""


def _moves_ends(transpose: Node) -> bool:
    order = transpose.attributes.get("perm")
    return not isinstance(order, tuple) or (len(order) > 0 and (order[0] != 0 or order[-1] != len(order) - 1))


def _moves_rows(transpose: Node) -> bool:
    order = transpose.attributes.get("perm")
    return not isinstance(order, tuple) or (len(order) > 2 and order[0] != 0)


def _crashes_anywhere(node: Node, computes_empty: bool) -> bool:
    """Whether a node crashes on any empty input.

    These are the matrix inverse, before 1.32 quantization in blocks, quantized terms and ConvTranspose of volumes.
    """
    if node.op == "ConvTranspose":
        kernel = node.attributes.get("kernel_shape")
        return not isinstance(kernel, tuple) or len(kernel) > 2
    if node.op == "Inverse" or node.op in _QUANTIZED_TERMS:
        return True
    return not computes_empty and node.op == "QuantizeLinear" and bool(node.attributes.get("block_size"))


def _is_quantized(node: Node) -> bool:
    return node.op in _QUANTIZED_PRODUCTS or node.op == "DequantizeLinear"


def _axes_of(node: Node, constants: Mapping[str, Tensor]) -> list[int]:
    """The axes of a Squeeze or Unsqueeze, from an attribute or a constant input; empty if unknown."""
    given = node.attributes.get("axes")
    if isinstance(given, tuple):
        return [one for one in given if isinstance(one, int)]
    known = constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
    return [int(one) for one in known.elements] if known is not None and known.elements else []
