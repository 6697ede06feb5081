"""Builders of models with small requests of high cost: long runs, large answers, or large memory to load.

The conventions are those of ``models.builders``.
"""

from pathlib import Path
from typing import Final

import numpy as np
from onnx import helper, numpy_helper

from models.builders import tensor, write
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
            tensor("i", DataType.INT64),
            tensor("go_on", DataType.BOOL),
            tensor("h", DataType.FP32, 1),
        ],
        [tensor("go_on_next", DataType.BOOL), tensor("h_next", DataType.FP32, 1)],
    )
    constants = [
        numpy_helper.from_array(np.ones(1, np.float32), "one"),
        numpy_helper.from_array(np.zeros(1, np.float32), "zero"),
    ]
    node = helper.make_node("Loop", ["n", "", "zero"], ["y"], body=body)
    return write(path, [node], [tensor("n", DataType.INT64, 1)], [tensor("y", DataType.FP32, 1)], constants)


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
    return write(path, nodes, [tensor("n", DataType.INT64, 1)], [tensor("y", DataType.FP64, 1, 1)])


def widened(path: Path) -> Path:
    """An output whose length is the input: n INT64 [1] → y FP32 [n], all ``FILL``."""
    fill = numpy_helper.from_array(np.array([FILL], np.float32))
    node = helper.make_node("ConstantOfShape", ["n"], ["y"], value=fill)
    return write(path, [node], [tensor("n", DataType.INT64, 1)], [tensor("y", DataType.FP32, "width")])


def largest(path: Path, datatype: DataType = DataType.FP32) -> Path:
    """The largest element of each row, for small answers: x [batch, width] → y [batch, 1]."""
    node = helper.make_node("ReduceMax", ["x", "axes"], ["y"], keepdims=1)
    axes = numpy_helper.from_array(np.array([1], np.int64), "axes")
    return write(path, [node], [tensor("x", datatype, "batch", "width")], [tensor("y", datatype, "batch", 1)], [axes])


def first_text(path: Path) -> Path:
    """The first text of each row, for small answers: x BYTES [batch, width] → y BYTES [batch]."""
    node = helper.make_node("Gather", ["x", "place"], ["y"], axis=1)
    place = numpy_helper.from_array(np.array(0, np.int64), "place")
    return write(
        path, [node], [tensor("x", DataType.BYTES, "batch", "width")], [tensor("y", DataType.BYTES, "batch")], [place]
    )


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
    return write(
        path,
        nodes,
        [tensor("x", DataType.FP32, "batch", width)],
        [tensor("y", DataType.FP32, "batch", 1)],
        [axes, *weights],
    )
