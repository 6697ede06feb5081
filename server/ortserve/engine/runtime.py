"""The process-wide state of ONNX Runtime: plug-in execution providers, the shared thread pool, the shared arena.

The state belongs to the process and cannot be undone while sessions exist.
"""

import ctypes
import importlib
import importlib.util
import pkgutil
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from ortserve.engine.ort_errors import ORT_ERRORS, without_paths
from ortserve.engine.process_limits import core_budget
from ortserve.engine.provider_options import CUDA, GPU_PROVIDERS, TENSORRT
from ortserve.errors import invalid_input

_PACKAGE_PREFIX: Final = "onnxruntime_ep_"
"""The name prefix of packages of plug-in providers, which have ``get_library_path`` and ``get_ep_names``."""

_PACKAGE_ERRORS: Final[tuple[type[Exception], ...]] = (ImportError, AttributeError, OSError, *ORT_ERRORS)
_LIBRARY: Final = "library_path"
"""The key of a plug-in's library in the metadata of its devices."""

_LIBRARIES: Final = Path(ort.__file__).parent / "capi"
_LIBRARY_OF: Final = {CUDA: "libonnxruntime_providers_cuda.so", TENSORRT: "libonnxruntime_providers_tensorrt.so"}
_TENSORRT_PACKAGE: Final = "tensorrt_libs"
"""The folder of NVIDIA's package ``tensorrt-cu13-libs``, on which ``tensorrt-cu13`` depends."""
_TENSORRT_LIBRARIES: Final = ("libnvinfer.so.10", "libnvonnxparser.so.10")  # the parser needs the first one
_MISSING: Final = re.compile(r"([^\s/:]+): cannot open shared object file")
"""The message of the dynamic loader about a missing dependency."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The availability of one execution provider.

    Attributes:
        devices: The devices of a plug-in; empty if it has none, and for a built-in provider, which sessions select by
            name.
        problem: The reason why the provider cannot be used; empty if it can.
    """

    devices: tuple[ort.OrtEpDevice, ...] = ()
    problem: str = ""


def preload_libraries(name: str) -> None:
    """Load the libraries that a GPU provider needs from NVIDIA's Python packages, if these are installed.

    Otherwise ONNX Runtime finds only libraries in the search path of the dynamic loader, and logs each missing one.
    """
    if name in GPU_PROVIDERS and name in ort.get_available_providers():
        with redirect_stdout(sys.stderr):  # it prints what it does not find, but a command may print JSON
            ort.preload_dlls()
        if name == TENSORRT:
            _preload_tensorrt()


def _preload_tensorrt() -> None:
    """Load the libraries of TensorRT's package, which ``preload_dlls`` omits."""
    package = importlib.util.find_spec(_TENSORRT_PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package else ():
        for library in _TENSORRT_LIBRARIES:
            with suppress(OSError):  # another version, or a library that it needs is missing: the provider reports it
                ctypes.CDLL(str(Path(folder) / library))


def loader_problem(name: str, folder: Path = _LIBRARIES) -> str:
    """The error of the dynamic loader for a built-in provider's library; empty if it loads or is not a separate file.

    ONNX Runtime reports this error only in its log. ``folder`` holds the libraries of providers.
    """
    if name not in _LIBRARY_OF:  # part of ONNX Runtime's own library, or a plug-in
        return ""
    try:
        ctypes.CDLL(str(folder / _LIBRARY_OF[name]))
    except OSError as error:
        return str(error)
    return ""


def missing_library(name: str, folder: Path = _LIBRARIES) -> str:
    """A clause that names the missing library of a built-in provider; empty if none is known to be missing."""
    missing = _MISSING.match(loader_problem(name, folder))
    return f"; the library {missing[1]} is missing here" if missing else ""


def plugin_names() -> tuple[str, ...]:
    """The execution providers of installed plug-in packages. Does not register them; omits unusable packages."""
    found: list[str] = []
    for package in _packages():
        with suppress(*_PACKAGE_ERRORS):
            found += _names(importlib.import_module(package))
    return tuple(found)


class Runtime:
    """The process's ONNX Runtime. Create one per process. Threads that load models call its methods."""

    def __init__(self, libraries: Sequence[Path] = (), *, global_threads: bool = False) -> None:
        """Register plug-in libraries, and create a thread pool for all sessions if it is requested.

        Raises:
            ServeError: invalid_input: a library cannot be used.
        """
        # Lines of ONNX Runtime's own would not be JSON where the log is. Failures are raised, too.
        ort.set_default_logger_severity(4)
        self.libraries: Final = tuple(libraries)
        self._registered: set[Path] = set()
        """The resolved paths of registered libraries."""
        for library in libraries:
            try:
                self._register(str(library), library)
            except ORT_ERRORS as error:
                reason = without_paths(str(error))
                raise invalid_input(f"execution_provider_libraries: '{library}' cannot be used: {reason}") from error
        self.has_global_threads: Final = global_threads
        """Whether all sessions share one thread pool. Then ONNX Runtime rejects sessions with threads of their own."""
        if global_threads:
            ort.set_global_thread_pool_sizes(core_budget(), 1)
        self._has_shared_arena = False
        self._changing = threading.Lock()

    def offer(self, name: str) -> Offer:
        """The availability of a provider, by its full name. Registers the plug-in package that contains it.

        A package that names ``OpenVINOExecutionProvider`` may also contain ``OpenVINOExecutionProvider.AUTO``, which is
        visible only after registration. A session must not select a plug-in by name: ONNX Runtime would silently create
        a session on the CPU.
        """
        with self._changing:
            return self._offer(name)

    def _offer(self, name: str) -> Offer:
        if devices := _devices(name):  # check first: ONNX Runtime lists names of plug-ins among its own providers, too
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
                problem = f"finds no device that it supports, according to the package {package}"
        devices = _devices(name)
        return Offer(devices=devices, problem="" if devices else problem)

    def _register(self, name: str, library: Path) -> None:
        """Register once: a second registration fails, or lists the library's devices again for another name."""
        whole = library.resolve()
        if whole not in self._registered:
            ort.register_execution_provider_library(name, str(library))
            self._registered.add(whole)

    def share_arena(self) -> None:
        """Create the arena that sessions may share, once."""
        with self._changing:
            if not self._has_shared_arena:
                memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
                ort.create_and_register_allocator(memory, None)
                self._has_shared_arena = True


def _devices(name: str) -> tuple[ort.OrtEpDevice, ...]:
    """The devices of a plug-in. Built-in providers have devices, too, but no library."""
    return tuple(device for device in ort.get_ep_devices() if device.ep_name == name and _LIBRARY in device.ep_metadata)


def _packages() -> list[str]:
    """The installed packages of plug-in providers."""
    return sorted(found.name for found in pkgutil.iter_modules() if found.name.startswith(_PACKAGE_PREFIX))


def _names(package: Any) -> Sequence[str]:
    names: Sequence[str] = package.get_ep_names() if hasattr(package, "get_ep_names") else [package.get_ep_name()]
    return names
