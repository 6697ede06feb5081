"""Each builder's model behaves as its docstring says when ONNX Runtime runs it on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortserve  # noqa: F401  before onnxruntime: it silences onnxruntime's telemetry
from models import interfaces

import onnxruntime as ort  # isort: skip

X = np.array([[1, -2, 3, 4]], np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def open_session(path: Path) -> Any:
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def types(session: Any) -> tuple[list[str], list[str]]:
    return [arg.type for arg in session.get_inputs()], [arg.type for arg in session.get_outputs()]


def test_bfloat16_sum_has_a_bfloat16_beside_a_float(path: Path) -> None:
    expected = ["tensor(bfloat16)", "tensor(float)"]
    assert types(open_session(interfaces.bfloat16_sum(path))) == (expected, expected)


def test_bfloat16_and_text_has_both(path: Path) -> None:
    inputs, outputs = types(open_session(interfaces.bfloat16_and_text(path)))
    assert inputs == ["tensor(bfloat16)", "tensor(string)"]
    assert outputs == ["tensor(float)", "tensor(string)", "tensor(bfloat16)"]


def test_float8_output_has_a_float8_output(path: Path) -> None:
    assert types(open_session(interfaces.float8_output(path))) == (["tensor(float)"], ["tensor(float8e4m3fn)"])


def test_sequence_input_returns_the_length(path: Path) -> None:
    session = open_session(interfaces.sequence_input(path))
    assert types(session) == (["seq(tensor(float))"], ["tensor(int64)"])
    assert session.run(None, {"x": [X, X]}) == [2]


def test_zipmap_classifier_gives_labels_and_maps(path: Path) -> None:
    label, (maps,) = open_session(interfaces.zipmap_classifier(path)).run(None, {"x": X[:, 2:]})
    assert label.tolist() == [1]
    assert maps[1] > maps[0]


@pytest.mark.parametrize("shape", [(), (1,), ("batch", 1)])
def test_default_scale_has_a_default(path: Path, shape: tuple[int | str, ...]) -> None:
    session = open_session(interfaces.default_scale(path, shape))
    assert [arg.name for arg in session.get_inputs()] == ["x"]
    assert [arg.name for arg in session.get_overridable_initializers()] == ["scale"]
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], 2 * X)
    three = np.full([1 for _ in shape], 3, np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": X, "scale": three})[0], 3 * X)


def test_optional_bias_is_added_when_present(path: Path) -> None:
    session = open_session(interfaces.optional_bias(path))
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], X)
    np.testing.assert_array_equal(session.run(None, {"x": X, "bias": X})[0], 2 * X)


def test_optional_sequence_returns_its_presence(path: Path) -> None:
    session = open_session(interfaces.optional_sequence(path))
    for feeds, has in (({"x": X[0]}, False), ({"x": X[0], "more": [X]}, True)):
        y, given = session.run(None, feeds)
        np.testing.assert_array_equal(y, X[0])
        assert given == has


def test_constant_needs_no_input(path: Path) -> None:
    assert open_session(interfaces.constant(path)).run(None, {})[0].tolist() == [1, 2, 3]


def test_positive_drops_other_values(path: Path) -> None:
    assert open_session(interfaces.positive(path)).run(None, {"x": X[0]})[0].tolist() == [1, 3, 4]


def test_any_shape_accepts_any_shape(path: Path) -> None:
    session = open_session(interfaces.any_shape(path))
    for x in (X, X[0], np.array(1, np.float32)):
        y, t = session.run(None, {"x": x, "s": np.array(3, np.float32)})
        np.testing.assert_array_equal(y, x)
        assert t == 3
