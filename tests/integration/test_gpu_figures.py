"""The script that measures GPUs runs through, on host memory and with tiny models, so that a GPU finds it in order."""

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

SCRIPT = Path(__file__).parents[2] / "loadtests" / "gpu_figures.py"


def test_every_section_runs_on_host_memory(tmp_path: Path) -> None:
    out = tmp_path / "figures.md"
    command = [sys.executable, str(SCRIPT), "--device", "host", "--scale", "tiny", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ)
    assert run.returncode == 0, run.stdout + run.stderr
    told = out.read_text()
    assert "FAILED" not in told
    assert " passed, " in told
    assert "host memory in the place of a GPU: the figures mean nothing" in told
    assert told.count("| MLP of") == 6
    assert told.count("| encoder of") == 8
    assert told.count("| as ") == 4
    rows = [line for line in told.splitlines() if line.startswith("|")]
    assert len(rows) == 6 + 8 + 4 + 3 + 2 * 3


@pytest.mark.skipif(
    "CUDAExecutionProvider" in ort.get_available_providers(), reason="it needs ONNX Runtime without CUDA"
)
def test_a_section_that_cannot_run_says_why() -> None:
    command = [sys.executable, str(SCRIPT), "--only", "overlap", "--device", "cuda", "--scale", "tiny"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ)
    assert run.returncode == 1
    assert "FAILED: ServeError: execution_providers: none of cuda can be used" in run.stdout
