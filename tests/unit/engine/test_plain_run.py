"""The way a session is run, chosen by what it takes and gives."""

from pathlib import Path

import numpy as np
import pytest

from models import builders, interfaces
from ortserve.core.absent import absent
from ortserve.core.dtypes import DataType
from ortserve.engine.model_signature import read_signature
from ortserve.engine.plain_run import PlainRun, make_plain_run
from ortserve.engine.providers import CPU, ProviderChoice
from ortserve.engine.session import ORT_ERRORS, SessionOptions, open_session

X = np.array([[1, 2, 3, 4]], np.float32)


def open_run(path: Path) -> PlainRun:
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    return make_plain_run(session, read_signature(session))


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
    (label,) = open_run(interfaces.zipmap_classifier(tmp_path / "model.onnx"))([X[:, :2]])
    assert label.tolist() == [1]


def test_inputs_that_do_not_fit_are_an_error_of_onnx_runtime(tmp_path: Path) -> None:
    with pytest.raises(ORT_ERRORS, match="Unexpected input data type"):
        open_run(builders.mlp(tmp_path / "model.onnx"))([np.zeros((1, 64), np.int64)])
