"""Incomplete files of a model."""

from pathlib import Path

import onnxruntime as ort

from models import builders
from ortserve.model_file.damage import find_damage
from ortserve.model_file.reading import read_model


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


def test_model_in_ort_format_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(builders.identity(tmp_path / "source.onnx"), options, providers=["CPUExecutionProvider"])

    assert find_damage(path, read_model(path)) == (
        "expected an ONNX model, it is in ORT format: serve the ONNX model from which it was converted"
    )
