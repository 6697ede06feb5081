"""``ortserve quantize`` on real models: against plain sessions, with unreachable bounds, and on bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from models import builders
from ortserve.cli.main import main
from ortserve.tools.quantize import command
from pages import DOCS, Command, blocks, commands
from scarcity import files_of_at_most, with_files_of_at_most

pytestmark = pytest.mark.usefixtures("preloaded_commands")

EXAMPLE = Path(__file__).parents[2] / "server" / "ortserve" / "example" / "repository"
CORPUS = Path(__file__).parents[1] / "rows" / "corpus"
DIGITS = EXAMPLE / "digits"
LIMIT_S = 100.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 images: ``images.npz``, the last 100 in ``other.npz``, and their labels."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("data")
    digits = load_digits()
    images = digits.images[:200].astype(np.float32)[:, np.newaxis]
    np.savez(folder / "images.npz", image=images)
    np.savez(folder / "other.npz", image=images[100:])
    np.save(folder / "labels.npy", digits.target[100:200])
    return folder


def quantized(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> dict[str, Any]:
    got = main(["quantize", *map(str, arguments), "--json"])
    printed = capsys.readouterr()
    assert got == status, printed.err
    result: dict[str, Any] = json.loads(printed.out)
    return result


def outputs(model: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    found: list[np.ndarray] = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    return found


def operators(model: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(model).graph.node)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_static_int8_keeps_the_accuracy_that_a_plain_session_finds(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labelled = ("--inputs", data / "other.npz", "--labels", data / "labels.npy")
    calibration = ("--calibration", data / "images.npz", "--calibrator", "percentile")
    out = tmp_path / "out.onnx"

    result = quantized(
        capsys, DIGITS, "-o", out, "--mode", "static", *calibration, *labelled, "--seconds", "0.2", "--page",
        tmp_path / "page.html",
    )  # fmt: skip

    images, labels = np.load(data / "other.npz")["image"], np.load(data / "labels.npy")
    rows = [outputs(out, {"image": image[np.newaxis]}) for image in images]
    accuracy = float(np.mean([row[1][0] == label for row, label in zip(rows, labels, strict=True)]))
    source = outputs(DIGITS / "1" / "model.onnx", {"image": images})[0]
    assert result["agreement"]["accuracy"] == accuracy
    assert accuracy >= result["agreement"]["reference_accuracy"] - 0.005
    assert result["agreement"]["outputs"][0]["max"] == pytest.approx(
        np.abs(np.concatenate([row[0] for row in rows]) - source).max(), abs=1e-5
    )
    assert result["nbytes"] == out.stat().st_size < result["source_nbytes"] / 2
    types = Counter(one.data_type for one in onnx.load(out).graph.initializer if one.name.endswith("_quantized"))
    assert types[onnx.TensorProto.INT8] == 3  # two Conv and a Gemm; biases are INT32
    assert result["speed"]["runs"] > 0
    provenance = json.loads((tmp_path / "out.provenance.json").read_text())
    assert provenance["agreement"] == result["agreement"]
    assert names(tmp_path) == {"out.onnx", "out.provenance.json", "page.html"}


def test_expensive_nodes_stay_in_floating_point_until_the_bound_is_kept(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.onnx"
    arguments = (DIGITS, "-o", out, "--mode", "static", "--calibration", data / "images.npz", "--seconds", "0")
    whole = quantized(capsys, *arguments, "--rank", "--max-error", "1")
    error = whole["agreement"]["outputs"][0]["max"]
    assert whole["floating"] == []

    bound = 0.9 * error  # one node alone may have a larger error than all together, because errors cancel out
    result = quantized(capsys, *arguments, "--max-error", f"max={bound}", "--max-error", "top1=0.1")

    held_out = np.load(data / "images.npz")["image"][3::4]
    assert "50 held out" in result["inputs"]
    found = np.concatenate([outputs(out, {"image": image[np.newaxis]})[0] for image in held_out])
    assert np.abs(found - outputs(DIGITS / "1" / "model.onnx", {"image": held_out})[0]).max() <= bound
    assert result["floating"]
    assert result["floating"][0] == result["ranking"][0]["nodes"][0]
    assert operators(out)["DequantizeLinear"] < 12


def test_the_time_limit_includes_calibration(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = quantized(
        capsys, DIGITS, "-o", tmp_path / "out.onnx", "--mode", "static", "--calibration", data / "images.npz",
        "--max-error", "cosine=1", "--minutes", "0", "--seconds", "0",
    )  # fmt: skip
    assert "calibration ran out of time and left out 149 of the samples; raise --minutes to use them" in result["notes"]


def test_a_bound_that_cannot_be_kept_writes_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = quantized(
        capsys, DIGITS, "-o", tmp_path / "out.onnx", "--mode", "dynamic", "--inputs", data / "other.npz",
        "--max-error", "1e-9", status=1,
    )  # fmt: skip
    assert result["missed"] == [f"max error {result['agreement']['outputs'][0]['max']:.3g} exceeds 1e-09"]
    assert result["delivered"] is None
    assert names(tmp_path) == set()


def test_weights_inside_of_loops_get_four_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.onnx"
    result = quantized(
        capsys, CORPUS / "torch_greedy_decoder.onnx", "-o", out, "--mode", "weights", "--seconds", "0",
        "--max-error", "1e3",
    )  # fmt: skip
    (loop,) = (node for node in onnx.load(out).graph.node if node.op_type == "Loop")
    inner = {node.op_type for attribute in loop.attribute for node in attribute.g.node}
    assert inner & {"MatMulNBits", "GatherBlockQuantized"}
    assert result["settings"]["bits"] == 4


def test_eight_bits_of_gather_and_matmul_are_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = CORPUS / "dynamo_encoder.onnx", tmp_path / "out.onnx"
    result = quantized(capsys, source, "-o", out, "--mode", "weights", "--bits", "8", "--seconds", "0")
    assert names(tmp_path) == {"out.onnx", "out.provenance.json"}
    assert result["nbytes"] == out.stat().st_size
    assert result["floating"] == []
    assert operators(out)["MatMulNBits"] == 8


def test_weights_that_are_no_longer_inputs_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(builders.mlp(tmp_path / "model.onnx"))
    weight = model.graph.initializer[0]
    model.graph.input.append(onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    onnx.save(model, tmp_path / "model.onnx")
    arguments = (tmp_path / "model.onnx", "-o", tmp_path / "out.onnx", "--mode", "weights", "--seconds", "0")

    notes = quantized(capsys, *arguments)["notes"]

    assert [value.name for value in onnx.load(tmp_path / "out.onnx").graph.input] == ["x"]
    assert f"requests can no longer replace the weights {weight.name}, which were inputs" in notes


def test_a_model_that_loses_its_batching_is_compared_in_the_form_of_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With rows on axis 1 and a fixed axis 0, no run succeeds in another form."""
    source, out = tmp_path / "source.onnx", tmp_path / "out.onnx"
    model = onnx.load(CORPUS / "torch_lstm_time_first.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 6
    onnx.save(model, source)

    result = quantized(capsys, source, "-o", out, "--mode", "dynamic", "--seconds", "0")

    assert operators(out)["DynamicQuantizeLSTM"] == 1
    assert any("the server batches requests for the source, but not for this model" in one for one in result["notes"])
    assert any("the model is not smaller than its source" in one for one in result["notes"])
    assert main(["compare", str(source), str(out), "--seconds", "0", "--max-error", "0.1"]) == 0


def test_labels_belong_to_samples_of_a_folder_in_the_order_of_their_files(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files are as a server records them, with requests of several rows."""
    images, labels = np.load(data / "other.npz")["image"], np.load(data / "labels.npy")
    (tmp_path / "recorded").mkdir()
    for number, begin in enumerate(range(0, 100, 5)):
        np.savez(tmp_path / "recorded" / f"{number:08}.npz", image=images[begin : begin + 5])
    calibration = ("--calibration", tmp_path / "recorded", "--labels", data / "labels.npy")
    result = quantized(
        capsys, DIGITS, "-o", tmp_path / "out.onnx", "--mode", "static", *calibration, "--seconds", "0"
    )  # fmt: skip
    assert "(20 files): 100 samples: 25 held out" in result["inputs"]
    source = outputs(DIGITS / "1" / "model.onnx", {"image": images[3::4]})[1]
    assert result["agreement"]["reference_accuracy"] == (source == labels[3::4]).mean()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mode", "static"], "--mode static: expected --calibration"),
        (["--mode", "dynamic", "--calibration", "images.npz"], "--calibration: expected --mode static"),
        (["--mode", "dynamic", "--labels", "labels.npy"], "--labels: expected --inputs or --calibration"),
        (["--mode", "dynamic", "--max-error", "loss=1"], "--max-error: expected a number from 0"),
        (["--mode", "dynamic", "--max-error", "accuracy=0.1"], "--max-error accuracy: expected --labels"),
        (
            ["--mode", "static", "--calibration", "wrong_shape.npz"],
            "--calibration wrong_shape.npz: array 'image': expected shape ['samples', 1, 8, 8]",
        ),
        (["--mode", "static", "--calibration", "empty.npz"], "first length of at least 1"),
    ],
)
def test_wrong_arguments_are_one_line(
    flags: list[str],
    message: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(data)
    images = np.load("images.npz")["image"]
    np.savez("wrong_shape.npz", image=images[:, 0])
    np.savez("empty.npz", image=images[:0])

    status = main(["quantize", str(DIGITS), "-o", str(tmp_path / "out.onnx"), *flags])

    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    assert message in line
    assert names(tmp_path) == set()


def test_labels_that_fit_no_output_are_refused_before_models_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    np.savez(tmp_path / "inputs.npz", x=np.zeros((100, 5, 4), np.float32))
    labelled = ("--inputs", str(tmp_path / "inputs.npz"), "--labels", str(data / "labels.npy"))
    source, out = str(CORPUS / "torch_lstm_time_first.onnx"), str(tmp_path / "out.onnx")
    assert main(["quantize", source, "-o", out, "--mode", "dynamic", *labelled]) == 2
    assert "--labels: expected an output with a class or with scores for each sample" in capsys.readouterr().err
    assert names(tmp_path) == {"inputs.npz"}


def test_a_full_disk_fails_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files simulates the full disk; the model has 30 KiB."""
    program = with_files_of_at_most(16384)
    command: list[str | Path] = [sys.executable, "-c", program, "quantize", DIGITS, "-o", tmp_path / "out.onnx"]
    done = subprocess.run([*command, "--mode", "dynamic"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("File too large")
    assert names(tmp_path) == set()


def test_the_result_is_shown_although_the_disk_is_full_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_deliver", files_of_at_most(100)(command._deliver))
    out = tmp_path / "out.onnx"
    assert main(["quantize", str(DIGITS), "-o", str(out), "--mode", "dynamic", "--seconds", "0"]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"ortserve quantize: {out}: File too large\n"
    assert "errors within" in printed.out
    assert "written" not in printed.out
    assert names(tmp_path) == set()


def test_an_interruption_leaves_nothing(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ortserve", "quantize", DIGITS, "-o", tmp_path / "out.onnx", "--mode", "static"]
    with subprocess.Popen(
        [*map(str, command), "--calibration", str(data / "images.npz")], stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + LIMIT_S
        while not any(tmp_path.glob(".ortserve-*/prepared*")) and not any(tmp_path.glob(".ortserve-*/named*")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (130, "ortserve quantize: interrupted\n")
    assert names(tmp_path) == set()


PAGE = DOCS / "tools" / "quantize.md"


@pytest.mark.parametrize("command", commands(PAGE), ids=str)
def test_commands_of_the_page_print_what_it_shows(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures depend on the machine; labels and accuracy do not."""
    (script,) = blocks("python", PAGE.read_text())
    shutil.copytree(DIGITS, tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    exec(script, {})

    assert main([*command.words[1:], "--seconds", "0"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]

    printed = {line.split()[0] for line in lines}
    shown = {line.split()[0] for line in command.output.splitlines() if line.strip() and line.strip("─ ")}
    assert shown - printed <= {"speed", "Note:"}
    assert "accuracy 100.00%, source 100.00%" in {" ".join(line.split()) for line in lines}
    assert {"digits_int8.onnx", "digits_int8.provenance.json"} <= names(tmp_path)
