"""Random arithmetic on long axes, in all types of sizes: every number that the proof knows, against ONNX Runtime.

The other random graphs have short axes, with which no integer overflows and no float is rounded.
"""

import random
from typing import Any, Final

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fuzz.bounds import CASES, LONG_ENOUGH, SEED
from ortserve.model_file.reading import parse_model
from ortserve.rows import Outcome, claims, prove_axes
from rows.brute_force import RefusedError, observe
from rows.claims import Check

_BLOCKS: Final = 4
_INTEGERS: Final = (TensorProto.INT32, TensorProto.INT64)
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.DOUBLE)
_AXES: Final = {"x": 0, "z": None}
_WHOLE: Final = (0, 1, 2, 3, -1, 7, 1000, 4096, 65536, 1 << 20, 1 << 24, 1 << 30, (1 << 31) - 1, -(1 << 31))
_LONG: Final = (1 << 31, 1 << 40, 1 << 53, 1 << 61, 1 << 62)
_BROKEN: Final = (0.5, 0.25, 1 / 3, 0.1, 1.5, 1e6, 1e9)
_OPERATORS: Final = {
    1: ("Abs", "Cast", "Ceil", "Floor", "Neg", "Sqrt"),
    2: ("Add", "Div", "Equal", "Greater", "Less", "Max", "Min", "Mod", "Mul", "Mul", "ReduceProd", "ReduceSum", "Sub"),
}


@LONG_ENOUGH
@pytest.mark.parametrize("block", range(_BLOCKS))
def test_no_claim_about_a_number_of_long_axes_is_false(block: int) -> None:
    compared = 0
    for index in range(block, CASES // 10, _BLOCKS):
        seed = SEED * 10_000_000 + index
        rng = random.Random(seed)
        model = _arithmetic(rng)
        parsed = parse_model(memoryview(model.SerializeToString()))
        verdict = prove_axes(parsed, _AXES)
        assert verdict.outcome is Outcome.PROVEN
        lengths = [rng.choice((1, 2, 3, 4097, 46_341, 65_536, round(2 ** rng.uniform(0, 17)))) for _ in "xz"]
        if max(lengths) > verdict.longest_axis:
            continue
        row = {"x": np.zeros((1, lengths[0]), bool), "z": np.zeros(lengths[1], bool)}
        try:
            seen = observe(model, [row] * 3, _AXES)
        except RefusedError:  # a division by 0
            continue
        if any(array is None for one in seen.values() for array in one.batches.values()):
            continue
        check = Check(claims(parsed, _AXES))
        for node in model.graph.node:
            one = seen[node.output[0]]
            if all(array is not None and np.isfinite(array).all() for array in (*one.alone, *one.batches.values())):
                check.look(node.output[0], one)
        assert not check.findings, f"seed {seed}, {lengths}: {check.findings}\n{onnx.printer.to_text(model)}"
        compared += check.checked
    assert compared > CASES // 10


def _arithmetic(rng: random.Random) -> onnx.ModelProto:
    """A model that computes with the lengths of two inputs and the number of rows, and returns its first input."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    weights: list[TensorProto] = []
    made: list[tuple[str, int]] = []

    def add(operator: str, *operands: str, result: int, **attributes: Any) -> str:
        made.append((f"t{len(nodes)}", result))
        nodes.append(helper.make_node(operator, operands, [made[-1][0]], **attributes))
        return made[-1][0]

    def constant(dtype: int) -> str:
        numbers: tuple[float, ...] = _WHOLE + (() if dtype == TensorProto.INT32 else _LONG)
        numbers += _BROKEN if dtype in _FLOATS else ()
        array = np.array([rng.choice(numbers)], helper.tensor_dtype_to_np_dtype(dtype))
        weights.append(numpy_helper.from_array(array, f"c{len(weights)}"))
        return f"c{len(weights) - 1}"

    for source, axis in (("x", 0), ("x", 1), ("z", 0)):
        add("Shape", source, result=TensorProto.INT64, start=axis, end=axis + 1)
    for _ in range(rng.randint(3, 12)):
        one, dtype = rng.choice(made[-4:])
        operator = rng.choice(_OPERATORS[rng.choice((1, 2, 2))])
        if operator == "Cast" or dtype == TensorProto.BOOL:
            to = rng.choice(_INTEGERS + _FLOATS)
            add("Cast", one, result=to, to=to)
        elif operator in _OPERATORS[1]:
            if dtype in _FLOATS or operator in ("Abs", "Neg"):
                add(operator, one, result=dtype)
        elif operator != "Mod" or dtype in _INTEGERS:
            other = rng.choice([constant(dtype), *(name for name, known in made if known == dtype)])
            operands = [one, other] if rng.random() < 0.7 else [other, one]
            if operator.startswith("Reduce"):
                operands = [add("Concat", *operands, result=0, axis=0)]
                made.pop()
            add(operator, *operands, result=TensorProto.BOOL if operator in ("Equal", "Greater", "Less") else dtype)
    inputs = [helper.make_tensor_value_info(name, TensorProto.BOOL, dims) for name, dims in (("x", "NL"), ("z", "M"))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.BOOL, "NL")]
    graph = helper.make_graph(nodes, "arithmetic", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
