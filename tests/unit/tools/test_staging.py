import errno
import os
import signal
from pathlib import Path

import pytest

from ortserve.engine.scratch import scratch_folder
from ortserve.tools.staging import install_files, replacement, staging_folder
from scarcity import files_of_at_most


def test_files_move_as_a_whole_and_the_folder_goes(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    target.write_text("old")
    with staging_folder(target) as folder:
        (folder / "model.onnx").write_text("new")
        (folder / "model.onnx.data").write_text("weights")
        assert target.read_text() == "old"
        install_files(folder, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert target.read_text() == "new"


def test_interruption_waits_until_all_files_are_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without its provenance, or the reverse, would stay."""
    target, replace = tmp_path / "model.onnx", Path.replace

    def interrupt(file: Path, place: Path) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return replace(file, place)

    monkeypatch.setattr(Path, "replace", interrupt)
    with staging_folder(target) as folder:
        for name in ("model.onnx", "model.onnx.data", "model.provenance.json"):
            (folder / name).touch()
        with pytest.raises(KeyboardInterrupt):
            install_files(folder, target)
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data", "model.provenance.json"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def write_half(target: Path, error: type[BaseException]) -> None:
    with staging_folder(target) as folder:
        (folder / target.name).write_text("half")
        raise error


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_nothing_stays_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write_half(tmp_path / "model.onnx", error)
    assert list(tmp_path.iterdir()) == []


def test_errors_of_writes_name_the_target(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    with pytest.raises(OSError, match=r"No space left on device: '.*model\.onnx'"), staging_folder(target):
        raise OSError(errno.ENOSPC, "No space left on device")


def write_too_much(file: Path) -> None:
    with replacement(file) as staged:
        staged.write_text("half of the new content")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_previous_file_and_is_reported_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    for before in ([], [file]):
        with pytest.raises(OSError, match=r"No space left on device: '.*page\.html'"):
            write_too_much(file)
        assert list(tmp_path.iterdir()) == before
        file.write_text("old")
    assert file.read_text() == "old"


def test_errors_never_name_the_hidden_folder(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    with pytest.raises(FileNotFoundError) as raised, replacement(file) as staged, staging_folder(staged) as inner:
        (inner / "missing").read_text()
    assert raised.value.filename == str(file)
    with pytest.raises(OSError, match="Invalid") as copied, replacement(file) as staged:
        raise OSError(errno.EINVAL, "Invalid", "source", None, str(staged))  # as shutil.copyfile does
    assert copied.value.filename == str(file)


def test_full_disk_of_the_target_is_not_taken_for_that_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that keeps its temporary files beside the target ignores TMPDIR."""

    def fill(folder: Path) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with files_of_at_most(4096), scratch_folder():
            pass

    target = tmp_path / "model.onnx"
    with pytest.raises(OSError, match="File too large: ") as raised, staging_folder(target) as folder:
        fill(folder)
    assert str(raised.value) == f"[Errno {errno.EFBIG}] File too large: '{target}'"


def test_permissions_of_a_replaced_file_stay_and_a_new_one_has_the_usual_ones(tmp_path: Path) -> None:
    file, other = tmp_path / "page.html", tmp_path / "other.html"
    other.touch()
    for expected in (other.stat().st_mode & 0o777, 0o640):
        with replacement(file) as staged:
            staged.write_text(f"{expected}")
        assert file.stat().st_mode & 0o777 == expected
        file.chmod(0o640)
    assert file.read_text() == f"{0o640}"


def test_devices_are_written_to_and_stay() -> None:
    with replacement(Path(os.devnull)) as place:
        assert place == Path(os.devnull)
