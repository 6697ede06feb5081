"""Incomplete files of a model."""

from pathlib import Path

import onnxruntime as ort
import pytest

from models import builders
from ortserve.config.model import ModelOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.model_file.damage import find_damage
from ortserve.model_file.reading import model_nbytes, read_model
from ortserve.registry.load.pipeline import load_model


def test_complete_files_have_no_damage(tmp_path: Path) -> None:
    path = builders.external_weights(tmp_path / "model.onnx", "weights.bin")
    (tmp_path / "weights.bin").write_bytes(bytes(16))

    assert find_damage(path, read_model(path)) == ""


def test_pointer_is_recognized_by_its_first_line_and_its_size(tmp_path: Path) -> None:
    path = builders.external_weights(tmp_path / "model.onnx", "weights.bin")
    for content in (builders.GIT_LFS_POINTER[1:], builders.GIT_LFS_POINTER + " " * 1024):
        (tmp_path / "weights.bin").write_text(content)
        assert find_damage(path, read_model(path)) == ""


def test_file_that_is_not_there_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"

    assert find_damage(path, read_model(path)) == "expected an ONNX model, there is no such file"


def test_file_behind_a_file_or_a_loop_of_links_is_not_there(tmp_path: Path) -> None:
    path = builders.external_weights(tmp_path / "model.onnx", "weights.bin")
    (tmp_path / "weights.bin").unlink(missing_ok=True)
    (tmp_path / "weights.bin").symlink_to("weights.bin")
    behind = path / "model.onnx"

    assert find_damage(path, read_model(path)).endswith("in weights.bin: there is no such file")
    assert find_damage(behind, read_model(behind)) == "expected an ONNX model, there is no such file"


@pytest.mark.parametrize("name", ["w" * 256, "w/" * 2048, "w\0"])
def test_load_of_a_model_whose_weights_no_file_can_hold_names_them(tmp_path: Path, name: str) -> None:
    path = builders.external_weights(tmp_path / "model.onnx", name)

    assert model_nbytes(path, read_model(path)) == path.stat().st_size
    with pytest.raises(ServeError, match="expected weights, as of tensor 'w', in w") as caught:
        load_model(path, "m", ModelOptions())
    assert caught.value.kind is ErrorKind.INVALID_INPUT


def test_model_in_ort_format_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(builders.identity(tmp_path / "source.onnx"), options, providers=["CPUExecutionProvider"])

    assert find_damage(path, read_model(path)) == (
        "expected an ONNX model, it is in ORT format: serve the ONNX model from which it was converted"
    )
