import errno
import os
import signal
from pathlib import Path

import pytest

from ortserve.tools.staging import install_files, staging_folder


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
