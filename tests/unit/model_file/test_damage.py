"""Incomplete files of a model."""

from pathlib import Path

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
