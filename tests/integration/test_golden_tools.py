"""``ortserve golden``, ``publish`` with golden samples, and ``ortserve check`` on real repositories and servers."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnxruntime
import pytest
import yaml

from models import builders, members, ragged, sequences
from ortserve.cli.main import main
from ortserve.config.golden import load_golden_file
from ortserve.config.model import ModelOptions
from ortserve.example import repository_path
from ortserve.tools.check.command import CheckResult
from ortserve.tools.command import json_schema
from ortserve.tools.golden import command as golden_command
from ortserve.tools.golden.command import GoldenResult
from ortserve.tools.publish import folder as publish_folder
from pages import DOCS, blocks, commands
from servers import SHORT_WARMUP, ServerProcess, add_model, serving

pytestmark = pytest.mark.usefixtures("preloaded_commands")

STEP = [("double", {"a": "a"}, {"b": "b"})]


@pytest.fixture(autouse=True)
def short_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTSERVE_WARMUP_S", "0.05")


@pytest.fixture(autouse=True)
def recorded_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open models in this process, which saves a second each, except in tests with ``recorded_apart``."""
    if "recorded_apart" not in request.fixturenames:
        for module in (golden_command, publish_folder):
            monkeypatch.setattr(module, "call_in_child", lambda limit_s, function, *arguments: function(*arguments))


@pytest.fixture
def recorded_apart() -> None:
    """Open models in separate processes, as the command does for users."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    model = add_model(folder, "mlp", builders.mlp)
    (model / "model.yaml").write_text("warmup_s: 0.1\n")
    return folder


def golden(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert main(["golden", *map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(result, json_schema(GoldenResult))
    return result


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 2) -> str:
    assert main(list(map(str, arguments))) == status
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.count("\n") == 1, shown.err
    return shown.err


@pytest.mark.usefixtures("recorded_apart")
def test_recorded_samples_are_what_the_version_computes_and_are_checked(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, x=np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32))

    result = golden(capsys, "record", repository / "mlp", "--inputs", data, "--samples", "5")

    assert (result["version"], result["samples"]) == (1, 5)
    assert result["agreement"].startswith("5 samples agree: alone 'y' relative 0 of 0.001")
    with np.load(repository / "mlp" / "1" / "golden" / "samples-1.npz") as recorded:
        np.testing.assert_array_equal(recorded["input.x"], np.load(data)["x"][[0, 2, 4, 6, 8]])
        assert recorded["output.y"].shape == (5, 10)
    assert golden(capsys, "check", repository / "mlp" / "1")["agreement"] == result["agreement"]
    assert "--replace replaces existing ones" in refused(capsys, "golden", "record", repository / "mlp")

    builders.mlp(repository / "mlp" / "1" / "model.onnx", seed=1)
    problem = refused(capsys, "golden", "check", repository / "mlp", status=1)
    assert "golden samples: output 'y': relative error at most 0.001 expected, got " in problem


def test_samples_of_a_model_with_sequences_are_those_of_new_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = add_model(tmp_path, "sum", sequences.accumulate)
    controls = {"START": {"kind": "start"}, "READY": {"kind": "ready"}, "END": {"kind": "end"}}
    controls["CORRID"] = {"kind": "id", "datatype": "UINT64"}
    options = {"sequences": {"controls": controls, "states": [{"input": "STATE", "output": "NEXT"}]}}
    # A limit that differs from the default on this machine.
    (model / "model.yaml").write_text(json.dumps(options | {"max_rows": 2}))

    result = golden(capsys, "record", model, "--samples", "3")

    with np.load(model / "1" / "golden" / "samples-1.npz") as recorded:
        outputs = {f"output.{name}" for name in ("OUTPUT", "STATE_SEEN", "ID_SEEN", "FLAGS_SEEN")}
        assert {*recorded} == {"input.INPUT"} | outputs
        np.testing.assert_array_equal(recorded["output.OUTPUT"], recorded["input.INPUT"])
    assert golden(capsys, "check", model)["agreement"] == result["agreement"]


def test_outputs_of_another_model_are_expected_within_the_given_tolerances(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = builders.mlp(tmp_path / "other.onnx", seed=1)
    arguments = ("record", repository / "mlp", "--from", other)

    assert "relative error" in refused(capsys, "golden", *arguments, status=1)
    assert list((repository / "mlp" / "1").iterdir()) == [repository / "mlp" / "1" / "model.onnx"]
    golden(capsys, *arguments, "--tolerance", "y:1", "--tolerance", "y:cosine=1")
    settings = repository / "mlp" / "1" / "golden" / "golden.yaml"
    assert json.loads(settings.read_text()) == {"tolerances": {"y": {"max": 1.0, "cosine": 1.0}}}
    golden(capsys, *arguments, "--replace", "--samples", "2")
    assert json.loads(settings.read_text()) == {"tolerances": {"y": {"max": 1.0, "cosine": 1.0}}}
    assert not list(settings.parents[1].glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("record", "mlp", "--tolerance", "y"), "--tolerance: expected OUTPUT:[MEASURE=]N, got 'y'"),
        (("record", "mlp", "--tolerance", "y:accuracy=1"), "one of max, relative, cosine, top1, got 'accuracy=1'"),
        (("record", "mlp", "--tolerance", "y:cosine=x"), "one of max, relative, cosine, top1, got 'cosine=x'"),
        (("record", "mlp", "--tolerance", "z:1"), "expected one of the outputs y, got 'z'"),
        (("check", "mlp"), "mlp/1: expected golden samples, got none; record them with ortserve golden record"),
        (("record", "mlp.onnx"), "expected REPOSITORY/name[/version], got a single file"),
        (("record", "sum"), "expected --from URL of a server with the ensemble"),
        (("check", "sum"), "sum is an ensemble: use ortserve check"),
        (("check", "mlp", "--from", "other.onnx"), "--from: expected the action record, got check"),
        (("check", "mlp", "--tolerance", "y:1"), "--tolerance: expected the action record, got check"),
        (("record", "mlp", "--model", "m"), "--model: expected --from URL, too, got none"),
        (("record", "mlp", "--from", "a.onnx", "--version", "2"), "--version: expected --from URL, too, got a.onnx"),
        (("record", "mlp", "--key-file", "keys"), "--key-file: expected --from URL, too, got none"),
        (("check", "mlp", "--header", "a: b"), "--header: expected --from URL, too, got none"),
    ],
)
def test_what_cannot_be_recorded_or_checked_is_refused(
    repository: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    builders.mlp(repository / "mlp.onnx") if "mlp.onnx" in arguments else None
    members.add_ensemble(repository, "sum", ["a"], ["b"], STEP)
    action, name, *flags = arguments

    assert problem in refused(capsys, "golden", action, repository / name, *flags)


def test_samples_of_a_model_with_ragged_batches_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = add_model(tmp_path, "double", ragged.double)
    (model / "model.yaml").write_text(
        "batched: true\nmax_rows: 8\ninputs: {X: {ragged: true}}\nbatch_outputs: {Y: X}\n"
    )

    assert "double: expected a model without ragged batches, whose samples share outputs" in refused(
        capsys, "golden", "record", model
    )


def test_publish_refuses_what_disagrees_and_copies_the_samples(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden(capsys, "record", repository / "mlp")
    wrong, same = builders.mlp(tmp_path / "wrong.onnx", seed=1), builders.mlp(tmp_path / "same.onnx")

    problem = refused(capsys, "publish", wrong, repository / "mlp")
    assert "golden samples: output 'y': relative error" in problem
    assert "--golden none publishes it without samples" in problem
    assert not (repository / "mlp" / "2").exists()
    assert main(["publish", str(same), str(repository / "mlp")]) == 0
    assert "golden samples: 16 samples agree" in " ".join(capsys.readouterr().out.split())
    assert (repository / "mlp" / "2" / "golden" / "samples-1.npz").is_file()
    assert main(["publish", str(wrong), str(repository / "mlp"), "--golden", "none"]) == 0
    assert not (repository / "mlp" / "3" / "golden").exists()
    (repository / "mlp" / "model.yaml").write_text("golden_required: true\n")
    capsys.readouterr()
    problem = refused(capsys, "publish", same, repository / "mlp")
    assert "golden_required: expected a folder 'golden'" in problem
    assert "--golden none" not in problem  # --golden none would be refused as well


@pytest.mark.parametrize("page", ["golden", "check"])
def test_documented_commands_print_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(str(repository_path()), tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    (command,) = (one for one in commands(DOCS / "tools" / f"{page}.md") if one.output)

    assert main(command.words[1:]) == 0

    shown, documented = (comparable(text) for text in (capsys.readouterr().out, command.output))
    assert shown[: len(documented)] == documented


def comparable(text: str) -> str:
    """Without what depends on the machine: line breaks, measured figures, and the batch size that warm-up finds."""
    text = re.sub(r"\brelative \S+ of\b", "relative … of", " ".join(text.split()))
    text = re.sub(r"\b[\d,]+\.\d+ [KM]iB|\b[\d,]+ [KM]iB|\b[\d,]+\.\d+\b|─+", "…", text)
    return re.sub(r"\bbatches of up to \d+\b", "batches of up to …", text)


def test_documented_settings_are_valid(tmp_path: Path) -> None:
    tolerances, gates = blocks("yaml", (DOCS / "tools" / "golden.md").read_text())
    (tmp_path / "golden.yaml").write_text(tolerances)

    assert load_golden_file(tmp_path / "golden.yaml").tolerances["probabilities"].bounds() == {"max": 0.02, "top1": 0}
    assert ModelOptions.model_validate(yaml.safe_load(gates)).max_slowdown == 1.5


def test_documented_snippet_writes_samples_that_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(str(repository_path()), tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    Path("models/digits/1/golden").mkdir()
    (snippet,) = blocks("python", (DOCS / "tools" / "golden.md").read_text())
    images = np.random.default_rng(0).random((3, 1, 8, 8), np.float32)
    session = onnxruntime.InferenceSession("models/digits/1/model.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(["probabilities"], {"image": images})

    exec(snippet, {"np": np, "images": images, "expected": expected})

    assert "3 samples agree" in golden(capsys, "check", "models/digits")["agreement"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServerProcess]]:
    repository = tmp_path_factory.mktemp("served")
    add_model(repository, "double", members.affine, scale=2)
    members.add_ensemble(repository, "sum", ["a"], ["b"], STEP)
    with serving(repository, *SHORT_WARMUP) as process:
        yield repository, process


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", ["double", "sum"])
def test_answers_of_a_server_are_recorded(
    server: tuple[Path, ServerProcess], capsys: pytest.CaptureFixture[str], protocol: str, name: str
) -> None:
    repository, process = server
    url = f"{protocol}://{getattr(process, protocol)}"

    result = golden(capsys, "record", repository / name, "--from", url, "--replace", "--version", "1")

    assert (result["samples"], result["outputs"]) == (16, url)
    with np.load(repository / name / "1" / "golden" / "samples-1.npz") as recorded:
        np.testing.assert_allclose(recorded["output.b"], 2 * recorded["input.a"])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_unknown_model_of_a_server_is_refused_with_the_known_ones(
    server: tuple[Path, ServerProcess], capsys: pytest.CaptureFixture[str], protocol: str
) -> None:
    repository, process = server
    url = f"{protocol}://{getattr(process, protocol)}"
    arguments = ("record", repository / "double", "--from", url, "--replace", "--model", "other")

    assert refused(capsys, "golden", *arguments, status=1).endswith("; the server has double, sum\n")


def checked(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int) -> dict[str, Any]:
    assert main(["check", *map(str, arguments), "--json"]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(result, json_schema(CheckResult))
    return result


def test_check_finds_what_a_load_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_model(tmp_path, "double", members.affine, scale=2)
    members.add_ensemble(tmp_path, "sum", ["a"], ["b"], STEP)
    members.add_ensemble(tmp_path, "lacks", ["a"], ["b"], [("broken", {"a": "a"}, {"b": "b"})])
    members.add_ensemble(tmp_path, "circle", ["a"], ["b"], [("circle", {"a": "a"}, {"b": "b"})])
    (add_model(tmp_path, "broken", members.affine) / "1" / "model.onnx").write_bytes(b"not ONNX")
    crashes = add_model(tmp_path, "crashes", builders.recurrent, operator="GRU")
    (crashes / "model.yaml").write_text("warmup_samples: [{inputs: {x: {dims: [0, 2]}}}]\n")
    for name, factor in (("double", 2), ("sum", 3)):
        (tmp_path / name / "1" / "golden").mkdir()
        arrays: dict[str, Any] = {"input.a": np.ones((2, 2), np.float32)}
        arrays["output.b"] = factor * arrays["input.a"]
        np.savez(tmp_path / name / "1" / "golden" / "a.npz", **arrays)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))

    result = checked(capsys, tmp_path, "--jobs", "2", status=1)

    found = {one["name"]: one for one in result["models"]}
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before, "nothing is changed"
    assert found["double"]["golden"].startswith("2 samples agree")
    assert "output 'b': relative error at most 0.001 expected, got 0.333" in found["sum"]["problem"]
    assert found["lacks"]["problem"].startswith("its member broken/1 cannot be served: ")
    assert "circle" in found["circle"]["problem"]
    assert "ended with signal 6" in found["crashes"]["problem"]
    assert {one["kind"] for one in result["findings"]} == {"model_fails"}
    assert [one["name"] for one in checked(capsys, tmp_path, "--model", "double", status=0)["models"]] == ["double"]
    broken = checked(capsys, tmp_path, "--model", "broken", "--fail-on", "never", status=0)  # it only reports
    assert [one["level"] for one in broken["findings"]] == ["problem"]
    assert "'s3://bucket/models': expected a folder of models" in refused(capsys, "check", "s3://bucket/models")
    problem = refused(capsys, "check", tmp_path, "--model", "nowhere")
    assert "--model nowhere: expected a model of" in problem


@pytest.mark.parametrize(
    ("labels", "candidate", "status", "problem"),
    [
        ("labels: {stable: 1}", 2, 0, ""),
        ("labels: {stable: 1}", 7, 1, "rollout.candidate: expected a version that is in the repository, got 7"),
        ("labels: {stable: 2}", 2, 0, "expected another candidate than version 2, which is labelled 'stable'"),
        ("", 2, 0, "rollout: expected model 'm' to have the label 'stable', got none"),
    ],
)
def test_check_finds_a_rollout_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], labels: str, candidate: int, status: int, problem: str
) -> None:
    for version in (1, 2):
        folder = add_model(tmp_path, "m", members.affine, version=version)
    (folder / "model.yaml").write_text(f"{labels}\nrollout: {{candidate: {candidate}}}\n")

    findings = checked(capsys, tmp_path, status=status)["findings"]

    assert {one["kind"] for one in findings} == (
        set() if not problem else {"model_fails" if status else "option_without_effect"}
    )
    assert all(problem in one["seen"] for one in findings)


@pytest.mark.parametrize("only", [(), ("--model", "sum")], ids=["all", "ensemble"])
def test_check_reports_warnings_of_members_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], only: tuple[str, ...]
) -> None:
    folder = add_model(tmp_path, "double", members.affine, scale=2)
    (folder / "model.yaml").write_text("execution_providers: [openvino, cpu]\n")
    members.add_ensemble(tmp_path, "sum", ["a"], ["b"], STEP)

    result = checked(capsys, tmp_path, *only, status=0)

    assert [one["name"] for one in result["models"]] == ["double", "sum"]
    (warning,) = result["findings"]
    assert warning["seen"].startswith("double/1: execution provider passed over: OpenVINOExecutionProvider")


def test_check_knows_the_response_cache_of_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_model(tmp_path, "double", members.affine, scale=2)
    members.add_ensemble(tmp_path, "sum", ["a"], ["b"], STEP)
    (tmp_path / "double" / "model.yaml").write_text("response_cache: true\n")
    config = tmp_path / "server.yaml"
    config.write_text("cache_bytes: 0\n")

    assert checked(capsys, tmp_path, status=0)["findings"] == []
    (found,) = checked(capsys, tmp_path, "--config", config, status=0)["findings"]

    assert found["seen"] == "double/1: option has no effect: response_cache: cache_bytes of the server is 0"


def test_a_version_that_is_not_checked_in_time_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_model(tmp_path, "slow", builders.slow)

    (model,) = checked(capsys, tmp_path, "--seconds-per-model", "0.1", status=1)["models"]

    assert model["skipped"] == "the process that loaded it returned no result within 0.1 s"
