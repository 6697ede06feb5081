"""ONNX Runtime's GPU package on a machine without a GPU, with substitutes for NVIDIA's libraries.

There are two kinds of substitutes. Libraries of the first kind do nothing, which suffices to see which options a
provider accepts and in which spelling, because it reads them before it uses a GPU. The second kind is a CUDA runtime on
host memory (``host_cuda/runtime.cpp``), on which the CUDA provider opens sessions, copies, captures and replays.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from apart import CACHE, UnavailableError, installed_apart, keep, run_tool

_CONSTRAINTS: Final = Path(__file__).parents[2] / "constraints.txt"
(GPU_VERSION,) = re.findall(r"^onnxruntime-gpu==(.+)$", _CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
"""The version of the package. It may be older than the installed CPU package, because it is released later."""
_PIP: Final = ("--no-deps", "--only-binary=:all:", "--timeout=15", "--retries=1")
_NVML: Final = "nvidia-ml-py==13.595.45"
_HEADERS: Final = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
_HOST_CUDA: Final = Path(__file__).parents[1] / "host_cuda"
_SOURCES: Final = {
    "libcudart.so.13": "runtime.cpp",
    "libcublas.so.13": "cublas.cpp",
    "libcublasLt.so.13": "cublas.cpp",
    "libcuda.so.1": "driver.cpp",
    "libnvidia-ml.so.1": "nvml.cpp",
}
_UNVERSIONED: Final = {
    "cuTensor": "libcuda.so.1",
    "create": "libnvinfer.so.10",
    "getInfer": "libnvinfer.so.10",
    "getPlugin": "libnvinfer.so.10",
}
"""Libraries of functions without a symbol version, by prefix of the function's name."""
_SYSTEM: Final = ("GLIBC", "CXXABI", "GCC_", "ld-", "libstdc++", "libgcc", "libc.", "libm.", "libdl", "librt", "libpth")
_AN_OBJECT: Final = """
static long nothing(void) { return 0; }
static void *methods[256], *object[512] = {methods};
static void *an_object(void) { for (int i = 0; i < 256; i++) methods[i] = (void *)nothing; return object; }
"""
"""C source of an object that C++ accepts, all of whose methods do nothing."""


def environment_for_options(provider: str) -> dict[str, str]:
    """Environment of a process in which ``cuda`` or ``tensorrt`` finds libraries that do nothing.

    TensorRT's provider fails right after it has read its options, because CUDA is missing.

    Raises:
        UnavailableError: The package or the tools that build libraries are not available on this machine.
    """

    def make(folder: Path) -> None:
        for home, functions in _needed(_provider(provider)).items():
            answer = "(long)an_object()" if home.startswith("libnv") else "0"
            source = folder / "source.c"
            source.write_text(_AN_OBJECT + "".join(f"long {name}(void) {{ return {answer}; }}\n" for name in functions))
            _link(home, [source], folder)

    return _environment(_made(f"in-nvidias-place-{GPU_VERSION}-{provider}", make))


def environment_on_host_memory(**settings: str) -> dict[str, str]:
    """Environment of a process in which the CUDA provider, and the parts of cupy that the server uses, use host memory.

    Args:
        settings: ``pace`` (late, any or at_once) and ``devices``; see ``host_cuda/runtime.cpp``.

    Raises:
        UnavailableError: As in ``environment_for_options``.
    """
    headers = installed_apart(f"headers-of-{'-'.join(_HEADERS)}", *_PIP, *_HEADERS) / "nvidia" / "cu13" / "include"
    digest = hashlib.sha256()
    for source in sorted(set(_SOURCES.values())):
        digest.update((_HOST_CUDA / source).read_bytes())

    def make(folder: Path) -> None:
        needed = {"libnvidia-ml.so.1": list[str](), **_needed(_provider("cuda"))}
        # First the library that others are linked with.
        for home in sorted(needed, key=lambda home: home != "libcudart.so.13"):
            parts: list[Path] = []
            if home in _SOURCES:
                parts.append(folder / "source.o")
                flags = ["-c", "-O2", "-std=c++17", "-fPIC", "-isystem", str(headers)]
                run_tool(["g++", *flags, str(_HOST_CUDA / _SOURCES[home]), "-o", str(parts[0])])
            there = {
                line.split()[-1] for part in parts for line in _output("nm", str(part)).splitlines() if " T " in line
            }
            rest = folder / "rest.c"
            rest.write_text(
                "".join(f"int {name}(void) {{ return 801; }}\n" for name in needed[home] if name not in there)
            )
            _link(home, [*parts, rest], folder, with_runtime=home != "libcudart.so.13")

    libraries = _made(f"host-cuda-{GPU_VERSION}-{digest.hexdigest()[:12]}", make)
    variables = {f"HOST_CUDA_{name.upper()}": value for name, value in settings.items()}
    return _environment(libraries, _HOST_CUDA, installed_apart(_NVML, *_PIP, _NVML)) | variables


def _package() -> Path:
    """The folder to import the package from. It has no metadata that says that it is installed beside the CPU's."""
    whole = installed_apart(f"onnxruntime-gpu-{GPU_VERSION}", *_PIP, f"onnxruntime-gpu=={GPU_VERSION}")
    return _made(f"{whole.name}-alone", lambda folder: (folder / "onnxruntime").symlink_to(whole / "onnxruntime"))


def _provider(name: str) -> Path:
    return _package() / "onnxruntime" / "capi" / f"libonnxruntime_providers_{name}.so"


def _environment(libraries: Path, *folders: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(_package()), *map(str, folders), *sys.path]),
        "LD_LIBRARY_PATH": str(libraries),
        "ORT_DISABLE_TELEMETRY": "1",
    }


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """A folder that is built once per machine."""
    folder = CACHE / name
    if not folder.exists():
        if missing := [tool for tool in ("gcc", "g++", "nm", "readelf") if shutil.which(tool) is None]:
            raise UnavailableError(f"there is no {', '.join(missing)}")
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            whole = Path(scratch) / "whole"
            whole.mkdir()
            make(whole)
            keep(whole, folder)
    return folder


def _needed(library: Path) -> Mapping[str, list[str]]:
    """The NVIDIA libraries that a library needs, and the functions that it uses from each."""
    functions: dict[str, list[str]] = defaultdict(list)
    for line in _output("readelf", "-d", str(library)).splitlines():
        home = line.partition("[")[2].rstrip("]")
        if "NEEDED" in line and not home.startswith(_SYSTEM):
            functions[home] = []
    for line in _output("nm", "-D", "--undefined-only", str(library)).splitlines():
        name, _, home = line.split()[-1].partition("@")
        home = home.lstrip("@") or next((_UNVERSIONED[start] for start in _UNVERSIONED if name.startswith(start)), "")
        if home and not home.startswith(_SYSTEM):
            functions[home].append(name)
    return functions


def _link(home: str, parts: list[Path], folder: Path, *, with_runtime: bool = False) -> None:
    versions = folder / "versions"
    versions.write_text(f"{home} {{ global: *; }};\n")
    flags = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{home}", f"-L{folder}"]
    if home not in (*_UNVERSIONED.values(), "libnvidia-ml.so.1"):
        flags.append(f"-Wl,--version-script={versions}")
    others = ["-l:libcudart.so.13"] if with_runtime else []
    run_tool(["gcc", *flags, *map(str, parts), "-lstdc++", *others, "-o", str(folder / home)])


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
