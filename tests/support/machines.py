"""Folders that look like the root of another machine: the files of ``/proc`` and ``/sys`` that doctor reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

X86_FLAGS: Final = "fpu sse2 avx2 fma f16c avx512f avx512_vnni amx_tile amx_int8"
ARM_FEATURES: Final = "fp asimd asimddp bf16 sve"

HEALTHY: Final[Mapping[str, str]] = {
    "proc/cpuinfo": f"processor\t: 0\nmodel name\t: Fast 9000\nflags\t\t: {X86_FLAGS}\n\nprocessor\t: 1\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-3\n",
    "proc/self/maps": "7f00-7f01 r-xp 0 00:00 1 /usr/lib/libc.so.6\n",
    "proc/self/cgroup": "0::/\n",
    "sys/devices/system/cpu/online": "0-3\n",
    **{f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n}\n" for n in range(4)},
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3600000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "sys/devices/system/node/online": "0\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/kernel/mm/transparent_hugepage/defrag": "always defer [madvise] never\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}
"""Four processors at a steady frequency, without a limit."""


def write_machine(root: Path, files: Mapping[str, str] = {}) -> Path:
    """Write a healthy machine below ``root``, with other contents for ``files``; empty content omits the file."""
    for name, content in {**HEALTHY, **files}.items():
        if content:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return root


def limits(
    version: Literal["v1", "v2"], *, group: str, quota: str, memory: str, used: str, throttled: int
) -> dict[str, str]:
    """The files of a cgroup ``group``, such as ``/kubepods/pod1``, that limit processors and memory.

    ``quota`` is the time per period of 100 ms in microseconds; ``-1`` or ``max`` means unlimited.
    """
    statistics = f"nr_periods 1000\nnr_throttled {throttled}\n"
    if version == "v2":
        folder = f"sys/fs/cgroup{group.rstrip('/')}"
        return {
            "proc/self/cgroup": f"0::{group}\n",
            f"{folder}/cpu.max": f"{quota} 100000\n",
            f"{folder}/cpu.stat": statistics,
            f"{folder}/memory.max": f"{memory}\n",
            f"{folder}/memory.current": f"{used}\n",
            f"{folder}/memory.events": "low 0\noom 3\noom_kill 2\n",
        }
    cpu, of_memory = (f"sys/fs/cgroup/{name}{group.rstrip('/')}" for name in ("cpu", "memory"))
    return {
        "proc/self/cgroup": f"5:memory:{group}\n4:cpu,cpuacct:{group}\n1:name=systemd:/\n",
        f"{cpu}/cpu.cfs_quota_us": f"{quota}\n",
        f"{cpu}/cpu.cfs_period_us": "100000\n",
        f"{cpu}/cpu.stat": statistics,
        f"{of_memory}/memory.limit_in_bytes": f"{memory}\n",
        f"{of_memory}/memory.usage_in_bytes": f"{used}\n",
        f"{of_memory}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    }
