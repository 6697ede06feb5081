"""Builders of tiny models with the patterns of nodes that ``ortserve inspect`` searches for, as exporters write them.

Every builder writes a model file to ``path`` and returns ``path``. ``leak`` makes a value inside the pattern an output
of the model, so that no optimizer may fuse the pattern.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    ends: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 21,
) -> Path:
    constants = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(nodes, path.stem, ends, outputs, constants)
    opsets = [helper.make_opsetid("", opset)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
    return path


def value(name: str, *shape: int | str, element: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, shape)


def float32(*numbers: float) -> np.ndarray:
    return np.array(numbers if len(numbers) > 1 else numbers[0], np.float32)


def attention(path: Path, heads: int = 2, size: int = 4, opset: int = 21) -> Path:
    """Attention without a mask: x FP32 [batch, 8, heads · size] → y, the same."""
    hidden = heads * size
    rng = np.random.default_rng(0)
    weights = {f"w{name}": rng.standard_normal((hidden, hidden)).astype(np.float32) for name in "qkvo"}
    weights |= {"split": np.array([0, 0, heads, size]), "join": np.array([0, 0, hidden]), "root": float32(size**0.5)}
    orders = {"q": (0, 2, 1, 3), "k": (0, 2, 3, 1), "v": (0, 2, 1, 3)}
    nodes = []
    for name, order in orders.items():
        nodes += [
            helper.make_node("MatMul", ["x", f"w{name}"], [f"{name}1"]),
            helper.make_node("Reshape", [f"{name}1", "split"], [f"{name}2"]),
            helper.make_node("Transpose", [f"{name}2"], [name], perm=order),
        ]
    nodes += [
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("Div", ["scores", "root"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["shares"], name="shares", axis=-1),
        helper.make_node("MatMul", ["shares", "v"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["moved"], perm=(0, 2, 1, 3)),
        helper.make_node("Reshape", ["moved", "join"], ["joined"]),
        helper.make_node("MatMul", ["joined", "wo"], ["y"]),
    ]
    return write(path, nodes, [value("x", "batch", 8, hidden)], [value("y", "batch", 8, hidden)], weights, opset)


def layer_norm(path: Path, *, leak: bool, opset: int = 21) -> Path:
    """LayerNorm in pieces: x FP32 [batch, 8] → y, the same."""
    weights = {"two": float32(2), "eps": float32(1e-5), "gain": np.ones(8, np.float32), "bias": np.ones(8, np.float32)}
    axes: dict[str, Any] = {"axes": [-1]} if opset < 18 else {}
    if opset >= 18:
        weights["last"] = np.array([-1])
    last = ["last"] if opset >= 18 else []
    nodes = [
        helper.make_node("ReduceMean", ["x", *last], ["mean"], **axes),
        helper.make_node("Sub", ["x", "mean"], ["centred"]),
        helper.make_node("Pow", ["centred", "two"], ["squares"]),
        helper.make_node("ReduceMean", ["squares", *last], ["variance"], **axes),
        helper.make_node("Add", ["variance", "eps"], ["positive"]),
        helper.make_node("Sqrt", ["positive"], ["deviation"]),
        helper.make_node("Div", ["centred", "deviation"], ["normed"]),
        helper.make_node("Mul", ["normed", "gain"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["y"]),
    ]
    outputs = [value("y", "batch", 8), *([value("variance", "batch", 1)] if leak else [])]
    return write(path, nodes, [value("x", "batch", 8)], outputs, weights, opset)


def rms_norm(path: Path, *, leak: bool) -> Path:
    """RMSNorm in pieces: x FP32 [batch, 8] → y, the same."""
    weights = {"two": float32(2), "eps": float32(1e-5), "gain": np.ones(8, np.float32), "last": np.array([-1])}
    nodes = [
        helper.make_node("Pow", ["x", "two"], ["squares"]),
        helper.make_node("ReduceMean", ["squares", "last"], ["mean"]),
        helper.make_node("Add", ["mean", "eps"], ["positive"]),
        helper.make_node("Sqrt", ["positive"], ["root"]),
        helper.make_node("Div", ["x", "root"], ["normed"]),
        helper.make_node("Mul", ["gain", "normed"], ["y"]),
    ]
    outputs = [value("y", "batch", 8), *([value("mean", "batch", 1)] if leak else [])]
    return write(path, nodes, [value("x", "batch", 8)], outputs, weights)


def gelu(path: Path, *, leak: bool) -> Path:
    """GELU in pieces, by Erf: x FP32 [batch, 8] → y, the same."""
    weights = {"root": float32(2**0.5), "one": float32(1), "half": float32(0.5)}
    nodes = [
        helper.make_node("Div", ["x", "root"], ["scaled"]),
        helper.make_node("Erf", ["scaled"], ["erf"]),
        helper.make_node("Add", ["erf", "one"], ["plus"]),
        helper.make_node("Mul", ["x", "plus"], ["product"]),
        helper.make_node("Mul", ["product", "half"], ["y"]),
    ]
    outputs = [value("y", "batch", 8), *([value("erf", "batch", 8)] if leak else [])]
    return write(path, nodes, [value("x", "batch", 8)], outputs, weights)


def gelu_by_tanh(path: Path) -> Path:
    """GELU in pieces, approximated with Tanh: x FP32 [batch, 8] → y, the same."""
    weights = {name: float32(number) for name, number in (("three", 3), ("c", 0.044715), ("r", 0.7978845), ("one", 1))}
    weights["half"] = float32(0.5)
    nodes = [
        helper.make_node("Pow", ["x", "three"], ["cube"]),
        helper.make_node("Mul", ["cube", "c"], ["small"]),
        helper.make_node("Add", ["x", "small"], ["sum"]),
        helper.make_node("Mul", ["sum", "r"], ["scaled"]),
        helper.make_node("Tanh", ["scaled"], ["tanh"]),
        helper.make_node("Add", ["tanh", "one"], ["plus"]),
        helper.make_node("Mul", ["x", "half"], ["halved"]),
        helper.make_node("Mul", ["halved", "plus"], ["y"]),
    ]
    return write(path, nodes, [value("x", "batch", 8)], [value("y", "batch", 8)], weights)


def convolution(path: Path, *, channels_last: bool) -> Path:
    """A convolution, between two Transposes if its images are channels-last: x [batch, 8, 8, 4] → y."""
    weights = {"w": np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)}
    if not channels_last:
        nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
        return write(path, nodes, [value("x", "batch", 4, 8, 8)], [value("y", "batch", 4, 8, 8)], weights)
    nodes = [
        helper.make_node("Transpose", ["x"], ["first"], perm=(0, 3, 1, 2)),
        helper.make_node("Conv", ["first", "w"], ["made"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["made"], ["positive"]),
        helper.make_node("Transpose", ["positive"], ["y"], perm=(0, 2, 3, 1)),
    ]
    return write(path, nodes, [value("x", "batch", 8, 8, 4)], [value("y", "batch", 8, 8, 4)], weights)


def casts(path: Path, *, back: bool, is_moved: bool = True) -> Path:
    """A Cast to half precision and, if ``back``, back: x FP32 [batch, 4, 4] → y. A Transpose is between or last."""
    element = FLOAT if back else TensorProto.FLOAT16
    source, target = ("half", "moved" if back else "y") if is_moved else ("full", "y")
    move = helper.make_node("Transpose", [source], [target], perm=(0, 2, 1))
    back_from, back_to = ("moved", "y") if is_moved else ("half", "full")
    nodes = [helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16), move]
    if back:
        nodes.insert(2 if is_moved else 1, helper.make_node("Cast", [back_from], [back_to], name="back", to=FLOAT))
    return write(path, nodes, [value("x", "batch", 4, 4)], [value("y", "batch", 4, 4, element=element)])


def dense(path: Path, dtype: type[np.generic] = np.float32, *, is_input: bool = False) -> Path:
    """A dense layer, whose weights can also be an input: x [batch, 8] → y [batch, 4]."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = {"w": np.ones((8, 4), dtype), "b": np.ones(4, dtype)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"], name="add")]
    ends = [value("x", "batch", 8, element=element), *([value("w", 8, 4, element=element)] if is_input else [])]
    return write(path, nodes, ends, [value("y", "batch", 4, element=element)], weights)


def branch(path: Path) -> Path:
    """A branch that depends on the input: x FP32 [batch, 4] → y, x or twice x."""
    sides = {
        name: helper.make_graph([helper.make_node(op, ["x", *more], [name])], name, [], [value(name, "batch", 4)])
        for name, op, more in (("same", "Identity", []), ("twice", "Add", ["x"]))
    }
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Greater", ["most", "zero"], ["is_positive"]),
        helper.make_node(
            "If", ["is_positive"], ["y"], name="decide", then_branch=sides["same"], else_branch=sides["twice"]
        ),
    ]
    return write(path, nodes, [value("x", "batch", 4)], [value("y", "batch", 4)], {"zero": float32(0)})


def flattens(path: Path) -> Path:
    """A Reshape by a shape that is computed in each run: x FP32 [batch, rows, 4] → y FP32 [batch, width]."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], name="shape"),
        helper.make_node("Gather", ["shape", "first"], ["batch"], name="batch"),
        helper.make_node("Concat", ["batch", "rest"], ["target"], axis=0, name="target"),
        helper.make_node("Mul", ["x", "two"], ["double"]),
        helper.make_node("Reshape", ["double", "target"], ["y"]),
    ]
    weights = {"first": np.array([0]), "rest": np.array([-1]), "two": float32(2)}
    return write(path, nodes, [value("x", "batch", "rows", 4)], [value("y", "batch", "width")], weights)
