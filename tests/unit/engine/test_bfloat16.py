"""BF16 through ONNX Runtime as bit patterns."""

import gc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from models import builders, interfaces
from ortserve.core.dtypes import DataType
from ortserve.engine.bfloat16 import BFloat16Run, can_give_bfloat16
from ortserve.engine.model_signature import read_signature
from ortserve.engine.providers import CPU, ProviderChoice
from ortserve.engine.session import SessionOptions, open_session


def open_run(path: Path) -> BFloat16Run:
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    signature = read_signature(session)
    return BFloat16Run(session, signature.inputs, signature.outputs)


def bits_of(*values: float) -> np.ndarray:
    return np.array(values, ml_dtypes.bfloat16).view(np.uint16)


def test_every_bit_pattern_passes(tmp_path: Path) -> None:
    run = open_run(builders.identity(tmp_path / "model.onnx", DataType.BF16, ("batch", 256)))
    x = np.arange(2**16, dtype=np.uint32).astype(np.uint16).reshape(256, 256)
    (y,) = run({"x": x})
    assert y.dtype == np.uint16
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 0), (1, 2, 3)])
def test_any_shape_passes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    run = open_run(builders.identity(tmp_path / "model.onnx", DataType.BF16, [None] * len(shape)))
    (y,) = run({"x": np.full(shape, 5, np.uint16)})
    assert y.shape == shape
    assert (y == 5).all()


def test_other_types_stand_beside_it(tmp_path: Path) -> None:
    run = open_run(interfaces.bfloat16_sum(tmp_path / "model.onnx"))
    n = np.array([[0.5, 1, 2, 3]], np.float32)
    y, m = run({"x": bits_of(1, 2, 3, 4).reshape(1, 4), "n": n})
    np.testing.assert_array_equal(y, bits_of(1.5, 3, 5, 7).reshape(1, 4))
    np.testing.assert_array_equal(m, n)


def test_strings_go_in_where_no_bfloat16_comes_out(tmp_path: Path) -> None:
    run = open_run(interfaces.bfloat16_and_text(tmp_path / "model.onnx"))
    wide, texts = run({"x": bits_of(1, -2), "s": np.array(["a", "ü"], object)})
    assert wide.tolist() == [1, -2]
    assert texts.tolist() == ["a", "ü"]


def test_strings_that_go_in_keep_bfloat16_from_coming_out(tmp_path: Path) -> None:
    session = open_session(
        interfaces.bfloat16_and_text(tmp_path / "model.onnx"), "m/1", SessionOptions(ProviderChoice(CPU), 1)
    )
    assert not can_give_bfloat16(read_signature(session).inputs)
    assert can_give_bfloat16([])


def test_answer_outlives_the_next_run_and_the_session(tmp_path: Path) -> None:
    run = open_run(builders.identity(tmp_path / "model.onnx", DataType.BF16, ("batch", 1000)))
    (first,) = run({"x": np.full((100, 1000), 1, np.uint16)})
    for value in range(2, 10):
        run({"x": np.full((100, 1000), value, np.uint16)})
    del run
    gc.collect()
    assert (first == 1).all()
