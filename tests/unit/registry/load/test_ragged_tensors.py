"""Ragged inputs, batch inputs and batch outputs against the tensors of the model."""

from typing import Any

import numpy as np
import pytest

from ortserve.config.model import ModelOptions
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ServeError
from ortserve.registry.load.interface import resolve_interface
from ortserve.registry.request_shapes import ShapeClasses


def spec(name: str, datatype: DataType = DataType.FP32, *dims: int) -> TensorSpec:
    return TensorSpec(name, datatype, (-1, *dims))


MODEL = ModelSignature(
    (spec("N", DataType.INT32), spec("X"), spec("wide", DataType.FP32, 2), spec("L", DataType.INT64)),
    (spec("Y"), spec("rows", DataType.FP32, 2)),
)


def options(**more: Any) -> ModelOptions:
    given = {"batched": True, "max_rows": 4, "inputs": {"X": {"ragged": True}}, **more}
    return ModelOptions.model_validate(given)


def test_requests_have_neither_batch_inputs_nor_the_models_shapes() -> None:
    derived = {"N": {"kind": "element_count", "source": "X"}}
    found = resolve_interface(options(batch_inputs=derived, batch_outputs={"Y": "X"}), MODEL)
    assert [(one.name, one.shape) for one in found.client.inputs] == [("X", (-1, -1)), ("wide", (-1, 2)), ("L", (-1,))]
    assert [(one.name, one.shape) for one in found.client.outputs] == [("Y", (-1, -1)), ("rows", (-1, 2))]
    ragged = found.model.ragged
    assert ragged is not None
    assert (ragged.joined, dict(ragged.scattered)) == (frozenset({0}), {0: 0})
    assert [(one.name, one.source) for one in ragged.batch_inputs] == [("N", 0)]


def test_indices_follow_the_order_that_clients_see() -> None:
    given = {"wide": {}, "X": {"ragged": True, "dims": [2, -1]}}
    found = resolve_interface(options(inputs=given, batch_outputs={"Y": "X"}, served_outputs=["rows", "Y"]), MODEL)
    ragged = found.client.ragged
    assert ragged is not None
    assert (ragged.joined, dict(ragged.scattered), ragged.output_names) == (frozenset({1}), {1: 1}, ("rows", "Y"))
    assert found.client.inputs[1].shape == (-1, 2, -1)
    assert found.client.outputs[1].shape == (-1, 2, -1)


def test_only_ragged_inputs_may_differ_within_a_batch() -> None:
    found = resolve_interface(options(), MODEL).model
    classes = ShapeClasses(found, None)

    def find(length: int, width: int) -> object:
        wide, large = np.ones((1, width), np.float32), np.ones(1, np.int64)
        return classes.find((np.ones((1, length), np.float32), np.ones(1, np.int32), wide, large))

    assert find(3, 2) == find(5, 2) != find(3, 4)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"inputs": {"wide": {"ragged": True}}}, r"shape \[-1\] for ragged input 'wide', model provides \[-1,2\]"),
        ({"batch_inputs": {"Q": {"kind": "item_shape", "source": "X"}}}, "unknown target input name 'Q'"),
        ({"batch_inputs": {"N": {"kind": "item_shape", "source": "Q"}}}, "unknown source input name 'Q'"),
        ({"batch_inputs": {"N": {"kind": "item_shape", "source": "N"}}}, "unknown source input name 'N'"),
        ({"batch_inputs": {"L": {"kind": "element_count", "source": "X"}}}, "must be TYPE_INT32 or TYPE_FP32"),
        ({"batch_inputs": {"N": {"kind": "item_shape", "source": "X"}}}, "expected two axes in the model"),
        (
            {"batch_inputs": {"N": {"kind": "element_count", "source": "X", "datatype": "FP32"}}},
            "the model's datatype is INT32, but the model configuration specifies FP32",
        ),
        ({"batch_outputs": {"Q": "X"}}, "unknown target output name 'Q'"),
        ({"batch_outputs": {"Y": "Q"}}, "unknown source input name 'Q'"),
        ({"batch_outputs": {"rows": "X"}}, r"output 'rows' of batch_outputs, model provides \[-1,2\]"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_named(more: dict[str, Any], error: str) -> None:
    with pytest.raises(ServeError, match=error):
        resolve_interface(options(**more), MODEL)
