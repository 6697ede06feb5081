"""The memory that this process holds, as the kernel counts it, and giving freed memory back to the kernel."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_KIB: Final = 1024
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Constants in glibc's malloc.h."""
_LARGE_BLOCK: Final = 2 * 1024 * 1024
"""A block of its own mapping costs a page fault for each 4 KiB, beside which its other costs are small from here on."""


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Resident memory in bytes.

    Attributes:
        private: Anonymous memory: heaps, arenas and stacks, which the kernel can only take back from swap.
        mapped: Pages of mapped files, such as weights that ONNX Runtime maps; the kernel can read them again.
    """

    private: int
    mapped: int


def read_held_memory(status: Path = _STATUS) -> HeldMemory:
    """Read two counters of the kernel, in about 20 µs, however many mappings the process has.

    The counters do not change when another process maps the same pages, which the unique set size (USS) does.
    """
    found = {"RssAnon": 0, "RssFile": 0}
    for line in status.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) * _KIB
    return HeldMemory(found["RssAnon"], found["RssFile"])


def give_back_freed() -> None:
    """Return the free memory of malloc's heaps to the kernel. No-op without glibc.

    Otherwise a load takes memory that an earlier one freed, and seems to need none.
    """
    if _trim is not None:
        _trim(0)


def return_large_blocks() -> None:
    """Have malloc return blocks of weights to the kernel when they are freed. No-op without glibc.

    By default glibc raises its limits with each large block that is freed: then blocks of up to 32 MiB come from heaps,
    of which up to 64 MiB each stay with the process, even after ``give_back_freed``. A model that was evicted would
    leave its memory behind, and the next load would seem to need less.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BLOCK)


def _find_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    return trim


_trim: Final = _find_trim()
