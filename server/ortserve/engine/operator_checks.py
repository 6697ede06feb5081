"""Checks in front of operators that would end the process, or use memory that is not theirs, on some inputs.

ONNX Runtime 1.31.1 on the CPU does not check everything that an operator relies on. So this module puts nodes in front
of such operators before a session is made, as ``divisions`` does: a Gather that is out of bounds if the inputs are
wrong, so that the request fails with an error of ONNX Runtime. All other results stay as they are, bit by bit.
"""

from collections.abc import Callable, Mapping, Set
from typing import Final

from ortserve.model_file.editing import GRAPH_NODE, Edits, write_constant, write_node
from ortserve.model_file.graph import BOOL, FLOAT, INT32, INT64, Dims, Model, Node

_LEAST_OPSET: Final = 11
"""Before it Gather takes no negative indices."""
_LARGEST_BOX: Final = 2.0**24
"""Cells of the feature map in a box of RoiAlign, which takes about 48 bytes for each: 768 MiB."""


def check_edits(model: Model) -> Edits:
    """The edits that check the inputs of operators in the main graph."""
    if model.opsets.get("", _LEAST_OPSET) < _LEAST_OPSET:
        return {}
    constants = model.graph.constants
    scales = {node.outputs[1] for node in model.graph.nodes if node.op == "DynamicQuantizeLinear" and node.outputs[1:]}
    declared = {declared.name: declared.dims for declared in model.graph.inputs}
    edits = {}
    for node in model.graph.nodes:
        check = _CHECKS.get((node.domain, node.op))
        if check is not None and any(node.outputs[:1]) and not constants.keys() >= set(node.inputs) - {""}:
            checked = _Checked(node, declared, constants.keys() | scales)
            check(checked)
            if checked.is_changed:
                edits[GRAPH_NODE, node.outputs[0]] = checked.write()
    return edits


class _Checked:
    """A node with the nodes around it."""

    def __init__(self, node: Node, declared: Mapping[str, Dims | None], known: Set[str]) -> None:
        """Begin with the node as it is.

        Args:
            node: The node.
            declared: The inputs of the model with their shapes.
            known: Constants, and the scales of DynamicQuantizeLinear, which are single numbers.
        """
        self.node = node
        self.known = known
        self._declared = declared
        self._inputs = list(node.inputs)
        self._output = node.outputs[0]
        self._made: list[bytes] = []
        self._after: list[bytes] = []

    @property
    def is_changed(self) -> bool:
        return bool(self._made)

    def has(self, place: int) -> bool:
        return place < len(self.node.inputs) and bool(self.node.inputs[place])

    def has_free_end(self, place: int) -> bool:
        """Whether an input of the node is an input of the model whose last axis has a free size."""
        dims = self.dims(place)
        return (
            place < len(self.node.inputs)
            and self.node.inputs[place] in self._declared
            and not (dims and isinstance(dims[-1], int))
        )

    def dims(self, place: int) -> Dims:
        """The declared shape of an input of the model; empty if it is not known."""
        return self._declared.get(self.node.inputs[place]) or () if place < len(self.node.inputs) else ()

    def size(self, place: int, axis: int) -> str:
        """The name of the size of an axis of an input."""
        shape = self.add("Shape", self.node.inputs[place])
        return self.add("Gather", shape, self.constant(INT64, axis))

    def add(self, operator: str, *sources: str, name: str = "", **attributes: int) -> str:
        """Add a node in front of the checked one, and return the name of its output."""
        output = self._new_name()
        self._made.append(write_node(operator, "", sources, output, attributes=attributes, name=name))
        return output

    def constant(self, dtype: int, *values: float, is_list: bool = False) -> str:
        output = self._new_name()
        self._made.append(write_constant(output, dtype, *values, is_list=is_list))
        return output

    def fail_if(self, is_wrong: str, place: int, expected: str) -> None:
        """Fail before the node reads this input, if any element of ``is_wrong`` is true.

        The error of ONNX Runtime contains the name of the node that failed, and so what the operator expects.
        """
        index = self.add("ReduceSum", self.add("Cast", is_wrong, to=INT64), keepdims=0)
        name = f"{self._new_name()}: {self.node.op} expects {expected}"  # names of nodes must differ
        nothing = self.add("Gather", self.constant(INT64, 0, is_list=True), index, name=name)
        source = self.node.inputs[place]
        # The node then depends on the Gather, and the input keeps its shape.
        self._inputs[place] = self.add("Reshape", source, self.add("Add", self.add("Shape", source), nothing))

    def replace_where(self, is_wrong: str, replacement: str) -> None:
        """Replace the elements of the output for which ``is_wrong`` is true."""
        written, self._output = self._output, f"{self._output}/written"
        self._after = [write_node("Where", "", [is_wrong, replacement, self._output], written)]

    def write(self) -> bytes:
        node = self.node
        outputs = self._output, *node.outputs[1:]
        # The checked operators have no other attributes.
        attributes = {name: value for name, value in node.attributes.items() if isinstance(value, int | float | str)}
        itself = write_node(node.op, node.domain, self._inputs, *outputs, attributes=attributes)
        return b"".join([*self._made, itself, *self._after])

    def _new_name(self) -> str:
        return f"{self.node.outputs[0]}/check_{len(self._made)}"


def _check_boxes(roi_align: _Checked) -> None:
    """RoiAlign takes samples in each cell of a box, if ``sampling_ratio`` is 0, and crashes if it cannot count them."""
    attributes = roi_align.node.attributes
    ratio, scale = attributes.get("sampling_ratio", 0), attributes.get("spatial_scale", 1.0)
    if not isinstance(ratio, int) or ratio > 0 or not isinstance(scale, int | float):
        return
    boxes = roi_align.add("Cast", roi_align.node.inputs[1], to=FLOAT)
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


def _check_frame(stft: _Checked) -> None:
    """STFT divides by the length of a frame, which is a number or the length of a window."""
    zero = stft.constant(INT64, 0)
    if stft.has(3):
        length = stft.add("Cast", stft.node.inputs[3], to=INT64)
        stft.fail_if(stft.add("Equal", length, zero), 3, "a frame_length other than 0")
    if stft.has(2):
        size = stft.add("Size", stft.node.inputs[2])
        stft.fail_if(stft.add("Equal", size, zero), 2, "a window that is not empty")


def _check_square(inverse: _Checked) -> None:
    """Inverse takes any matrix for a square one."""
    rows, columns = (inverse.size(0, axis) for axis in (-2, -1))
    inverse.fail_if(inverse.add("Not", inverse.add("Equal", rows, columns)), 0, "square matrices")


def _check_words(embedding: _Checked) -> None:
    """WordConvEmbedding does not write words without characters, which begin with 0 or less: they become zeros."""
    first = embedding.add("Gather", embedding.node.inputs[0], embedding.constant(INT32, 0, is_list=True), axis=-1)
    has_none = embedding.add("Not", embedding.add("Greater", first, embedding.constant(INT32, 0)))
    embedding.replace_where(has_none, embedding.constant(FLOAT, 0))


def _check_values(attention: _Checked) -> None:
    """MultiHeadAttention takes the size of a past of other values for that of these, and reads beyond it."""
    if attention.has(7) and attention.has_free_end(2):
        keys, values = attention.size(1, -1), attention.size(2, -1)
        attention.fail_if(attention.add("Not", attention.add("Equal", keys, values)), 2, "keys and values of one size")


def _check_pairs(embedding: _Checked) -> None:
    """RotaryEmbedding rotates pairs, and does not write the last element of a head of odd size."""
    attributes = embedding.node.attributes
    if embedding.has_free_end(0) and not attributes.get("rotary_embedding_dim"):
        heads = attributes.get("num_heads", 0) if len(embedding.dims(0)) == 3 else 0
        pairs = embedding.constant(INT64, 2 * max(1, heads if isinstance(heads, int) else 0))
        rest = embedding.add("Mod", embedding.size(0, -1), pairs)
        embedding.fail_if(embedding.add("Cast", rest, to=BOOL), 0, "heads of an even size")


def _check_scales(product: _Checked) -> None:
    """MatMulIntegerToFloat writes beyond the product if scales widen it."""
    for place in (2, 3):
        if product.has(place) and product.node.inputs[place] not in product.known:
            one, columns = product.constant(INT64, 1, is_list=True), product.size(1, -1)
            # The last axis, and 1 for a scalar.
            last = product.add("Concat", one, product.add("Shape", product.node.inputs[place]), axis=0)
            last = product.add("Gather", last, product.constant(INT64, -1))
            is_one, is_list = (product.add("Equal", last, size) for size in (one, columns))
            is_flat = product.add("Equal", product.add("Size", product.node.inputs[place]), last)
            is_right = product.add("And", is_flat, product.add("Or", is_one, is_list))
            product.fail_if(product.add("Not", is_right), place, "scales of one number, or one for each column")


_CHECKS: Final[Mapping[tuple[str, str], Callable[[_Checked], None]]] = {
    ("", "RoiAlign"): _check_boxes,
    ("", "STFT"): _check_frame,
    ("", "RotaryEmbedding"): _check_pairs,
    ("com.microsoft", "Inverse"): _check_square,
    ("com.microsoft", "MatMulIntegerToFloat"): _check_scales,
    ("com.microsoft", "MultiHeadAttention"): _check_values,
    ("com.microsoft", "RotaryEmbedding"): _check_pairs,
    ("com.microsoft", "WordConvEmbedding"): _check_words,
}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 1.0
