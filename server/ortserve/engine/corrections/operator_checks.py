"""Checks in front of operators that would end the process, or use memory that is not theirs, on some inputs.

ONNX Runtime 1.31.1 on the CPU does not check everything that an operator relies on. So this module puts nodes in front
of such operators: a Gather that is out of bounds if the inputs are wrong, so that the request fails with an error of
ONNX Runtime. All other results stay as they are, bit by bit.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache
from itertools import chain
from typing import Final

from ortserve.engine.corrections.checked_node import CheckedNode, FindTensors, NodeContext
from ortserve.engine.corrections.empty_checks import EMPTY_CHECKS
from ortserve.engine.corrections.least_axes import axes_needed_by
from ortserve.errors import ErrorKind, ServeError
from ortserve.model_file.editing import GRAPH_NODE, Edits, Rewired, first_output, inner_scope
from ortserve.model_file.graph import BOOL, FLOAT, INT32, INT64, Graph, Model, Node, all_nodes, graphs_of, makers_of
from ortserve.rows import find_sizes

_MIN_OPSET: Final = 9
"""Before it there is no Where, and Less and Greater take no integers."""
_SHAPES: Final = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1}
"""Operators with the place of the list of sizes that they make a tensor of."""
_LAYER_NORMALIZATION_SET: Final = 17
"""The first version of ONNX's own operators with LayerNormalization."""
_LARGEST_BOX: Final = 2.0**24
"""Cells of the feature map in a box of RoiAlign, which takes about 48 bytes for each: 768 MiB."""


def check_edits(model: Model, find_tensors: FindTensors | None = None) -> Edits:
    """The edits that check the inputs of operators, in the main graph and in the graphs of If, Loop and Scan."""
    if model.opsets.get("", _MIN_OPSET) < _MIN_OPSET:
        return {}
    has_any_rank = _has_any_rank(model)
    kinds = _CHECKS.keys() | EMPTY_CHECKS.keys()
    if not has_any_rank and not any((node.domain, node.op) in kinds for node in all_nodes(model)):
        return {}
    declared = {declared.name: declared.dims for declared in model.graph.inputs}
    find_tensors = find_tensors or cache(lambda: find_sizes(model).tensors)
    edits: dict[tuple[int, str], bytes | Rewired] = {}
    for scope, graph in _graphs(model.graph):
        scales = {node.outputs[1] for node in graph.nodes if node.op == "DynamicQuantizeLinear" and node.outputs[1:]}
        context = NodeContext(
            graph,
            declared=declared,
            narrow=graph.constants.keys() | scales,
            makers=makers_of(graph.nodes),
            find_tensors=find_tensors,
        )
        for node in graph.nodes:
            if graph.constants.keys() >= set(node.inputs) - {""}:
                continue
            checked = CheckedNode(node, context)
            for check in _checks_of(node, has_any_rank=has_any_rank):
                check(checked)
            if checked.is_changed:
                edits[GRAPH_NODE, scope + first_output(node)] = checked.edit()
    return edits


def check_written_outputs(model: Model) -> None:
    """Check that ONNX Runtime writes all outputs of the operators Scan and GroupQueryAttention.

    An answer with an unwritten output would hold what was in the memory before: values of other requests.

    Raises:
        ServeError: unsupported.
    """
    for node in all_nodes(model):
        if node.op == "Scan" and isinstance(body := node.attributes.get("body"), Graph):
            _check_scan(body)
        elif (node.domain, node.op) == ("com.microsoft", "GroupQueryAttention"):
            _check_scores(node)


def check_functions(model: Model) -> None:
    """Check that no function of the model calls an operator that ONNX Runtime 1.32.0 itself adds to ONNX's domain.

    The load would end the process. Outside of functions such operators work.

    Raises:
        ServeError: unsupported.
    """
    version = model.opsets.get("", _LAYER_NORMALIZATION_SET)
    functions = model.functions.values()
    inner = [graph for function in functions for graph in graphs_of(function.nodes)]
    called = [function.nodes for function in functions] + [graph.nodes for each in inner for _, graph in _graphs(each)]
    for node in chain.from_iterable(called):
        if node.domain == "" and (
            node.op == "SimplifiedLayerNormalization"
            or (node.op == "LayerNormalization" and version < _LAYER_NORMALIZATION_SET)
        ):
            raise ServeError(
                ErrorKind.UNSUPPORTED,
                f"operator {node.op}: expected a call outside of functions, or of LayerNormalization in operator set "
                f"{_LAYER_NORMALIZATION_SET} or later, got one in a function and set {version}, which ends the load",
            )


def _check_scan(body: Graph) -> None:
    """ONNX Runtime 1.31.1 does not write an output of the body that is also an input or another output of it."""
    names = Counter(declared.name for declared in (*body.inputs, *body.outputs))
    for output in body.outputs:
        if names[output.name] > 1:
            raise ServeError(
                ErrorKind.UNSUPPORTED,
                "operator Scan: expected a body whose outputs are not among its inputs and differ from each "
                f"other, got '{output.name}', which ONNX Runtime would not write; return an Identity of it",
            )


def _check_scores(attention: Node) -> None:
    """ONNX Runtime 1.32.0 does not write scores without ``qk_output``. Only with a past it rejects such a model."""
    if any(attention.outputs[3:4]) and not attention.attributes.get("qk_output"):
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            f"operator GroupQueryAttention: expected qk_output to be 1 or 2 for output '{attention.outputs[3]}', "
            "got 0, with which ONNX Runtime would not write it",
        )


def _has_any_rank(model: Model) -> bool:
    """Whether a request may choose the number of axes of a tensor."""
    inputs = model.graph.inputs
    lists = {one.name for one in inputs if one.dims and len(one.dims) == 1 and not isinstance(one.dims[0], int)}
    return any(declared.lacks_shape for declared in inputs) or any(
        _chooses_axes(node, lists) for node in all_nodes(model)
    )


def _chooses_axes(node: Node, lists: Set[str]) -> bool:
    if node.op == "Squeeze":  # of all axes of size 1
        return len(node.inputs) == 1 and "axes" not in node.attributes
    return not lists.isdisjoint(node.inputs[_SHAPES.get(node.op, len(node.inputs)) :])


def _checks_of(node: Node, *, has_any_rank: bool) -> list[Callable[[CheckedNode], None]]:
    if not first_output(node):
        return []
    kind = node.domain, node.op
    return [table[kind] for table in (_CHECKS, EMPTY_CHECKS) if kind in table] + [_check_axes] * has_any_rank


def _graphs(graph: Graph, scope: str = "") -> Iterator[tuple[str, Graph]]:
    """Yield a graph and those of its nodes, each with its scope."""
    yield scope, graph
    for node in graph.nodes:
        for name, value in node.attributes.items():
            if isinstance(value, Graph):
                yield from _graphs(value, inner_scope(scope, node, name))


def _check_boxes(roi_align: CheckedNode) -> None:
    """RoiAlign takes samples in each cell of a box, if ``sampling_ratio`` is 0, and crashes if it cannot count them."""
    attributes = roi_align.attributes
    ratio, scale = attributes.get("sampling_ratio", 0), attributes.get("spatial_scale", 1.0)
    if not isinstance(ratio, int) or ratio > 0 or not isinstance(scale, int | float):
        return
    boxes = roi_align.add("Cast", roi_align.inputs[1], to=FLOAT)
    starts, ends = (
        roi_align.add("Gather", boxes, roi_align.constant(INT64, *columns, is_list=True), axis=1)
        for columns in ((0, 1), (2, 3))
    )
    sizes = roi_align.add("Abs", roi_align.add("Sub", ends, starts))
    pooled = [attributes.get(f"output_{side}", 1) for side in ("width", "height")]
    scaled = roi_align.add("Mul", sizes, roi_align.constant(FLOAT, scale))
    rounded = roi_align.add("Add", scaled, roi_align.constant(FLOAT, *map(_number, pooled), is_list=True))
    width, height = (roi_align.add("Gather", rounded, roi_align.constant(INT64, column), axis=1) for column in (0, 1))
    cells = roi_align.add("Mul", width, height)
    is_large = roi_align.add("Greater", cells, roi_align.constant(FLOAT, _LARGEST_BOX))
    roi_align.fail_if(is_large, 1, f"boxes of at most {_LARGEST_BOX:.0f} cells")


def _check_frame(stft: CheckedNode) -> None:
    """STFT divides by the length of a frame, which is a number or the length of a window."""
    zero = stft.constant(INT64, 0)
    if stft.has(3):
        length = stft.add("Cast", stft.inputs[3], to=INT64)
        stft.fail_if(stft.add("Equal", length, zero), 3, "a frame_length other than 0")
    if stft.has(2):
        size = stft.add("Size", stft.inputs[2])
        stft.fail_if(stft.add("Equal", size, zero), 2, "a window that is not empty")


def _check_square(inverse: CheckedNode) -> None:
    """Inverse takes any matrix for a square one."""
    rows, columns = (inverse.add_size(0, axis) for axis in (-2, -1))
    inverse.fail_if(inverse.add("Not", inverse.add("Equal", rows, columns)), 0, "square matrices")


def _check_words(embedding: CheckedNode) -> None:
    """WordConvEmbedding does not write words without characters, which begin with 0 or less: they become zeros."""
    first = embedding.add("Gather", embedding.inputs[0], embedding.constant(INT32, 0, is_list=True), axis=-1)
    has_none = embedding.add("Not", embedding.add("Greater", first, embedding.constant(INT32, 0)))
    embedding.replace_where(has_none, embedding.constant(FLOAT, 0))


def _check_past(attention: CheckedNode) -> None:
    """MultiHeadAttention takes the size of a past of other values for that of these, and reads beyond it."""
    _make_present(attention, 6, 7)
    if attention.has(7) and attention.has_free_end(2):
        keys, values = attention.add_size(1, -1), attention.add_size(2, -1)
        attention.fail_if(attention.add("Not", attention.add("Equal", keys, values)), 2, "keys and values of one size")


def _check_grouped(attention: CheckedNode) -> None:
    """GroupQueryAttention does not write rows whose number of new tokens is 0: they become zeros."""
    _make_present(attention, 3, 4)
    if attention.has(16):
        value = attention.context.value(attention.inputs[0])
        zero = attention.add("Cast", attention.constant(FLOAT, 0), to=value.dtype if value and value.dtype else FLOAT)
        is_idle = attention.add("Equal", attention.inputs[16], attention.constant(INT32, 0))
        attention.replace_where(
            attention.add("Reshape", is_idle, attention.constant(INT64, -1, 1, 1, is_list=True)), zero
        )


def _make_present(attention: CheckedNode, *past: int) -> None:
    """Attention joins a past with the rest in the outputs for the present. Without them it reads beyond both."""
    if any(map(attention.has, past)):
        attention.make_outputs(3)


def _check_pairs(embedding: CheckedNode) -> None:
    """RotaryEmbedding rotates pairs, and does not write the last element of a head of odd size."""
    attributes = embedding.attributes
    if embedding.has_free_end(0) and not attributes.get("rotary_embedding_dim"):
        heads = attributes.get("num_heads", 0) if len(embedding.declared_dims(0)) == 3 else 0
        pairs = embedding.constant(INT64, 2 * max(1, heads if isinstance(heads, int) else 0))
        size = embedding.add_size(0, -1)
        rest = embedding.add("Sub", size, embedding.add("Mul", embedding.add("Div", size, pairs), pairs))
        embedding.fail_if(embedding.add("Cast", rest, to=BOOL), 0, "heads of an even size")


def _check_scales(product: CheckedNode) -> None:
    """MatMulIntegerToFloat writes beyond the product if scales widen it."""
    for place in (2, 3):
        if product.has(place) and product.inputs[place] not in product.context.narrow:
            one, columns = product.constant(INT64, 1, is_list=True), product.add_size(1, -1)
            # The last axis, and 1 for a scalar.
            last = product.add("Concat", one, product.add("Shape", product.inputs[place]), axis=0)
            last = product.add("Gather", last, product.constant(INT64, -1))
            is_one, is_list = (product.add("Equal", last, size) for size in (one, columns))
            is_flat = product.add("Equal", product.add("Size", product.inputs[place]), last)
            is_right = product.add("And", is_flat, product.add("Or", is_one, is_list))
            product.fail_if(product.add("Not", is_right), place, "scales of one number, or one for each column")


def _check_axes(node: CheckedNode) -> None:
    """Some operators read the sizes of more axes than a tensor has."""
    for place, least in enumerate(axes_needed_by(node.node)):
        if least and node.has(place) and node.known_sizes(place) is None:
            axes = node.add_rank(place)
            expected = f"input {place} with at least {least} axes"
            node.fail_if(node.add("Less", axes, node.constant(INT64, least)), place, expected)


def _check_image(pool: CheckedNode) -> None:
    """QLinearAveragePool divides by 0 if an image with channels on the last axis is smaller than the kernel."""
    attributes = pool.attributes
    kernel, pads = attributes.get("kernel_shape"), attributes.get("pads")
    is_padded = str(attributes.get("auto_pad", "")).startswith("SAME")
    if not attributes.get("channels_last") or not isinstance(kernel, tuple) or is_padded:
        return
    count = len(kernel)
    added = (
        [int(pads[axis]) + int(pads[axis + count]) for axis in range(count)] if isinstance(pads, tuple) else [0] * count
    )
    least = [int(size) - more for size, more in zip(kernel, added, strict=True)]
    known = (pool.known_sizes(0) or ())[1:-1]
    if not known or any((size or 1) < needed for size, needed in zip(known, least, strict=False)):
        sizes = pool.add_sizes(0, range(1, count + 1))
        is_small = pool.add("Less", sizes, pool.constant(INT64, *least, is_list=True))
        pool.fail_if(is_small, 0, f"images of at least {'x'.join(map(str, least))}")


def _check_zero_point(activation: CheckedNode) -> None:
    """QLinearLeakyRelu and QLinearSigmoid end the process at the load if their last input is missing."""
    activation.name_inputs(5)


def _check_axes_of_steps(scan: CheckedNode) -> None:
    """Scan crashes if a state, or a slice, has another number of axes than its body declares."""
    body, sliced = scan.attributes.get("body"), scan.attributes.get("num_scan_inputs")
    if not isinstance(body, Graph) or not isinstance(sliced, int):
        return
    states = len(body.inputs) - sliced
    for place, declared in enumerate(body.inputs):
        if declared.dims is None or not scan.has(place):
            continue
        expected = len(declared.dims) + (place >= states)
        known = scan.known_sizes(place)
        if known is None or len(known) != expected:
            axes = scan.add_rank(place)
            is_wrong = scan.add("Not", scan.add("Equal", axes, scan.constant(INT64, expected)))
            scan.fail_if(is_wrong, place, f"input {place} with {expected} axes")


_CHECKS: Final[Mapping[tuple[str, str], Callable[[CheckedNode], None]]] = {
    ("", "RoiAlign"): _check_boxes,
    ("", "STFT"): _check_frame,
    ("", "RotaryEmbedding"): _check_pairs,
    ("", "Scan"): _check_axes_of_steps,
    ("com.microsoft", "GroupQueryAttention"): _check_grouped,
    ("com.microsoft", "Inverse"): _check_square,
    ("com.microsoft", "MatMulIntegerToFloat"): _check_scales,
    ("com.microsoft", "MultiHeadAttention"): _check_past,
    ("com.microsoft", "QLinearAveragePool"): _check_image,
    ("com.microsoft", "QLinearLeakyRelu"): _check_zero_point,
    ("com.microsoft", "QLinearSigmoid"): _check_zero_point,
    ("com.microsoft", "RotaryEmbedding"): _check_pairs,
    ("com.microsoft", "WordConvEmbedding"): _check_words,
}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 1.0
