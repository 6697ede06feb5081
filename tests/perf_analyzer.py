"""perf_analyzer, the load generator of Triton's users: where it comes from and how it is run.

It comes in a wheel of an older tritonclient than the tests use, so it is installed apart, into the user's cache, by the
first test that wants it.
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

VERSION: Final = "2.51.0"
"""The last whose binary runs on glibc 2.34; later ones want 2.38."""

_PACKAGES: Final = (f"tritonclient=={VERSION}", "nvidia-cuda-runtime-cu12==12.9.79")  # it is linked to libcudart.so.12
_INSTALL_S: Final = 90
_RUN_S: Final = 60
_LIBB64: Final = "libb64.so.0d"
_NO_LIBB64: Final = "\n".join(
    ["void abort(void);"]
    + [
        f"void base64_{name}(void) {{ abort(); }}"
        for name in ("init_encodestate", "encode_block", "encode_blockend", "init_decodestate", "decode_block")
    ]
)
"""In the place of a library that few machines have. It is there to be found when perf_analyzer starts, and is called
for CUDA handles over HTTP and encoded input files only, which no test has."""


class UnavailableError(Exception):
    """perf_analyzer cannot be had on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """An installed perf_analyzer."""

    folder: Path

    def run(self, *arguments: str) -> str:
        """Run to the end, which must be a good one, and return all it wrote."""
        ran = self._start(*arguments)
        assert ran.returncode == 0, f"{' '.join(arguments)}: exit status {ran.returncode}\n{ran.stdout}"
        return ran.stdout

    def require_start(self) -> None:
        """Raises UnavailableError, where the binary does not start."""
        ran = self._start("--version")
        if ran.returncode != 0:
            raise UnavailableError(f"perf_analyzer {VERSION} does not start here: {ran.stdout.strip()}")

    def _start(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        libraries = f"{self.folder / 'lib'}:{self.folder / 'nvidia' / 'cuda_runtime' / 'lib'}"
        return subprocess.run(
            [self.folder / "bin" / "perf_analyzer", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_RUN_S,
            env=dict(os.environ) | {"LD_LIBRARY_PATH": libraries},
        )


def find_perf_analyzer() -> PerfAnalyzer:
    """The one in the cache, which is put there first where there is none.

    Raises:
        UnavailableError: This is no machine that it runs on, or it could not be installed.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise UnavailableError(f"perf_analyzer {VERSION} is made for Linux on x86_64 only")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ortserve-tests"
    installed = PerfAnalyzer(cache / f"perf_analyzer-{VERSION}")
    if not installed.folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            _install(Path(made) / "whole")
            try:
                (Path(made) / "whole").rename(installed.folder)
            except OSError:  # another test run was faster
                if not installed.folder.exists():
                    raise
    installed.require_start()
    return installed


def _install(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--no-compile"]
    _do([*pip, "--timeout=15", "--retries=1", f"--target={folder}", *_PACKAGES], "pip")
    if not (folder / "bin" / "perf_analyzer").exists():
        raise UnavailableError(f"the wheel of tritonclient {VERSION} for this machine has no perf_analyzer")
    (folder / "bin" / "perf_analyzer").chmod(0o755)
    (folder / "lib").mkdir()
    if not _is_found(_LIBB64):
        if shutil.which("cc") is None:
            raise UnavailableError(f"perf_analyzer needs {_LIBB64}, or cc to make something in its place")
        source = folder / "lib" / "no_libb64.c"
        source.write_text(_NO_LIBB64)
        _do(["cc", "-shared", "-fPIC", "-fno-builtin", "-o", str(folder / "lib" / _LIBB64), str(source)], "cc")


def _is_found(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _do(command: list[str], what: str) -> None:
    try:
        subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_INSTALL_S, check=True)
    except subprocess.CalledProcessError as error:
        last = error.stdout.decode(errors="replace").strip().splitlines()[-1:]
        raise UnavailableError(f"perf_analyzer could not be installed: {what}: {''.join(last)}") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"perf_analyzer could not be installed: {what} took over {_INSTALL_S} s") from None
