"""The objects of a model that are fetched, and the names that are rejected."""

import re
import subprocess
from pathlib import Path

import pytest

from ortserve.config.model import LoadOptions
from ortserve.registry.stores.model_plan import (
    listed_versions,
    missing_objects,
    needed_objects,
    read_digests,
    wanted_versions,
)
from ortserve.registry.stores.objects import StoredObject, StoreError, group_by_entry, path_problem
from pages import DOCS

DIGEST = "a" * 64


def objects(*paths: str) -> dict[str, StoredObject]:
    return {path: StoredObject(path, 0 if path.endswith("/1") else 5, "t") for path in paths}


def test_only_versions_that_would_serve_and_files_beside_them_are_needed(tmp_path: Path) -> None:
    found = objects("m/1/model.onnx", "m/2/model.onnx", "m/10/model.onnx", "m/labels.txt", "m/assets/a.bin")
    listed = listed_versions("m", found.values())
    assert wanted_versions("m", tmp_path, listed, LoadOptions()) == {"10"}
    (tmp_path / "model.yaml").write_text("version_policy: {specific: [1, 2]}\n")
    wanted = wanted_versions("m", tmp_path, listed, LoadOptions())
    assert wanted == {"1", "2"}
    assert [known.path for known in needed_objects("m", found, listed, wanted)] == [
        "m/1/model.onnx",
        "m/2/model.onnx",
        "m/labels.txt",
        "m/assets/a.bin",
    ]


def test_versions_that_labels_rollouts_or_calls_name_are_needed_if_they_are_there(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("labels: {stable: 1, next: 7}\nrollout: {candidate: 2}\n")
    listed = {str(number): number for number in range(1, 6)}
    assert wanted_versions("m", tmp_path, listed, LoadOptions()) == {"1", "2", "5"}
    assert wanted_versions("m", tmp_path, listed, LoadOptions(), {3, 8}) == {"1", "2", "3", "5"}


def test_invalid_configuration_needs_no_version(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("max_rows: many\n")
    assert wanted_versions("m", tmp_path, {"1": 1}, LoadOptions()) is None


def test_empty_version_folder_of_an_ensemble_is_an_empty_object() -> None:
    found = objects("e/model.yaml", "e/1")
    listed = listed_versions("e", found.values())
    assert listed == {"1": 1}
    assert [known.path for known in needed_objects("e", found, listed, {"1"})] == ["e/model.yaml"]


def test_entries_that_cannot_be_models_are_left_out() -> None:
    found = objects(
        "README.md", ".hidden/1/model.onnx", "bare.onnx", "m", "m/1/model.onnx", "a\\b/1/model.onnx", "../x.onnx"
    )
    assert {entry: list(group) for entry, group in group_by_entry(found.values()).items()} == {
        "bare.onnx": ["bare.onnx"],
        "m": ["m/1/model.onnx"],
    }


@pytest.mark.parametrize(
    "path", ["a/../b", "/etc/passwd", "a//b", "a/./b", "a\\b", "a\nb", "x" * 256, "a/" * 20 + "b", ""]
)
def test_paths_that_leave_the_folder_or_are_too_long_are_refused(path: str) -> None:
    assert path_problem(path)


def test_digests_are_read_as_sha256sum_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "SHA256SUMS"
    assert read_digests(file) == {}
    file.write_text(f"{DIGEST}  1/model.onnx\n{DIGEST} *./2/model.onnx\n")
    assert read_digests(file) == {"1/model.onnx": DIGEST, "2/model.onnx": DIGEST}
    file.write_text("no digest\n")
    with pytest.raises(StoreError, match="in line 1"):
        read_digests(file)


def test_documented_command_writes_the_digests_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"test")
    (found,) = re.findall(r"`(find .*?)`", (DOCS / "repositories.md").read_text())

    for _ in range(2):  # also beside the list of an earlier version
        subprocess.run(found, cwd=tmp_path, shell=True, check=True, timeout=60)

        digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
        assert read_digests(tmp_path / "SHA256SUMS") == {"1/model.onnx": digest}


def test_missing_files_of_wanted_versions_are_found() -> None:
    found = objects("m/1/model.onnx", "m/2/model.onnx")
    digests = ["1/model.onnx", "2/model.onnx", "2/weights.bin", "3/model.onnx"]
    assert missing_objects(digests, "m", found, {"1"}) == ""
    assert missing_objects(digests, "m", found, {"2"}) == "2/weights.bin"
    assert missing_objects(["labels.txt"], "m", found, {"1"}) == "labels.txt"
