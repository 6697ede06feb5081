"""Reads versions and GPUs, and tries each execution provider in a process of its own."""

import ctypes
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from ortserve import __version__
from ortserve.config.session import SessionSettings
from ortserve.core.compiled import IS_COMPILED
from ortserve.device.nvml import Gpu, open_library, visible_gpus
from ortserve.engine.child_process import Failure, run_in_child
from ortserve.engine.distributions import installed_runtimes
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.engine.provider_options import AZURE, CUDA, TENSORRT
from ortserve.engine.providers import choose_provider
from ortserve.engine.runtime import loader_problem, plugin_names
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ServeError, invalid_input
from ortserve.model_file.reading import read_model
from ortserve.tools.console import progress
from ortserve.tools.doctor.result import GpuFacts, ProviderTrial, RuntimeFacts

_TRIAL_S: Final = 60.0
_PACKAGES: Final = ("numpy", "onnx", "protobuf", "grpcio", "cupy-cuda13x", "nvidia-ml-py", "tensorrt")

_FAILURES: Final[tuple[type[Exception], ...]] = (ServeError, *ORT_ERRORS)
_LIBRARIES: Final[Mapping[str, Mapping[str, str]]] = {
    CUDA: {
        "libcuda.so.1": "cuDriverGetVersion",
        "libcudart.so.13": "cudaRuntimeGetVersion",
        "libcublasLt.so.13": "",
        "libcublas.so.13": "",
        "libcurand.so.10": "",
        "libcufft.so.12": "",
        "libcudnn.so.9": "cudnnGetVersion",
    },
    TENSORRT: {"libnvinfer.so.10": "getInferLibVersion", "libnvonnxparser.so.10": ""},
}
"""The libraries that a provider of onnxruntime-gpu 1.31 loads, and the functions that return their versions."""

TINY_MODEL: Final = bytes.fromhex(
    "08083a430a110a01780a017812017922064d61744d756c120474696e795a130a0178120e0a0c080112080a0208020a020802"
    "62130a0179120e0a0c080112080a0208020a02080242040a001011"
)
"""A model of one operator that all execution providers have: y = x · x, 2 x 2. ``onnx.helper`` created it."""


def read_runtime() -> RuntimeFacts:
    """Try all execution providers, and read the GPUs from NVML."""
    offered = [name for name in dict.fromkeys((*ort.get_available_providers(), *plugin_names())) if name != AZURE]
    trials = []
    with progress("trying execution providers", len(offered)) as step:
        for number, name in enumerate(offered):
            step(number, f"trying {name}")
            trial = next(run_in_child(try_provider, [name], _TRIAL_S))
            if isinstance(trial, Failure):
                trial = ProviderTrial(name, True, False, f"its process {trial.reason}")
            trials.append(trial)
    absent = "not part of the installed ONNX Runtime"
    trials += [ProviderTrial(name, False, False, absent) for name in (CUDA, TENSORRT) if name not in offered]
    found = next(run_in_child(read_gpus, [dict(os.environ)], _TRIAL_S))
    gpus, gpu_problem = ([], f"the process that asked NVML {found.reason}") if isinstance(found, Failure) else found
    how = "compiled" if IS_COMPILED else "interpreted"
    versions = {"ortserve": f"{__version__}, {how}", "Python": platform.python_version()}
    installed = {each.name: each.version for each in metadata.distributions()}
    versions |= {name: installed[name] for name in _PACKAGES if name in installed}
    return RuntimeFacts(
        versions=versions,
        distributions=installed_runtimes(),
        build=ort.get_build_info().removeprefix("ORT Build Info: "),
        providers=tuple(trials),
        gpus=tuple(gpus),
        gpu_problem=gpu_problem,
    )


def try_provider(name: str) -> ProviderTrial:
    """Run the tiny model on one execution provider, in this process."""
    problem = ""
    try:
        run_tiny(name)
    except _FAILURES as error:
        sentence = loader_problem(name)
        problem = sentence if "cannot open shared object" in sentence else str(error)
    libraries = {soname: _library_version(soname, function) for soname, function in _LIBRARIES.get(name, {}).items()}
    return ProviderTrial(name, True, not problem, problem, libraries)


def run_tiny(name: str, *, has_global_threads: bool = False) -> None:
    """Open and run the tiny model in this process. Raises one of several errors if the execution provider cannot."""
    choice = choose_provider([name])
    file = os.memfd_create("tiny.onnx")  # in memory: doctor writes no files
    try:
        os.write(file, TINY_MODEL)
        path = Path(f"/proc/self/fd/{file}")
        options = SessionOptions(choice, 1, SessionSettings(), has_global_threads=has_global_threads)
        session = open_session(path, "tiny", options, read_model(path))
        x = np.array([[1, 2], [3, 4]], np.float32)
        (y,) = session.run(None, {"x": x})
    finally:
        os.close(file)
    if not np.allclose(y, x @ x, rtol=0.02):
        raise invalid_input(f"expected {(x @ x).tolist()} from a MatMul, got {np.asarray(y).tolist()}")


def _library_version(soname: str, function: str) -> str:
    """The version of a shared library, or the error of the loader."""
    try:
        library = ctypes.CDLL(soname)
    except OSError as error:
        return str(error)
    call = getattr(library, function, None) if function else None
    if call is None:
        return "found"
    if function.startswith("cu") and function != "cudnnGetVersion":
        number = ctypes.c_int(0)
        status = call(ctypes.byref(number))
        return f"found, but {function} fails with {status}" if status else _cuda_version(number.value)
    version = int(call())  # cuDNN 9 and TensorRT 10 encode versions alike
    return f"{version // 10_000}.{version % 10_000 // 100}.{version % 100}"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def read_gpus(environment: Mapping[str, str], library: Any = None) -> tuple[list[GpuFacts], str]:
    """The GPUs that this process may use, or why there are none. ``library`` replaces the module of NVML."""
    library = open_library(library)
    if library is None:
        return [], "NVML cannot be used: the package nvidia-ml-py or NVIDIA's driver is missing"

    def ask(call: str, *arguments: Any) -> Any:
        try:
            return getattr(library, call)(*arguments)
        except Exception:  # noqa: BLE001 - errors of NVML, and plain exceptions about versions
            return None

    handles = [ask("nvmlDeviceGetHandleByIndex", number) for number in range(ask("nvmlDeviceGetCount") or 0)]
    found = [Gpu(each, str(ask("nvmlDeviceGetUUID", each)), str(ask("nvmlDeviceGetName", each))) for each in handles]
    driver, cuda = ask("nvmlSystemGetDriverVersion"), ask("nvmlSystemGetCudaDriverVersion_v2")
    gpus = []
    for gpu in visible_gpus(found, environment):
        memory = ask("nvmlDeviceGetMemoryInfo", gpu.handle)
        facts = GpuFacts(
            name=gpu.model,
            capability=".".join(map(str, ask("nvmlDeviceGetCudaComputeCapability", gpu.handle) or ())) or None,
            memory_bytes=int(memory.total) if memory else None,
            used_bytes=int(memory.used) if memory else None,
            driver=driver,
            cuda=_cuda_version(cuda) if cuda else None,
        )
        gpus.append(facts)
    return gpus, f"CUDA_VISIBLE_DEVICES hides all {len(found)}" if found and not gpus else ""
