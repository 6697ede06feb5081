"""The interface of a model for clients, and its configuration."""

import re

import numpy as np
import pytest

from ortserve.config.model import LoadOptions, ModelOptions, load_model_options
from ortserve.core.conversion import Reshape
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.load.interface import Interface, resolve_interface
from ortserve.registry.load.loaded_model import batch_options_without_effect
from ortserve.registry.load.row_axes import Grounds, RowAxes

BATCHED = ModelSignature(
    (
        TensorSpec("a", DataType.FP32, (-1, 16), ("batch", "")),
        TensorSpec("b", DataType.INT64, (-1, -1), ("batch", "seq")),
    ),
    (
        TensorSpec("y", DataType.FP32, (-1, 4), ("batch", "")),
        TensorSpec("z", DataType.FP32, (-1,), ("batch",)),
    ),
)
FIXED = ModelSignature(
    (TensorSpec("x", DataType.FP32, (1, 3, 8, 8), ("",) * 4),),
    (TensorSpec("y", DataType.FP32, (1, 1000, 1, 1), ("",) * 4),),
    "the first dimension of input 'x' is fixed at 1",
)


def resolve(signature: ModelSignature, **options: object) -> Interface:
    return resolve_interface(ModelOptions.model_validate(options), signature)


def test_unconfigured_interface_is_the_model_interface() -> None:
    assert resolve(BATCHED) == Interface(BATCHED, BATCHED)


def test_batching_options_have_no_effect_without_batching() -> None:
    said = ModelOptions(max_rows=8, buckets=(1, 8), preferred_rows=(4,), queue_delay_s=1, warmup_s=0)
    why = "each request runs alone: the first dimension of input 'x' is fixed at 1"
    assert batch_options_without_effect(resolve(FIXED).model, said) == [
        f"{key}: {why}" for key in ("max_rows", "buckets", "preferred_rows", "queue_delay_s")
    ]
    assert batch_options_without_effect(resolve(BATCHED).model, said) == []
    found = resolve(BATCHED).unbatched("rows depend")
    assert batch_options_without_effect(found.model, ModelOptions(buckets=(4,))) == [
        "buckets: each request runs alone: rows depend"
    ]


def test_options_with_effect_or_from_the_server_are_not_reported() -> None:
    assert (
        batch_options_without_effect(resolve(FIXED).model, ModelOptions(max_rows=1, buckets=(), queue_delay_s=0)) == []
    )
    inherited = load_model_options(None, LoadOptions(max_rows=8, queue_delay_s=0.1))
    assert inherited.max_rows == 8
    assert batch_options_without_effect(resolve(FIXED).model, inherited) == []


def test_configured_sizes_fix_free_dimensions_for_clients_and_warm_up() -> None:
    interface = resolve(BATCHED, inputs={"b": {"dims": (7,), "datatype": "INT64"}})
    assert interface.client.inputs_by_name["b"].shape == (-1, 7)
    assert interface.model.inputs_by_name["b"].shape == (-1, 7)
    assert interface.model.inputs_by_name["b"].dim_names == ("batch", "")
    assert interface.conversions is None


def test_named_tensors_come_first_and_only_chosen_outputs_are_served() -> None:
    interface = resolve(BATCHED, inputs={"b": {}}, served_outputs=("z",))
    assert [spec.name for spec in interface.client.inputs] == ["b", "a"]
    assert [spec.name for spec in interface.model.outputs] == ["z"]


def test_reshape_shows_clients_other_dimensions() -> None:
    interface = resolve(
        BATCHED,
        inputs={"a": {"dims": (4, 4), "reshape": (16,)}},
        outputs={"z": {"dims": (1,), "reshape": ()}},
    )
    assert interface.client.inputs_by_name["a"].shape == (-1, 4, 4)
    assert interface.model.inputs_by_name["a"].shape == (-1, 16)
    assert interface.conversions is not None
    assert interface.conversions.inputs == (Reshape((4, 4), (16,), 1), None)
    assert {reshape for reshape in interface.conversions.outputs if reshape} == {Reshape((), (1,), 1)}


def test_whole_shapes_are_reshaped_without_batching() -> None:
    interface = resolve(
        FIXED,
        batched=False,
        inputs={"x": {"dims": (3, 8, 8), "reshape": (1, 3, 8, 8)}},
        outputs={"y": {"dims": (1000,), "reshape": (1, 1000, 1, 1)}},
    )
    assert interface.client.inputs[0].shape == (3, 8, 8)
    assert interface.client.outputs[0].shape == (1000,)
    assert interface.client.unbatched_because == FIXED.unbatched_because


def test_dims_are_whole_shapes_with_batching_off() -> None:
    signature = RowAxes(Grounds.CONFIGURED, is_disabled=True).apply(BATCHED)
    interface = resolve(signature, batched=False, inputs={"a": {"dims": (-1, 16)}})
    assert interface.model.unbatched_because == interface.client.unbatched_because == "its configuration says so"
    assert interface.client.inputs[0].shape == (-1, 16)


def test_optional_input_that_the_model_requires_is_reported_and_stays_required() -> None:
    interface = resolve(BATCHED, inputs={"a": {"optional": True}})
    assert interface.without_effect == ("optional: the model requires input 'a'",)
    assert not interface.client.has_one_shape_class


@pytest.mark.parametrize(
    ("signature", "options", "problem"),
    [
        (FIXED, {"batched": True}, "the configuration says that the model is batched, but the first dimension"),
        (BATCHED, {"inputs": {"c": {}}}, "unexpected inference input 'c', allowed inputs are: a, b"),
        (BATCHED, {"outputs": {"a": {}}}, "unexpected inference output 'a', allowed outputs are: y, z"),
        (BATCHED, {"served_outputs": ("q",)}, "unexpected inference output 'q', allowed outputs are: y, z"),
        (
            BATCHED,
            {"inputs": {"a": {"datatype": "INT8"}}},
            "'a': the model's datatype is FP32, but the model configuration specifies INT8",
        ),
        (
            BATCHED,
            {"inputs": {"a": {"dims": (-1, 16)}}},
            (
                "tensor 'a': the model expects 1 dimensions after the batch dimension ([16]) "
                "but the model configuration "
                "specifies 2 dimensions ([-1,16])"
            ),
        ),
        (
            BATCHED,
            {"inputs": {"a": {"dims": (8,)}}},
            (
                "tensor 'a': the model expects shape after the batch dimension ([16]) but the model configuration "
                "specifies shape ([8])"
            ),
        ),
        (BATCHED, {"outputs": {"y": {"dims": (-1,)}}}, "specifies shape ([-1])"),
        (
            BATCHED,
            {"inputs": {"a": {"dims": (4, 5), "reshape": (16,)}}},
            "'a': dims [4,5] and reshape [16] have different numbers of elements",
        ),
        (BATCHED, {"inputs": {"a": {"reshape": (16,)}}}, "'a': expected dims to be set with reshape: dims are"),
    ],
)
def test_options_that_contradict_the_model_are_rejected(
    signature: ModelSignature, options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ServeError) as caught:
        resolve(signature, **options)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert problem in caught.value.message


def test_dependent_rows_are_reported_on_both_sides() -> None:
    interface = resolve(BATCHED).unbatched("rows mix")
    assert interface.model.unbatched_because == interface.client.unbatched_because == "rows mix"


TIME_FIRST = ModelSignature(
    (TensorSpec("x", DataType.FP32, (-1, -1, 4), ("time", "n", ""), batch_axis=1),),
    (TensorSpec("y", DataType.FP32, (-1, 2), ("n", "")),),
)


def test_rows_on_another_axis_are_moved_from_the_model_layout() -> None:
    interface = resolve(TIME_FIRST, inputs={"x": {"dims": (8, -1, 4)}})
    assert interface.client.inputs[0].shape == (8, -1, 4)
    assert interface.conversions is not None
    x = np.arange(8 * 3 * 4.0).reshape(8, 3, 4)
    np.testing.assert_array_equal(interface.conversions.to_model((x,), 3)[0], np.moveaxis(x, 1, 0))


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ({"dims": (8, 2, 4)}, "expected -1 on axis 1 of dims [8,2,4], as rows are on it"),
        ({"dims": (-1, -1, 2, 2), "reshape": (-1, -1, 4)}, "expected no reshape, as its rows are on axis 1"),
    ],
)
def test_batch_axis_is_neither_fixed_nor_reshaped(declared: dict[str, object], problem: str) -> None:
    with pytest.raises(ServeError, match=re.escape(problem)):
        resolve(TIME_FIRST, inputs={"x": declared})
