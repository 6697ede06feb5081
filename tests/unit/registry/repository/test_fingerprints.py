"""Changes of a model's files, with files that ONNX Runtime itself writes and reads."""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from models import builders
from ortserve.config.model import LoadOptions, ModelOptions, make_model_options
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.registry.repository import fingerprints
from ortserve.registry.repository.fingerprints import Fingerprint, changed_file, take_fingerprints
from ortserve.registry.repository.model_files import ModelFiles

MEMORY_STATS = "session.collect_node_memory_stats_to_file"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a model with version 1."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    builders.mlp(tmp_path / "m" / "1" / "model.onnx")
    return tmp_path / "m"


def options_with(**entries: object) -> ModelOptions:
    return make_model_options({"session": {"entries": entries}}, LoadOptions(), "test")


def stamp(folder: Path, options: ModelOptions) -> tuple[Fingerprint, ...]:
    files = ModelFiles("m", {1: folder / "1" / "model.onnx"}, folder=folder)
    return take_fingerprints(files, 1, options)


def run_once(folder: Path, options: ModelOptions) -> None:
    session_options = SessionOptions(ProviderChoice("CPUExecutionProvider"), 1, options.session)
    session = open_session(folder / "1" / "model.onnx", "m", session_options)
    session.run(None, {"x": np.zeros((1, 64), np.float32)})


def wait_until_times_differ(file: Path, probe: Path) -> None:
    """Wait until the clock of the file system, which ticks every few milliseconds, has passed a file's last change."""
    probe.touch()
    while probe.stat().st_ctime_ns <= file.stat().st_ctime_ns:
        probe.write_bytes(b".")


@pytest.mark.parametrize(
    ("named", "written"),
    [
        ("stats.csv", "1/stats.csv"),
        ("../stats.csv", "stats.csv"),
        ("FOLDER/1/stats.csv", "1/stats.csv"),
        ("FOLDER/stats.csv", "stats.csv"),
    ],
)
def test_statistics_file_written_by_runs_is_no_change(folder: Path, named: str, written: str) -> None:
    options = options_with(**{MEMORY_STATS: named.replace("FOLDER", str(folder))})
    before = stamp(folder, options)
    run_once(folder, options)
    assert (folder / written).exists()
    assert stamp(folder, options) == before
    (folder / "1" / "stats.txt").touch()
    assert stamp(folder, options) != before


def test_empty_statistics_option_changes_no_fingerprint(folder: Path) -> None:
    assert len(stamp(folder, options_with(**{MEMORY_STATS: ""}))) == 1


def test_counter_files_that_sessions_read_are_model_files(folder: Path) -> None:
    counters = folder / "1" / "counters.txt"
    counters.write_text("moe_expert_state 1\n")
    entry = "session.moe_expert_counter_state_file"
    options = options_with(**{entry: str(counters), "session.enable_moe_expert_counting": 1})
    before = stamp(folder, options)
    run_once(folder, options)
    assert stamp(folder, options) == before
    counters.write_text('moe_expert_state 1\n"main" 0 MoE 2 12\n')
    assert stamp(folder, options) != before


@pytest.mark.parametrize(
    ("entries", "written"),
    [
        ({"ep.context_enable": 1}, ["model_ctx.onnx", "model_OpenVINOExecutionProvider.bin"]),
        ({"ep.context_enable": True, "ep.context_embed_mode": 1}, ["model_ctx.onnx"]),
        ({"ep.context_enable": 1, "ep.context_model_external_initializers_file_name": "w.bin"}, ["w.bin"]),
        (
            {"ep.context_enable": 1, "ep.context_file_path": "FOLDER/1/c_ctx.onnx"},
            ["c_ctx.onnx", "c_OpenVINOExecutionProvider.bin", "c_ctx_OpenVINOExecutionProvider.bin"],
        ),
        (
            {
                "ep.context_enable": 1,
                "ep.context_file_path": "FOLDER/1/[c].onnx",
                "ep.context_model_external_initializers_file_name": "w.bin",
            },
            ["[c].onnx", "[c]_OpenVINOExecutionProvider.bin", "w.bin"],
        ),
    ],
)
def test_compiled_model_and_its_files_are_no_change(
    folder: Path, entries: dict[str, int | str], written: list[str]
) -> None:
    settings = {
        key: value.replace("FOLDER", str(folder)) if isinstance(value, str) else value for key, value in entries.items()
    }
    options = options_with(**settings)
    before = stamp(folder, options)
    for name in written:
        (folder / "1" / name).touch()
    assert stamp(folder, options) == before
    (folder / "1" / "model_weights.bin").touch()
    assert stamp(folder, options) != before


def test_compiled_model_counts_as_a_model_file_unless_written(folder: Path) -> None:
    options = options_with(**{"ep.context_enable": 0})
    before = stamp(folder, options)
    (folder / "1" / "model_ctx.onnx").touch()
    assert stamp(folder, options) != before


def test_content_from_an_archive_of_equal_times_and_sizes_is_a_change(folder: Path, tmp_path: Path) -> None:
    """``tar`` replaces the file, and the file system gives the freed inode to the new one."""
    file = folder / "1" / "model.onnx"
    archives = []
    for number in range(2):
        file.write_bytes(bytes([number]) * 1000)
        os.utime(file, (1, 1))
        archives.append(tmp_path / f"{number}.tar")
        with tarfile.open(archives[-1], "w") as archive:
            archive.add(file, "m/1/model.onnx")
    stamps = []
    for path in archives:
        wait_until_times_differ(file, tmp_path / "probe")
        file.unlink()
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path, filter="data")
        stamps.append(stamp(folder, options_with()))
    assert stamps[0] != stamps[1]


def test_links_to_a_file_are_no_change(folder: Path, tmp_path: Path) -> None:
    """Backups link files, and the cache of stores links contents into the folders of all processes."""
    file = folder / "1" / "model.onnx"
    alone = stamp(folder, options_with())
    assert changed_file(alone) == ""
    wait_until_times_differ(file, tmp_path / "probe")
    (tmp_path / "first").hardlink_to(file)
    linked = stamp(folder, options_with())
    assert linked == alone
    assert changed_file(alone) == ""
    (tmp_path / "second").hardlink_to(file)
    assert stamp(folder, options_with()) == linked
    (tmp_path / "first").unlink()
    (tmp_path / "second").unlink()
    assert stamp(folder, options_with()) == linked
    assert changed_file(linked) == ""


def test_links_count_as_what_they_lead_to(folder: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights" / "deep"
    weights.mkdir(parents=True)
    (weights / "w.bin").write_bytes(b"first")
    (folder / "1" / "linked").symlink_to(tmp_path / "weights")
    before = stamp(folder, ModelOptions())
    assert len(before) == 2
    (weights / "w.bin").write_bytes(b"another")
    assert stamp(folder, ModelOptions()) != before


def test_links_to_themselves_to_nothing_and_to_folders_above_do_no_harm(folder: Path) -> None:
    before = stamp(folder, ModelOptions())
    for name, target in (("itself", "itself"), ("broken", "nothing"), ("above", "."), ("folder", "../1")):
        (folder / "1" / name).symlink_to(target)
    assert stamp(folder, ModelOptions()) == before


def test_links_to_large_trees_are_followed_to_a_bound_and_the_nearest_files_count(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "MAX_ENTRIES", 50)
    (folder / "1" / "weights").mkdir()
    weights = folder / "1" / "weights" / "w.bin"
    weights.write_bytes(b"first")
    for number in range(30):
        (tmp_path / "tree" / str(number)).mkdir(parents=True)
        (tmp_path / "tree" / str(number) / "file").touch()
    (folder / "1" / "linked").symlink_to(tmp_path / "tree")
    before = stamp(folder, ModelOptions())
    assert len(before) < 50
    weights.write_bytes(b"another")
    assert stamp(folder, ModelOptions()) != before


def test_links_to_folders_above_are_not_followed(folder: Path) -> None:
    before = stamp(folder, ModelOptions())
    (folder / "1" / "repository").symlink_to("../..")
    (folder / "1" / "root").symlink_to("/")
    (folder / "root").symlink_to("/")
    assert stamp(folder, ModelOptions()) == before
