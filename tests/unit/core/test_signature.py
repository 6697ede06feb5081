"""The properties that a signature states about its model."""

import pickle

import pytest

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import format_shape


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, DataType.FP32, shape)


def test_inputs_are_found_by_name_and_outputs_by_place() -> None:
    signature = ModelSignature((spec("a", -1, 1), spec("b", -1, 2)), (spec("y", -1), spec("z", -1)))
    assert signature.inputs_by_name == {"a": signature.inputs[0], "b": signature.inputs[1]}
    assert signature.output_index == {"y": 0, "z": 1}


def test_model_is_batched_unless_there_is_a_reason_why_not() -> None:
    assert ModelSignature((), ()).is_batched
    assert not ModelSignature((), (), "rows influence each other").is_batched


@pytest.mark.parametrize(
    ("shapes", "unbatched_because", "has_one"),
    [
        ([(-1, 4)], "", True),
        ([(-1, 4), (-1, 2, 3)], "", True),
        ([(-1, 4), (-1, -1)], "", False),
        ([(-1,)], "", True),
        ([(-1,)], "reason", False),
        ([(3, 4)], "reason", True),
        ([()], "reason", True),
    ],
)
def test_shapes_without_free_items_are_one_class(
    shapes: list[tuple[int, ...]], unbatched_because: str, has_one: bool
) -> None:
    inputs = tuple(spec(f"x{i}", *shape) for i, shape in enumerate(shapes))
    assert ModelSignature(inputs, (), unbatched_because).has_one_shape_class is has_one


def test_requests_that_may_leave_an_input_out_are_not_all_of_one_class() -> None:
    optional = TensorSpec("b", DataType.FP32, (-1, 4), is_optional=True)
    assert not ModelSignature((spec("a", -1, 4), optional), ()).has_one_shape_class
    assert not ModelSignature((spec("a", 4), optional), (), "reason").has_one_shape_class


def test_inputs_that_are_the_same_for_all_rows_can_be_taken_out() -> None:
    whole = TensorSpec("w", DataType.FP32, (2,), is_optional=True, batch_axis=None)
    signature = ModelSignature((spec("a", -1, 4), whole), (spec("y", -1),), "", {"s": "a sequence"}, {"z": "a map"})
    without = signature.without_optional_whole("because")
    assert list(without.inputs_by_name) == ["a"]
    assert without.unserved_inputs == {"s": "a sequence", "w": "because"}
    assert without.unserved_outputs == {"z": "a map"}
    assert signature.has_optional_inputs
    assert not without.has_optional_inputs


@pytest.mark.parametrize(("shape", "text"), [((), "[]"), ((-1,), "[-1]"), ((-1, 16, 0), "[-1,16,0]")])
def test_shape_is_spelled_as_clients_know_it(shape: tuple[int, ...], text: str) -> None:
    assert format_shape(shape) == text


def test_signature_can_be_sent_to_another_process() -> None:
    x = TensorSpec("x", DataType.FP32, (-1, 4), dim_names=("batch", ""), is_optional=True)
    signature = ModelSignature((x,), (TensorSpec("y", DataType.INT64, (-1,)),), "", unserved_outputs={"z": "a map"})
    copied = pickle.loads(pickle.dumps(signature))
    assert copied == signature
    assert copied.inputs_by_name["x"].dim_names == ("batch", "")
    assert copied.has_optional_inputs
