"""The script that measures GPUs runs on host memory with tiny models, which shows that it will run on a GPU machine."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import onnxruntime as ort
import pytest

SCRIPT = Path(__file__).parents[2] / "loadtests" / "gpu_figures.py"
without_cuda = pytest.mark.skipif(
    "CUDAExecutionProvider" in ort.get_available_providers(), reason="it needs ONNX Runtime without CUDA"
)


def run_script(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script. Its section of checks runs some of ``tests/gpu``, which this run of pytest includes anyway.

    ``path`` is a folder of modules that precede others.
    """
    command = [sys.executable, str(SCRIPT), "--scale", "tiny", *arguments]
    left_out = [f"--deselect=tests/gpu/test_gpu.py::test_{name}" for name in ("every", "model", "networks", "provider")]
    folders = filter(None, (path, os.environ.get("PYTHONPATH")))
    env = os.environ | {"PYTEST_ADDOPTS": " ".join(left_out), "PYTHONPATH": os.pathsep.join(folders)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = (
        "1"  # the checks need no plugin; schemathesis alone takes a second to import
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """The column names and lines of each table."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        found.append((head, lines))
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of all sections on host memory."""
    folder = tmp_path_factory.mktemp("figures")
    out = folder / "figures.md"
    for module in ("httpx", "tritonclient"):  # a GPU machine may lack packages that other tests need
        (folder / f"{module}.py").write_text(f"raise ImportError('no {module} here')")
    run = run_script("--device", "host", "--out", str(out), path=str(folder))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == out.read_text()
    return run.stdout


def test_every_section_runs_on_host_memory_and_shows_goals(report: str) -> None:
    assert "FAILED" not in report
    assert " passed, " in report
    assert "host memory in the place of a GPU: the figures mean nothing" in report
    goals: list[tuple[str, str, str]] = []
    for columns, lines in tables(report):
        place = columns.index("goal")
        assert columns[place + 1] == ""
        for line in lines:
            assert len(line) == len(columns)
            figure, goal, verdict = line[place - 1 : place + 2]
            goals.append((columns[place - 1], line[0].split(",")[0], goal))
            is_met = goal != "none" and float(figure) >= float(goal.removeprefix("≥ "))
            assert verdict == ("" if goal == "none" else "met" if is_met else "missed")
    assert Counter(goals) == {
        ("run ÷ replay", "MLP of 2 layers", "none"): 3,
        ("run ÷ replay", "MLP of 4 layers", "≥ 1.50"): 3,
        ("run ÷ replay", "encoder of 1 layers", "≥ 1.50"): 8,
        ("served ÷ bare", "as ResNet-50", "≥ 0.90"): 2,
        ("served ÷ bare", "as BERT base", "≥ 0.95"): 2,
        **{("slower alone ÷ two at a time", rows, "≥ 0.90"): 1 for rows in "124"},
    }


def test_overlap_is_the_ratio_of_the_slower_half_to_both(report: str) -> None:
    columns, lines = tables(report)[-1]
    assert len(lines) == 3
    for line in lines:
        figures = dict(zip(columns, line, strict=True))
        alone = max(float(figures["copying alone µs"]), float(figures["computing alone µs"]))
        expected = pytest.approx(alone / float(figures["two at a time µs"]), rel=0.1)  # the ratio of rounded figures
        assert float(figures["slower alone ÷ two at a time"]) == expected


@without_cuda
def test_failed_section_shows_its_reason_and_later_ones_are_written(tmp_path: Path) -> None:
    out = tmp_path / "figures.md"
    run = run_script("--device", "cuda", "--out", str(out))
    assert run.returncode == 1
    head, checks, server, *others = out.read_text().split("\n## ")
    assert "a GPU without properties from cupy" in head
    assert "\nFAILED: RuntimeError: pytest ended with 1\n" in checks, "no test may be skipped there"
    assert len(others) == 3
    for section in (server, *others):
        assert "none of cuda can be used" in section.partition("FAILED: ")[2]
    assert others[0].count("| FAILED: ") == 4
    assert "| encoder of 1 layers, FP16 | FAILED: " in others[0], "a model that fails leaves the others their turns"


def test_sections_stay_within_the_time_budget(tmp_path: Path) -> None:
    out = tmp_path / "figures.md"
    run = run_script("--device", "host", "--budget-s", "0.2", "--out", str(out))
    assert run.returncode == 1
    assert len(re.findall(r"\n## [^\n]+\n\n(?:```text\n)?\nFAILED: its time of \d s was over\n", out.read_text())) == 5
