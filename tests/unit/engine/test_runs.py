"""Plain runs of sessions, by the types of inputs and outputs, including BF16 as bit patterns."""

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from models import builders, interfaces
from ortserve.core.dtypes import DataType
from ortserve.core.tensor import absent, why_not_stacked
from ortserve.engine.model_signature import read_signature
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.runs import PlainRun, can_return_bfloat16
from ortserve.engine.session import SessionOptions, open_session
from ortserve.model_file.reading import read_model

X = np.array([[1, 2, 3, 4]], np.float32)


Run = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
RunByName = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


def open_run(path: Path) -> Run:
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    return PlainRun(session, read_signature(session, read_model(path))).run


def open_run_by_name(path: Path) -> RunByName:
    run = open_run(path)
    return lambda feeds: run(list(feeds.values()))


@pytest.mark.parametrize("datatype", DataType)
def test_every_datatype_passes_unchanged(tmp_path: Path, datatype: DataType) -> None:
    run = open_run(builders.identity(tmp_path / "model.onnx", datatype))
    x = np.full((2, 4), "text" if datatype is DataType.BYTES else 1, datatype.numpy)
    (y,) = run([x])
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


def test_absent_inputs_are_not_passed_to_the_model(tmp_path: Path) -> None:
    scaled = open_run(interfaces.default_scale(tmp_path / "model.onnx"))
    np.testing.assert_array_equal(scaled([X, absent(1)])[0], 2 * X)
    np.testing.assert_array_equal(scaled([X, np.array([3], np.float32)])[0], 3 * X)
    biased = open_run(interfaces.optional_bias(tmp_path / "model.onnx"))
    np.testing.assert_array_equal(biased([X, absent(1)])[0], X)
    np.testing.assert_array_equal(biased([X, X])[0], 2 * X)


def test_only_served_outputs_are_fetched(tmp_path: Path) -> None:
    path = interfaces.split_sequence(tmp_path / "model.onnx")
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    (y,) = PlainRun(session, read_signature(session, read_model(path), served_outputs=["y"])).run([X])
    np.testing.assert_array_equal(y, X)


def test_tensors_of_a_sequence_are_stacked(tmp_path: Path) -> None:
    parts, _ = open_run(interfaces.split_sequence(tmp_path / "model.onnx"))([X])
    np.testing.assert_array_equal(parts, [[[1, 2]], [[3, 4]]])
    assert why_not_stacked(parts) == ""
    none, _ = open_run(interfaces.empty_sequence(tmp_path / "model.onnx"))([X])
    assert none.shape == (0, 2, 0)
    assert none.dtype == np.int64


def test_strings_of_a_sequence_are_stacked(tmp_path: Path) -> None:
    run = open_run(interfaces.text_sequence(tmp_path / "model.onnx"))
    both, each = run([np.array(["a", "öl"], object)])
    assert both.tolist() == [["a", "öl"], ["a", "öl"]]
    assert each.tolist() == ["a", "öl"]


def test_ragged_sequence_is_an_error_of_its_output_only(tmp_path: Path) -> None:
    parts, y = open_run(interfaces.split_sequence(tmp_path / "model.onnx", lengths=(1, 3)))([X])
    assert why_not_stacked(parts) == "its 2 tensors have different shapes, [1,1] and [1,3]"
    np.testing.assert_array_equal(y, X)


def test_inputs_that_do_not_fit_are_an_error_of_onnx_runtime(tmp_path: Path) -> None:
    with pytest.raises(ORT_ERRORS, match="Unexpected input data type"):
        open_run(builders.mlp(tmp_path / "model.onnx"))([np.zeros((1, 64), np.int64)])


def bits_of(*values: float) -> np.ndarray:
    return np.array(values, ml_dtypes.bfloat16).view(np.uint16)


def test_every_bit_pattern_passes_unchanged(tmp_path: Path) -> None:
    run = open_run_by_name(builders.identity(tmp_path / "model.onnx", DataType.BF16, ("batch", 256)))
    x = np.arange(2**16, dtype=np.uint32).astype(np.uint16).reshape(256, 256)
    (y,) = run({"x": x})
    assert y.dtype == np.uint16
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 0), (1, 2, 3)])
def test_any_shape_passes_unchanged(tmp_path: Path, shape: tuple[int, ...]) -> None:
    run = open_run_by_name(builders.identity(tmp_path / "model.onnx", DataType.BF16, [None] * len(shape)))
    (y,) = run({"x": np.full(shape, 5, np.uint16)})
    assert y.shape == shape
    assert (y == 5).all()


def test_other_types_are_served_beside_it(tmp_path: Path) -> None:
    run = open_run_by_name(interfaces.bfloat16_sum(tmp_path / "model.onnx"))
    n = np.array([[0.5, 1, 2, 3]], np.float32)
    y, m = run({"x": bits_of(1, 2, 3, 4).reshape(1, 4), "n": n})
    np.testing.assert_array_equal(y, bits_of(1.5, 3, 5, 7).reshape(1, 4))
    np.testing.assert_array_equal(m, n)


def test_an_output_that_is_an_input_is_a_copy_of_it(tmp_path: Path) -> None:
    run = open_run_by_name(interfaces.bfloat16_beside_its_input(tmp_path / "model.onnx"))
    x = bits_of(1, 2, 3, 4).reshape(1, 4)
    outputs = run({"x": x})
    x[:] = 0  # like the rows of the next batch
    for output in outputs:
        np.testing.assert_array_equal(output, bits_of(1, 2, 3, 4).reshape(1, 4))


def test_string_inputs_are_accepted_without_bfloat16_outputs(tmp_path: Path) -> None:
    run = open_run_by_name(interfaces.bfloat16_and_text(tmp_path / "model.onnx"))
    wide, texts = run({"x": bits_of(1, -2), "s": np.array(["a", "ü"], object)})
    assert wide.tolist() == [1, -2]
    assert texts.tolist() == ["a", "ü"]


def test_string_inputs_exclude_bfloat16_outputs(tmp_path: Path) -> None:
    session = open_session(
        interfaces.bfloat16_and_text(tmp_path / "model.onnx"), "m/1", SessionOptions(ProviderChoice(CPU), 1)
    )
    assert not can_return_bfloat16(read_signature(session).inputs)
    assert can_return_bfloat16([])


def test_answer_outlives_the_next_run_and_the_session(tmp_path: Path) -> None:
    run = open_run_by_name(builders.identity(tmp_path / "model.onnx", DataType.BF16, ("batch", 1000)))
    (first,) = run({"x": np.full((100, 1000), 1, np.uint16)})
    for value in range(2, 10):
        run({"x": np.full((100, 1000), value, np.uint16)})
    del run
    gc.collect()
    assert (first == 1).all()
