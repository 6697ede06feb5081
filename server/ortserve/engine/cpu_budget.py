"""How many threads this process may keep busy: the affinity mask and the cgroup's quota, never the host's cores.

ONNX Runtime's own default is the host's physical cores, whatever mask or quota is set (microsoft/onnxruntime#29510).
"""

import math
import os
from pathlib import Path

from ortserve.engine.cgroups import CGROUP_ROOT, SELF_CGROUP, cgroup_folders


def cpu_budget(cgroup_root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP) -> int:
    """Threads, at least 1: the processors in the affinity mask, or the smallest quota on the way up, rounded up."""
    processors = len(os.sched_getaffinity(0))
    quotas = [math.ceil(quota) for quota in _quotas(cgroup_root, self_cgroup)]
    return max(1, min([processors, *quotas]))


def intra_op_threads(budget: int, *, on_gpu: bool, inter_op_threads: int) -> int:
    """Threads inside an operator, at least 1, of a run that may keep ``budget`` threads busy.

    ``inter_op_threads`` run branches of the graph at the same time, the calling thread among them: 1 where branches
    wait for each other. A run on a GPU has little to do here but to wait for it.
    """
    return 1 if on_gpu else max(1, budget - (inter_op_threads - 1))


def _quotas(root: Path, self_cgroup: Path) -> list[float]:
    folders = cgroup_folders("cpu", root, self_cgroup)
    return [quota for folder, is_v2 in folders for quota in (_quota_v2 if is_v2 else _quota_v1)(folder)]


def _quota_v2(folder: Path) -> list[float]:
    """``cpu.max`` holds quota and period in microseconds; the quota may be ``max``."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    except (OSError, ValueError, ZeroDivisionError):
        return []


def _quota_v1(folder: Path) -> list[float]:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return [quota / period] if quota > 0 else []
    except (OSError, ValueError, ZeroDivisionError):
        return []
