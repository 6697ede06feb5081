"""Devices for tests: a GPU where there is one, and host memory in its place, so that the tests themselves are tried."""

from functools import cache

import onnxruntime as ort
import pytest

from device_models import Place
from ortserve.engine.device.cuda import CudaDevice
from ortserve.engine.device.host import HostDevice, Pace
from ortserve.engine.provider_options import CPU, CUDA


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


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    """Host memory, and the first GPU."""
    if request.param == "host":
        return Place(CPU, lambda: HostDevice(pace=Pace.ANY), 500)
    if problem := why_no_gpu():
        pytest.skip(problem)
    return Place(CUDA, lambda: CudaDevice(0), 100_000)


@pytest.fixture
def gpu() -> Place:
    """The first GPU."""
    if problem := why_no_gpu():
        pytest.skip(problem)
    return Place(CUDA, lambda: CudaDevice(0), 100_000)
