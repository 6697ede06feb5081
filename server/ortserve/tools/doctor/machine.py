"""The machine, read from ``/proc`` and ``/sys``. What cannot be read or understood is None.

Every path is below ``root``, so that another machine's files can be read as well. Nothing raises on any content.
"""

import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from ortserve.engine.process_limits import cgroup_folders, cpu_quotas
from ortserve.tools.doctor.result import Memory, Processors, System

X86_SETS: Final = (
    *("avx2", "fma", "f16c", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
)
ARM_SETS: Final = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2")
"""The kernel's names of what ONNX Runtime has kernels for; ``asimddp`` is the dot product of bytes."""

ENVIRONMENT: Final = re.compile(
    r"(ORT|OMP|KMP|GOMP|MKL|OPENBLAS|MALLOC|CUDA)_\w+|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|TF32_OVERRIDE)|"
    r"LD_PRELOAD|LD_LIBRARY_PATH|GLIBC_TUNABLES"
)
"""Variables that change ONNX Runtime, its libraries or the allocator."""

_MOST_PROCESSORS: Final = 8192
_BLOCK_BYTES: Final = 64 * 1024
_MOST_BLOCKS: Final = 256
_NO_LIMIT: Final = 2**60
"""Version 1 of cgroups reports about 2**63 for no limit."""
_CONTAINERS: Final = ("kubepods", "docker", "containerd", "podman", "lxc", "garden")
_ALLOCATORS: Final = ("mimalloc", "jemalloc", "tcmalloc")


class Files:
    """Files of a machine below ``root``. Methods return an empty value for what is not there."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root: Final = root

    def text(self, path: str) -> str:
        """The content without space around it."""
        try:
            # In blocks, because the kernel refuses to read a file of /proc/sys into a large buffer.
            with (self.root / path.lstrip("/")).open("rb", buffering=0) as file:
                blocks = iter(lambda: file.read(_BLOCK_BYTES), b"")
                content = b"".join(islice(blocks, _MOST_BLOCKS))
        except (OSError, ValueError):
            return ""
        return content.decode(errors="replace").strip()

    def number(self, path: str) -> int | None:
        """The first whole number."""
        return first_number(self.text(path))

    def fields(self, path: str, separator: str = ":") -> dict[str, str]:
        """Lines ``key: value``; the first of equal keys counts."""
        return parse_fields(self.text(path), separator)

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return (self.root / path.lstrip("/")).exists()

    @property
    def cgroups(self) -> Path:
        """The mount point of cgroups."""
        return self.root / "sys/fs/cgroup"

    @property
    def own_cgroup(self) -> Path:
        """The file that names this process's cgroups."""
        return self.root / "proc/self/cgroup"


def first_number(text: str) -> int | None:
    """The first whole number of a text."""
    found = re.search(r"-?[0-9]{1,20}", text)
    return int(found[0]) if found else None


def parse_fields(text: str, separator: str = ":") -> dict[str, str]:
    """Lines ``key<separator>value``; the first of equal keys counts."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, found, value = line.partition(separator)
        if found:
            fields.setdefault(key.strip(), value.strip())
    return fields


def parse_list(text: str) -> tuple[int, ...]:
    """Numbers in the kernel's form ``0-3,8``, ascending; parts that are none are left out."""
    numbers: set[int] = set()
    for part in text.split(","):
        if found := re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part):
            first, last = int(found[1]), int(found[2] or found[1])
            numbers.update(range(first, min(last, first + _MOST_PROCESSORS) + 1))
    return tuple(sorted(numbers))


def parse_chosen(text: str) -> str | None:
    """The word in brackets: ``always [madvise] never``."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else None


def parse_pressure(text: str) -> float | None:
    """The share of the last 10 s in which some task waited."""
    found = re.search(r"^some avg10=([0-9]{1,3}\.[0-9]+)", text, re.MULTILINE)
    return float(found[1]) / 100 if found else None


def read_processors(files: Files) -> Processors:
    """Read the processors, the affinity mask and the quota."""
    info = files.fields("proc/cpuinfo")
    is_x86 = "flags" in info
    flags = set(info.get("flags", info.get("Features", "")).split())
    folder = "sys/devices/system/cpu"
    online = parse_list(files.text(f"{folder}/online"))
    siblings = {files.text(f"{folder}/cpu{number}/topology/thread_siblings_list") for number in online} - {""}
    allowed = parse_list(files.fields("proc/self/status").get("Cpus_allowed_list", "")) or online
    allowed = _among(allowed, online) if online else allowed
    quotas = cpu_quotas(files.cgroups, files.own_cgroup)
    quota = min(quotas, key=lambda each: each.processors, default=None)
    budgets = [len(allowed)] * bool(allowed) + ([math.ceil(quota.processors)] if quota else [])
    throttled = Files(quota.folder).fields("cpu.stat", " ").get("nr_throttled", "") if quota else ""
    caches = [_cache(files, f"{folder}/cpu0/cache/index{index}") for index in range(6)]
    lowest, highest = (files.number(f"{folder}/cpu0/cpufreq/cpuinfo_{end}_freq") for end in ("min", "max"))
    known_sets = X86_SETS if is_x86 else ARM_SETS if flags else ()
    return Processors(
        model=info.get("model name") or info.get("Model") or info.get("Hardware"),
        architecture=("x86_64" if is_x86 else "aarch64") if flags else None,
        is_virtual="hypervisor" in flags if is_x86 else None,
        online=len(online) or None,
        cores=len(siblings) or None,
        threads_per_core=max((len(parse_list(text)) for text in siblings), default=0) or None,
        allowed=allowed,
        quota=quota.processors if quota else None,
        budget=max(1, min(budgets)) if budgets else None,
        throttled_periods=first_number(throttled),
        instruction_sets={name: name in flags for name in known_sets},
        last_level_cache_bytes=max(caches)[1] or None,
        governor=files.text(f"{folder}/cpu0/cpufreq/scaling_governor") or None,
        lowest_mhz=None if lowest is None else lowest // 1000,
        highest_mhz=None if highest is None else highest // 1000,
        numa_nodes={node: own for node, processors in _numa_nodes(files) if (own := _among(processors, allowed))},
    )


def _cache(files: Files, folder: str) -> tuple[int, int]:
    """Level and size of a cache; zeros if it is unknown."""
    size = files.text(f"{folder}/size")
    unit = {"K": 1024, "M": 1024**2}.get(size[-1:], 1)
    return files.number(f"{folder}/level") or 0, (first_number(size) or 0) * unit


def _numa_nodes(files: Files) -> Iterator[tuple[int, tuple[int, ...]]]:
    folder = "sys/devices/system/node"
    for number in parse_list(files.text(f"{folder}/online")):
        yield number, parse_list(files.text(f"{folder}/node{number}/cpulist"))


def _among(processors: tuple[int, ...], allowed: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(number for number in processors if number in allowed)


def read_memory(files: Files, environment: Mapping[str, str]) -> Memory:
    """Read the memory, its limits and the allocator of this process."""
    info = {key: first_number(value) for key, value in files.fields("proc/meminfo").items()}

    def in_bytes(key: str) -> int | None:
        kilobytes = info.get(key)
        return None if kilobytes is None else kilobytes * 1024

    limit, used, kills = _memory_cgroup(files)
    swap, free = in_bytes("SwapTotal"), in_bytes("SwapFree")
    pages = "sys/kernel/mm/transparent_hugepage"
    shared = re.search(r"^\S+ /dev/shm \S+ \S*?\bsize=([0-9]{1,15})k", files.text("proc/self/mounts"), re.MULTILINE)
    return Memory(
        total_bytes=in_bytes("MemTotal"),
        available_bytes=in_bytes("MemAvailable"),
        limit_bytes=limit,
        used_bytes=used,
        killed_processes=kills,
        swapped_bytes=None if swap is None or free is None else max(0, swap - free),
        huge_pages=parse_chosen(files.text(f"{pages}/enabled")),
        huge_pages_defrag=parse_chosen(files.text(f"{pages}/defrag")),
        allocator=_allocator(files.text("proc/self/maps"), environment.get("LD_PRELOAD", "")),
        shared_bytes=int(shared[1]) * 1024 if shared else None,
    )


def _memory_cgroup(files: Files) -> tuple[int | None, int | None, int | None]:
    """The smallest limit, what its cgroup uses, and how many of the cgroup's processes were killed."""
    found: list[tuple[int, int | None]] = []
    kills: list[int] = []
    for folder, is_v2 in cgroup_folders("memory", files.cgroups, files.own_cgroup):
        group = Files(folder)
        used = group.number("memory.current" if is_v2 else "memory.usage_in_bytes")
        limits = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
        found += [(limit, used) for name in limits if 0 < (limit := group.number(name) or 0) < _NO_LIMIT]
        events = group.fields("memory.events" if is_v2 else "memory.oom_control", " ")
        if (count := first_number(events.get("oom_kill", ""))) is not None:
            kills.append(count)
    least = min(found, key=lambda each: each[0], default=None)
    return least and least[0], least and least[1], max(kills, default=None)


def _allocator(maps: str, preloaded: str) -> str | None:
    for name in _ALLOCATORS:
        if name in maps or name in preloaded:
            return name
    if "ld-musl" in maps:
        return "musl"
    return "glibc" if re.search(r"libc[.-]", maps) else None


def read_system(files: Files, environment: Mapping[str, str]) -> System:
    """Read the kernel, the container and the limits of this process."""
    hierarchies = [line.split(":", 2)[1:2] for line in files.text("proc/self/cgroup").splitlines()]
    has_v1 = any(part and part[0] and not part[0].startswith("name=") for part in hierarchies)
    has_v2 = [""] in hierarchies
    limits = re.search(r"^Max open files\s+(\w+)\s+(\w+)", files.text("proc/self/limits"), re.MULTILINE)
    pressure = {name: parse_pressure(_pressure_text(files, name)) for name in ("cpu", "memory", "io")}
    return System(
        kernel=files.text("proc/sys/kernel/osrelease") or None,
        cgroups="hybrid" if has_v1 and has_v2 else "v1" if has_v1 else "v2" if has_v2 else None,
        container=_container(files, environment),
        clock_source=files.text("sys/devices/system/clocksource/clocksource0/current_clocksource") or None,
        open_files=first_number(limits[1]) if limits else None,
        open_files_hard=first_number(limits[2]) if limits else None,
        listen_backlog=files.number("proc/sys/net/core/somaxconn"),
        pressure={name: value for name, value in pressure.items() if value is not None},
        environment={name: value for name, value in sorted(environment.items()) if ENVIRONMENT.fullmatch(name)},
    )


def _pressure_text(files: Files, name: str) -> str:
    """Of the own cgroup where the kernel counts it, else of the machine."""
    for folder, is_v2 in cgroup_folders(name, files.cgroups, files.own_cgroup):
        if is_v2 and (text := Files(folder).text(f"{name}.pressure")):
            return text
    return files.text(f"proc/pressure/{name}")


def _container(files: Files, environment: Mapping[str, str]) -> str | None:
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if files.exists(".dockerenv"):
        return "docker"
    if files.exists("run/.containerenv"):
        return "podman"
    places = files.text("proc/self/cgroup") + files.text("proc/self/mountinfo")
    name = next((name for name in _CONTAINERS if re.search(rf"[/-]{name}\b", places)), None)
    return "kubernetes" if name == "kubepods" else name
