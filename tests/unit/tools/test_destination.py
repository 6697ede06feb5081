import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest

from models import builders
from ortserve.errors import ServeError, invalid_input
from ortserve.tools import destination
from ortserve.tools.command import ToolParser, add_destination
from ortserve.tools.destination import Delivered, check_destination, deliver, staged_model
from ortserve.tools.provenance import make_provenance, read_provenance
from ortserve.tools.publish import folder as folder_module
from ortserve.tools.publish.folder import Published, publish_version
from ortserve.tools.subject import Subject, find_model


@pytest.fixture(autouse=True)
def opened_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open models in this process, which saves a second each."""
    monkeypatch.setattr(folder_module, "call_in_child", lambda limit_s, function, *arguments: function(*arguments))


@pytest.fixture
def source(tmp_path: Path) -> Subject:
    """A version of a repository whose model has its weights in another file."""
    folder = tmp_path / "models" / "m" / "1"
    folder.mkdir(parents=True)
    builders.external_weights(folder / "model.onnx", "model.onnx.data")
    (folder / "model.onnx.data").write_bytes(bytes(16))
    return find_model(str(folder.parent))


def parsed(*words: str | Path) -> argparse.Namespace:
    parser = ToolParser("make", "Make a model.", page_flags=("--page",))
    add_destination(parser)
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(list(map(str, words)))


def make(source: Subject, arguments: argparse.Namespace) -> Delivered:
    check_destination(arguments, source)
    with staged_model(arguments, source) as staged:
        builders.external_weights(staged, f"{staged.name}.data")
        staged.with_name(f"{staged.name}.data").write_bytes(bytes(16))
        return deliver(staged, source, make_provenance(source, staged, arguments=("make", "m")), arguments)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("given", "shown"), [(["-o", "out.onnx"], "out.onnx"), (["--publish"], "the new model")])
def test_errors_name_the_destination_and_not_the_folder_that_disappears(
    given: list[str], shown: str, source: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServeError, match=rf"^{shown}: it disagrees$"), staged_model(parsed(*given), source) as staged:
        raise invalid_input(f"{staged}: it disagrees")


def test_a_file_comes_with_its_weights_and_its_provenance(source: Subject, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "better.onnx").write_text("of a run before")
    delivered = make(source, parsed("-o", out / "better.onnx"))
    assert files(out) == {"better.onnx", "better.onnx.data", "better.provenance.json"}
    found = read_provenance(out / "better.onnx")
    assert found is not None
    assert (found.source.name, found.source.version) == ("m", 1)
    assert (delivered.output, delivered.version) == (str(out / "better.onnx"), None)


def test_a_version_is_published_to_where_the_source_came_from_and_a_file_is_written_too(
    source: Subject, tmp_path: Path
) -> None:
    delivered = make(source, parsed("-o", tmp_path / "better.onnx", "--publish"))
    assert (delivered.published, delivered.version) == ("m", 2)
    assert files(tmp_path / "models" / "m" / "2") == {"model.onnx", "better.onnx.data", "provenance.json"}
    assert {"better.onnx", "better.onnx.data", "better.provenance.json"} <= files(tmp_path)
    make(source, parsed("--publish", tmp_path / "models" / "new"))
    assert files(tmp_path / "models" / "new") == {
        ".highest-version",
        *(f"1/{name}" for name in ("model.onnx", "model.onnx.data", "provenance.json")),
    }
    assert not list(tmp_path.rglob(".ortserve-*"))


def test_a_destination_is_checked_before_the_work(source: Subject, tmp_path: Path) -> None:
    single = Subject("single", Path(shutil.copy(source.path, tmp_path / "single.onnx")))
    renamed = Subject("renamed", Path(shutil.copy(source.path, source.path.with_name("renamed.onnx"))))
    (samples := tmp_path / "samples.npz").touch()
    check_destination(parsed("--dry-run"), source)
    for words, subject, problem in (
        ((), source, "expected -o OUT.onnx or --publish"),
        (("-o", samples), source, "expected a model's name, which ends in .onnx"),
        (("-o", tmp_path / "page.html"), source, "expected a model's name, which ends in .onnx"),
        (("-o", tmp_path / "none" / "out.onnx"), source, "existing folder"),
        (("-o", tmp_path), source, "expected a file"),
        (("-o", source.path), source, "another file than the model itself"),
        (("--publish",), single, "is not a version of a model"),
        (("-o", renamed.path.with_name("model.onnx")), renamed, "the model itself, got '.*/model.onnx.data'"),
        (("--publish", tmp_path / "none" / "m"), source, "existing repository"),
    ):
        with pytest.raises(ServeError, match=problem):
            check_destination(parsed(*words), subject)


def test_nothing_is_written_if_the_version_is_refused(source: Subject, tmp_path: Path) -> None:
    builders.mlp(source.path)  # the served version now has other inputs
    before = files(tmp_path)
    with pytest.raises(ServeError, match="allow-changed-interface"):
        make(source, parsed("-o", tmp_path / "better.onnx", "--publish"))
    assert files(tmp_path) == before


def test_an_error_names_the_version_that_was_published_before(
    source: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish_and_replace_the_folder(*arguments: Any, **more: Any) -> Published:
        (tmp_path / "better.onnx").mkdir()  # while the command runs
        return publish_version(*arguments, **more)

    monkeypatch.setattr(destination, "publish_version", publish_and_replace_the_folder)
    with pytest.raises(IsADirectoryError, match="; version 2 of m is published"):
        make(source, parsed("-o", tmp_path / "better.onnx", "--publish"))


def test_an_error_without_a_number_keeps_its_text(
    source: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Path) -> None:
        raise OSError("the copy is incomplete")

    monkeypatch.setattr(destination, "install_files", fail)
    with pytest.raises(OSError, match="the copy is incomplete; version 2 of m is published"):
        make(source, parsed("-o", tmp_path / "better.onnx", "--publish"))
