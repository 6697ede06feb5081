"""The model and the inputs of a tool, by its arguments."""

from pathlib import Path

import numpy as np
import pytest

from models.builders import heavy
from ortserve.errors import ServeError
from ortserve.tools.inputs import choose_inputs, read_inputs
from ortserve.tools.opening import OpenModel, open_model
from ortserve.tools.subject import find_model

EXAMPLE = Path(__file__).parents[3] / "server" / "ortserve" / "example" / "repository"
CORPUS = Path(__file__).parents[2] / "rows" / "corpus"


@pytest.mark.parametrize("suffix", ["", "/1"])
def test_model_of_a_repository_has_its_configuration(suffix: str) -> None:
    found = find_model(f"{EXAMPLE / 'digits'}{suffix}")

    assert (found.name, found.version) == ("digits", 1)
    assert found.path == EXAMPLE / "digits" / "1" / "model.onnx"
    assert found.folder == EXAMPLE / "digits"


def test_file_has_no_configuration() -> None:
    path = EXAMPLE / "digits" / "1" / "model.onnx"

    found = find_model(str(path))

    assert (found.name, found.path, found.folder, found.version) == ("model", path, None, None)


def test_versions_that_the_policy_does_not_serve_are_found_by_their_number(tmp_path: Path) -> None:
    for version in ("1", "2", "3"):
        (tmp_path / "m" / version).mkdir(parents=True)
        heavy(tmp_path / "m" / version / "model.onnx", 2, 8)
    (tmp_path / "m" / "model.yaml").write_text("max_rows: 3\n")

    assert find_model(str(tmp_path / "m")).version == 3
    found = find_model(str(tmp_path / "m" / "1"))
    assert (found.version, found.path, found.options.max_rows) == (1, tmp_path / "m" / "1" / "model.onnx", 3)
    with pytest.raises(ServeError, match="expected a version out of 1, 2, 3, got 4"):
        find_model(str(tmp_path / "m" / "4"))


def test_single_file_of_a_repository_is_found_by_its_name(tmp_path: Path) -> None:
    heavy(tmp_path / "m.onnx", 2, 8)

    assert find_model(str(tmp_path / "m")).path == tmp_path / "m.onnx"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing/here", "found neither"),
        (str(EXAMPLE / "nothing"), "found neither"),
        (str(EXAMPLE / "digits" / "7"), "expected a version out of 1, got 7"),
    ],
)
def test_missing_model_is_named(name: str, message: str) -> None:
    with pytest.raises(ServeError, match=message):
        find_model(name)


@pytest.mark.parametrize("content", [b"", b"no model", "truncated"])
def test_file_that_is_no_model_is_named(content: bytes | str, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(heavy(path, 2, 8).read_bytes()[:-20] if isinstance(content, str) else content)

    with pytest.raises(ServeError, match=r"broken\.onnx"):
        open_model(find_model(str(path)))


def digits() -> OpenModel:
    return open_model(find_model(str(EXAMPLE / "digits")), threads=1)


@pytest.mark.parametrize(
    "name", ["torch_lstm_time_first", "sklearn_words", "half_cnn", "dynamo_encoder", "torch_windows"]
)
def test_synthetic_inputs_run(name: str) -> None:
    model = open_model(find_model(str(CORPUS / f"{name}.onnx")), threads=1)
    inputs = choose_inputs(model)

    outputs = model.runner().run(model.for_model(inputs.take(2 if model.signature.is_batched else 1, 3)))

    assert len(outputs) == len(model.signature.outputs)
    assert "synthetic" in inputs.origin


def test_samples_of_a_file_are_taken_in_turn(tmp_path: Path) -> None:
    model = digits()
    spec = model.signature.inputs[0]
    samples = np.arange(3 * np.prod(spec.row_shape), dtype=np.float64).reshape(3, *spec.row_shape)
    np.savez(tmp_path / "data.npz", allow_pickle=True, **{spec.name: samples})

    inputs = choose_inputs(model, tmp_path / "data.npz")

    (taken,) = inputs.take(4, 1)
    assert taken.dtype == spec.datatype.numpy
    assert np.array_equal(taken, samples[[1, 2, 0, 1]].astype(np.float32))
    assert inputs.origin == "data.npz: 3 samples"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros((1, 64), np.float32)}, "array 'other' is no input of the model, which has"),
        ({}, "expected an array"),
        ({"INPUT": np.zeros((1, 5), np.float32)}, "expected shape"),
        ({"INPUT": np.zeros((), np.float32)}, "expected shape"),
        ({"INPUT": np.array([["a"] * 64])}, "got <U1"),
        ({"INPUT": np.zeros((0, 64), np.float32)}, "at least 1"),
    ],
)
def test_file_of_inputs_that_does_not_fit_is_named(arrays: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    spec = digits().signature.inputs[0]
    named = {
        spec.name if name == "INPUT" else name: array.reshape(*array.shape[:1], *spec.row_shape)
        if array.size in (0, 64)
        else array
        for name, array in arrays.items()
    }
    np.savez(tmp_path / "data.npz", allow_pickle=True, **named)

    with pytest.raises(ServeError, match=message):
        read_inputs(tmp_path / "data.npz", digits().signature)


def test_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_text("x")

    with pytest.raises(ServeError, match=r"data\.npz: expected a file written by numpy.savez"):
        read_inputs(tmp_path / "data.npz", digits().signature)
