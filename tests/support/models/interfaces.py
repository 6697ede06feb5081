"""Builders of tiny ONNX models with an unusual interface: optional inputs, types other than tensors, no inputs.

As in ``models.builders``, every builder writes a model file to ``path`` and returns ``path``.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.builders import OPSET, tensor, write
from ortserve.core.dtypes import DataType

_write: Final = partial(write, opsets={"": OPSET, "ai.onnx.ml": 3, "com.microsoft": 1})


def bfloat16_sum(path: Path) -> Path:
    """BF16 with another type: x BF16 [batch, 4], n FP32 [batch, 4] → y BF16 [batch, 4], the sum, and m FP32, n."""
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["wide", "n"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["y"], to=TensorProto.BFLOAT16),
        helper.make_node("Identity", ["n"], ["m"]),
    ]
    inputs = [tensor("x", DataType.BF16, "batch", 4), tensor("n", DataType.FP32, "batch", 4)]
    outputs = [tensor("y", DataType.BF16, "batch", 4), tensor("m", DataType.FP32, "batch", 4)]
    return _write(path, nodes, inputs, outputs)


def bfloat16_beside_its_input(path: Path) -> Path:
    """An input that is also an output: x BF16 [batch, 4] → x, and y BF16 [batch, 4], the same."""
    x, y = tensor("x", DataType.BF16, "batch", 4), tensor("y", DataType.BF16, "batch", 4)
    return _write(path, [helper.make_node("Identity", ["x"], ["y"])], [x], [x, y])


def joined(path: Path) -> Path:
    """Concatenations: y [batch, time, 8] of f [batch, steps, 4] and x [batch, time, 4]; present of past and x."""
    nodes = [
        helper.make_node("Concat", ["f", "x"], ["y"], axis=2),
        helper.make_node("Concat", ["past", "x"], ["present"], axis=-2),
    ]
    x, f = tensor("x", DataType.FP32, "batch", "time", 4), tensor("f", DataType.FP32, "batch", "steps", 4)
    past, present = (tensor(name, DataType.FP32, "batch", name, 4) for name in ("past", "present"))
    return _write(path, nodes, [x, f, past], [tensor("y", DataType.FP32, "batch", "time", 8), present])


def free_heads(path: Path) -> Path:
    """An attention with 2 heads of any size: x FP32 [batch, length, hidden] → y, of the same shape."""
    node = helper.make_node("MultiHeadAttention", ["x", "x", "x"], ["y"], domain="com.microsoft", num_heads=2)
    x, y = (tensor(name, DataType.FP32, "batch", "length", "hidden") for name in ("x", "y"))
    return _write(path, [node], [x], [y])


def free_window(path: Path) -> Path:
    """A spectrum with a window of any size: x FP32 [batch, 16, 1], window FP32 [size] → y [batch, frames, bins, 2]."""
    node = helper.make_node("STFT", ["x", "step", "window"], ["y"])
    inputs = [tensor("x", DataType.FP32, "batch", 16, 1), tensor("window", DataType.FP32, "size")]
    y = tensor("y", DataType.FP32, "batch", "frames", "bins", 2)
    return _write(path, [node], inputs, [y], [numpy_helper.from_array(np.array(4), "step")])


def running_sum(path: Path) -> Path:
    """The sum over steps, by a Scan along axis 1: x FP32 [batch, steps, 2] → last FP32 [batch, 2]."""
    state, step, total = (tensor(name, DataType.FP32, "batch", 2) for name in ("state", "step", "total"))
    body = helper.make_graph([helper.make_node("Add", ["state", "step"], ["total"])], "body", [state, step], [total])
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "kept"], ["size"]),
        helper.make_node("ConstantOfShape", ["size"], ["zeros"]),
        helper.make_node("Scan", ["zeros", "x"], ["last"], body=body, num_scan_inputs=1, scan_input_axes=[1]),
    ]
    x, last = tensor("x", DataType.FP32, "batch", "steps", 2), tensor("last", DataType.FP32, "batch", 2)
    return _write(path, nodes, [x], [last], [numpy_helper.from_array(np.array([0, 2]), "kept")])


def upsampled_volume(path: Path) -> Path:
    """A transposed convolution: x FP32 [batch, 1, depth, height, 4] → y FP32 [batch, 1, deeper, higher, 6]."""
    node = helper.make_node("ConvTranspose", ["x", "kernel"], ["y"], kernel_shape=[3, 3, 3])
    x = tensor("x", DataType.FP32, "batch", 1, "depth", "height", 4)
    y = tensor("y", DataType.FP32, "batch", 1, "deeper", "higher", 6)
    return _write(path, [node], [x], [y], [numpy_helper.from_array(np.ones((1, 1, 3, 3, 3), np.float32), "kernel")])


def transposed_product(path: Path) -> Path:
    """An Einsum over an axis of any length: x FP32 [batch, inner], z FP32 [3, inner] → y FP32 [3, batch]."""
    node = helper.make_node("Einsum", ["x", "z"], ["y"], equation="ij,kj->ki")
    inputs = [tensor("x", DataType.FP32, "batch", "inner"), tensor("z", DataType.FP32, 3, "inner")]
    return _write(path, [node], inputs, [tensor("y", DataType.FP32, 3, "batch")])


def skip_normalized(path: Path) -> Path:
    """A normalized sum: x FP32 [batch, length, 4], skip FP32 [others, length, 4] → y FP32 [batch, length, 4]."""
    node = helper.make_node("SkipLayerNormalization", ["x", "skip", "gamma"], ["y"], domain="com.microsoft")
    inputs = [tensor("x", DataType.FP32, "batch", "length", 4), tensor("skip", DataType.FP32, "others", "length", 4)]
    y = tensor("y", DataType.FP32, "batch", "length", 4)
    return _write(path, [node], inputs, [y], [numpy_helper.from_array(np.ones(4, np.float32), "gamma")])


def joined_features(path: Path) -> Path:
    """Concatenated features: x FP32 [batch, 2] and z FP32 [batch, 2] → y FP32 [batch, 4]."""
    node = helper.make_node("FeatureVectorizer", ["x", "z"], ["y"], domain="ai.onnx.ml", inputdimensions=[2, 2])
    inputs = [tensor(name, DataType.FP32, "batch", 2) for name in ("x", "z")]
    return _write(path, [node], inputs, [tensor("y", DataType.FP32, "batch", 4)])


def quantized_product(path: Path) -> Path:
    """A product of two inputs that is computed in INT32: a [batch, inner] and b [inner, 3] → y FP32 [batch, 3]."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["a"], ["a8", "a_scale", "a_zero"]),
        helper.make_node("DynamicQuantizeLinear", ["b"], ["b8", "b_scale", "b_zero"]),
        helper.make_node("MatMulInteger", ["a8", "b8", "a_zero", "b_zero"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["a_scale", "b_scale"], ["scale"]),
        helper.make_node("Mul", ["wide", "scale"], ["y"]),
    ]
    inputs = [tensor("a", DataType.FP32, "batch", "inner"), tensor("b", DataType.FP32, "inner", 3)]
    return _write(path, nodes, inputs, [tensor("y", DataType.FP32, "batch", 3)])


def quantized_multiple(path: Path) -> Path:
    """Three times x, which ONNX Runtime computes in UINT8: x FP32 [batch, length] → y FP32 [batch, length]."""
    weights: dict[str, np.ndarray] = {
        "half": np.array(0.5, np.float32),
        "zero": np.array(0, np.uint8),
        "six": np.array([6], np.uint8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "half", "zero"], ["x8"]),
        helper.make_node("DequantizeLinear", ["x8", "half", "zero"], ["a"]),
        helper.make_node("DequantizeLinear", ["six", "half", "zero"], ["b"]),
        helper.make_node("Mul", ["a", "b"], ["product"]),
        helper.make_node("QuantizeLinear", ["product", "half", "zero"], ["y8"]),
        helper.make_node("DequantizeLinear", ["y8", "half", "zero"], ["y"]),
    ]
    x, y = (tensor(name, DataType.FP32, "batch", "length") for name in "xy")
    return _write(path, nodes, [x], [y], [numpy_helper.from_array(value, name) for name, value in weights.items()])


def product_with_vector(path: Path) -> Path:
    """A product with a vector without rows: a FP32 [rows, inner] and b FP32 [inner] → y FP32 [rows]."""
    inputs = [tensor("a", DataType.FP32, "rows", "inner"), tensor("b", DataType.FP32, "inner")]
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    return _write(path, [node], inputs, [tensor("y", DataType.FP32, "rows")])


def product_of_transposed(path: Path) -> Path:
    """A product that ONNX Runtime joins with a Transpose: a FP32 [n, rows, inner] and b FP32 [n, m, inner] → y FP32."""
    inputs = [tensor(name, DataType.FP32, "n", rows, "inner") for name, rows in (("a", "rows"), ("b", "m"))]
    nodes = [
        helper.make_node("Transpose", ["b"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["a", "t"], ["y"]),
    ]
    return _write(path, nodes, inputs, [tensor("y", DataType.FP32, "n", "rows", "m")])


def bfloat16_and_text(path: Path) -> Path:
    """Returns its inputs: x BF16 [batch], s BYTES [batch] → wide FP32 [batch], t BYTES [batch], y BF16."""
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Identity", ["s"], ["t"]),
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    inputs = [tensor("x", DataType.BF16, "batch"), tensor("s", DataType.BYTES, "batch")]
    outputs = [
        tensor("wide", DataType.FP32, "batch"),
        tensor("t", DataType.BYTES, "batch"),
        tensor("y", DataType.BF16, "batch"),
    ]
    return _write(path, nodes, inputs, outputs)


def float8_output(path: Path) -> Path:
    """An element type without a name in the protocol: x FP32 [4] → y FLOAT8E4M3FN [4]."""
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E4M3FN)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT8E4M3FN, [4])]
    return _write(path, nodes, [tensor("x", DataType.FP32, 4)], outputs)


def sequence_input(path: Path) -> Path:
    """An input that is not a tensor: x, a sequence of FP32 → n INT64 [], its length."""
    nodes = [helper.make_node("SequenceLength", ["x"], ["n"])]
    inputs = [helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)]
    return _write(path, nodes, inputs, [tensor("n", DataType.INT64)])


def zipmap_classifier(path: Path, classes: Sequence[int] | Sequence[str] = (0, 1), *, is_tree: bool = False) -> Path:
    """A converted scikit-learn classifier: x FP32 [batch, n] → label [batch], probabilities, maps; n classes.

    The label is the class of the largest element. A tree's label is the first class if x[0] is at most 0.5, else the
    last.
    """
    count, is_text = len(classes), isinstance(classes[0], str)
    numbers = "classlabels_int64s" if is_tree else "classlabels_ints"
    names: dict[str, Any] = {"classlabels_strings" if is_text else numbers: list(classes)}
    if is_tree:
        node = helper.make_node(
            "TreeEnsembleClassifier",
            ["x"],
            ["label", "scores"],
            domain="ai.onnx.ml",
            nodes_treeids=[0, 0, 0],
            nodes_nodeids=[0, 1, 2],
            nodes_featureids=[0, 0, 0],
            nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
            nodes_values=[0.5, 0.0, 0.0],
            nodes_truenodeids=[1, 0, 0],
            nodes_falsenodeids=[2, 0, 0],
            class_treeids=[0, 0, 0, 0],
            class_nodeids=[1, 1, 2, 2],
            class_ids=[0, count - 1, 0, count - 1],
            class_weights=[0.75, 0.25, 0.125, 0.875],
            post_transform="NONE",
            **names,
        )
    else:
        node = helper.make_node(
            "LinearClassifier",
            ["x"],
            ["label", "scores"],
            domain="ai.onnx.ml",
            coefficients=np.eye(count, dtype=np.float32).ravel().tolist(),
            intercepts=[0.0] * count,
            multi_class=0,
            post_transform="SOFTMAX",
            **names,
        )
    label = tensor("label", DataType.BYTES if is_text else DataType.INT64, "batch")
    nodes = [node, zip_map(classes, "scores")]
    return _write(path, nodes, [tensor("x", DataType.FP32, "batch", count)], [label, maps(classes)])


def zip_map(classes: Sequence[int] | Sequence[str], scores: str) -> onnx.NodeProto:
    """The node that converts scores to the maps ``probabilities``."""
    keys = "classlabels_strings" if isinstance(classes[0], str) else "classlabels_int64s"
    names: dict[str, Any] = {keys: list(classes)}
    return helper.make_node("ZipMap", [scores], ["probabilities"], domain="ai.onnx.ml", **names)


def maps(classes: Sequence[int] | Sequence[str]) -> onnx.ValueInfoProto:
    """The output of ``zip_map``."""
    key = TensorProto.STRING if isinstance(classes[0], str) else TensorProto.INT64
    row = helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    return helper.make_value_info("probabilities", helper.make_sequence_type_proto(row))


def zipped_scores(path: Path, classes: Sequence[int] = (0, 1, 2), shape: Sequence[int | str] = ("batch", 3)) -> Path:
    """Scores as maps: x FP32 ``shape`` → probabilities, maps."""
    return _write(path, [zip_map(classes, "x")], [tensor("x", DataType.FP32, *shape)], [maps(classes)])


def split_sequence(path: Path, lengths: Sequence[int] = (2, 2), shape: Sequence[int | str] = ("batch", 4)) -> Path:
    """An output that is a sequence of tensors: x FP32 ``shape`` → parts, x split along axis 1, and y FP32, x."""
    given = numpy_helper.from_array(np.array(lengths, np.int64), "lengths")
    nodes = [
        helper.make_node("SplitToSequence", ["x", "lengths"], ["parts"], axis=1),
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    parts = helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    return _write(
        path, nodes, [tensor("x", DataType.FP32, *shape)], [parts, tensor("y", DataType.FP32, *shape)], [given]
    )


def bfloat16_and_sequence(path: Path) -> Path:
    """A sequence and a BF16 output: x FP32 [batch] → y BF16 [batch], x, and parts, a sequence of x."""
    nodes = [
        helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16),
        helper.make_node("SequenceConstruct", ["x"], ["parts"]),
    ]
    parts = helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    return _write(path, nodes, [tensor("x", DataType.FP32, "batch")], [tensor("y", DataType.BF16, "batch"), parts])


def text_sequence(path: Path) -> Path:
    """Sequences of texts: x BYTES [n] → y, the sequence of x twice, and parts, each text of x without axes."""
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["y"]),
        helper.make_node("SplitToSequence", ["x"], ["parts"], axis=0, keepdims=0),
    ]
    outputs = [helper.make_tensor_sequence_value_info(name, TensorProto.STRING, None) for name in ("y", "parts")]
    return _write(path, nodes, [tensor("x", DataType.BYTES, "n")], outputs)


def empty_sequence(path: Path) -> Path:
    """A sequence without tensors: x FP32 [batch, 4] → none, a sequence of INT64 [2, n], and y FP32 [batch, 4], x."""
    nodes = [
        helper.make_node("SequenceEmpty", [], ["none"], dtype=TensorProto.INT64),
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    none = helper.make_tensor_sequence_value_info("none", TensorProto.INT64, [2, "n"])
    outputs = [none, tensor("y", DataType.FP32, "batch", 4)]
    return _write(path, nodes, [tensor("x", DataType.FP32, "batch", 4)], outputs)


def default_scale(path: Path, shape: Sequence[int | str] = (1,)) -> Path:
    """An input with a default: x FP32 [batch, 4], scale FP32 ``shape``, or a 2 → y FP32 [batch, 4], x * scale."""
    default = numpy_helper.from_array(np.full([1 for _ in shape], 2, np.float32), "scale")
    nodes = [helper.make_node("Mul", ["x", "scale"], ["y"])]
    inputs = [tensor("x", DataType.FP32, "batch", 4), tensor("scale", DataType.FP32, *shape)]
    return _write(path, nodes, inputs, [tensor("y", DataType.FP32, "batch", 4)], [default])


def optional_bias(path: Path, rows: int | str = "batch") -> Path:
    """An input of an optional type: x, bias FP32 [rows, 4] → y FP32 [rows, 4], x + bias, or x if bias is absent."""
    then_branch = helper.make_graph(
        [
            helper.make_node("OptionalGetElement", ["bias"], ["some"]),
            helper.make_node("Add", ["x", "some"], ["with_bias"]),
        ],
        "with",
        [],
        [tensor("with_bias", DataType.FP32, rows, 4)],
    )
    else_branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["without_bias"])],
        "without",
        [],
        [tensor("without_bias", DataType.FP32, rows, 4)],
    )
    nodes = [
        helper.make_node("OptionalHasElement", ["bias"], ["has"]),
        helper.make_node("If", ["has"], ["y"], then_branch=then_branch, else_branch=else_branch),
    ]
    bias = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [rows, 4]))
    inputs = [tensor("x", DataType.FP32, rows, 4), helper.make_value_info("bias", bias)]
    return _write(path, nodes, inputs, [tensor("y", DataType.FP32, rows, 4)])


def optional_sequence(path: Path) -> Path:
    """An optional input that requests can omit but not supply: x FP32 [4], more → y FP32 [4], x, and has BOOL []."""
    more = helper.make_optional_type_proto(
        helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    )
    nodes = [
        helper.make_node("OptionalHasElement", ["more"], ["has"]),
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    inputs = [tensor("x", DataType.FP32, 4), helper.make_value_info("more", more)]
    return _write(path, nodes, inputs, [tensor("y", DataType.FP32, 4), tensor("has", DataType.BOOL)])


def constant(path: Path) -> Path:
    """No inputs: → y INT64 [3], 1, 2, 3."""
    value = numpy_helper.from_array(np.array([1, 2, 3], np.int64))
    return _write(path, [helper.make_node("Constant", [], ["y"], value=value)], [], [tensor("y", DataType.INT64, 3)])


def any_shape(path: Path) -> Path:
    """Inputs without a declared shape: x FP32 → y FP32, x. s FP32 [] has a shape → t FP32 [], s, has none."""
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["s"], ["t"])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None), tensor("s", DataType.FP32)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None), tensor("t", DataType.FP32)]
    return _write(path, nodes, inputs, outputs)


def reversed_of_any_shape(path: Path) -> Path:
    """X FP32 without a declared shape, but 2 axes or more; lengths INT64 [n] → y FP32, reversed rows."""
    node = helper.make_node("ReverseSequence", ["x", "lengths"], ["y"], batch_axis=0, time_axis=1)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    return _write(path, [node], [x, tensor("lengths", DataType.INT64, "n")], [y])


def positive(path: Path) -> Path:
    """The values determine the output shape: x FP32 [n] → y FP32 [m], the positive elements of x."""
    zero = numpy_helper.from_array(np.zeros((), np.float32), "zero")
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["is_positive"]),
        helper.make_node("Compress", ["x", "is_positive"], ["y"], axis=0),
    ]
    return _write(path, nodes, [tensor("x", DataType.FP32, "n")], [tensor("y", DataType.FP32, None)], [zero])
