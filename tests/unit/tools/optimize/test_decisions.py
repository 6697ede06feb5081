"""The steps that are kept, the nodes that need FP32, and the remaining nodes after fusions."""

import errno
import os
from collections.abc import Collection
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from onnx import TensorProto, helper

from models import patterns
from ortserve.core.agreement import Agreement, ErrorBound, OutputError
from ortserve.model_file.reading import read_model
from ortserve.tools.compare.result import ComparedModel, CompareResult
from ortserve.tools.optimize.checking import Checked, Look
from ortserve.tools.optimize.findings import find
from ortserve.tools.optimize.pipeline import Draft, Step, judge, keep_arrays, run_steps
from ortserve.tools.optimize.precision import search
from ortserve.tools.optimize.recognition import almost_fused, fused_operators
from ortserve.tools.optimize.result import Shape
from ortserve.tools.speed import Timed
from ortserve.tools.subject import Subject
from scarcity import few_descriptors, files_of_at_most


def look(nodes: int = 10, run: int | None = 10, nbytes: int = 100_000) -> Look:
    return Look(Shape(nodes, run, nbytes), (), {}, {}, (), (), "CPUExecutionProvider")


def step(*, is_requested: bool = False) -> Step:
    return Step("step", {}, ErrorBound("relative", 1e-4), is_requested)


def checked(after: Look, error: float = 0.0, ratio: float = 1.0) -> Checked:
    return Checked(after, Agreement(32, (OutputError("y", error, error, error, 0),)), ratio)


@pytest.mark.parametrize(
    ("after", "error", "ratio", "is_kept", "reason"),
    [
        (look(5, 5), 0.0, 1.0, True, "nodes to run: 10 → 5"),
        (look(5, 5), 2e-4, 1.0, False, "relative error 0.0002 exceeds 0.0001"),
        (look(5, 5), 0.0, 0.5, False, "slower: 0.500 times as fast"),
        (look(5, 11), 0.0, 2.0, False, "more nodes to run: 10 → 11"),
        (look(5, 10), 0.0, 1.0, True, "fewer nodes in the file, but the same number runs"),
        (look(5, None), 0.0, 1.0, True, "nodes to run: 10 → 5"),
        (look(5, 10, 150_000), 0.0, 1.0, False, "a larger file"),
        (look(nbytes=90_000), 0.0, 1.0, True, "a smaller file"),
        (look(), 0.0, 1.0, False, "no improvement"),
    ],
)
def test_steps_are_kept_for_what_they_gain(after: Look, error: float, ratio: float, is_kept: bool, reason: str) -> None:
    verdict = judge(step(), look(), checked(after, error, ratio))
    assert (verdict.is_kept, verdict.reason) == (is_kept, reason)


def test_steps_that_were_asked_for_only_need_a_small_error() -> None:
    asked = step(is_requested=True)
    assert judge(asked, look(), checked(look(99, 99, 10**6), ratio=0.1)).is_kept
    assert not judge(asked, look(), checked(look(), error=1)).is_kept


@pytest.mark.parametrize("inputs", [None, Path("data.npz")])
def test_only_synthetic_inputs_are_called_so(inputs: Path | None) -> None:
    """This holds whatever else the comparison notes, such as a busy machine."""
    timed = Timed(Subject("m", Path("m.onnx")))
    model = ComparedModel("m", None, "m.onnx", "", 0, 0, "CPUExecutionProvider", 1, None)
    compared = CompareResult(
        reference=model,
        candidate=model,
        inputs="",
        rows=1,
        agreement=Agreement(32, ()),
        reference_speed=None,
        speed=None,
        notes=("busy",),
    )
    found = find(look(), Draft(Path("m.onnx"), look(), timed, inputs), compared, None, None)
    assert [finding.kind for finding in found] == ([] if inputs else ["synthetic_inputs"])


NAMES = [f"n{number}" for number in range(64)]


def errors_of(bad: Collection[str], calls: list[int], each: float = 1e-6) -> object:
    def error_of(half: Collection[str]) -> float:
        calls.append(len(half))
        return each * len(half) + sum(0.1 for name in half if name in bad)

    return error_of


@pytest.mark.parametrize("delicate", [(), ("n3", "n40"), ("n3", "n40", "n50", "n63")])
def test_the_search_finds_the_nodes_that_need_fp32(delicate: Collection[str]) -> None:
    calls: list[int] = []
    half, reasons = search(NAMES, delicate, errors_of({"n3", "n40"}, calls), 0.01, 40)  # type: ignore[arg-type]
    assert half == {*NAMES} - {"n3", "n40"}
    assert reasons.keys() == {"n3", "n40"}
    assert len(calls) <= 2 + 4 * 7


def test_a_search_that_runs_out_of_trials_is_within_the_bound_nevertheless() -> None:
    calls: list[int] = []
    error_of = errors_of(NAMES[::2], calls)
    half, reasons = search(NAMES, (), error_of, 0.01, 10)  # type: ignore[arg-type]
    assert len(calls) == 10
    assert error_of(half) <= 0.01  # type: ignore[operator]
    assert half | reasons.keys() == {*NAMES}


def test_fused_operators_are_those_that_stand_for_several() -> None:
    before = {"LayerNormalization": 3, "com.microsoft.BiasGelu": 1, "Conv": 1}
    after = {"com.microsoft.SkipLayerNormalization": 2, "com.microsoft.BiasGelu": 2, "LayerNormalization": 1, "Relu": 9}
    after |= {"com.microsoft.nchwc.Conv": 1}
    assert fused_operators(before, after) == {"SkipLayerNormalization": 2, "BiasGelu": 1}


def test_an_attention_in_pieces_is_reported(tmp_path: Path) -> None:
    model = read_model(patterns.attention(tmp_path / "attention.onnx"))
    (left,) = almost_fused(model, model)
    assert left.kind == "attention"
    assert left.node.startswith("Softmax")
    assert left.difference == ""  # the pattern is as fusions expect it


def test_scaled_queries_are_the_first_difference(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["q", "shape"], ["q1"]),
        helper.make_node("Transpose", ["q1"], ["q2"], perm=[0, 2, 1, 3]),
        helper.make_node("Mul", ["q2", "scale"], ["q3"], "scale_queries"),
        helper.make_node("MatMul", ["q3", "k"], ["scores"], "product"),
        helper.make_node("Softmax", ["scores"], ["shares"], "softmax"),
        helper.make_node("MatMul", ["shares", "v"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("q", "k", "v", "scale")]
    path = tmp_path / "scaled.onnx"
    inputs.append(helper.make_tensor_value_info("shape", TensorProto.INT64, [4]))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    path.write_bytes(helper.make_model(helper.make_graph(nodes, "g", inputs, outputs)).SerializeToString())
    (left,) = almost_fused(read_model(path), read_model(path))
    assert left.difference == "queries: MatMul 'product' reads Mul 'scale_queries', expected Transpose"


def test_samples_keep_the_arrays_of_inputs_with_any_names(tmp_path: Path) -> None:
    samples = tmp_path / "samples.npz"
    with ZipFile(samples, "w") as archive:
        for name in ("file", "other"):
            with archive.open(f"{name}.npy", "w") as member:
                np.save(member, np.ones((2, 3), np.float32))

    with np.load(keep_arrays(samples, ["file"], tmp_path)) as kept:
        assert kept.files == ["file"]
        assert kept["file"].tolist() == [[1.0] * 3] * 2

    (tmp_path / "folder").mkdir()
    samples.rename(tmp_path / "folder" / "1.npz")
    (tmp_path / "folder" / ".2.npz").write_bytes(b"half")  # read_inputs leaves it out, too
    assert [file.name for file in keep_arrays(tmp_path / "folder", ["file"], tmp_path).iterdir()] == ["1.npz"]


def fill(source: Path, target: Path) -> tuple[str, ...]:
    with files_of_at_most(10):
        target.write_bytes(bytes(100))
    return ()


def try_to_fill(folder: Path) -> Draft:
    draft = Draft(folder / "m.onnx", look(), Timed(Subject("m", folder / "m.onnx")), None)
    return run_steps(draft, [Step("fill", {"": fill}, ErrorBound("relative", 1))], folder, lambda done, now: None)


@pytest.mark.usefixtures("importable", "preloaded_commands")
def test_a_step_that_meets_a_full_disk_is_dropped_and_its_error_kept(tmp_path: Path) -> None:
    done = try_to_fill(tmp_path)
    assert done.full_disk is not None
    assert done.full_disk.errno == errno.EFBIG
    assert [(step.is_kept, step.reason) for step in done.steps] == [
        (False, "failed: OSError: [Errno 27] File too large")
    ]


def test_a_step_whose_process_cannot_be_started_is_no_full_disk(tmp_path: Path) -> None:
    free = os.dup(0)
    os.close(free)
    with few_descriptors(free), pytest.raises(OSError, match="Too many open files"):
        try_to_fill(tmp_path)
