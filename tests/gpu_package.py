"""ONNX Runtime's package for GPUs on a machine without one, with libraries in the place of NVIDIA's that do nothing.

Which options its providers take, and how spelled, it says before it asks anything of a GPU.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Final

from apart import CACHE, UnavailableError, installed_apart, keep, run_tool

_VERSION: Final = version("onnxruntime")
_PROVIDERS: Final = {
    "cuda": ("libonnxruntime_providers_cuda.so", {"cu": "libcuda.so.1"}),
    # Not the driver, without which it gives up as soon as it has read its options.
    "tensorrt": ("libonnxruntime_providers_tensorrt.so", {"create": "libnvinfer.so.10", "get": "libnvinfer.so.10"}),
}
"""By provider its own library, and where names without a version come from, by how they begin."""
_SYSTEM: Final = (
    "GLIBC",
    "CXXABI",
    "GCC_",
    "ld-linux",
    "libstdc++",
    "libgcc",
    "libc.",
    "libm.",
    "libdl",
    "librt",
    "libpth",
)
_OBJECTS: Final = """
static long nothing(void) { return 0; }
static void *methods[256], *object[512] = {methods};
static void *an_object(void) { for (int i = 0; i < 256; i++) methods[i] = (void *)nothing; return object; }
"""


def environment_of(provider: str) -> dict[str, str]:
    """For a process that imports the package for GPUs, in which ``cuda`` or ``tensorrt`` finds its libraries.

    Raises:
        UnavailableError: The package cannot be installed here, or there are no tools to make libraries with.
    """
    options = ("--no-deps", "--only-binary=:all:", "--timeout=15", "--retries=1")
    package = installed_apart(f"onnxruntime-gpu-{_VERSION}", *options, f"onnxruntime-gpu=={_VERSION}")
    libraries = CACHE / f"in-nvidias-place-{_VERSION}-{provider}"
    if not libraries.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            whole = Path(scratch) / "whole"
            whole.mkdir()
            _make_libraries(provider, package / "onnxruntime" / "capi", whole)
            keep(whole, libraries)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(package), *sys.path]),
        "LD_LIBRARY_PATH": str(libraries),
        "ORT_DISABLE_TELEMETRY": "1",
    }


def _make_libraries(provider: str, capi: Path, folder: Path) -> None:
    """Each that the provider's own library needs, with all the functions that it takes from it."""
    if missing := [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]:
        raise UnavailableError(f"there is no {', '.join(missing)}")
    library, homes = _PROVIDERS[provider]
    functions: dict[str, list[str]] = defaultdict(list)
    for line in _output("readelf", "-d", str(capi / library)).splitlines():
        needed = line.partition("[")[2].rstrip("]")
        if "NEEDED" in line and not needed.startswith(_SYSTEM):
            functions[needed] = []
    for line in _output("nm", "-D", "--undefined-only", str(capi / library)).splitlines():
        name, _, home = line.split()[-1].partition("@")
        home = home.lstrip("@") or next((homes[start] for start in homes if name.startswith(start)), "")
        if home and not home.startswith(_SYSTEM):
            functions[home].append(name)
    for home, names in functions.items():
        source, script = folder / "source.c", folder / "versions"
        # What is named after creating or getting hands out an object, in C++ a table of methods in front.
        bodies = [
            f"void *{name}(void) {{ return {'an_object()' if home.startswith('libnv') else '0'}; }}" for name in names
        ]
        source.write_text(_OBJECTS + "\n".join(bodies))
        script.write_text(f"{home} {{ global: {'; '.join(names) or 'nothing_of_it'}; local: *; }};\n")
        made = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{home}", f"-Wl,--version-script={script}", str(source)]
        run_tool(["gcc", *made, "-o", str(folder / home)])


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
