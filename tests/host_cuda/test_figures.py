"""The script of the figures on ONNX Runtime's CUDA provider: it measures; its numbers are not checked."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import gpu_figures
import gpu_models


def multiplying(path: Path, *_: Any, dtype: type[np.floating] = np.float32, **__: Any) -> Path:
    """In the place of a network whose kernels are not here: rows times a matrix, three times."""
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
