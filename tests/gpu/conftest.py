"""Devices for tests: a GPU where there is one, and host memory in its place, so that the tests themselves are tried."""

import os
from functools import cache

import onnxruntime as ort
import pytest

from device_models import STRICT_TRIAL, Place, StrictDevice
from ortserve.engine.device.cuda import CudaDevice
from ortserve.engine.device.host import Pace
from ortserve.engine.provider_options import CPU, CUDA
from ortserve.registry.capture_trial import CaptureTrials

EXACT = {"use_tf32": "0"}
"""TF32 differs from the CPU's FP32 by more than its tolerance."""


@cache
def why_no_gpu() -> str:
    """Why nothing can be tried on a GPU here; empty where it can."""
    if CUDA not in ort.get_available_providers():
        return "this ONNX Runtime has no CUDA"
    try:
        CudaDevice(0)
    except (ImportError, RuntimeError) as error:
        return str(error)
    ort.preload_dlls()  # else a library that is not found makes a session on the CPU
    return ""


def host_memory() -> Place:
    return Place(CPU, lambda: StrictDevice(pace=Pace.ANY), 500, CaptureTrials(STRICT_TRIAL, timeout_s=60))


def first_gpu() -> Place:
    if problem := why_no_gpu():
        if os.environ.get("ORTSERVE_TEST_GPU") == "1":
            pytest.fail(problem)  # somebody counts on these tests being run
        pytest.skip(problem)
    return Place(CUDA, lambda: CudaDevice(0), 100_000, CaptureTrials(timeout_s=100), EXACT)


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    """Host memory, and the first GPU."""
    return host_memory() if request.param == "host" else first_gpu()


@pytest.fixture
def host() -> Place:
    """Host memory, for what may take a GPU from the tests behind it."""
    return host_memory()


@pytest.fixture
def gpu() -> Place:
    """The first GPU."""
    return first_gpu()
