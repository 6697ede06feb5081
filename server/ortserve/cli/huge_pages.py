"""Huge pages for weights: the process starts anew with the setting of malloc that requests them from the kernel.

With pages of 4 KiB, a model of 200 MB has 50,000 of them. ONNX Runtime frees them while it holds the interpreter lock,
which stopped the event loop for 27 ms; with huge pages for 2 ms. The model also opens in 0.4 of the time and runs a row
in 0.8 of it (``loadtests/huge_pages.py``). glibc reads its tunables only when a process starts.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Final

_TUNABLE: Final = "glibc.malloc.hugetlb"
_VARIABLE: Final = "GLIBC_TUNABLES"
_MODE: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages() -> None:
    """Replace this process by one of the same command line and process id, in which malloc requests huge pages.

    Returns if that is not useful: the tunable is set already, to any value; the kernel gives huge pages to all memory
    or to none; or the C library is not glibc 2.35 or newer.
    """
    tunables = os.environ.get(_VARIABLE, "")
    if _TUNABLE in tunables or not sys.executable or not _has_tunable() or not _is_on_request():
        return
    os.environ[_VARIABLE] = f"{tunables}:{_TUNABLE}=1".lstrip(":")
    sys.stdout.flush()
    sys.stderr.flush()
    # Ctrl-C waits until ``main`` has installed its handler again. Python's own start would write a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    with contextlib.suppress(OSError):  # such as a limit of a sandbox
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - without a shell, on purpose
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _has_tunable() -> bool:
    try:
        library, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor = map(int, version.split(".")[:2])  # versions in development have a third number
    except (AttributeError, ValueError):  # not a Unix, or not glibc
        return False
    return library == "glibc" and (major, minor) >= (2, 35)


def _is_on_request() -> bool:
    try:
        return "[madvise]" in _MODE.read_text()
    except OSError:
        return False
