"""The processors, memory and open files that this process may use: affinity, cgroups, resource limits, the machine.

ONNX Runtime itself starts a thread for each physical core of the host, even if a mask or quota is set
(microsoft/onnxruntime#29510). This module counts the cores within the mask and the quota.
"""

import ctypes
import math
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
SELF_CGROUP: Final = Path("/proc/self/cgroup")
PROCESSORS: Final = Path("/sys/devices/system/cpu")

_UNLIMITED: Final = 2**60
"""Larger limits count as none: version 1 of cgroups reports about 2**63 without a limit."""
_M_ARENA_MAX: Final = -8
"""The constant in glibc's malloc.h."""
_MAX_ARENAS: Final = 2

SPARE_FILES: Final = 256
"""Open files of a server that are not connections of its callers: models, libraries, stores, the metrics port."""

_THROTTLING_READ_NS: Final = 1_000_000_000
_RECENT_NS: Final = 10_000_000_000


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit of processor time, as a number of processors, and the folder of its cgroup."""

    processors: float
    folder: Path


def cpu_budget(cgroup_root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP) -> int:
    """Threads that this process may keep busy, at least 1: the affinity mask or the smallest quota, rounded up."""
    processors = len(os.sched_getaffinity(0))
    quotas = [math.ceil(quota.processors) for quota in cpu_quotas(cgroup_root, self_cgroup)]
    return max(1, min([processors, *quotas]))


def core_budget(cgroup_root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP, processors: Path = PROCESSORS) -> int:
    """Physical cores that this process may keep busy, at least 1: at most ``cpu_budget``.

    The processors of one core share its arithmetic units, so matrix products gain little from a second thread on it.
    """
    cores = {_core(processors, number) for number in os.sched_getaffinity(0)}
    return min(cpu_budget(cgroup_root, self_cgroup), len(cores))


@cache
def _core(processors: Path, number: int) -> str:
    """The processors of the core to which a processor belongs; its own number if the system does not tell.

    Each load counts the cores of up to hundreds of processors, each file takes 25 µs, and its content stays.
    """
    with suppress(OSError):
        return (processors / f"cpu{number}/topology/thread_siblings_list").read_text()
    return str(number)


def intra_op_threads(budget: int, *, on_gpu: bool, inter_op_threads: int) -> int:
    """The number of threads inside an operator, at least 1, for a run that may keep ``budget`` threads busy.

    ``inter_op_threads`` threads, the calling thread included, run branches of the graph in parallel; with 1, branches
    run in sequence. A run on a GPU needs one thread, which mostly waits.
    """
    return 1 if on_gpu else max(1, budget - (inter_op_threads - 1))


def cpu_quotas(cgroup_root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP) -> list[Quota]:
    """All quotas of this process's cgroup and its ancestors."""
    quotas: list[Quota] = []
    for folder, is_v2 in cgroup_folders("cpu", cgroup_root, self_cgroup):
        processors = _quota_v2(folder) if is_v2 else _quota_v1(folder)
        if processors is not None:
            quotas.append(Quota(processors, folder))
    return quotas


def _quota_v2(folder: Path) -> float | None:
    """Read ``cpu.max``, which holds quota and period in microseconds; the quota may be ``max``."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def memory_limit(
    cgroup_root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP, meminfo: Path = Path("/proc/meminfo")
) -> int:
    """The smallest readable memory limit in bytes, of cgroups, address space and machine."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    for folder, is_v2 in cgroup_folders("memory", cgroup_root, self_cgroup):
        limits.append(_read_number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")))
    limits.append(_read_number(meminfo, after="MemTotal:") * 1024)
    return min([limit for limit in limits if 0 < limit < _UNLIMITED], default=_UNLIMITED)


def raise_open_files() -> int | None:
    """Raise the soft limit of open files to the hard one, because systemd and many shells set 1,024 only.

    Returns:
        The limit that holds now; None without one.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError):  # a hard limit above fs.nr_open cannot be set again
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def limit_malloc_arenas() -> None:
    """Limit malloc to two arenas if the address space is limited. No-op without glibc. Call it before threads start.

    Each arena reserves 64 MiB of addresses, and glibc creates up to eight for each processor. With 1.5 GiB of address
    space, eight arenas reserve a third. If only resident memory is limited, arenas cost nothing.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)


def _read_number(file: Path, after: str = "") -> int:
    """The first number in a file, or the first after ``after``; 0 if there is none, for example for ``max``."""
    try:
        return int(file.read_text().partition(after)[2].split()[0] if after else file.read_text())
    except (OSError, ValueError, IndexError):
        return 0


class Throttling:
    """Tells whether a CPU quota has recently throttled this process, by the kernel's ``cpu.stat`` (cgroups(7)).

    A throttled process has no processor time to spare. Only one thread may use it.
    """

    def __init__(self, files: Sequence[Path], now_ns: int) -> None:
        """``files`` are the ``cpu.stat`` files of the cgroups with a quota; empty if there are none."""
        self._files = files
        self._read_ns = now_ns
        self._periods = self._read()
        self._throttled_ns: int | None = None

    def is_recent(self, now_ns: int) -> bool:
        """Whether a quota was used up in the last 10 s. Reads the files at most once a second, in 20 µs per file."""
        if self._files and now_ns - self._read_ns >= _THROTTLING_READ_NS:
            self._read_ns = now_ns
            periods = self._read()
            if periods != self._periods:
                self._periods = periods
                self._throttled_ns = now_ns
        return self._throttled_ns is not None and now_ns - self._throttled_ns < _RECENT_NS

    def _read(self) -> int:
        return sum(map(_throttled_periods, self._files))


def _throttled_periods(file: Path) -> int:
    try:
        counts = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
        return int(counts.get("nr_throttled", "0"))
    except (OSError, ValueError):
        return 0


def cgroup_folders(controller: str, root: Path, self_cgroup: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's cgroups of a controller, and of all their visible ancestors.

    Yields:
        A folder, and whether its files have the format of version 2. Nothing if ``self_cgroup`` cannot be read.
    """
    try:
        lines = self_cgroup.read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, found, rest = line.partition(":")
        controllers, is_whole, path = rest.partition(":")
        if not (found and is_whole):
            continue
        if not controllers:
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        # In a container, the path may be the host's, which is not visible here. Then the root is the container's own.
        folder = base / path.lstrip("/")
        while True:
            yield folder, not controllers
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
