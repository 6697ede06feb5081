"""Finds the tensors of a model that may become empty although the inputs of the model are not.

A Slice behind the end of an axis, NonZero without a hit or a pooling of a small image make such tensors. The graph is
analysed like one without rows, but an operator without a rule makes a tensor of unknown shape.

The same walk finds the sizes that constant matrices need.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ortserve.model_file.graph import Declared, Dims, Graph, Model, Node, graphs_of
from ortserve.rows.number import Number, atom_alone, is_positive
from ortserve.rows.rules import RULES
from ortserve.rows.symbols import Symbols
from ortserve.rows.values import Value, free
from ortserve.rows.walk import Walk
from ortserve.rows.work_budget import TooMuchWorkError, WorkBudget

_DOMAINS: Final = frozenset({"", "com.microsoft", "ai.onnx.ml"})
"""The operators of other domains make outputs of any size."""
_MAY_CUT: Final = """
    AveragePool BifurcationDetector BlackmanWindow CausalConvWithState CenterCropPad Col2Im Compress
    ConcatFromSequence Constant ConstantOfShape Conv ConvInteger ConvTranspose ConvTransposeWithDynamicPads
    CropAndResize DFT Expand FusedConv HammingWindow HannWindow LpPool MaxPool MaxUnpool MaxpoolWithMask
    MelWeightMatrix NhwcConv NhwcFusedConv NhwcMaxPool NonMaxSuppression NonZero OneHot Optional OptionalGetElement
    Pad QLinearAveragePool QLinearConv RandomNormal RandomUniform Range Resize STFT SequenceAt SequenceConstruct
    SequenceEmpty SequenceErase SequenceInsert SequenceMap Shape Slice Split SplitToSequence StringSplit
    TfIdfVectorizer Tile Tokenizer TopK UnfoldTensor Upsample
"""
_CUTTING: Final = frozenset(_MAY_CUT.split())
"""Operators whose outputs may be empty although their operands are not. The others keep or join elements."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a walk shows about a model if no input of a request is empty.

    Attributes:
        tensors: What is known about the tensors of each graph, by the ``id`` of the graph. A graph that is not followed
            is left out. A graph knows the tensors that its nodes read and make, also those of graphs around it.
        needed: The sizes of axes that the graph needs, such as the number of features of a constant matrix, by input.
            None stands for an axis that may have any size, as far as the graph shows it.
    """

    tensors: Mapping[int, Mapping[str, Value]]
    needed: Mapping[str, Sequence[int | None]]


def find_sizes(model: Model, *, keeps_targets: bool = False) -> Sizes:
    """Follow the sizes of tensors through a model.

    With ``keeps_targets``, the result of a Reshape has the sizes of the target shape, although ONNX Runtime may replace
    computed ones.
    """
    walk = _Sizes(model, keeps_targets=keeps_targets)
    inputs = {declared.name: walk.given(declared) for declared in model.graph.inputs}
    try:
        walk.run(inputs)
    except TooMuchWorkError:
        walk.found.clear()
    known = walk.symbols.needed
    needed = {
        name: [
            size if isinstance(size, int) else known.get(atom) if (atom := atom_alone(size)) else None
            for size in value.dims or ()
        ]
        for name, value in inputs.items()
    }
    return Sizes(walk.found, needed)


class _Sizes(Walk):
    """The analysis without rows."""

    def __init__(self, model: Model, *, keeps_targets: bool) -> None:
        super().__init__(model, Symbols(), WorkBudget())
        self._main = model.graph
        self._keeps_targets = keeps_targets
        self.found: dict[int, Mapping[str, Value]] = {}

    def given(self, declared: Declared) -> Value:
        """What is known about an input of the model."""
        if not declared.is_tensor or declared.dims is None:
            return replace(free(None, declared.dtype), has_elements=declared.is_tensor)
        dims = tuple(size if isinstance(size, int) else self.symbols.fresh(1, "") for size in declared.dims)
        return replace(free(dims, declared.dtype), has_elements=0 not in dims)

    def finished(self, graph: Graph, names: Mapping[str, Value]) -> None:
        if graph is not self._main:  # The names of all graphs around it would take much memory in a large model.
            own = {name for node in graph.nodes for name in (*node.inputs, *node.outputs)}
            names = {name: names[name] for name in own & names.keys()}
        self.found[id(graph)] = names

    def wrong_size(self, name: str, declared: Dims, value: Value) -> str:
        return ""

    def concluded(self, node: Node, operands: Sequence[Value | None], results: list[Value]) -> list[Value]:
        if all(value.cause is None for value in results):
            if self.function(node) is not None or any(graphs_of([node])):
                return results  # of the nodes inside
        else:
            results = [free(None)] * len(results)
            if self.function(node) is not None or node.domain not in _DOMAINS or self._forget([node]):
                return results
        rule = RULES.get((node.domain, node.op))
        arguments = rule.arguments if rule is not None else ()
        are_full = [
            value is not None and value.has_elements
            for place, (name, value) in enumerate(zip(node.inputs, operands, strict=True))
            if name and place not in arguments
        ]
        if node.op == "Resize":  # without a region of interest, its second operand is empty
            del are_full[1:]
        is_full = any(are_full) if node.op == "Concat" else all(are_full)
        if node.op == "Expand":
            is_full &= all(target is not None and _are_positive(target.elements) for target in operands[1:])
        if node.op == "Slice" and any(value.dims is None for value in results):
            results = [replace(value, dims=self._cut(node, operands)) for value in results]
        return [self._with_elements(node, value, is_full=is_full) for value in results]

    def _cut(self, node: Node, operands: Sequence[Value | None]) -> tuple[Number, ...] | None:
        """The shape of a part of a tensor that begins or ends at unknown positions."""
        value, _, _, axes = (*operands, None, None, None, None)[:4]
        if value is None or value.dims is None:
            return None
        given = node.attributes.get("axes")
        known = axes.elements if axes is not None else given if isinstance(given, tuple) else None
        rank = len(value.dims)
        axes_cut = [axis for axis in known or () if isinstance(axis, int)]
        is_known = rank > 0 and known is not None and len(axes_cut) == len(known) > 0
        cut = {axis % rank for axis in axes_cut} if is_known else range(rank)
        return tuple(self.symbols.fresh(0) if axis in cut else size for axis, size in enumerate(value.dims))

    def _with_elements(self, node: Node, value: Value, *, is_full: bool) -> Value:
        dims = value.dims
        if node.op in _CUTTING:
            is_full = is_full and _are_positive(dims)
        if node.op == "Reshape" and dims is not None and not self._keeps_targets:
            least = int(is_full)
            dims = tuple(size if isinstance(size, int) else self.symbols.fresh(least) for size in dims)
        return replace(value, dims=dims, has_elements=is_full)

    def _forget(self, nodes: Iterable[Node]) -> bool:
        """Drop what was found about the graphs of these nodes. Returns whether there are any."""
        graphs = list(graphs_of(nodes))
        for graph in graphs:
            self.found.pop(id(graph), None)
            self._forget(graph.nodes)
        return bool(graphs)


def _are_positive(numbers: Sequence[Number] | None) -> bool:
    return numbers is not None and all(map(is_positive, numbers))
