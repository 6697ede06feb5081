"""Builders of models with small requests of high cost: long runs, large answers, or large memory to load.

The conventions are those of ``models.builders``.
"""

from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.builders import ELEMENT_TYPES, IR_VERSION, OPSET
from ortserve.core.dtypes import DataType

FILL: Final = 0.12345678
"""Value of every element in the answers of ``widened``; nine digits in JSON."""


def counted_loop(path: Path) -> Path:
    """A loop whose number of steps is the input: n INT64 [1] → y FP32 [1], the number of steps.

    A step takes about 0.5 µs, so the duration of a run depends on a value and not on a shape.
    """
    body = helper.make_graph(
        [
            helper.make_node("Add", ["h", "one"], ["h_next"]),
            helper.make_node("Identity", ["go_on"], ["go_on_next"]),
        ],
        "step",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("go_on_next", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h_next", TensorProto.FLOAT, [1]),
        ],
    )
    constants = [
        numpy_helper.from_array(np.ones(1, np.float32), "one"),
        numpy_helper.from_array(np.zeros(1, np.float32), "zero"),
    ]
    node = helper.make_node("Loop", ["n", "", "zero"], ["y"], body=body)
    return _write(path, [node], ("n", DataType.INT64, [1]), ("y", DataType.FP32, [1]), *constants)


def square_product(path: Path) -> Path:
    """A product of matrices whose width is the input: n INT64 [1] → y FP64 [1, 1], the square of n.

    A run cannot be terminated inside the product, which takes seconds for a width of some thousands.
    """
    one = numpy_helper.from_array(np.ones(1))
    nodes = [
        helper.make_node("Concat", ["n", "n"], ["shape"], axis=0),
        helper.make_node("ConstantOfShape", ["shape"], ["ones"], value=one),
        helper.make_node("MatMul", ["ones", "ones"], ["product"]),
        helper.make_node("ReduceMean", ["product"], ["mean"]),
        helper.make_node("Mul", ["mean", "mean"], ["y"]),
    ]
    return _write(path, nodes, ("n", DataType.INT64, [1]), ("y", DataType.FP64, [1, 1]))


def widened(path: Path) -> Path:
    """An output whose length is the input: n INT64 [1] → y FP32 [n], all ``FILL``."""
    fill = numpy_helper.from_array(np.array([FILL], np.float32))
    node = helper.make_node("ConstantOfShape", ["n"], ["y"], value=fill)
    return _write(path, [node], ("n", DataType.INT64, [1]), ("y", DataType.FP32, ["width"]))


def largest(path: Path, datatype: DataType = DataType.FP32) -> Path:
    """The largest element of each row, for small answers: x [batch, width] → y [batch, 1]."""
    node = helper.make_node("ReduceMax", ["x", "axes"], ["y"], keepdims=1)
    axes = numpy_helper.from_array(np.array([1], np.int64), "axes")
    return _write(path, [node], ("x", datatype, ["batch", "width"]), ("y", datatype, ["batch", 1]), axes)


def first_text(path: Path) -> Path:
    """The first text of each row, for small answers: x BYTES [batch, width] → y BYTES [batch]."""
    node = helper.make_node("Gather", ["x", "place"], ["y"], axis=1)
    place = numpy_helper.from_array(np.array(0, np.int64), "place")
    return _write(path, [node], ("x", DataType.BYTES, ["batch", "width"]), ("y", DataType.BYTES, ["batch"]), place)


def weighty(path: Path, width: int = 5_000, layers: int = 2) -> Path:
    """Dense layers with 200 MB of weights by default: x FP32 [batch, width] → y FP32 [batch, 1]."""
    rng = np.random.default_rng(0)
    names = ["x", *(f"h{number}" for number in range(layers))]
    weights = [
        numpy_helper.from_array(rng.standard_normal((width, width), np.float32), f"w{number}")
        for number in range(layers)
    ]
    nodes = [
        helper.make_node("MatMul", [start, weight.name], [end])
        for start, weight, end in zip(names, weights, names[1:], strict=False)
    ]
    nodes.append(helper.make_node("ReduceMax", [names[-1], "axes"], ["y"], keepdims=1))
    axes = numpy_helper.from_array(np.array([1], np.int64), "axes")
    return _write(
        path, nodes, ("x", DataType.FP32, ["batch", width]), ("y", DataType.FP32, ["batch", 1]), axes, *weights
    )


_Value = tuple[str, DataType, list[int | str]]
"""Name, datatype and shape of an input or output."""


def _write(path: Path, nodes: list[onnx.NodeProto], given: _Value, made: _Value, *weights: onnx.TensorProto) -> Path:
    values = [
        helper.make_tensor_value_info(name, ELEMENT_TYPES[datatype], shape) for name, datatype, shape in (given, made)
    ]
    graph = helper.make_graph(nodes, path.stem, values[:1], values[1:], initializer=weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    path.write_bytes(model.SerializeToString())
    return path
