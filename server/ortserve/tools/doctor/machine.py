"""Reads the facts of a machine from ``/proc`` and ``/sys`` below a root folder, which may hold another machine's files.

Values that cannot be read or parsed are None. No content of a file raises an error.
"""

import math
import platform
import re
import resource
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from ortserve.engine.process_limits import Quota, cgroup_folders, cpu_quotas
from ortserve.tools.doctor.result import Memory, Processors, System

X86_SETS: Final = (
    *("avx2", "fma", "f16c", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
)
ARM_SETS: Final = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2")
"""Instruction sets with kernels in ONNX Runtime, as Linux names them. ``asimddp`` is the dot product of bytes."""

ENVIRONMENT: Final = re.compile(
    r"(ORT|OMP|KMP|GOMP|MKL|OPENBLAS|MALLOC|CUDA)_\w+|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|TF32_OVERRIDE)|"
    r"LD_PRELOAD|LD_LIBRARY_PATH|GLIBC_TUNABLES"
)
"""Variables that change ONNX Runtime, its libraries or the allocator. Others are not shown: they may hold secrets."""

_MAX_PROCESSORS: Final = 8192
_MAX_BYTES: Final = 1024**2
"""Limit of the bytes read of a file. The kernel refuses reads of /proc/sys into buffers of several MiB."""
_ALLOCATORS: Final = {
    **{name: f"({name})" for name in ("mimalloc", "jemalloc", "tcmalloc")},
    "musl": "(ld-musl)",
    "glibc": r"(libc[.-])",
}
"""Patterns of the libraries of allocators. The first one that is loaded is in use."""
_NO_LIMIT: Final = 2**60
"""Version 1 of cgroups reports about 2**63 for no limit."""


class Files:
    """The files of a machine below ``root``. A missing file counts as empty."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root: Final = root

    def find(self, path: str, pattern: str = r"(.+)") -> str | None:
        """The group of the first match of a pattern; None without a match. ``^`` matches at each line."""
        try:
            with (self.root / path).open("rb") as file:
                text = file.read(_MAX_BYTES).decode(errors="replace")
        except (OSError, ValueError):
            return None
        found = re.search(pattern, text, re.MULTILINE | re.ASCII)
        return found[1].strip() if found else None

    def number(self, path: str, pattern: str = r"^(\d{1,20})\b") -> int | None:
        """As ``find``, for an integer."""
        found = self.find(path, pattern)
        return int(found) if found else None

    def listed(self, path: str, pattern: str = r"(.+)") -> tuple[int, ...]:
        """As ``find``, for a list in the form ``0-3,8``; empty without a match."""
        return parse_list(self.find(path, pattern) or "")

    def quotas(self) -> list[Quota]:
        """All CPU quotas of this process."""
        return cpu_quotas(self.root / "sys/fs/cgroup", self.root / "proc/self/cgroup")


def parse_list(text: str) -> tuple[int, ...]:
    """Parse a list of numbers in the kernel's form ``0-3,8``. Returns them in ascending order; ignores other text."""
    numbers: set[int] = set()
    for part in text.split(","):
        if found := re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part):
            first, last = int(found[1]), int(found[2] or found[1])
            numbers.update(range(first, min(last, first + _MAX_PROCESSORS) + 1))
    return tuple(sorted(numbers))


def read_processors(files: Files) -> Processors:
    """Read the processors, the affinity mask and the quota."""
    folder = "sys/devices/system"
    cpu = f"{folder}/cpu/cpu"
    x86_flags = files.find("proc/cpuinfo", r"^flags\s*:(.*)")
    flags = x86_flags or files.find("proc/cpuinfo", r"^Features\s*:(.*)") or ""
    known_sets = X86_SETS if x86_flags else ARM_SETS if flags else ()
    online = files.listed(f"{folder}/cpu/online")
    allowed = files.listed("proc/self/status", r"^Cpus_allowed_list:(.*)") or online
    allowed = tuple(number for number in allowed if not online or number in online)
    siblings = {files.listed(f"{cpu}{number}/topology/thread_siblings_list") for number in online} - {()}
    nodes = {node: files.listed(f"{folder}/node/node{node}/cpulist") for node in files.listed(f"{folder}/node/online")}
    quotas = files.quotas()
    quota = min((each.processors for each in quotas), default=None)
    highest_khz = files.number(f"{cpu}0/cpufreq/cpuinfo_max_freq")
    return Processors(
        model=files.find("proc/cpuinfo", r"^(?:model name|Model|Hardware)\s*:(.+)"),
        online=len(online) or None,
        cores=len(siblings) or None,
        allowed=allowed,
        quota=quota,
        budget=max(1, min(len(allowed), math.ceil(quota or len(allowed)))) if allowed else None,
        throttled_periods=throttled_periods(quotas) if quotas else None,
        instruction_sets={name: name in flags.split() for name in known_sets},
        governor=files.find(f"{cpu}0/cpufreq/scaling_governor"),
        highest_mhz=highest_khz // 1000 if highest_khz else None,
        numa_nodes={node: own for node, held in nodes.items() if (own := tuple(sorted({*held} & {*allowed})))},
    )


def throttled_periods(quotas: Sequence[Quota]) -> int:
    """The number of periods in which a quota was used up, since the cgroups were created."""
    return sum(Files(quota.folder).number("cpu.stat", r"^nr_throttled (\d{1,20})") or 0 for quota in quotas)


def read_memory(files: Files) -> Memory:
    """Read the memory of this machine, its limits, and the allocator of this process."""
    limits: list[tuple[int, int]] = []
    kills: list[int] = []
    for folder, is_v2 in cgroup_folders("memory", files.root / "sys/fs/cgroup", files.root / "proc/self/cgroup"):
        group = Files(folder)
        used = group.number("memory.current" if is_v2 else "memory.usage_in_bytes") or 0
        names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
        limits += [(limit, used) for name in names if 0 < (limit := group.number(name) or 0) < _NO_LIMIT]
        events = "memory.events" if is_v2 else "memory.oom_control"
        if (count := group.number(events, r"^oom_kill (\d{1,20})")) is not None:
            kills.append(count)
    least = min(limits, default=None)
    machine = psutil.virtual_memory()
    pages = "sys/kernel/mm/transparent_hugepage"
    return Memory(
        total_bytes=machine.total,
        available_bytes=machine.available,
        limit_bytes=least and least[0],
        used_bytes=least and least[1],
        killed_processes=max(kills, default=None),
        shared_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,  # noqa: S108
        huge_pages=files.find(f"{pages}/enabled", r"\[(\w+)\]"),
        huge_pages_defrag=files.find(f"{pages}/defrag", r"\[(\w+)\]"),
        allocator=next((name for name, mark in _ALLOCATORS.items() if files.find("proc/self/maps", mark)), None),
    )


def read_system(environment: Mapping[str, str]) -> System:
    """Read the kernel and the limits of this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    chosen = {name: value for name, value in sorted(environment.items()) if ENVIRONMENT.fullmatch(name)}
    return System(platform.release(), soft, hard, chosen)
