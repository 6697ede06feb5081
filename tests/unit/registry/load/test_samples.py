"""Configured warm-up requests."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ortserve.codecs.binary_tensor import encode_binary_tensor
from ortserve.config.model import ModelOptions
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.load.inputs import Sample, make_samples
from ortserve.registry.load.interface import Interface, resolve_interface

SIGNATURE = ModelSignature(
    (
        TensorSpec("a", DataType.FP32, (-1, 4), ("batch", "")),
        TensorSpec("b", DataType.INT64, (-1, -1), ("batch", "seq")),
        TensorSpec("t", DataType.BYTES, (-1, 1), ("batch", "")),
    ),
    (TensorSpec("y", DataType.FP32, (-1, 4), ("batch", "")),),
)


def make(
    folder: Path | None, *samples: dict[str, object], max_rows: int | None = None, **options: object
) -> list[Sample]:
    configured = ModelOptions.model_validate({"warmup_samples": samples} | options)
    return make_samples(configured, interface(configured), folder, max_rows=max_rows)


def interface(options: ModelOptions) -> Interface:
    return resolve_interface(options, SIGNATURE)


def test_unlisted_sample_inputs_are_synthetic() -> None:
    (sample,) = make(None, {"rows": 3, "count": 2})
    assert (sample.rows, sample.count) == (3, 2)
    assert [array.shape for array in sample.inputs] == [(3, 4), (3, 8), (3, 1)]
    assert [array.dtype for array in sample.inputs] == [np.float32, np.int64, object]
    assert sample.inputs[0].any()


def test_zero_samples_are_zeros_and_empty_strings() -> None:
    zeros = {name: {"data": "zeros"} for name in "abt"}
    (sample,) = make(None, {"inputs": zeros})
    assert not sample.inputs[0].any()
    assert sample.inputs[2].tolist() == [[""]]


def test_file_holds_the_raw_tensor_of_all_rows(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    ids = np.arange(6, dtype=np.int64).reshape(2, 3)
    texts = np.array([["one"], ["zwei"]], dtype=object)
    (tmp_path / "warmup" / "ids").write_bytes(ids.tobytes())
    (tmp_path / "warmup" / "texts").write_bytes(bytes(encode_binary_tensor(texts, DataType.BYTES)))
    inputs = {"b": {"dims": (3,), "file": "ids"}, "t": {"dims": (1,), "datatype": "BYTES", "file": "texts"}}
    (sample,) = make(tmp_path, {"rows": 2, "inputs": inputs})
    np.testing.assert_array_equal(sample.inputs[1], ids)
    assert sample.inputs[2].tolist() == texts.tolist()


def test_file_of_one_row_stands_for_equal_rows_as_in_triton(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "ids").write_bytes(np.arange(3, dtype=np.int64).tobytes())
    (tmp_path / "warmup" / "text").write_bytes(b"\x03\x00\x00\x00" + b"233")
    inputs = {"b": {"dims": (3,), "file": "ids"}, "t": {"file": "text", "dims": (1,)}}
    (sample,) = make(tmp_path, {"rows": 4, "inputs": inputs})
    assert sample.inputs[1].tolist() == [[0, 1, 2]] * 4
    assert sample.inputs[2].tolist() == [["233"]] * 4


def test_controls_and_states_may_be_listed_as_in_triton() -> None:
    sequences = {
        "controls": {"START": {"kind": "start"}, "READY": {"kind": "ready"}},
        "states": [{"input": "STATE", "output": "NEXT"}],
    }
    flags = tuple(TensorSpec(name, DataType.INT32, (-1, 1), ("batch", "")) for name in ("START", "READY"))
    state = TensorSpec("STATE", DataType.FP32, (-1, 2), ("batch", ""))
    signature = replace(
        SIGNATURE, inputs=(*flags, state, *SIGNATURE.inputs), outputs=(*SIGNATURE.outputs, replace(state, name="NEXT"))
    )
    listed = {"START": {"dims": (1,), "data": "zeros"}, "STATE": {"dims": (2,)}}
    options = ModelOptions.model_validate({"sequences": sequences, "warmup_samples": [{"rows": 2, "inputs": listed}]})
    (sample,) = make_samples(options, resolve_interface(options, signature), None, max_rows=None)
    assert [array.shape for array in sample.inputs[3:]] == [(2, 1), (2, 1), (2, 2)]
    start, ready, first_state = sample.inputs[3:]
    assert (start.tolist(), ready.tolist()) == ([[0], [0]], [[1], [1]])
    assert first_state.any()


def test_samples_have_the_model_layout() -> None:
    (sample,) = make(None, {"rows": 2}, inputs={"a": {"dims": (2, 2), "reshape": (4,)}})
    assert sample.inputs[0].shape == (2, 4)


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ({"name": "s", "rows": 9}, "warm-up sample 's': expected at most 8 rows, got 9"),
        ({"inputs": {"c": {}}}, "warm-up sample '0': unexpected input 'c', allowed are: a, b, t"),
        ({"inputs": {"a": {"datatype": "INT8"}}}, "input 'a': expected FP32, got INT8"),
        ({"inputs": {"a": {"dims": (5,)}}}, "input 'a': expected dims like [4], got [5]"),
        ({"inputs": {"b": {"dims": (5, 5)}}}, "input 'b': expected dims like [-1], got [5, 5]"),
        ({"inputs": {"b": {"file": "none"}}}, "input 'b': 'warmup/none' cannot be read: No such file"),
        ({"inputs": {"b": {"file": "../../secret"}}}, "input 'b': expected a file in the model's folder"),
        ({"inputs": {"a": {"file": "short"}}}, "warm-up sample '0': "),
    ],
)
def test_sample_that_no_client_could_send_is_rejected(tmp_path: Path, sample: dict[str, object], problem: str) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "short").write_bytes(b"123")
    with pytest.raises(ServeError) as caught:
        make(tmp_path, sample, max_rows=8)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert problem in caught.value.message
    assert str(tmp_path) not in caught.value.message
