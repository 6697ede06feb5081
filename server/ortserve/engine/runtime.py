"""ONNX Runtime as one process has it: plug-in execution providers, and what sessions share.

All of it is ONNX Runtime's own state, which belongs to the process and cannot be taken back while sessions live.
"""

import ctypes
import importlib
import pkgutil
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from ortserve.engine.cpu_budget import cpu_budget
from ortserve.engine.device.devices import Devices
from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.engine.provider_options import CUDA, GPU_PROVIDERS, TENSORRT
from ortserve.errors import invalid_input

_PACKAGE_PREFIX: Final = "onnxruntime_ep_"
"""What the packages of plug-in providers are called, each with ``get_library_path`` and ``get_ep_names``."""

_PACKAGE_ERRORS: Final[tuple[type[Exception], ...]] = (ImportError, AttributeError, OSError, *ORT_ERRORS)
_LIBRARY: Final = "library_path"
"""Where ONNX Runtime notes a plug-in's library, in what it tells of its devices."""


_LIBRARIES: Final = Path(ort.__file__).parent / "capi"
_LIBRARY_OF: Final = {CUDA: "libonnxruntime_providers_cuda.so", TENSORRT: "libonnxruntime_providers_tensorrt.so"}
_MISSING: Final = re.compile(r"([^\s/:]+): cannot open shared object file")
"""What the system's loader says of a library that another one needs."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What there is of one execution provider here.

    Attributes:
        devices: That a plug-in offers; empty for a built-in one, which is asked for by its name, and where there are
            none.
        problem: In words, why it cannot be used; empty where it can.
    """

    devices: tuple[ort.OrtEpDevice, ...] = ()
    problem: str = ""


def preload_libraries(name: str) -> None:
    """Load what a GPU's provider needs from NVIDIA's packages, where it is installed as such.

    Else ONNX Runtime would find only what the system's loader finds, and say no more than a line in its log.
    """
    if name in GPU_PROVIDERS and name in ort.get_available_providers():
        ort.preload_dlls()


def missing_library(name: str, folder: Path = _LIBRARIES) -> str:
    """That a library which a built-in provider needs is not found here, as the end of a sentence; empty where none is.

    ONNX Runtime writes it to its log alone. ``folder`` holds the libraries of providers.
    """
    try:
        ctypes.CDLL(str(folder / _LIBRARY_OF[name]))
    except KeyError:  # a provider that is a part of ONNX Runtime, or a plug-in
        return ""
    except OSError as error:
        missing = _MISSING.match(str(error))
        return f"; the library {missing[1]} is missing here" if missing else ""
    return ""


class Runtime:
    """The process's ONNX Runtime. Make one; all but the constructor is for the threads that load models."""

    def __init__(
        self, libraries: Sequence[Path] = (), *, global_threads: bool = False, devices: Devices | None = None
    ) -> None:
        """Register plug-in libraries, and make the thread pool of all sessions where there shall be one.

        Args:
            libraries: Of plug-ins.
            global_threads: Whether there shall be one.
            devices: That sessions may have buffers on; None for those that there are.

        Raises:
            ServeError: invalid_input, naming the library that cannot be used, and why.
        """
        self._registered: set[Path] = set()
        """Libraries of plug-ins, where they really are."""
        for library in libraries:
            try:
                self._register(str(library), library)
            except ORT_ERRORS as error:
                reason = without_paths(str(error))
                raise invalid_input(f"execution_provider_libraries: '{library}' cannot be used: {reason}") from error
        self.has_global_threads: Final = global_threads
        """Whether sessions have no threads of their own; then ONNX Runtime refuses those that want some."""
        if global_threads:
            ort.set_global_thread_pool_sizes(cpu_budget(), 1)
        self._has_shared_arena = False
        self._changing = threading.Lock()
        self.devices: Final = devices or Devices()
        """Where sessions may have buffers."""

    def offer(self, name: str) -> Offer:
        """What there is of a provider, by its full name; a plug-in package that has it is registered for it.

        One that names ``OpenVINOExecutionProvider`` may have ``OpenVINOExecutionProvider.AUTO``, too, of which it tells
        once it is registered. A plug-in must not be asked for by its name: ONNX Runtime would make a session on the
        CPU, and say nothing.
        """
        with self._changing:
            return self._offer(name)

    def _offer(self, name: str) -> Offer:
        if devices := _devices(name):  # first, because ONNX Runtime lists the names of plug-ins among its own
            return Offer(devices=devices)
        if name in ort.get_available_providers():
            preload_libraries(name)
            return Offer()
        problem = "is not offered by this ONNX Runtime"
        for package in _packages():
            try:
                module: Any = importlib.import_module(package)
                if not any(name == own or name.startswith(f"{own}.") for own in _names(module)):
                    continue
                self._register(package, Path(module.get_library_path()))
            except _PACKAGE_ERRORS as error:
                problem += f"; the package {package} cannot be used: {without_paths(str(error))}"
            else:
                problem = f"finds no device here that it supports, says the package {package}"
        devices = _devices(name)
        return Offer(devices=devices, problem="" if devices else problem)

    def _register(self, name: str, library: Path) -> None:
        """Once: ONNX Runtime refuses a name again, and lists the devices of a library again under another one."""
        whole = library.resolve()
        if whole not in self._registered:
            ort.register_execution_provider_library(name, str(library))
            self._registered.add(whole)

    def share_arena(self) -> None:
        """Have an arena that sessions may share."""
        with self._changing:
            if not self._has_shared_arena:
                memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
                ort.create_and_register_allocator(memory, None)
                self._has_shared_arena = True


def _devices(name: str) -> tuple[ort.OrtEpDevice, ...]:
    """Of a plug-in: what is built in has devices, too, but no library."""
    return tuple(device for device in ort.get_ep_devices() if device.ep_name == name and _LIBRARY in device.ep_metadata)


def _packages() -> list[str]:
    """The installed packages of plug-in providers."""
    return sorted(found.name for found in pkgutil.iter_modules() if found.name.startswith(_PACKAGE_PREFIX))


def _names(package: Any) -> Sequence[str]:
    names: Sequence[str] = package.get_ep_names() if hasattr(package, "get_ep_names") else [package.get_ep_name()]
    return names
