"""Sources of models on disk."""

import os
from pathlib import Path

import pytest

from ortserve.config.model import LoadOptions
from ortserve.registry.repository import source
from ortserve.registry.repository.configuration import Configuration, read_configuration
from ortserve.registry.repository.source import ModelSource, read_source, read_sources


def read(root: Path) -> dict[str, ModelSource]:
    return {source.name: source for source in read_sources([root], LoadOptions())}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """``m`` in versions 1 and 2, both to be served, with weights and a file of labels; ``f`` is a file."""
    for version in ("1", "2"):
        (tmp_path / "m" / version).mkdir(parents=True)
        (tmp_path / "m" / version / "model.onnx").write_bytes(b"model")
    (tmp_path / "m" / "1" / "weights").mkdir()
    (tmp_path / "m" / "1" / "weights" / "w.bin").write_bytes(b"weights")
    (tmp_path / "m" / "labels.txt").write_text("cat\n")
    (tmp_path / "m" / "model.yaml").write_text("version_policy: {all: true}")
    (tmp_path / "f.onnx").write_bytes(b"file")
    (tmp_path / "g.onnx").write_bytes(b"file")
    return tmp_path


def changed(before: ModelSource, after: ModelSource) -> list[int]:
    return [version for version in before.versions if before.versions[version] != after.versions[version]]


def test_reading_is_deterministic(root: Path) -> None:
    assert read(root) == read(root)
    (root / "m" / "model.yaml").touch()
    os.utime(root / "m" / "1")
    assert read(root)["m"].versions.keys() == {1, 2}
    before = read(root)
    os.utime(root / "m" / "model.yaml", ns=(1, 1))
    assert read(root) == before, "the same options say the same, whenever they were written"


@pytest.mark.parametrize(
    ("path", "versions"),
    [("m/1/model.onnx", [1]), ("m/1/weights/w.bin", [1]), ("m/2/more.bin", [2]), ("m/labels.txt", [1, 2])],
)
def test_change_of_a_file_changes_the_versions_it_belongs_to(root: Path, path: str, versions: list[int]) -> None:
    before = read(root)
    (root / path).write_bytes(b"something else")
    after = read(root)
    assert changed(before["m"], after["m"]) == versions
    assert before["f"] == after["f"]


def test_file_that_is_replaced_by_one_of_the_same_size_and_time_is_seen(root: Path) -> None:
    before = read(root)
    file = root / "m" / "1" / "model.onnx"
    times = file.stat()
    fresh = root / "m" / "1" / "fresh"
    fresh.write_bytes(b"other")
    os.utime(fresh, ns=(times.st_atime_ns, times.st_mtime_ns))
    fresh.rename(file)
    assert changed(before["m"], read(root)["m"]) == [1]


@pytest.mark.parametrize("path", ["m/.model.yaml.swp", "m/1/.model.onnx.swp", "m/1/.cache/x", "m/.git/index"])
def test_names_that_begin_with_a_dot_are_ignored(root: Path, path: str) -> None:
    before = read(root)
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).write_text("x")
    assert read(root) == before


@pytest.mark.parametrize("link", ["m/.#model.yaml", "m/dangling", "m/1/dangling", "m/1/weights/dangling"])
def test_dangling_link_is_ignored(root: Path, link: str) -> None:
    before = read(root)
    (root / link).symlink_to("user@host.1234:1700000000")
    assert read(root) == before


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ("session: {optimized_model_file: ROOT/m/1/optimized.onnx}", "1/optimized.onnx"),
        ("session: {optimized_model_file: LINK/m/1/optimized.onnx}", "1/optimized.onnx"),
        (
            (
                "session: {optimized_model_file: ROOT/m/1/o.onnx, "
                "entries: {session.optimized_model_external_initializers_file_name: o.bin}}"
            ),
            "1/o.bin",
        ),
        ("session: {entries: {ep.context_enable: 1, ep.context_file_path: ROOT/m/context.onnx}}", "context.onnx"),
        ("execution_providers: [{tensorrt: {trt_engine_cache_path: ROOT/m/1/engines}}, cpu]", "1/engines/a.engine"),
        ("execution_providers: [{openvino: {cache_dir: ROOT/m/cache}}, cpu]", "cache/blob"),
    ],
)
def test_files_that_a_load_writes_are_no_change(
    root: Path, tmp_path_factory: pytest.TempPathFactory, options: str, written: str
) -> None:
    link = tmp_path_factory.mktemp("elsewhere") / "link"
    link.symlink_to(root)
    text = options.replace("ROOT", str(root)).replace("LINK", str(link))
    (root / "m" / "model.yaml").write_text(text + "\nversion_policy: {all: true}")
    before = read(root)
    assert not before["m"].problem
    (root / "m" / written).parent.mkdir(exist_ok=True)
    (root / "m" / written).write_bytes(b"written")
    assert read(root) == before
    (root / "m" / "1" / "model.onnx").write_bytes(b"another model")
    assert changed(before["m"], read(root)["m"]) == [1]


def test_file_that_becomes_readable_is_a_change(root: Path) -> None:
    file = root / "m" / "1" / "model.onnx"
    file.chmod(0)
    before = read(root)
    file.chmod(0o644)
    assert changed(before["m"], read(root)["m"]) == [1]


def test_options_change_every_version(root: Path) -> None:
    before = read(root)
    (root / "m" / "model.yaml").write_text("version_policy: {all: true}\nmax_rows: 3\nrequired: true")
    after = read(root)
    assert changed(before["m"], after["m"]) == [1, 2]
    assert (before["m"].is_required, after["m"].is_required) == (False, True)


def test_single_file_model_ignores_changed_neighbours(root: Path) -> None:
    before = read(root)
    (root / "g.onnx").write_bytes(b"another")
    after = read(root)
    assert changed(before["f"], after["f"]) == []
    assert changed(before["g"], after["g"]) == [1]


def test_problem_says_whether_there_are_files(root: Path) -> None:
    (root / "m" / "model.yaml").write_text("version_policy: {specific: [7]}")
    (root / "empty").mkdir()
    sources = read(root)
    assert (sources["m"].problem, sources["m"].has_files) == ("", True)
    assert sources["m"].versions[7].problem == "version_policy: expected versions out of 1, 2, got 7"
    assert (sources["empty"].problem[:17], sources["empty"].has_files) == ("no version folder", False)


def test_version_without_its_file_has_its_own_problem(root: Path) -> None:
    (root / "m" / "1" / "model.onnx").rename(root / "m" / "1" / "other.onnx")
    (root / "m" / "model.yaml").write_text("version_policy: {all: true}\nmodel_file: other.onnx")
    versions = read(root)["m"].versions
    assert versions[1].problem == ""
    assert versions[1].path == root / "m" / "1" / "other.onnx"
    assert versions[2].problem == "version folder 2 has no file other.onnx: it has model.onnx"


def test_single_model_is_read_as_among_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def read_noted(name: str, path: Path | None, defaults: LoadOptions) -> Configuration:
        names.append(name)
        return read_configuration(name, path, defaults)

    all_of_them = read(root)
    monkeypatch.setattr(source, "read_configuration", read_noted)
    assert read_source("m", [root], LoadOptions()) == all_of_them["m"]
    assert read_source("none", [root], LoadOptions()) is None
    assert names == ["m"]


def test_fault_in_reading_a_model_is_logged_and_blocks_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_faultily(name: str, path: Path | None, defaults: LoadOptions) -> Configuration:
        if name == "m":
            raise RecursionError("too deep")
        return read_configuration(name, path, defaults)

    monkeypatch.setattr(source, "read_configuration", read_faultily)
    sources = read(root)
    assert sources["m"] == ModelSource("m", problem="its configuration cannot be read")
    assert sources["f"].versions.keys() == {1}
    assert "RecursionError: too deep" in caplog.text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("model.yaml", "inputs: {2020-01-01: {dims: none}}"),
        ("model.yaml", "pad: &a {x: *a}"),
        ("model.yaml", "max_rows: 0x" + "f" * 6000),
        ("model.yaml", r'model_file: "\ud800"'),
        ("model.yaml", "inputs: " + "[" * 5000 + "]" * 5000),
        ("config.pbtxt", "instance_group [{ kind: 7 }]"),
        ("config.pbtxt", 'input [{ name: "x" data_type: 99 }]'),
        ("config.pbtxt", "dynamic_batching { default_queue_policy { timeout_action: 5 } }"),
        ("config.pbtxt", 'parameters { key: "gpu_mem_limit" value { string_value: "' + "9" * 5000 + '" } }'),
    ],
    ids=lambda text: text[:32],
)
def test_misnamed_configuration_is_reported(root: Path, file: str, text: str) -> None:
    (root / "m" / "model.yaml").unlink()
    (root / "m" / file).write_text(text)
    assert read(root)["m"].problem.startswith(f"{file}: ")
