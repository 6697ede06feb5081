"""Devices for the tests: a GPU if there is one, and host memory, so that the tests run everywhere."""

import ctypes
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import onnxruntime as ort
import pytest

from device_models import Place, StrictDevice, strict_trials
from fakes.host_device import Pace
from ortserve.device.cuda import CudaDevice
from ortserve.engine.provider_options import CPU, CUDA, TENSORRT
from ortserve.engine.runtime import preload_libraries
from ortserve.registry.load.capture_trial import CaptureTrials

_TENSORRT = "libnvinfer.so.10"
EXACT = {"use_tf32": "0"}
"""TF32 differs from the CPU's FP32 by more than the tolerance."""


@cache
def why_no_gpu() -> str:
    """The reason why tests cannot use a GPU here; empty if they can."""
    if CUDA not in ort.get_available_providers():
        return "this ONNX Runtime has no CUDA"
    try:
        CudaDevice(0)
    except (ImportError, RuntimeError) as error:
        return str(error)
    ort.preload_dlls()  # without it, a missing library would silently select the CPU
    return ""


def host_memory() -> Place:
    return Place(CPU, lambda: StrictDevice(pace=Pace.ANY), 500, strict_trials())


def host_memory_with_one_graph_a_session() -> Place:
    trials = strict_trials(one_graph_per_session=True)
    return Place(CPU, lambda: StrictDevice(pace=Pace.ANY, one_graph_per_session=True), 500, trials)


def first_gpu() -> Place:
    if problem := why_no_gpu():
        if os.environ.get("ORTSERVE_TEST_GPU") == "1":
            pytest.fail(problem)  # the caller requires these tests to run
        pytest.skip(problem)
    # Fewer repetitions suffice on host memory, where the runtime overlaps runs and copies as well.
    times = 10_000 if "HOST_CUDA_PACE" in os.environ else 100_000
    return Place(CUDA, lambda: CudaDevice(0), times, CaptureTrials(timeout_s=100), EXACT)


def first_gpu_by_tensorrt(engines: Path) -> Place:
    """The first GPU with TensorRT. Its engines are built once and stored in this folder for later sessions."""
    gpu = first_gpu()
    preload_libraries(TENSORRT)
    try:
        ctypes.CDLL(_TENSORRT)
    except OSError as error:
        pytest.skip(f"there is no TensorRT: {error}")  # even if GPU tests are required
    cache = {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(engines)}
    return replace(gpu, provider=TENSORRT, trials=CaptureTrials(), options=cache)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of capture trials import ``support``.

    Replaces the fixture of ``tests/conftest.py``, without which ``loadtests/gpu_figures.py`` runs these tests.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


@pytest.fixture(params=["host", pytest.param("tensorrt", marks=pytest.mark.gpu)])
def one_graph_per_session(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Devices on which a session keeps a single graph: host memory, and the first GPU by TensorRT."""
    if request.param == "host":
        return host_memory_with_one_graph_a_session()
    return first_gpu_by_tensorrt(tmp_path / "engines")


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    """Host memory, and the first GPU."""
    return host_memory() if request.param == "host" else first_gpu()


@pytest.fixture
def host() -> Place:
    """Host memory, for tests that may leave a GPU unusable for later ones."""
    return host_memory()


@pytest.fixture
def gpu() -> Place:
    """The first GPU."""
    return first_gpu()
