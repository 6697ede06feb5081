"""The way a session is run, chosen by what it takes and gives."""

from pathlib import Path

import numpy as np
import pytest

from models import builders, interfaces
from ortserve.core.dtypes import DataType
from ortserve.core.tensor import absent, why_not_stacked
from ortserve.engine.model_signature import read_signature
from ortserve.engine.plain_run import PlainRun, make_plain_run
from ortserve.engine.providers import CPU, ProviderChoice
from ortserve.engine.session import ORT_ERRORS, SessionOptions, open_session

X = np.array([[1, 2, 3, 4]], np.float32)


def open_run(path: Path) -> PlainRun:
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    return make_plain_run(session, read_signature(session, path))


@pytest.mark.parametrize("datatype", DataType)
def test_every_datatype_passes(tmp_path: Path, datatype: DataType) -> None:
    run = open_run(builders.identity(tmp_path / "model.onnx", datatype))
    x = np.full((2, 4), "text" if datatype is DataType.BYTES else 1, datatype.numpy)
    (y,) = run([x])
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


def test_absent_inputs_are_not_handed_to_the_model(tmp_path: Path) -> None:
    scaled = open_run(interfaces.default_scale(tmp_path / "model.onnx"))
    np.testing.assert_array_equal(scaled([X, absent(1)])[0], 2 * X)
    np.testing.assert_array_equal(scaled([X, np.array([3], np.float32)])[0], 3 * X)
    biased = open_run(interfaces.optional_bias(tmp_path / "model.onnx"))
    np.testing.assert_array_equal(biased([X, absent(1)])[0], X)
    np.testing.assert_array_equal(biased([X, X])[0], 2 * X)


def test_only_what_is_served_is_fetched(tmp_path: Path) -> None:
    path = interfaces.split_sequence(tmp_path / "model.onnx")
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    (y,) = make_plain_run(session, read_signature(session, path, served_outputs=["y"]))([X])
    np.testing.assert_array_equal(y, X)


def test_tensors_of_a_sequence_are_stacked(tmp_path: Path) -> None:
    parts, _ = open_run(interfaces.split_sequence(tmp_path / "model.onnx"))([X])
    np.testing.assert_array_equal(parts, [[[1, 2]], [[3, 4]]])
    assert why_not_stacked(parts) == ""
    none, _ = open_run(interfaces.empty_sequence(tmp_path / "model.onnx"))([X])
    assert none.shape == (0, 2, 0)
    assert none.dtype == np.int64


def test_texts_of_a_sequence_are_stacked(tmp_path: Path) -> None:
    run = open_run(interfaces.text_sequence(tmp_path / "model.onnx"))
    both, each = run([np.array(["a", "öl"], object)])
    assert both.tolist() == [["a", "öl"], ["a", "öl"]]
    assert each.tolist() == ["a", "öl"]


def test_tensors_of_different_shapes_are_no_tensor_and_leave_the_other_outputs(tmp_path: Path) -> None:
    parts, y = open_run(interfaces.split_sequence(tmp_path / "model.onnx", lengths=(1, 3)))([X])
    assert why_not_stacked(parts) == "its 2 tensors have different shapes, [1,1] and [1,3]"
    np.testing.assert_array_equal(y, X)


def test_inputs_that_do_not_fit_are_an_error_of_onnx_runtime(tmp_path: Path) -> None:
    with pytest.raises(ORT_ERRORS, match="Unexpected input data type"):
        open_run(builders.mlp(tmp_path / "model.onnx"))([np.zeros((1, 64), np.int64)])
