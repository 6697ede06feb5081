"""``ortserve compare`` on real models, against results of ONNX Runtime and numpy alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from models import builders, members, sequences
from models.members import add_ensemble
from ortserve.cli.main import main
from ortserve.tools.compare import measure
from ortserve.tools.ensemble import open_ensemble
from ortserve.tools.opening import open_model
from ortserve.tools.subject import find_version
from pages import DOCS, commands
from servers import add_model, json_input, rest_url, serving

pytestmark = pytest.mark.usefixtures("preloaded_commands")

EXAMPLE = Path(__file__).parents[2] / "server" / "ortserve" / "example" / "repository"
CORPUS = Path(__file__).parents[1] / "rows" / "corpus"
DIGITS = EXAMPLE / "digits" / "1" / "model.onnx"


@pytest.fixture(autouse=True)
def compared_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare outputs in this process, which saves a second each, except in tests with ``compared_apart``."""
    if "compared_apart" not in request.fixturenames:
        monkeypatch.setattr(measure, "call_in_child", lambda limit_s, function, *arguments: function(*arguments))


@pytest.fixture
def compared_apart() -> None:
    """Compare outputs in a separate process, as the command does for users."""


def compared(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path, seconds: str = "0", status: int = 0
) -> dict[str, Any]:
    assert main(["compare", *map(str, arguments), "--seconds", seconds, "--json"]) == status, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["compare", *map(str, arguments), "--seconds", "0"]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.count("\n") == 1, shown.err
    return shown.err


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    """The digits classifier with other weights in its last layer."""
    model = onnx.load(DIGITS)
    weight = next(one for one in model.graph.initializer if one.name == model.graph.node[-3].input[1])
    values = numpy_helper.to_array(weight)
    noise = np.random.default_rng(0).normal(scale=1.5 * values.std(), size=values.shape).astype(np.float32)
    weight.CopyFrom(numpy_helper.from_array(values + noise, weight.name))
    path = tmp_path / "noisy.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def samples(tmp_path: Path) -> tuple[Path, Path]:
    """Images and their digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    np.savez(tmp_path / "data.npz", image=data.images[:301, None].astype(np.float32))
    np.save(tmp_path / "labels.npy", data.target[:301])
    return tmp_path / "data.npz", tmp_path / "labels.npy"


def test_errors_and_accuracy_are_those_that_numpy_computes(
    noisy: Path, samples: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data, labels = samples
    result = compared(capsys, EXAMPLE / "digits", noisy, "--inputs", data, "--labels", labels)

    image, digits = np.load(data)["image"], np.load(labels)
    first, second = (ort.InferenceSession(path).run(None, {"image": image}) for path in (DIGITS, noisy))
    agreement = result["agreement"]
    errors = {error["name"]: error for error in agreement["outputs"]}
    assert agreement["samples"] == 301
    assert errors["probabilities"]["max"] == pytest.approx(np.abs(first[0] - second[0]).max(), rel=1e-4)
    assert errors["label"]["top1"] == pytest.approx((first[1] != second[1]).mean())
    assert 0 < errors["label"]["top1"] < 0.5
    assert agreement["reference_accuracy"] == pytest.approx((first[0].argmax(1) == digits).mean())
    assert agreement["reference_accuracy"] > 0.95
    assert agreement["accuracy"] == pytest.approx((second[0].argmax(1) == digits).mean())
    assert result["inputs"] == "data.npz: 301 samples"
    assert (result["reference"]["version"], result["candidate"]["version"]) == (1, None)
    assert result["candidate"]["nbytes"] == noisy.stat().st_size
    assert result["speed"] is None


def test_exceeded_bounds_are_named_and_are_the_exit_status(
    noisy: Path, samples: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data, labels = samples
    models = (DIGITS, noisy, "--inputs", data, "--labels", labels)
    loose = ("--max-error", "9", "--max-error", "top1=0.5", "--max-error", "accuracy=0.5")
    assert compared(capsys, *models, *loose)["exceeded"] == []
    exceeded = compared(capsys, *models, *loose, "--max-error", "cosine=1e-6", status=1)["exceeded"]
    assert len(exceeded) == 1
    assert exceeded[0].startswith("cosine error ")
    assert exceeded[0].endswith(" exceeds 1e-06")


@pytest.mark.parametrize(
    "model",
    [
        EXAMPLE / "text_stats",
        CORPUS / "sklearn_random_forest_with_zipmap.onnx",
        CORPUS / "torch_greedy_decoder.onnx",
        CORPUS / "torch_lstm_time_first.onnx",
        CORPUS / "half_cnn.onnx",
        "counting",
        "fixed_batch",
        "sequence_output",
        "scalar_sum",
    ],
    ids=lambda model: Path(model).stem,
)
def test_a_model_agrees_with_itself(model: Path | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model if isinstance(model, Path) else getattr(builders, model)(tmp_path / "model.onnx")
    result = compared(capsys, path, path, "--max-error", "0", "--max-error", "top1=0")
    assert result["agreement"]["outputs"]
    assert result["agreement"]["samples"] == 32
    assert "real ones" in result["notes"][0]


def test_a_model_that_reads_rows_on_another_axis_is_compared_sample_by_sample(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(CORPUS / "torch_lstm_time_first.onnx", tmp_path / "model.onnx")
    assert compared(capsys, tmp_path / "model.onnx", tmp_path / "model.onnx", "--batch", "5")["rows"] == 5


def test_outputs_of_bfloat16_are_compared_by_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, factor in (("one", 1.0), ("other", 1.25)):
        text = f"""<ir_version: 9, opset_import: ["": 17]>
            g (float[n, 2] x) => (bfloat16[n, 2] y) {{
                factor = Constant<value_float = {factor}>()
                scaled = Mul(x, factor)
                y = Cast<to = 16>(scaled)
            }}"""
        onnx.save(onnx.parser.parse_model(text), tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "data.npz", x=np.array([[1, -2], [0.5, 4]], np.float32))

    result = compared(capsys, tmp_path / "one.onnx", tmp_path / "other.onnx", "--inputs", tmp_path / "data.npz")

    (output,) = result["agreement"]["outputs"]
    assert (output["max"], output["relative"], output["top1"]) == (1.0, 0.25, 0.0)


def test_what_cannot_be_compared_is_refused_with_one_line(
    noisy: Path, samples: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, labels = samples
    problem = refused(capsys, EXAMPLE / "text_stats", noisy)
    assert "its interface is not that of the first model: input 'text': expected BYTES[-1,1], got none" in problem
    assert "expected an ONNX model" in refused(capsys, DIGITS, builders.not_onnx(tmp_path / "bad.onnx"))
    assert "expected --inputs to be given, too" in refused(capsys, DIGITS, noisy, "--labels", labels)
    assert "expected --labels to be given, too" in refused(capsys, DIGITS, noisy, "--max-error", "accuracy=0")
    assert "expected a number from 0" in refused(capsys, DIGITS, noisy, "--max-error", "most=1")
    assert "--seconds above 0" in refused(capsys, DIGITS, noisy, "--min-speedup", "1")
    np.save(tmp_path / "few.npy", np.zeros(3, int))
    problem = refused(capsys, DIGITS, noisy, "--inputs", data, "--labels", tmp_path / "few.npy")
    assert "expected 301 integers or texts, one per sample, got int64 [3]" in problem
    assert "numpy.save" in refused(capsys, DIGITS, noisy, "--inputs", data, "--labels", tmp_path / "none.npy")


@pytest.fixture
def ensembles(tmp_path: Path) -> Path:
    """A repository in which the ensemble ``whole`` computes y = 2 (2 x + 1) + 1 and z = y - x in three steps."""
    repository = tmp_path / "models"
    add_model(repository, "plus", members.affine, scale=2, offset=1)
    add_model(repository, "plus", members.affine, version=2, scale=9)
    (repository / "plus" / "model.yaml").write_text("version_policy: {all: true}\nlabels: {stable: 1}\n")
    add_model(repository, "both", members.sums)
    text = "inputs: {b: {}, a: {}}\nserved_outputs: [difference]\nmax_rows: 3\n"
    (repository / "both" / "model.yaml").write_text(text)
    add_model(repository, "flat", members.affine, scale=4, offset=3, shape=("batch", 2, 1))
    (repository / "flat" / "model.yaml").write_text(
        "inputs: {a: {dims: [2], reshape: [2, 1]}}\noutputs: {b: {dims: [2], reshape: [2, 1]}}\n"
    )
    add_model(repository, "one", members.affine, shape=(2,))
    twice = [("plus", {"a": "x"}, {"b": "t"}), ("plus", {"a": "t"}, {"b": "y"})]
    add_ensemble(repository, "twice", ["x"], ["y"], twice)
    steps = [("twice", {"x": "x"}, {"y": "y"}), ("both", {"a": "y", "b": "x"}, {"difference": "z"})]
    add_ensemble(repository, "whole", ["x"], ["y", "z"], steps)
    steps = [("flat", {"a": "x"}, {"b": "y"}), ("both", {"a": "y", "b": "x"}, {"difference": "z"})]
    add_ensemble(repository, "other", ["x"], ["y", "z"], steps)
    steps = [("flat", {"a": "x"}, {"b": "t"}), ("one", {"a": "t"}, {"b": "y"})]
    add_ensemble(repository, "alone", ["x"], ["y"], steps, batched="true")
    return repository


def test_ensembles_are_compared_with_each_other_and_with_models(
    ensembles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compared(capsys, ensembles / "whole", ensembles / "other", "--max-error", "0")
    assert result["rows"] == 3
    assert [output["name"] for output in result["agreement"]["outputs"]] == ["y", "z"]
    files = [(ensembles / name / "1" / "model.onnx") for name in ("plus", "both")]
    assert result["reference"]["nbytes"] == sum(file.stat().st_size for file in files)
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    np.savez(tmp_path / "x.npz", a=x)
    add_ensemble(ensembles, "fits", ["a"], ["b"], [("plus", {"a": "a"}, {"b": "t"}), ("plus", {"a": "t"}, {"b": "b"})])
    result = compared(capsys, ensembles / "fits", ensembles / "plus" / "1", "--inputs", tmp_path / "x.npz")
    assert result["agreement"]["samples"] == 5
    assert result["agreement"]["outputs"][0]["max"] == np.max((4 * x + 3) - (2 * x + 1))
    assert compared(capsys, ensembles / "alone", ensembles / "twice", "--max-error", "0")["rows"] == 1


def test_an_open_ensemble_answers_as_a_server_does(ensembles: Path) -> None:
    x = np.array([[1, 2]], np.float32)
    with serving(ensembles) as server:
        for name in ("whole", "other", "alone"):
            opened = open_ensemble(find_version(str(ensembles / name)), open_model)
            answer = httpx.post(rest_url(server, name), json={"inputs": [json_input("x", x)]}, timeout=30).json()
            wanted = {output["name"]: (output["shape"], output["data"]) for output in answer["outputs"]}
            for spec, array in zip(opened.signature.outputs, opened.run([x]), strict=True):
                assert (list(array.shape), array.ravel().tolist()) == wanted[spec.name], name


def test_the_speed_of_ensembles_is_compared(
    ensembles: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ortserve.tools.speed._PROCESSES", 2)
    result = compared(capsys, ensembles / "whole", ensembles / "other", seconds="0.2")
    assert result["speed"]["median_ms"] > 0


def test_ensembles_that_cannot_be_compared_are_refused_with_one_line(
    ensembles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_model(ensembles, "sum", sequences.slow)
    (ensembles / "sum" / "model.yaml").write_text("sequences: {states: [{input: STATE, output: NEXT}]}\n")
    add_ensemble(ensembles, "sums", ["x"], ["y"], [("sum", {"INPUT": "x"}, {"TOTAL": "y"})])
    problem = refused(capsys, ensembles / "sums", ensembles / "sums")
    assert "ensemble 'sums': expected members that answer requests alone, and 'sum' has sequences" in problem
    for name, other in (("ring", "loop"), ("loop", "ring")):
        add_ensemble(ensembles, name, ["x"], ["y"], [(other, {"x": "x"}, {"y": "y"})])
    assert "between ensembles: ring -> loop -> ring" in refused(capsys, ensembles / "ring", ensembles / "twice")
    add_ensemble(ensembles, "lost", ["x"], ["y"], [("gone", {"a": "x"}, {"b": "y"})])
    assert "gone: expected a model file or REPOSITORY" in refused(capsys, ensembles / "lost", ensembles / "twice")


@pytest.mark.usefixtures("compared_apart")
def test_speed_is_compared_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = builders.heavy(tmp_path / "long.onnx", steps=64)
    short = builders.heavy(tmp_path / "short.onnx", steps=4)
    page = tmp_path / "page.html"
    bounds = ("--min-speedup", "2", "--page", page, "--batch", "1")
    result = compared(capsys, long, short, *bounds, seconds="1")
    assert result["speed"]["ratio"]["low"] > 2
    assert result["speed"]["ratio"]["value"] == pytest.approx(
        result["reference_speed"]["median_ms"] / result["speed"]["median_ms"], rel=0.7
    )
    assert result["speed"]["rss_nbytes"] > 1024 * 1024 * 4  # the weights of one step
    assert "times as fast" in page.read_text()


def test_the_page_shows_what_the_command_prints(
    noisy: Path, samples: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = (one for one in commands(DOCS / "tools" / "compare.md") if one.output)
    monkeypatch.chdir(noisy.parent)
    shutil.copytree(EXAMPLE / "digits", "models/digits")
    shutil.copy(noisy, "out.onnx")
    assert main([*command.words[1:], "--seconds", "0"]) in (0, 1)
    shown = {line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines()}
    timed = ("time of a run, ms", "processor time of a run, ms", "time of opening, s", "memory of the process", "other")
    documented = {line.split("  ")[0].strip() for line in command.output.splitlines()}
    assert {line for line in documented if not line.startswith((*timed, "─")) and "times as fast" not in line} <= shown
