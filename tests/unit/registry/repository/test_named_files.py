"""Files named by a configuration."""

from pathlib import Path

import pytest

from ortserve.config.model import ModelOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.repository.model_files import operator_libraries, read_output_labels


def labelled(labels: object) -> ModelOptions:
    return ModelOptions.model_validate({"outputs": {"y": {"labels": labels}, "z": {}}})


def test_labels_are_the_lines_of_a_file_or_a_list(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\r\nçedilla\n")
    assert read_output_labels(labelled("labels.txt"), tmp_path) == {"y": ("cat", "dog", "çedilla")}
    assert read_output_labels(labelled(("cat", "dog")), None) == {"y": ("cat", "dog")}
    assert read_output_labels(ModelOptions(), None) == {}


def test_links_in_the_folder_of_a_model_are_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.txt").write_text("cat")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "labels.txt").symlink_to(tmp_path / "elsewhere.txt")
    assert read_output_labels(labelled("labels.txt"), tmp_path / "m") == {"y": ("cat",)}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none.txt", "'none.txt' cannot be read: No such file or directory"),
        ("../other/labels.txt", "expected a file in the model's folder, got '../other/labels.txt'"),
        ("/etc/hostname", "expected a file in the model's folder, got '/etc/hostname'"),
        ("1/../../other/labels.txt", "expected a file in the model's folder, got '1/../../other/labels.txt'"),
        ("binary", "expected text in UTF-8, got other bytes in 'binary'"),
        ("", "cannot be read: Is a directory"),
    ],
)
def test_labels_that_are_unreadable_or_elsewhere_are_rejected(tmp_path: Path, name: str, problem: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "labels.txt").write_text("secret")
    (folder / "binary").write_bytes(b"\xff\xff")
    with pytest.raises(ServeError) as caught:
        read_output_labels(labelled(name), folder)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message.startswith("labels of output 'y': ")
    assert problem in caught.value.message


def test_single_file_has_no_files_beside_it() -> None:
    with pytest.raises(ServeError, match=r"'labels.txt' needs a model in a folder of its own, got a single file"):
        read_output_labels(labelled("labels.txt"), None)


def test_libraries_of_a_relative_path_are_in_the_models_folder(tmp_path: Path) -> None:
    options = ModelOptions.model_validate({"session": {"operator_libraries": ("ops.so", "/lib/ops.so")}})
    assert operator_libraries(options, tmp_path) == (tmp_path / "ops.so", Path("/lib/ops.so"))
