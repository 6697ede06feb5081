"""``ortserve optimize`` on real models and a repository, with refusals, and without leftover files.

The command runs in the test's process, which saves a second of imports; its steps are processes.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from models import builders
from ortserve.cli.main import main
from ortserve.core.dtypes import DataType
from ortserve.tools.optimize import command as optimize
from ortserve.tools.optimize.pipeline import run_steps
from scarcity import files_of_at_most
from servers import LOOK_S

pytestmark = pytest.mark.usefixtures("preloaded_commands")

CORPUS = Path(__file__).parents[1] / "rows" / "corpus"
FAST = ("--seconds", "0", "--skip", "fold", "--skip", "slim", "--skip", "share")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ortserve", "optimize", *map(str, arguments)]


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command. The output includes that of libraries."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        words = ["optimize", *map(str, arguments)]
        status = main(words)
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return run


def outputs(path: Path, feeds: dict[str, np.ndarray], level: str = "ORT_ENABLE_ALL") -> list[Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    return list(ort.InferenceSession(str(path), options).run(None, feeds))


def test_attentions_of_a_real_exporter_are_fused_and_equal(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"

    done = run(
        CORPUS / "transformers_bert.onnx", "-o", out, "--json", "--seconds", "1", "--skip", "slim", "--skip", "share"
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema"] == "ortserve.optimize/1"
    assert result["fused"]["SkipLayerNormalization"] == 2
    assert result["after"]["nodes_run"] < result["before"]["nodes_run"] / 1.2
    steps = {step["name"]: step for step in result["steps"]}
    assert steps["fusions"]["is_kept"]
    assert steps["fusions"]["error"] < 1e-4
    assert result["speed"]["ratio"]["value"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.onnx", "out.provenance.json"]
    provenance = json.loads((tmp_path / "out.provenance.json").read_text())
    assert provenance["model"]["nbytes"] == out.stat().st_size
    assert provenance["figures"]["steps"].startswith("fusions")
    model = onnx.load(out)
    assert sum(node.op_type == "SkipLayerNormalization" for node in model.graph.node) == 2
    random = np.random.default_rng(0)
    for session_input in ort.InferenceSession(str(out)).get_inputs():
        assert session_input.type == "tensor(int64)"
    names = [one.name for one in model.graph.input]
    feeds = {name: random.integers(0, 2, (3, 7)) for name in names}
    for expected, got in zip(outputs(CORPUS / "transformers_bert.onnx", feeds), outputs(out, feeds), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_a_fusion_is_kept_that_adds_nodes_to_the_file_and_leaves_fewer_to_run(run: Run, tmp_path: Path) -> None:
    for attempt in range(3):
        done = run(CORPUS / "dynamo_windows.onnx", "-o", tmp_path / f"out{attempt}.onnx", "--json", *FAST)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        (fusions,) = result["steps"]
        if not fusions.get("reason", "").startswith("slower: "):  # as it may be measured beside other work
            break
    assert fusions["is_kept"], fusions
    assert result["after"]["nodes"] > result["before"]["nodes"]
    assert result["after"]["nodes_run"] < result["before"]["nodes_run"]
    assert result["fused"]["MultiHeadAttention"] == 1


def test_a_half_precision_model_saved_for_this_machine_becomes_a_version(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "cnn" / "1"
    folder.mkdir(parents=True)
    source = Path(shutil.copy(CORPUS / "torch_cnn.onnx", folder / "model.onnx"))

    done = run(tmp_path / "models" / "cnn", "--publish", "--precision", "fp16", "--level", "all", "--json", *FAST)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [step["name"] for step in result["steps"]] == ["precision", "level"]
    assert result["delivered"]["version"] == 2
    assert {finding["kind"] for finding in result["findings"]} >= {"not_portable"}
    made = folder.parent / "2" / "model.onnx"
    assert "only for this version of ONNX Runtime" in (made.parent / "provenance.json").read_text()
    (value,) = onnx.load(source).graph.input
    shape = [dim.dim_value or 3 for dim in value.type.tensor_type.shape.dim]
    feeds = {value.name: np.random.default_rng(0).standard_normal(shape, np.float32)}
    again, plain = outputs(made, feeds), outputs(made, feeds, "ORT_DISABLE_ALL")
    for expected, repeated, loaded in zip(outputs(source, feeds), again, plain, strict=True):
        np.testing.assert_array_equal(repeated, loaded)
        assert 0 < np.abs(loaded - expected).max() <= 0.01 * np.abs(expected).max()


def test_a_copy_of_the_source_is_written_but_not_published(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "cnn" / "1"
    folder.mkdir(parents=True)
    source = Path(shutil.copy(CORPUS / "torch_mlp.onnx", folder / "model.onnx"))

    done = run(tmp_path / "models" / "cnn", "--publish", "-o", tmp_path / "out.onnx", "--json", *FAST, "--seconds", "1")

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not any(step["is_kept"] for step in result["steps"])
    assert (tmp_path / "out.onnx").read_bytes() == source.read_bytes()
    copied, unpublished = result["delivered"]["notes"]
    assert "out.onnx is a copy of the source" in copied
    assert "nothing is published" in unpublished
    assert (result["speed"], result["agreement"]["outputs"][0]["cosine"]) == (None, 0)
    assert [path.name for path in folder.parent.iterdir()] == ["1"]


@pytest.mark.parametrize("fixed", [(), ("--dim", "n=2")])
def test_inputs_may_have_what_pruned_outputs_needed(run: Run, tmp_path: Path, fixed: tuple[str, ...]) -> None:
    nodes = [onnx.helper.make_node("Relu", ["x"], ["a"]), onnx.helper.make_node("Relu", ["z"], ["b"])]
    ends = {name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4]) for name in "xzab"}
    graph = onnx.helper.make_graph(nodes, "two", [ends["x"], ends["z"]], [ends["a"], ends["b"]])
    source, data = tmp_path / "two.onnx", tmp_path / "data.npz"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), source)
    shape = (5, 2, 4) if fixed else (5, 4)
    np.savez(data, x=np.ones(shape, np.float32), z=np.ones(shape, np.float32))

    done = run(source, "-o", tmp_path / "out.onnx", "--outputs", "a", *fixed, "--inputs", data, "--json", *FAST)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["inputs"] == "data.npz: 5 samples"
    (kept,) = onnx.load(tmp_path / "out.onnx").graph.input
    assert kept.name == "x"
    assert kept.type.tensor_type.shape.dim[0].dim_value == (2 if fixed else 0)


def broken(path: Path) -> Path:
    """A model whose node reads a value that no node produces."""
    model = onnx.load(CORPUS / "torch_cnn.onnx")
    model.graph.node[0].input[0] = "nowhere"
    onnx.save(model, path)
    return path


def of_unknown_operators(path: Path) -> Path:
    """A model whose library of operators ONNX Runtime lacks."""
    model = onnx.load(CORPUS / "torch_cnn.onnx")
    model.graph.node[0].domain = "nowhere"
    model.opset_import.append(onnx.helper.make_opsetid("nowhere", 1))
    onnx.save(model, path)
    return path


def half(path: Path) -> Path:
    """A model without FP32 numbers."""
    return builders.identity(path, DataType.FP16)


@pytest.mark.parametrize(
    ("make", "arguments", "status", "problem"),
    [
        (broken, (), 2, "/source.onnx: the model fails the checker of onnx"),
        (of_unknown_operators, (), 2, "/source.onnx: ONNX Runtime cannot load the model"),
        (builders.not_onnx, (), 2, "expected an ONNX model"),
        (builders.scalar_sum, ("--outputs", "z"), 2, "optimize: --outputs: expected outputs out of "),
        (builders.refuses_synthetic, ("--level", "basic"), 2, "optimize: the model rejects synthetic inputs"),
        (builders.scalar_sum, ("--precision", "bf16"), 1, "cannot run on this machine, so it cannot be checked"),
        (half, ("--precision", "fp16"), 1, "--precision fp16: no node computes with fp32 numbers"),
    ],
)
def test_rejected_models_leave_no_files(
    run: Run, tmp_path: Path, make: Any, arguments: tuple[str, ...], status: int, problem: str
) -> None:
    source = make(tmp_path / "source.onnx")
    done = run(source, "-o", tmp_path / "out.onnx", *FAST, *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert problem in done.stderr
    assert ".ortserve-" not in done.stderr  # the name of the hidden folder
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_the_steps_are_shown_although_the_disk_is_full(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimize, "_deliver", files_of_at_most(100)(optimize._deliver))
    done = run(CORPUS / "torch_mlp.onnx", "-o", tmp_path / "out.onnx", *FAST)
    assert (done.returncode, done.stderr) == (1, f"ortserve optimize: {tmp_path / 'out.onnx'}: File too large\n")
    assert "nodes that run" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_during_a_step_fails_the_command(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The space may suffice for a copy of the source afterwards."""
    steps, full = run_steps, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(optimize, "run_steps", lambda *arguments: replace(steps(*arguments), full_disk=full))
    done = run(CORPUS / "torch_mlp.onnx", "-o", tmp_path / "out.onnx", *FAST)
    assert (done.returncode, done.stderr) == (
        1,
        f"ortserve optimize: {tmp_path / 'out.onnx'}: No space left on device\n",
    )
    assert "nodes that run" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_opset_that_onnx_lacks_is_refused(run: Run, tmp_path: Path) -> None:
    done = run(builders.scalar_sum(tmp_path / "source.onnx"), "-o", tmp_path / "out.onnx", "--opset", "99")
    assert done.returncode == 2
    assert f"--opset: expected an integer from 1 to {onnx.defs.onnx_opset_version()}, got '99'" in done.stderr


def test_an_interruption_leaves_nothing_incomplete(tmp_path: Path) -> None:
    """The killed process, which opens the model, must not leave temporary files either."""
    (tmp_path / "temporary").mkdir()
    source = shutil.copy(CORPUS / "torch_cnn.onnx", tmp_path)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    arguments = command(source, "-o", tmp_path / "out.onnx")
    start = partial(subprocess.Popen, arguments, stderr=subprocess.PIPE, text=True, env=environment)
    with ExitStack() as stack:
        process = stack.enter_context(start())
        until = time.monotonic() + 60
        # Folders may vanish meanwhile; os.walk skips them.
        while not any("/ortserve-" in path for path, _, _ in os.walk(tmp_path)):
            assert time.monotonic() < until
            if process.poll() is not None:  # the folder came and went unseen on a busy machine
                assert process.returncode == 0
                for made in ("out.onnx", "out.provenance.json"):
                    (tmp_path / made).unlink()
                process = stack.enter_context(start())
            time.sleep(LOOK_S)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "ortserve optimize: interrupted\n"
    assert process.returncode == 130
    left = {path.name for path in tmp_path.rglob("*")} - {"torch_cnn.onnx", "temporary"}
    assert left in (set(), {"out.onnx", "out.provenance.json"})  # the signal may come while the model is moved
