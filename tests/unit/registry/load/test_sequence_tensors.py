"""Controls and states against the tensors of the model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortserve.config.model import ModelOptions
from ortserve.core.dtypes import DataType
from ortserve.core.sequence import SequenceTensors
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.load.interface import Interface, resolve_interface


def spec(name: str, datatype: DataType = DataType.INT32, *dims: int, axis: int | None = 0) -> TensorSpec:
    return TensorSpec(name, datatype, (-1, *(dims or (1,))), batch_axis=axis)


MODEL = ModelSignature(
    (
        spec("STATE", DataType.FP32, 2, -1),
        spec("x"),
        spec("START"),
        spec("wide", DataType.INT32, 2),
        spec("ID", DataType.UINT64),
    ),
    (spec("NEXT", DataType.FP32, 2, -1), spec("y"), spec("other")),
)


def resolve(signature: ModelSignature = MODEL, folder: Path | None = None, **sequences: Any) -> Interface:
    options = ModelOptions.model_validate({"sequences": sequences})
    return resolve_interface(options, signature, folder)


def tensors(**state: Any) -> SequenceTensors:
    found = resolve(states=[{"input": "STATE", "output": "NEXT", **state}]).sequences
    assert found is not None
    return found


def test_hidden_tensors_come_last_for_the_model_and_not_at_all_for_clients() -> None:
    found = resolve(
        controls={"START": {"kind": "start"}, "ID": {"kind": "id"}}, states=[{"input": "STATE", "output": "NEXT"}]
    )
    assert [one.name for one in found.client.inputs] == ["x", "wide"]
    assert [one.name for one in found.client.outputs] == ["y", "other"]
    assert [one.name for one in found.model.inputs] == ["x", "wide", "START", "ID", "STATE"]
    assert [one.name for one in found.model.outputs] == ["y", "other", "NEXT"]
    assert found.sequences is not None
    assert [state.output_index for state in found.sequences.states] == [2]


def test_a_state_output_that_is_listed_is_for_clients_too() -> None:
    options = ModelOptions.model_validate(
        {"sequences": {"states": [{"input": "STATE", "output": "NEXT"}]}, "served_outputs": ["NEXT", "y"]}
    )
    found = resolve_interface(options, MODEL)
    assert [one.name for one in found.client.outputs] == ["NEXT", "y"]
    assert found.sequences is not None
    assert [state.output_index for state in found.sequences.states] == [0]
    assert found.sequences.shown_outputs == 2


def test_first_states_are_zeros_with_1_for_free_sizes() -> None:
    assert tensors().initial[0].shape == (1, 2, 1)
    assert tensors(initial_dims=[2, 0]).initial[0].shape == (1, 2, 0)
    assert tensors(dims=[2, 3]).initial[0].shape == (1, 2, 3)
    assert not tensors(initial_dims=[2, 3]).initial[0].any()


def test_a_first_state_is_read_from_a_file_and_a_longer_one_is_cut(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "f").write_bytes(np.arange(9, dtype=np.float32).tobytes())
    state = {"input": "STATE", "output": "NEXT", "initial_dims": [2, 2], "initial_file": "f"}
    found = resolve(folder=tmp_path, states=[state]).sequences
    assert found is not None
    assert found.initial[0].tolist() == [[[0, 1], [2, 3]]]
    text = "initial_state setting expects 80 bytes, but the data provided from f has 36 bytes."
    with pytest.raises(ServeError, match=text):
        resolve(folder=tmp_path, states=[{**state, "initial_dims": [2, 10]}])


def test_ids_reach_the_model_by_their_low_bits() -> None:
    for datatype, value in ((DataType.UINT64, 2**64 - 5), (DataType.INT64, -5), (DataType.INT32, -5)):
        model = ModelSignature((spec("x"), spec("ID", datatype)), (spec("y"),))
        found = resolve(model, controls={"ID": {"kind": "id"}}).sequences
        assert found is not None
        array = found.id_array(2**64 - 5)
        assert array is not None
        assert (array.dtype, array.shape, int(array[0, 0])) == (datatype.numpy, (1, 1), value)


@pytest.mark.parametrize(
    ("sequences", "text"),
    [
        (
            {"controls": {"NOPE": {"kind": "start"}}},
            "configuration specified sequence control 'NOPE', but model does not provide that input",
        ),
        (
            {"controls": {"wide": {"kind": "start"}}},
            "sequence control 'wide' in model has dims [2] but dims [1] is expected",
        ),
        (
            {"controls": {"START": {"kind": "start", "datatype": "FP32"}}},
            (
                "sequence control 'START', the model expects data-type INT32 but the model configuration specifies "
                "data-type FP32"
            ),
        ),
        ({"controls": {"START": {"kind": "id", "datatype": "UINT64"}}}, "the model expects data-type INT32"),
        ({"states": [{"input": "NOPE", "output": "NEXT"}]}, "unexpected input 'NOPE'"),
        ({"states": [{"input": "STATE", "output": "NOPE"}]}, "unexpected output 'NOPE'"),
        ({"states": [{"input": "STATE", "output": "y"}]}, "state 'STATE' is FP32, but its output 'y' is INT32"),
        ({"states": [{"input": "wide", "output": "y"}]}, "state 'wide' has dims [2], but its output 'y' has [1]"),
        ({"states": [{"input": "STATE", "output": "NEXT", "datatype": "INT32"}]}, "the model's datatype is FP32"),
        ({"states": [{"input": "STATE", "output": "NEXT", "dims": [3, -1]}]}, "the model expects dims [2,-1]"),
        ({"states": [{"input": "STATE", "output": "NEXT", "initial_dims": [3, 1]}]}, "initial_dims are [3,1]"),
        ({"states": [{"input": "STATE", "output": "NEXT", "initial_file": "f"}]}, "needs a model in a folder"),
        (
            {"states": [{"input": "STATE", "output": "NEXT", "initial_dims": [2, 2**31 - 1]}]},
            "at most max_state_bytes 1073741824, got 17179869176 bytes of shape [1,2,2147483647]",
        ),
    ],
)
def test_what_does_not_fit_the_model_fails_the_load(sequences: dict[str, Any], text: str) -> None:
    with pytest.raises(ServeError) as caught:
        resolve(**sequences)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert text in caught.value.message


def test_controls_are_not_for_clients() -> None:
    options = {"sequences": {"controls": {"START": {"kind": "start"}}}, "inputs": {"START": {}}}
    with pytest.raises(ServeError, match="input 'START' is filled by the server"):
        resolve_interface(ModelOptions.model_validate(options), MODEL)


def test_direct_needs_rows_in_all_inputs() -> None:
    model = ModelSignature((spec("x"), spec("scale", axis=None)), (spec("y"),))
    with pytest.raises(ServeError, match="direct needs rows in all inputs, but 'scale' has none"):
        resolve(model, strategy="direct")


def test_a_state_is_no_sequence_of_tensors() -> None:
    model = ModelSignature((spec("x"), spec("h")), (spec("y"), replace(spec("hs"), is_sequence=True)))
    with pytest.raises(ServeError, match="state 'h': expected a tensor, got the sequence of tensors 'hs'"):
        resolve(model, states=[{"input": "h", "output": "hs"}])
