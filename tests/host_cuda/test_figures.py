"""The script of GPU figures on ONNX Runtime's CUDA provider: it completes; its numbers are not checked."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import gpu_figures
import gpu_models
import gpu_server


def multiplying(path: Path, *_: Any, dtype: type[np.floating] = np.float32, **__: Any) -> Path:
    """Replaces a network whose kernels are missing here: rows times a matrix, three times."""
    kind, width = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), 32
    weights = np.random.default_rng(0).standard_normal((width, width)) / width**0.5
    nodes = [helper.make_node("MatMul", [one, "w"], [other]) for one, other in (("x", "a"), ("a", "b"), ("b", "y"))]
    x, y = (helper.make_tensor_value_info(name, kind, ["batch", width]) for name in ("x", "y"))
    graph = helper.make_graph(nodes, "multiplying", [x], [y], [numpy_helper.from_array(weights.astype(dtype), "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.mark.parametrize(("section", "rows"), [("replay", 14), ("served", 4), ("overlap", 3)])
def test_every_section_measures_all_models(
    section: str, rows: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mlp", "encoder", "residual"):
        monkeypatch.setattr(gpu_models, name, multiplying)
    assert gpu_figures.run_section(section, "cuda", "tiny") == 0
    _, _, *lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == rows
    assert not [line for line in lines if "Error" in line]


def test_server_is_asked_over_both_protocols_and_by_gpu_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The substitute of the driver's library reports a constant for the memory."""
    monkeypatch.setattr(gpu_models, "encoder", multiplying)
    (tmp_path / "digits" / "1").mkdir(parents=True)
    multiplying(tmp_path / "digits" / "1" / "model.onnx")
    monkeypatch.setattr(gpu_server, "repository_path", lambda: tmp_path)
    assert gpu_figures.run_section("server", "cuda", "tiny") == 0
    memory, *answers, shared = capsys.readouterr().out.splitlines()
    assert re.match(
        r"- memory of the large model: (?!0\.00)\d+\.\d\d MB in the ledger, 0\.00 MB by the driver, ", memory
    )
    assert [line.partition(": 3 answers right")[0] for line in answers] == [
        f"- {model}, {protocol}" for model in ("digits", "large") for protocol in ("REST", "gRPC")
    ]
    assert shared.startswith("- CUDA shared memory: ")
