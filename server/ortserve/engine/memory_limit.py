"""How much memory this process may use: its cgroup's limit, its address space limit, and the machine's memory."""

import ctypes
import resource
from pathlib import Path
from typing import Final

from ortserve.engine.cgroups import CGROUP_ROOT, SELF_CGROUP, cgroup_folders

_UNLIMITED: Final = 2**60
"""Version 1 of cgroups says about 2**63 for no limit."""
_M_ARENA_MAX: Final = -8
"""Of glibc's malloc.h."""
_MOST_ARENAS: Final = 2


def memory_limit(
    cgroup_root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP, meminfo: Path = Path("/proc/meminfo")
) -> int:
    """The smallest of the limits that can be read, in bytes."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    for folder, is_v2 in cgroup_folders("memory", cgroup_root, self_cgroup):
        limits.append(_read_number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")))
    limits.append(_read_number(meminfo, after="MemTotal:") * 1024)
    return min([limit for limit in limits if 0 < limit < _UNLIMITED], default=_UNLIMITED)


def limit_malloc_arenas() -> None:
    """Keep malloc to few arenas where the address space is limited, before threads make more. No-op without glibc.

    Each arena reserves 64 MiB of addresses, and glibc makes up to eight for each processor: a third of what a process
    of 1.5 GiB may use. Where only resident memory is limited, they cost nothing.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, _MOST_ARENAS)


def _read_number(file: Path, after: str = "") -> int:
    """The first number in a file behind a word; 0 where there is none, such as where it says ``max``."""
    try:
        return int(file.read_text().partition(after)[2].split()[0] if after else file.read_text())
    except (OSError, ValueError, IndexError):
        return 0
