"""What may crash or hang, for a process of its own: using an execution provider, and asking NVML about GPUs.

``python -m ortserve.tools.doctor.trial provider NAME`` or ``… gpus`` writes one line of JSON behind ``verdict: ``.
``in_child`` is the other side.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from ortserve.config.session import SessionSettings
from ortserve.device.nvml import Gpu, open_library, visible_gpus
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.engine.provider_options import CUDA, TENSORRT
from ortserve.engine.providers import choose_provider
from ortserve.engine.runtime import loader_problem
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ServeError, invalid_input
from ortserve.model_file.reading import read_model
from ortserve.tools.doctor.result import GpuFacts, ProviderTrial

VERDICT: Final = "verdict: "
MODULE: Final = "ortserve.tools.doctor.trial"

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
"""The libraries that a provider loads, and the functions that tell their versions (from onnxruntime-gpu 1.31)."""

TINY_MODEL: Final = bytes.fromhex(
    "08083a430a110a01780a017812017922064d61744d756c120474696e795a130a0178120e0a0c080112080a0208020a020802"
    "62130a0179120e0a0c080112080a0208020a02080242040a001011"
)
"""A model of one operator, which every execution provider has: y = x · x, 2 x 2. ``onnx.helper`` made it."""

_FAILURES: Final[tuple[type[Exception], ...]] = (ServeError, *ORT_ERRORS)

_THROTTLING: Final = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Bits of ``nvmlDeviceGetCurrentClocksEventReasons`` in nvml.h."""


def in_child(arguments: Sequence[str], timeout_s: float, module: str = MODULE) -> dict[str, Any]:
    """Run a module in a process of its own. Returns its verdict, or ``{"problem": …}`` if it gave none in time."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        child = subprocess.run(  # noqa: S603 - this interpreter, and a module of this package
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"gave no result within {timeout_s:g} s"}
    except OSError as error:
        return {"problem": f"could not be tried in a process of its own: {error.strerror}"}
    verdicts = [line for line in child.stdout.splitlines() if line.startswith(VERDICT)]
    if verdicts:
        verdict: dict[str, Any] = json.loads(verdicts[-1].removeprefix(VERDICT))
        return verdict
    how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
    last = (child.stderr.strip().splitlines() or ["no output"])[-1]
    return {"problem": f"its process ended with {how}: {last[:500]}"}


def try_provider(name: str) -> ProviderTrial:
    """Run the tiny model on one execution provider, in this process."""
    problem = ""
    try:
        _run_tiny(name)
    except _FAILURES as error:
        sentence = loader_problem(name)
        problem = sentence if "cannot open shared object" in sentence else str(error)
    libraries = {soname: _library_version(soname, function) for soname, function in _LIBRARIES.get(name, {}).items()}
    return ProviderTrial(name, True, not problem, problem, libraries=libraries)


def _run_tiny(name: str) -> None:
    choice = choose_provider([name])
    file = os.memfd_create("tiny.onnx")  # no file system is written to
    try:
        os.write(file, TINY_MODEL)
        path = Path(f"/proc/self/fd/{file}")
        session = open_session(path, "tiny", SessionOptions(choice, 1, SessionSettings()), read_model(path))
        x = np.array([[1, 2], [3, 4]], np.float32)
        (y,) = session.run(None, {"x": x})
    finally:
        os.close(file)
    if not np.allclose(y, x @ x, rtol=0.02):
        raise invalid_input(f"expected {(x @ x).tolist()} from a MatMul, got {np.asarray(y).tolist()}")


def _library_version(soname: str, function: str) -> str:
    """The version of a shared library, or what the loader says about it."""
    try:
        library = ctypes.CDLL(soname)
    except OSError as error:
        return str(error)
    call = getattr(library, function, None) if function else None
    if call is None:
        return "found"
    if function.startswith("cud") and function != "cudnnGetVersion":
        number = ctypes.c_int(0)
        if status := call(ctypes.byref(number)):
            return f"found, but {function} fails with {status}"
        return f"{number.value // 1000}.{number.value % 1000 // 10}"
    call.restype = ctypes.c_size_t if function == "cudnnGetVersion" else ctypes.c_int
    version = int(call())
    major = 10000 if version >= 10000 else 1000
    return f"{version // major}.{version % major // 100}.{version % 100}"


def read_gpus(environment: Mapping[str, str], library: Any = None) -> tuple[list[GpuFacts], str]:
    """The GPUs that this process may use, and why NVML shows none. ``library`` replaces NVML's module."""
    library = open_library(library)
    if library is None:
        return [], "NVML cannot be used: the package nvidia-ml-py or NVIDIA's driver is missing"

    def ask(call: str, *arguments: Any) -> Any:
        try:
            return getattr(library, call)(*arguments)
        except Exception:  # noqa: BLE001 - its errors, and plain exceptions about versions
            return None

    found = []
    for number in range(ask("nvmlDeviceGetCount") or 0):
        handle = ask("nvmlDeviceGetHandleByIndex", number)
        found.append(Gpu(handle, str(ask("nvmlDeviceGetUUID", handle)), str(ask("nvmlDeviceGetName", handle))))
    visible = visible_gpus(found, environment)
    hidden = f"CUDA_VISIBLE_DEVICES hides all {len(found)}" if found and not visible else ""
    return [_gpu_facts(gpu, ask) for gpu in visible], hidden


def _gpu_facts(gpu: Gpu, ask: Any) -> GpuFacts:
    capability = ask("nvmlDeviceGetCudaComputeCapability", gpu.handle)
    memory = ask("nvmlDeviceGetMemoryInfo", gpu.handle)
    cuda, driver = ask("nvmlSystemGetCudaDriverVersion_v2"), ask("nvmlSystemGetDriverVersion")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu.handle) or 0
    persistence, partitions = ask("nvmlDeviceGetPersistenceMode", gpu.handle), ask("nvmlDeviceGetMigMode", gpu.handle)
    processes = ask("nvmlDeviceGetComputeRunningProcesses", gpu.handle)
    return GpuFacts(
        gpu.model,
        capability=f"{capability[0]}.{capability[1]}" if capability else None,
        memory_bytes=int(memory.total) if memory else None,
        used_bytes=int(memory.used) if memory else None,
        driver=str(driver) if driver else None,
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        persistence=None if persistence is None else bool(persistence),
        partitioned=None if partitions is None else bool(partitions[0]),
        processes=None if processes is None else len(processes),
        throttled_because=tuple(name for bit, name in _THROTTLING.items() if reasons & bit),
    )


def main(arguments: Sequence[str]) -> None:
    """Write the verdict."""
    verdict: dict[str, Any]
    if arguments[0] == "gpus":
        gpus, problem = read_gpus(os.environ)
        verdict = {"gpus": [asdict(gpu) for gpu in gpus], "problem": problem}
    else:
        verdict = asdict(try_provider(arguments[1]))
    sys.stdout.write(f"\n{VERDICT}{json.dumps(verdict)}\n")
    sys.stdout.flush()
    os._exit(0)  # a broken driver may hang the release of its resources


if __name__ == "__main__":
    main(sys.argv[1:])
