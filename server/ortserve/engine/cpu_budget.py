"""How many threads this process may keep busy: the affinity mask and the cgroup's quota, never the host's cores.

ONNX Runtime's own default is the host's physical cores, whatever mask or quota is set (microsoft/onnxruntime#29510).
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from ortserve.engine.cgroups import CGROUP_ROOT, SELF_CGROUP, cgroup_folders


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit of processor time: ``processors`` of them, and the folder of the cgroup that has it."""

    processors: float
    folder: Path


def cpu_budget(cgroup_root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP) -> int:
    """Threads, at least 1: the processors in the affinity mask, or the smallest quota on the way up, rounded up."""
    processors = len(os.sched_getaffinity(0))
    quotas = [math.ceil(quota.processors) for quota in cpu_quotas(cgroup_root, self_cgroup)]
    return max(1, min([processors, *quotas]))


def intra_op_threads(budget: int, *, on_gpu: bool, inter_op_threads: int) -> int:
    """Threads inside an operator, at least 1, of a run that may keep ``budget`` threads busy.

    ``inter_op_threads`` run branches of the graph at the same time, the calling thread among them: 1 where branches
    wait for each other. A run on a GPU has little to do here but to wait for it.
    """
    return 1 if on_gpu else max(1, budget - (inter_op_threads - 1))


def cpu_quotas(cgroup_root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP) -> list[Quota]:
    """All quotas that hold for this process, on the way from its cgroup up."""
    quotas: list[Quota] = []
    for folder, is_v2 in cgroup_folders("cpu", cgroup_root, self_cgroup):
        processors = _quota_v2(folder) if is_v2 else _quota_v1(folder)
        if processors is not None:
            quotas.append(Quota(processors, folder))
    return quotas


def _quota_v2(folder: Path) -> float | None:
    """``cpu.max`` holds quota and period in microseconds; the quota may be ``max``."""
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
