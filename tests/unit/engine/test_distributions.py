"""The installed distribution of ONNX Runtime, and whether it can serve."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ortserve.engine.distributions import installed_runtimes, runtime_problem


def test_installed_distributions_are_found_by_their_metadata(
    install: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    assert installed_runtimes() == {}

    install("onnxruntime-gpu")
    assert installed_runtimes() == {"onnxruntime-gpu": "9.9.9"}

    install("onnxruntime")
    assert installed_runtimes() == {"onnxruntime": "9.9.9", "onnxruntime-gpu": "9.9.9"}


def test_distribution_behind_another_folder_of_the_search_path_is_ignored(
    install: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a package for GPUs in a folder of PYTHONPATH, on a machine that has the one for CPUs."""
    install("onnxruntime")
    own = tmp_path / "own"
    (own / "onnxruntime_gpu-9.9.8.dist-info").mkdir(parents=True)
    (own / "onnxruntime_gpu-9.9.8.dist-info" / "METADATA").write_text("Name: onnxruntime-gpu\nVersion: 9.9.8\n")
    monkeypatch.setattr(sys, "path", [str(own), str(tmp_path / "site-packages")])
    assert installed_runtimes() == {"onnxruntime-gpu": "9.9.8"}


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-gpu"])
def test_one_distribution_can_serve(name: str) -> None:
    assert runtime_problem([name]) is None


def test_both_distributions_together_are_rejected_with_a_hint() -> None:
    problem = runtime_problem(["onnxruntime", "onnxruntime-gpu"])

    assert problem is not None
    assert "pip uninstall onnxruntime onnxruntime-gpu" in problem
    assert "pip install 'ortserve[gpu]'" in problem


def test_missing_distribution_is_rejected_with_a_hint() -> None:
    problem = runtime_problem([])

    assert problem is not None
    assert "pip install 'ortserve[cpu]'" in problem
