"""Recognizes fused operators, and patterns that fusions did not recognize. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from ortserve.model_file.graph import Model, Node, all_graphs
from ortserve.tools.inspect import patterns
from ortserve.tools.inspect.content import described
from ortserve.tools.inspect.patterns import Wiring
from ortserve.tools.inspect.placement import Optimized
from ortserve.tools.optimize.result import AlmostFused

_FUSED: Final = frozenset(
    {"Attention", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "Gelu"}
)
"""Fused operators in ONNX's own domain. All operators of ``com.microsoft`` count as fused."""
_PREFIX: Final = "com.microsoft."
_MASK: Final = frozenset({"Add", "Where"})
_SCALE: Final = frozenset({"Div", "Mul"})
_PRODUCT: Final = frozenset({"MatMul", "FusedMatMul"})
_SPLIT_HEADS: Final = (frozenset({"Transpose"}), frozenset({"Reshape"}), frozenset({"Add", "MatMul", "Gemm"}))


def sizes_of(simplified: Optimized) -> tuple[int, int]:
    """Heads and hidden size, if all attentions have the same; else 0 and 0, for which fusions assume nothing.

    Args:
        simplified: The graph before fusions.
    """
    wirings = [Wiring.of(graph) for graph in all_graphs(simplified.model)]
    found = {
        patterns.heads_and_width(wiring, product, simplified.values)
        for wiring in wirings
        for _, product in patterns.attentions(wiring)
    }
    known = found.pop() if len(found) == 1 else None
    return known if known and known[0] > 0 and known[1] % known[0] == 0 else (0, 0)


def fused_operators(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """The fused operators that a model has gained, with their numbers."""
    gained = Counter(after) - Counter(before)
    return {
        name.removeprefix(_PREFIX): count
        for name, count in gained.items()
        if name in _FUSED or (name.startswith(_PREFIX) and "." not in name.removeprefix(_PREFIX))
    }


def almost_fused(run: Model, file: Model) -> list[AlmostFused]:
    """The patterns that are not fused in the graph that runs, with the first edge that fusions do not expect.

    Args:
        run: The graph as ONNX Runtime optimized it.
        file: The same model as it is in its file, which was the input of the fusions.
    """
    differences = {
        softmax.outputs[0]: _first_difference(wiring, softmax, product)
        for wiring in map(Wiring.of, all_graphs(file))
        for softmax, product in patterns.attentions(wiring)
    }
    found: list[AlmostFused] = []
    for wiring in map(Wiring.of, all_graphs(run)):
        for softmax, _ in patterns.attentions(wiring):
            found.append(AlmostFused("attention", described(softmax), differences.get(softmax.outputs[0], "")))
        for kind, node in (*patterns.norms(wiring), *patterns.gelus(wiring)):
            found.append(AlmostFused(kind, described(node), ""))
    return found


def _first_difference(wiring: Wiring, softmax: Node, product: Node) -> str:
    """The first edge where an attention differs from softmax(scale · q kᵀ + mask) v.

    Reshape and Transpose are expected to split the heads. The text is empty if no edge differs: then the mask or the
    sizes differ, or other nodes read an inner value, too.
    """
    node, allowed = softmax, [_MASK, _SCALE]
    while (maker := _maker(wiring, node, 0)) is not None and maker.op not in _PRODUCT:
        while allowed and maker.op not in allowed[0]:
            allowed.pop(0)
        if not allowed:
            return _edge(node, maker, "MatMul")
        allowed.pop(0)
        node = maker
    if maker is None:
        return _edge(node, None, "MatMul")
    for start, index, role in ((maker, 0, "queries"), (maker, 1, "keys"), (product, 1, "values")):
        node = start
        for wanted in _SPLIT_HEADS:
            before = _maker(wiring, node, index)
            if before is None or before.op not in wanted:
                return f"{role}: {_edge(node, before, ' or '.join(sorted(wanted)))}"
            node, index = before, 0
    return ""


def _maker(wiring: Wiring, node: Node, index: int) -> Node | None:
    """The node that computes an input; for masks and scales, the input on the path to the product."""
    if node.op not in _MASK | _SCALE:
        return wiring.makers.get(node.inputs[index]) if index < len(node.inputs) else None
    makers = [wiring.makers[name] for name in node.inputs[node.op == "Where" :] if name in wiring.makers]
    return min(makers, key=lambda maker: maker.op not in _MASK | _SCALE | _PRODUCT, default=None)


def _edge(node: Node, maker: Node | None, expected: str) -> str:
    got = "an input or a constant" if maker is None else described(maker)
    return f"{described(node)} reads {got}, expected {expected}"
