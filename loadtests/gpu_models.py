"""Models of the sizes used to measure GPUs, generated with ``onnx.helper`` and random weights; needs no downloads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_OPSET = 18
_IR_VERSION = 9
_ELEMENT = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16}


class _Graph:
    """Nodes and weights under construction. Weights are scaled so that activations keep their size."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def constant(self, value: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(value, f"w{len(self.weights)}"))
        return str(self.weights[-1].name)

    def weight(self, *shape: int, fan_in: int) -> str:
        values = self._random.standard_normal(shape, np.float32) / np.float32(fan_in**0.5)
        return self.constant(values.astype(self.dtype))

    def number(self, value: float) -> str:
        return self.constant(np.array(value, self.dtype))

    def dense(self, x: str, inputs: int, outputs: int) -> str:
        product = self.add("MatMul", x, self.weight(inputs, outputs, fan_in=inputs))
        return self.add("Add", product, self.constant(np.zeros(outputs, self.dtype)))

    def norm(self, x: str, width: int) -> str:
        ones, zeros = np.ones(width, self.dtype), np.zeros(width, self.dtype)
        return self.add("LayerNormalization", x, self.constant(ones), self.constant(zeros), axis=-1)

    def save(self, path: Path, x: onnx.ValueInfoProto, y: str, *shape: int | str) -> Path:
        self.nodes.append(helper.make_node("Identity", [y], ["y"]))
        output = helper.make_tensor_value_info("y", _ELEMENT[self.dtype], shape)
        graph = helper.make_graph(self.nodes, path.stem, [x], [output], self.weights)
        opset = [helper.make_opsetid("", _OPSET)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=_IR_VERSION), path)
        return path


def mlp(path: Path, *, layers: int, width: int, dtype: type[np.floating] = np.float32) -> Path:
    """Dense layers with tanh: x [batch, width] → y [batch, width]; two kernels with little work per layer."""
    graph = _Graph(np.dtype(dtype))
    last = "x"
    for _ in range(layers):
        last = graph.add("Tanh", graph.dense(last, width, width))
    x = helper.make_tensor_value_info("x", _ELEMENT[graph.dtype], ["batch", width])
    return graph.save(path, x, last, "batch", width)


def counting(path: Path, width: int = 8) -> Path:
    """A model that cannot be captured, because NonZero reports its count to the host: x [batch, width] → y, the same.

    y = x + 0 · (sum of the positions of nonzero elements). Rows are independent, but the analysis of the graph cannot
    know that the product is 0, so the model is batched only with ``batched: true``. All nodes are on the GPU: the
    positions are no shapes, with which ONNX Runtime would compute on the CPU and refuse to capture anything.
    """
    graph = _Graph(np.dtype(np.float32))
    positions = graph.add("Cast", graph.add("NonZero", "x"), to=TensorProto.FLOAT)
    nothing = graph.add("Mul", graph.add("ReduceSum", positions, keepdims=0), graph.number(0))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])
    return graph.save(path, x, graph.add("Add", "x", nothing), "batch", width)


def encoder(
    path: Path,
    *,
    layers: int,
    hidden: int,
    heads: int,
    length: int,
    vocabulary: int = 1000,
    dtype: type[np.floating] = np.float32,
) -> Path:
    """A transformer encoder like BERT: x INT64 [batch, length] → y [batch, hidden], the mean over the tokens."""
    graph = _Graph(np.dtype(dtype))
    size = hidden // heads
    split = graph.constant(np.array([0, length, heads, size], np.int64))
    joined = graph.constant(np.array([0, length, hidden], np.int64))
    half, one, root = graph.number(0.5), graph.number(1.0), graph.number(2**0.5)
    last = graph.add("Gather", graph.weight(vocabulary, hidden, fan_in=1), "x")
    last = graph.norm(last, hidden)
    for _ in range(layers):
        query, key, value = (graph.add("Reshape", graph.dense(last, hidden, hidden), split) for _ in range(3))
        query = graph.add("Transpose", query, perm=[0, 2, 1, 3])
        key = graph.add("Transpose", key, perm=[0, 2, 3, 1])
        value = graph.add("Transpose", value, perm=[0, 2, 1, 3])
        scores = graph.add("Div", graph.add("MatMul", query, key), graph.number(size**0.5))
        mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), value)
        mixed = graph.add("Reshape", graph.add("Transpose", mixed, perm=[0, 2, 1, 3]), joined)
        last = graph.norm(graph.add("Add", last, graph.dense(mixed, hidden, hidden)), hidden)
        wide = graph.dense(last, hidden, 4 * hidden)
        bent = graph.add("Add", graph.add("Erf", graph.add("Div", wide, root)), one)
        gelu = graph.add("Mul", graph.add("Mul", wide, bent), half)
        last = graph.norm(graph.add("Add", last, graph.dense(gelu, 4 * hidden, hidden)), hidden)
    pooled = graph.add("ReduceMean", last, graph.constant(np.array([1], np.int64)), keepdims=0)
    x = helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", length])
    return graph.save(path, x, pooled, "batch", hidden)


def residual(
    path: Path,
    *,
    blocks: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    size: int = 224,
    classes: int = 1000,
    dtype: type[np.floating] = np.float32,
) -> Path:
    """A convolutional network like ResNet-50: x [batch, 3, size, size] → y [batch, classes]."""
    graph = _Graph(np.dtype(dtype))

    def convolve(x: str, inputs: int, outputs: int, kernel: int, stride: int = 1) -> str:
        weight = graph.weight(outputs, inputs, kernel, kernel, fan_in=inputs * kernel * kernel)
        bias = graph.constant(np.zeros(outputs, graph.dtype))
        pads = [kernel // 2] * 4
        return graph.add("Conv", x, weight, bias, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)

    last = graph.add("Relu", convolve("x", 3, width, 7, 2))
    last = graph.add("MaxPool", last, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            way = graph.add("Relu", convolve(last, channels, inner, 1))
            way = graph.add("Relu", convolve(way, inner, inner, 3, stride))
            way = convolve(way, inner, 4 * inner, 1)
            short = last if block else convolve(last, channels, 4 * inner, 1, stride)
            # Scaled, because the sum of both branches would otherwise grow from block to block and overflow FP16.
            last = graph.add("Relu", graph.add("Mul", graph.add("Add", way, short), graph.number(0.5**0.5)))
            channels = 4 * inner
    flat = graph.add("Flatten", graph.add("GlobalAveragePool", last))
    x = helper.make_tensor_value_info("x", _ELEMENT[graph.dtype], ["batch", 3, size, size])
    return graph.save(path, x, graph.dense(flat, channels, classes), "batch", classes)
