"""Models found in folders of the test. The files are not models, because no file is opened."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortserve.config.model import LoadOptions, ModelOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.repository.model_files import ModelFiles, read_repositories
from ortserve.registry.repository.source import read_sources

PLACES = "in repository 1 and in repository 2 of those in the options"


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (root / name).mkdir(exist_ok=True)
        else:
            (root / name).write_bytes(b"")


def read_one(root: Path) -> ModelFiles:
    (model,) = read_repositories([root])
    return model


def test_folder_with_versions_is_a_model(tmp_path: Path) -> None:
    touch(tmp_path, "m/1/model.onnx", "m/12/model.onnx", "m/12/weights.bin", "m/README.md")
    assert read_one(tmp_path) == ModelFiles(
        "m",
        {1: tmp_path / "m/1/model.onnx", 12: tmp_path / "m/12/model.onnx"},
        folder=tmp_path / "m",
    )


def test_options_lie_beside_the_versions(tmp_path: Path) -> None:
    touch(tmp_path, "m/1/model.onnx", "m/model.yaml")
    assert read_one(tmp_path).options == tmp_path / "m/model.yaml"


def test_triton_options_lie_beside_the_versions_too(tmp_path: Path) -> None:
    touch(tmp_path, "m/1/model.onnx", "m/config.pbtxt")
    assert read_one(tmp_path).options == tmp_path / "m/config.pbtxt"


def test_options_can_name_another_model_file_or_folder(tmp_path: Path) -> None:
    touch(tmp_path, "m/1/net.onnx", "m/2/net.onnx/model.onnx", "m/3/model.onnx", "m/model.yaml")
    model = read_one(tmp_path)
    options = ModelOptions(model_file="net.onnx")
    assert model.problem == ""
    assert model.file(1, options) == tmp_path / "m/1/net.onnx"
    assert model.file(2, options) == tmp_path / "m/2/net.onnx/model.onnx"
    with pytest.raises(ServeError, match=r"version folder 3 has no file net\.onnx"):
        model.file(3, options)


def test_single_file_is_opened_under_any_configured_name(tmp_path: Path) -> None:
    touch(tmp_path, "m.onnx")
    assert read_one(tmp_path).file(1, ModelOptions(model_file="net.onnx")) == tmp_path / "m.onnx"


def test_file_is_version_1_of_its_name(tmp_path: Path) -> None:
    touch(tmp_path, "my.model.onnx")
    assert read_one(tmp_path) == ModelFiles("my.model", {1: tmp_path / "my.model.onnx"})


def test_models_of_all_repositories_are_listed_by_name(tmp_path: Path) -> None:
    touch(tmp_path, "one/c.onnx", "one/a/1/model.onnx", "two/b.onnx", "two/notes.txt", "two/.hidden/1/model.onnx")
    found = read_repositories([tmp_path / "one", tmp_path / "two"])
    assert [model.name for model in found] == ["a", "b", "c"]
    assert not any(model.problem for model in found)


@pytest.mark.parametrize("folder", ["0", "-1", "v1", "1a", "\u0661", "01", "latest", str(2**63), "9" * 200])
def test_folder_whose_name_is_no_version_number_is_left_out(tmp_path: Path, folder: str) -> None:
    touch(tmp_path, f"m/{folder}/model.onnx", "m/1/model.onnx")
    assert list(read_one(tmp_path).versions) == [1]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["m/"], "no version folder (1, 2, …) with a file model.onnx: it has nothing"),
        (
            ["m/model.onnx"],
            "no version folder (1, 2, …) with a file model.onnx: it has model.onnx; move the file to m/1/model.onnx",
        ),
        (
            ["m/config.pbtxt"],
            (
                "no version folder (1, 2, …) with a file model.onnx: it has config.pbtxt; "
                "an ensemble needs an empty one, which Git does not store"
            ),
        ),
        (["m/1"], "no version folder (1, 2, …) with a file model.onnx: it has 1"),
        (
            ["m/g", "m/f", "m/e", "m/d", "m/c", "m/b", "m/.a"],
            "no version folder (1, 2, …) with a file model.onnx: it has b, c, d, e, f and 1 more",
        ),
        (["m/1/model.onnx", "m/model.yml"], "found model.yml: expected model.yaml"),
        (["m/1/model.onnx", "m/Model.YAML"], "found Model.YAML: expected model.yaml"),
        (["m/1/model.onnx", "m/config.pbtext"], "found config.pbtext: expected config.pbtxt"),
        (["m/1/model.onnx", "m/Config.pbtxt"], "found Config.pbtxt: expected config.pbtxt"),
        (["m/1/model.onnx", "m/1/model.yaml"], "found 1/model.yaml: expected it beside the version folders"),
        (
            ["m/1/model.onnx", "m/config.pbtxt", "m/model.yaml"],
            "it has both model.yaml and config.pbtxt: expected one of them",
        ),
        (
            ["m/1/model.onnx", "m.onnx"],
            "the repositories have two models of this name: a folder and a file in repository 1",
        ),
    ],
)
def test_model_that_cannot_be_read_is_found_with_its_problem(tmp_path: Path, files: list[str], problem: str) -> None:
    touch(tmp_path, *files)
    model = read_one(tmp_path)
    assert (model.name, model.problem) == ("m", problem)


@pytest.mark.parametrize(
    "file", ["config.json", "config.yaml", "model.json", "README.md", "model.yaml.bak", "1/config.pbtxt"]
)
def test_unrelated_files_are_ignored(tmp_path: Path, file: str) -> None:
    touch(tmp_path, "m/1/model.onnx", f"m/{file}")
    assert not read_one(tmp_path).problem


@pytest.mark.parametrize(
    ("files", "there"),
    [(["m/1/"], "nothing"), (["m/1/b.onnx", "m/1/a"], "a, b.onnx")],
)
def test_version_without_its_file_does_not_block_others(tmp_path: Path, files: list[str], there: str) -> None:
    touch(tmp_path, *files, "m/2/model.onnx")
    model = read_one(tmp_path)
    assert not model.problem
    assert model.file(2, ModelOptions()) == tmp_path / "m/2/model.onnx"
    with pytest.raises(ServeError) as caught:
        model.file(1, ModelOptions())
    assert caught.value.message == f"version folder 1 has no file model.onnx: it has {there}"


def test_model_file_that_is_no_file_is_described(tmp_path: Path) -> None:
    touch(tmp_path, "m/1/model.onnx/", "m/2/", "m/3/")
    (tmp_path / "m/2/model.onnx").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "m/3/model.onnx")
    model = read_one(tmp_path)
    messages = (
        "version folder 1 has no file model.onnx/model.onnx: it has model.onnx",
        "version folder 2: model.onnx is a link to a file that does not exist",
        "version folder 3: model.onnx: expected a file, got something else",
    )
    for version, message in enumerate(messages, 1):
        with pytest.raises(ServeError) as caught:
            model.file(version, ModelOptions())
        assert caught.value.message == message


def test_configuration_that_is_no_file_is_a_problem_of_its_model_alone(tmp_path: Path) -> None:
    """It is not opened: a pipe would block the poll of all models."""
    touch(tmp_path, "a/1/model.onnx", "b/1/model.onnx", "c/1/model.onnx", "b/config.pbtxt/")
    os.mkfifo(tmp_path / "a/model.yaml")
    a, b, c = read_sources([tmp_path], LoadOptions())
    assert a.problem == "model.yaml: expected a file, got something else"
    assert b.problem == "config.pbtxt: expected a file, got something else"
    assert not c.problem


def test_model_folder_given_as_a_repository_is_recognized(tmp_path: Path) -> None:
    touch(tmp_path, "m/1/model.onnx")
    (model,) = read_repositories([tmp_path / "m"])
    assert model.problem.endswith(
        "it has model.onnx; a repository is a folder of models, but 'm' seems to be a model itself"
    )


def test_repository_given_as_a_model_is_recognized(tmp_path: Path) -> None:
    touch(tmp_path, "models/m/1/model.onnx", "models/notes.txt")
    (model,) = read_repositories([tmp_path])
    assert model.problem == (
        "expected the folder of a model, got a repository, a folder of models: it has m, notes.txt"
    )


def test_model_that_is_in_two_repositories_is_served_from_neither(tmp_path: Path) -> None:
    touch(tmp_path, "one/m.onnx", "two/m/1/model.onnx", "two/n.onnx")
    m, n = read_repositories([tmp_path / "one", tmp_path / "two"])
    assert m.problem == f"the repositories have two models of this name: {PLACES}"
    assert not m.versions
    assert not n.problem


def test_unreadable_model_folder_does_not_hide_others(tmp_path: Path) -> None:
    # The path of the folder is short enough, but paths inside it are too long. This is an error for root too, unlike a
    # lack of permissions.
    root = tmp_path
    while len(str(root)) < 3900:
        root = root / ("d" * 90)
    root = root / ("d" * (4096 - len(str(root)) - 5))
    root.mkdir(parents=True)
    touch(root, "b")
    (root / "a").mkdir()
    parent = os.open(root / "a", os.O_RDONLY)
    os.mkdir("12345", dir_fd=parent)
    os.close(parent)
    (model,) = read_repositories([root])
    assert model == ModelFiles("a", problem="it cannot be read: File name too long")


def test_unreadable_entry_does_not_hide_others(tmp_path: Path) -> None:
    touch(tmp_path, "good.onnx")
    (tmp_path / "bad").symlink_to("x" * 300)  # the system refuses to follow this name, also for root
    bad, good = read_repositories([tmp_path])
    assert bad == ModelFiles("bad", problem="it cannot be read: File name too long")
    assert good == ModelFiles("good", {1: tmp_path / "good.onnx"})


@pytest.mark.parametrize(
    ("name", "escaped"),
    [(b"na\xffme", "na\\udcffme"), (b"na\nme", "na\\nme"), (b"na\xffme.onnx", "na\\udcffme")],
)
def test_unprintable_name_is_escaped(tmp_path: Path, name: bytes, escaped: str) -> None:
    touch(tmp_path, os.fsdecode(name) if name.endswith(b".onnx") else f"{os.fsdecode(name)}/1/model.onnx")
    model = read_one(tmp_path)
    assert model.name == escaped
    assert model.problem == "its name has characters that cannot be printed or are not UTF-8"


@pytest.mark.parametrize("name", ["none", "file"])
def test_repository_that_is_not_a_folder_is_an_error_naming_it(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "file")
    with pytest.raises(ServeError) as caught:
        read_repositories([tmp_path / name])
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    reason = os.strerror(2 if name == "none" else 20)
    assert (
        caught.value.message
        == f"repository {tmp_path / name}: expected a folder of models or an .onnx file, got: {reason}"
    )


def test_model_file_can_be_a_repository(tmp_path: Path) -> None:
    touch(tmp_path, "m.onnx", "other.onnx", "r/m.onnx")
    (model,) = read_repositories([tmp_path / "m.onnx"])
    assert (model.name, model.versions, model.problem) == ("m", {1: tmp_path / "m.onnx"}, "")
    (model,) = read_repositories([tmp_path / "m.onnx", tmp_path / "r"])
    assert model.problem == f"the repositories have two models of this name: {PLACES}"


def test_empty_repository_has_no_models(tmp_path: Path) -> None:
    assert read_repositories([tmp_path]) == []


def test_one_model_is_read_as_among_all(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    touch(one, "both/1/model.onnx", "both.onnx", "f.onnx/1/model.onnx", "f.onnx.onnx", ".h/1/model.onnx", ".h.onnx")
    touch(
        one, "a\nb/1/model.onnx", "a\\nb.onnx", os.fsdecode(b"n\xff.onnx"), "text", "e/", "m.onnx", "z" * 250 + ".onnx"
    )
    touch(two, "m/1/model.onnx", "only.onnx")
    for link, to in (("long", "x" * 300), ("gone.onnx", "none"), ("lost", "none"), ("link", "both")):
        (one / link).symlink_to(to)
    others = {
        "",
        ".",
        "..",
        "/",
        "m/1",
        "one/m",
        "../one/m",
        "./m",
        "m/",
        "f",
        "a\nb",
        "m\0",
        "\ud800",
        ".h",
        "text",
        "lost",
    }
    others |= {"none", "m.onnx", "q" * 256, "q" * 5000, os.fsdecode(b"n\xff")}
    for roots in ([one], [one, two], [one / "m.onnx", two]):
        found = {files.name: [files] for files in read_repositories(roots)}
        for name in others | found.keys():
            assert read_repositories(roots, name) == found.get(name, []), name
    with pytest.raises(ServeError, match="expected a folder of models"):
        read_repositories([one, tmp_path / "none"], "both")


def test_one_model_is_read_without_a_look_at_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load on demand reads one model, and a repository may have thousands."""
    touch(tmp_path, *(f"m{number}/1/model.onnx" for number in range(100)))
    calls: list[Path] = []

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(path: Any, *arguments: Any, dir_fd: int | None = None, **options: Any) -> Any:
            calls.append(Path(path) if dir_fd is None else tmp_path / path)
            return function(path, *arguments, **options) if dir_fd is None else function(path, dir_fd=dir_fd)

        return noted

    for function in (os.stat, os.lstat, os.listdir, os.scandir, os.open):
        monkeypatch.setattr(os, function.__name__, note(function))
    (model,) = read_repositories([tmp_path], "m7")
    read = set(calls) - {tmp_path}
    assert model.versions == {1: tmp_path / "m7/1/model.onnx"}
    assert tmp_path / "m7" in read
    assert all(path.is_relative_to(tmp_path / "m7") for path in read - {tmp_path / "m7.onnx"})
    calls.clear()
    assert len(read_repositories([tmp_path])) == 100
    assert len(calls) > 100
