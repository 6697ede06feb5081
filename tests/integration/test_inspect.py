"""``ortserve inspect`` on real and broken models, compared with the reports of sessions and servers.

The command runs in the test's process, which saves a second of imports; it measures memory in another process.
"""

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import gpu_models
from apart import UnavailableError
from gpu_package import environment_on_host_memory
from models import builders, interfaces, patterns
from ortserve.cli.main import main
from ortserve.engine.corrections.harmful_optimizers import harmful_optimizers
from ortserve.model_file.reading import read_model
from pages import DOCS, Command, commands
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, serving

pytestmark = pytest.mark.usefixtures("preloaded_commands")

EXAMPLE = Path(__file__).parents[2] / "server" / "ortserve" / "example" / "repository"
CORPUS = Path(__file__).parents[1] / "rows" / "corpus"
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


Run = Callable[..., subprocess.CompletedProcess[str]]
Inspected = Callable[..., dict[str, Any]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command, in another process if it needs another environment. Its output includes that of libraries."""

    def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        words = ["inspect", *map(str, arguments)]
        if env:
            command = [sys.executable, "-m", "ortserve", *words]
            return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
        status = main(words)
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return run


@pytest.fixture
def plain_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the processes whose memory is measured by the interpreter: forked ones share memory with the template."""
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # read by the interpreter


@pytest.fixture
def inspected(run: Run) -> Inspected:
    """Runs the command, which must succeed. Returns its result."""

    def inspected(*arguments: str | Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        done = run(*arguments, "--json", env=env)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return inspected


VERDICTS = {
    "quantized_cnn_qdq": "proven",
    "torch_lstm_time_first": "proven",
    "torch_greedy_decoder": "alone",
    "sklearn_words": "proven",
}


def copied(source: Path, path: Path) -> Path:
    return Path(shutil.copy(source, path))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServerProcess]]:
    repository = tmp_path_factory.mktemp("served")
    for name in VERDICTS:
        add_model(repository, name, partial(copied, CORPUS / f"{name}.onnx"))
    with serving(repository, *SHORT_WARMUP) as server:
        yield repository, server


def test_model_that_runs_requests_alone_has_batches_of_one_row(inspected: Inspected, tmp_path: Path) -> None:
    """Its warm-up tries larger inputs, because the first dimension of an input without a shape may be any size."""
    model = interfaces.any_shape(tmp_path / "model.onnx")

    rows = inspected(model)["rows"]

    assert (rows["verdict"], rows["max_rows"]) == ("alone", 1)


@pytest.mark.parametrize("name", VERDICTS)
def test_placement_and_rows_are_those_that_a_server_reports(
    inspected: Inspected, name: str, served: tuple[Path, ServerProcess]
) -> None:
    repository, server = served
    metadata = httpx.get(f"{server.url}/v2/models/{name}", timeout=LONG_S).raise_for_status().json()

    found = inspected(repository / name, "--batch", "1,2")

    (on_cpu,) = (one for one in found["placement"] if one["provider"] == CPU)
    nodes = ", ".join(f"{provider}: {count}" for provider, count in on_cpu["nodes"].items())
    assert nodes == metadata["properties"]["nodes"]
    assert found["rows"]["verdict"] == VERDICTS[name]
    rows = re.compile(r"up to \d+ rows")
    assert rows.sub("", found["rows"]["because"]) == rows.sub("", metadata["properties"]["batching"])
    assert [one["name"] for one in found["inputs"]] == [one["name"] for one in metadata["inputs"]]


def test_nodes_that_run_are_those_of_a_profile(inspected: Inspected, tmp_path: Path) -> None:
    path = CORPUS / "dynamo_encoder.onnx"
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    left_out = list(harmful_optimizers(read_model(path)))
    session = ort.InferenceSession(path, options, providers=[CPU], disabled_optimizers=left_out)
    session.run(None, {one.name: np.ones((2, 8), np.int64) for one in session.get_inputs()})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = Counter(event["args"]["op_name"] for event in events if event["cat"] == "Node")

    found = inspected(path, "--no-run")

    fused = next(one["fused"] for one in found["placement"] if one["provider"] == CPU)
    assert {name.rpartition(".")[2]: count for name, count in fused.items()} == dict(ran)


def test_rows_are_tried_although_they_are_proven(inspected: Inspected) -> None:
    found = inspected(CORPUS / "transformers_vit.onnx", "--batch", "1,2")

    assert found["rows"]["verdict"] == "proven"
    assert 0 <= found["rows"]["drift"] < 1e-3
    assert "of inputs, of up to" in found["rows"]["trial"]


def within(share: float, predicted: int, measured: int) -> bool:
    return abs(predicted - measured) <= share * measured


@pytest.mark.usefixtures("plain_children")
@pytest.mark.parametrize("kind", ["encoder", "convolutions"])
def test_memory_is_predicted_within_a_tenth(inspected: Inspected, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    if kind == "encoder":
        gpu_models.encoder(path, layers=2, hidden=384, heads=12, length=128, vocabulary=20_000)
    else:
        gpu_models.residual(path, blocks=(1, 1, 1, 1), size=96)

    memory = inspected(path, "--batch", "1,16")["memory"]

    assert memory["problem"] == ""
    assert within(0.1, memory["weights_nbytes"], memory["weights_measured_nbytes"]), memory
    for one in memory["batches"]:
        for figure in ("activations", "arena", "process"):
            assert within(0.1, one[f"{figure}_nbytes"], one[f"{figure}_measured_nbytes"]), (figure, one)


@pytest.mark.usefixtures("plain_children")
def test_blocks_of_almost_twice_the_size_of_tensors_do_not_count_as_activations(
    inspected: Inspected, tmp_path: Path
) -> None:
    path = builders.chain(tmp_path / "m.onnx", nodes=4, width=2_250_000)

    one = inspected(path, "--batch", "1", "--seconds", "100")["memory"]["batches"][0]

    assert within(0.01, one["activations_nbytes"], one["activations_measured_nbytes"])
    assert within(0.01, one["arena_nbytes"], one["arena_measured_nbytes"])


@pytest.mark.usefixtures("plain_children")
def test_memory_of_the_process_does_not_include_the_events_of_a_profile(inspected: Inspected, tmp_path: Path) -> None:
    path = builders.chain(tmp_path / "m.onnx", nodes=1000, width=4)

    one, many = inspected(path, "--batch", "1,32")["memory"]["batches"]

    assert many["process_measured_nbytes"] - one["process_measured_nbytes"] < 2**20


def test_model_is_run_on_the_samples_of_the_user(inspected: Inspected, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", image=np.zeros((3, 1, 8, 8), np.float32))

    found = inspected(EXAMPLE / "digits", "--inputs", tmp_path / "data.npz", "--batch", "1,2")

    assert found["memory"]["inputs"] == "data.npz: 3 samples"


def test_model_that_rejects_synthetic_inputs_is_inspected_nevertheless(inspected: Inspected, tmp_path: Path) -> None:
    found = inspected(builders.refuses_synthetic(tmp_path / "m.onnx"), "--batch", "1")

    assert "pass real samples with --inputs" in found["memory"]["problem"]
    assert found["placement"][0]["nodes"]


def test_page_needs_no_network_and_shows_the_findings(run: Run, tmp_path: Path) -> None:
    done = run(patterns.layer_norm(tmp_path / "m.onnx", leak=True), "-o", tmp_path / "page.html", "--batch", "1,2")

    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "LayerNorm split into several operators" in page
    assert not re.search(r"(src|href)=\"https?:", page)


def test_weights_of_gigabytes_are_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2.1 GB of external data in a sparse file: a table in which each row looks up some entries."""
    rows, width = 1 << 20, 512
    path = tmp_path / "m.onnx"
    table = onnx.TensorProto(
        name="t", data_type=TensorProto.FLOAT, dims=[rows, width], data_location=TensorProto.EXTERNAL
    )
    table.external_data.add(key="location", value="table.bin")
    nodes = [helper.make_node("Gather", ["t", "x"], ["y"])]
    ids = [patterns.value("x", "batch", 4, element=TensorProto.INT64)]
    graph = helper.make_graph(nodes, "m", ids, [patterns.value("y", "batch", 4, width)], [table])
    opsets = [helper.make_opsetid("", 21)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    with (tmp_path / "table.bin").open("wb") as file:
        file.truncate(rows * width * 4)

    assert main(["inspect", str(path), "--no-run", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["content"]["weights"][0]["nbytes"] == rows * width * 4
    assert found["content"]["external_nbytes"] == {"table.bin": rows * width * 4}
    assert found["placement"][0]["fused"] == {"Gather": 1}


@pytest.mark.parametrize("command", commands(DOCS / "tools" / "inspect.md"), ids=str)
def test_commands_of_the_page_print_what_it_shows(
    run: Run, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EXAMPLE / "digits", tmp_path / "digits")
    monkeypatch.chdir(tmp_path)

    done = run(*command.words[2:])

    assert done.returncode == 0, done.stderr
    printed = {" ".join(line.split()) for line in done.stdout.splitlines()}
    for line in command.output.splitlines():
        assert " ".join(line.split()) in printed


def broken_models(folder: Path) -> dict[str, Path]:
    builders.not_onnx(folder / "other.onnx")
    builders.external_weights(folder / "external.onnx", "gone.bin")
    builders.external_weights(folder / "short.onnx", "short.bin")
    (folder / "short.bin").write_bytes(bytes(7))
    (folder / "empty.onnx").touch()
    whole = patterns.attention(folder / "whole.onnx").read_bytes()
    (folder / "truncated.onnx").write_bytes(whole[: len(whole) // 2])
    return {name: folder / f"{name}.onnx" for name in ("other", "external", "short", "empty", "truncated", "absent")}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other", "expected an ONNX model"),
        ("external", "external.onnx: expected weights, as of tensor 'w', in gone.bin: there is no such file"),
        ("short", "expected weights, as of tensor 'w', in short.bin: at least 16 bytes, got 7"),
        ("empty", "expected an ONNX model, the file is empty"),
        ("truncated", "expected an ONNX model"),
        ("absent", "expected a model file"),
    ],
)
def test_broken_model_is_reported_in_one_line(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["inspect", str(broken_models(tmp_path)[name]), "--json"])

    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    assert line.startswith("ortserve inspect: ")
    assert message in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "0"], "expected an integer from 1"),
        (["--batch", "1,x"], "expected an integer from 1"),
        (["--seconds", "-1"], "expected a number from 0 to 3,600"),
        (["--fail-on", "nothing"], "invalid choice"),
        (["--provider", "cdua"], "--provider: expected cpu, cuda, tensorrt, openvino or a full name"),
        (["-o", "/nowhere/page.html"], "expected a file in an existing folder"),
    ],
)
def test_wrong_arguments_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(EXAMPLE / "digits"), *flags]) == 2

    assert message in capsys.readouterr().err


def test_wrong_names_of_inputs_are_named(run: Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", picture=np.zeros((3, 1, 8, 8), np.float32))

    done = run(EXAMPLE / "digits", "--inputs", tmp_path / "data.npz")

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "array 'picture' is not an input of the model, whose inputs are image" in line


def test_interruption_of_the_measurement_is_one_line(tmp_path: Path) -> None:
    """The command runs on a terminal, which shows its progress."""
    path = builders.mlp(tmp_path / "m.onnx", inputs=1024, hidden=4096, outputs=1024)
    command = [sys.executable, "-m", "ortserve", "inspect", str(path), "--batch", "1,500000", "--seconds", "3600"]
    child, terminal = pty.fork()
    if not child:
        os.execv(command[0], command)
    said = b""
    while b"measuring memory" not in said:
        said += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
        while more := os.read(terminal, 4096):
            said += more
    os.close(terminal)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert b"ortserve inspect: interrupted" in said
    assert b"Traceback" not in said


@pytest.fixture(scope="module")
def host_cuda() -> dict[str, str]:
    try:
        return environment_on_host_memory(pace="late", devices="1")
    except UnavailableError as error:
        pytest.skip(f"ONNX Runtime's package for GPUs cannot be had here: {error}")


def test_graphs_are_captured_where_cuda_is(inspected: Inspected, host_cuda: dict[str, str], tmp_path: Path) -> None:
    path = builders.identity(tmp_path / "m.onnx")

    found = inspected(path, "--provider", "cuda", "--batch", "1", env=host_cuda)

    replay = found["replay"]
    assert (replay["source"], replay["possible"]) == ("captured", True)
    assert replay["captured"][0] == 1
    (on_cuda,) = (one for one in found["placement"] if one["provider"] == CUDA)
    assert on_cuda["nodes"] == {CUDA: 1}


def test_nodes_and_copies_beside_cuda_are_named(
    inspected: Inspected, host_cuda: dict[str, str], tmp_path: Path
) -> None:
    flattens = inspected(patterns.flattens(tmp_path / "flattens.onnx"), "--no-run", env=host_cuda)
    branch = inspected(patterns.branch(tmp_path / "branch.onnx"), "--no-run", env=host_cuda)

    (on_cuda,) = (one for one in flattens["placement"] if one["provider"] == CUDA)
    assert on_cuda["operators"][CPU] == {"Gather": 1, "Concat": 1}
    assert on_cuda["elsewhere"] == f"{CPU}: Gather 'batch', Concat 'target'"
    assert "nodes_elsewhere" in {finding["kind"] for finding in flattens["findings"]}
    broken = {one["name"]: one["nodes"] for one in branch["replay"]["conditions"] if one["fails_because"]}
    assert branch["replay"]["source"] == "placed"
    assert broken["no_control_flow"] == ["If 'decide'"]
    assert broken["no_copies"] == ["MemcpyToHost 'Memcpy'"]
