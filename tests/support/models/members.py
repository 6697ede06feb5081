"""Small models for ensembles; each computes a result that a test can compute itself."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.builders import write

Shape = Sequence[int | str | None]
ROWS: Shape = ("batch", 2)


def affine(path: Path, scale: float = 1, offset: float = 0, shape: Shape = ROWS) -> Path:
    """A FP32 → b FP32 of the same shape, b = scale · a + offset."""
    weights = [
        numpy_helper.from_array(np.array(value, np.float32), name) for name, value in (("s", scale), ("o", offset))
    ]
    nodes = [helper.make_node("Mul", ["a", "s"], ["m"]), helper.make_node("Add", ["m", "o"], ["b"])]
    return write(path, nodes, [_value("a", shape)], [_value("b", shape)], weights)


def sums(path: Path, shape: Shape = ROWS) -> Path:
    """A FP32, b FP32 → sum FP32, difference FP32."""
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])]
    inputs = [_value("a", shape), _value("b", shape)]
    return write(path, nodes, inputs, [_value("sum", shape), _value("difference", shape)])


def scaled(path: Path) -> Path:
    """A FP32 [batch, 2] and an optional factor FP32 [batch, 2], by default 1 → b FP32 [batch, 2], their product."""
    factor = numpy_helper.from_array(np.ones((1, 2), np.float32), "factor")
    inputs = [_value("a", ROWS), _value("factor", (None, 2))]
    return write(path, [helper.make_node("Mul", ["a", "factor"], ["b"])], inputs, [_value("b", ROWS)], [factor])


def picks(path: Path) -> Path:
    """A FP32 [batch, 2] → b FP32 [batch, 2], entries of a table at the indices in a; fails for indices over 15."""
    table = [numpy_helper.from_array(np.arange(16, dtype=np.float32), "table")]
    nodes = [
        helper.make_node("Cast", ["a"], ["i"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "i"], ["b"]),
    ]
    return write(path, nodes, [_value("a", ROWS)], [_value("b", ROWS)], table)


def _value(name: str, shape: Shape) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


Step = tuple[str, dict[str, str], dict[str, str]]


def ensemble_text(inputs: Sequence[str], outputs: Sequence[str], steps: Sequence[Step], **more: str) -> str:
    """The ``model.yaml`` of an ensemble, with the keys of ``more`` as further lines."""
    lines = [f"{key}: {value}" for key, value in more.items()]
    lines += [f"inputs: {{{', '.join(f'{name}: {{}}' for name in inputs)}}}"]
    lines += [f"outputs: {{{', '.join(f'{name}: {{}}' for name in outputs)}}}", "ensemble:", "  steps:"]
    for model, given, made in steps:
        lines += [f"    - model: {model}", f"      inputs: {_mapping(given)}", f"      outputs: {_mapping(made)}"]
    return "\n".join(lines) + "\n"


def _mapping(names: dict[str, str]) -> str:
    return "{" + ", ".join(f"{own}: {tensor}" for own, tensor in names.items()) + "}"


def add_ensemble(
    repository: Path, name: str, inputs: Sequence[str], outputs: Sequence[str], steps: Sequence[Step], **more: str
) -> Path:
    """Write an ensemble into a repository. Returns its folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "model.yaml").write_text(ensemble_text(inputs, outputs, steps, **more))
    return folder
