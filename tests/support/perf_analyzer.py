"""perf_analyzer, the load generator for Triton: its installation and use.

It is part of a wheel of an older tritonclient than the tests use.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from apart import CACHE, UnavailableError, installed_apart, keep, run_tool

VERSION: Final = "2.51.0"
"""The last version whose binary runs with glibc 2.34; later ones require 2.38."""

_WHEELS: Final = (
    *("--no-deps", "--only-binary=:all:", "--timeout=15", "--retries=1"),
    *(f"tritonclient=={VERSION}", "nvidia-cuda-runtime-cu12==12.9.79"),  # the binary is linked to libcudart.so.12
)
_RUN_S: Final = 60
_LIBB64: Final = "libb64.so.0d"
_NO_LIBB64: Final = "\n".join(
    ["void abort(void);"]
    + [
        f"void base64_{name}(void) {{ abort(); }}"
        for name in ("init_encodestate", "encode_block", "encode_blockend", "init_decodestate", "decode_block")
    ]
)
"""Substitute for libb64, which few machines have. perf_analyzer needs the library to start, but calls it only for CUDA
handles over HTTP and for encoded input files, which no test uses."""


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """An installed perf_analyzer, and the folders of its libraries."""

    program: Path
    libraries: tuple[Path, ...]

    def run(self, *arguments: str) -> str:
        """Run perf_analyzer to its end. It must succeed. Returns its output."""
        ran = self._start(*arguments)
        assert ran.returncode == 0, f"{' '.join(arguments)}: exit status {ran.returncode}\n{ran.stdout}"
        return ran.stdout

    def require_start(self) -> None:
        """Raises UnavailableError if the binary does not start."""
        ran = self._start("--version")
        if ran.returncode != 0:
            raise UnavailableError(f"it does not start: {ran.stdout.strip()}")

    def _start(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_RUN_S,
            env=dict(os.environ) | {"LD_LIBRARY_PATH": ":".join(map(str, self.libraries))},
        )


def find_perf_analyzer() -> PerfAnalyzer:
    """The installed perf_analyzer; the first call on a machine installs it.

    Raises:
        UnavailableError: It does not run on this machine, or could not be installed.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise UnavailableError("it is made for Linux on x86_64 only")
    folder = installed_apart(f"perf_analyzer-{VERSION}", *_WHEELS)
    program = folder / "bin" / "perf_analyzer"
    if not program.exists():
        raise UnavailableError(f"the wheel of tritonclient {VERSION} for this machine does not hold it")
    program.chmod(0o755)
    found = PerfAnalyzer(program, (folder / "nvidia" / "cuda_runtime" / "lib", _folder_of_libb64()))
    found.require_start()
    return found


def _folder_of_libb64() -> Path:
    """The folder of the substitute. Raises UnavailableError if it cannot be built."""
    folder = CACHE / "no_libb64"
    if _is_installed(_LIBB64) or folder.exists():
        return folder
    if shutil.which("cc") is None:
        raise UnavailableError(f"it needs {_LIBB64}, or cc to make something in its place")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        (whole / "no_libb64.c").write_text(_NO_LIBB64)
        run_tool(["cc", "-shared", "-fPIC", "-fno-builtin", "-o", f"{whole / _LIBB64}", f"{whole / 'no_libb64.c'}"])
        keep(whole, folder)
    return folder


def _is_installed(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
