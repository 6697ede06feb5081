"""The limits of this process, from files in the kernel's format in temporary folders."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ortserve.engine.process_limits import Throttling, core_budget, cpu_budget, intra_op_threads, memory_limit

MASK = 64
"""Processors in the affinity mask of these tests."""


@pytest.fixture(autouse=True)
def _wide_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(MASK)))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def budget(tmp_path: Path, self_cgroup: str, files: dict[str, str]) -> int:
    write(tmp_path / "cgroup", files)
    (tmp_path / "self").write_text(self_cgroup)
    return cpu_budget(tmp_path / "cgroup", tmp_path / "self")


@pytest.mark.parametrize(
    ("self_cgroup", "files", "expected"),
    [
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2, id="v2"),
        pytest.param("0::/\n", {"cpu.max": "250000 100000\n"}, 3, id="v2 rounded up"),
        pytest.param("0::/\n", {"cpu.max": "10000 100000\n"}, 1, id="v2 below one"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, MASK, id="v2 without quota"),
        pytest.param("0::/\n", {}, MASK, id="v2 root has no file"),
        pytest.param("0::/\n", {"cpu.max": "100000000 100000\n"}, MASK, id="quota beyond the mask"),
        pytest.param(
            "0::/pods/a/b\n",
            {"cpu.max": "max 100000\n", "pods/cpu.max": "900000 100000\n", "pods/a/cpu.max": "400000 100000\n",
             "pods/a/b/cpu.max": "max 100000\n"},
            4,
            id="v2 smallest on the way up",
        ),
        pytest.param(
            "0::/pods/a\n",
            {"cpu.max": "max 100000\n", "pods/a/cpu.max": "max 100000\n", "pods/b/cpu.max": "100000 100000\n"},
            MASK,
            id="v2 quota of a neighbour does not count",
        ),
        pytest.param("0::/not/visible/here\n", {"cpu.max": "300000 100000\n"}, 3, id="v2 path of the host"),
        pytest.param("0::/../../other\n", {"cpu.max": "300000 100000\n"}, 3, id="v2 path outside the namespace"),
        pytest.param("0::/\n", {"cpu.max": "rubbish\n"}, MASK, id="v2 one word"),
        pytest.param("0::/\n", {"cpu.max": "some rubbish\n"}, MASK, id="v2 no numbers"),
        pytest.param("0::/\n", {"cpu.max": "1000 0\n"}, MASK, id="v2 no period"),
        pytest.param(
            "12:memory:/x\n4:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "150000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            2,
            id="v1",
        ),
        pytest.param(
            "4:cpuacct,cpu:/x/y\n",
            {"cpu/x/cpu.cfs_quota_us": "500000\n", "cpu/x/cpu.cfs_period_us": "100000\n",
             "cpu/x/y/cpu.cfs_quota_us": "-1\n", "cpu/x/y/cpu.cfs_period_us": "100000\n"},
            5,
            id="v1 quota of the parent",
        ),
        pytest.param(
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            MASK,
            id="v1 without quota",
        ),
        pytest.param("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000\n"}, MASK, id="v1 without period"),
        pytest.param(
            "4:cpuset:/\n",
            {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            MASK,
            id="v1 another controller",
        ),
        pytest.param(
            "4:cpu:/a\n0::/a\n",
            {"cpu/a/cpu.cfs_quota_us": "700000\n", "cpu/a/cpu.cfs_period_us": "100000\n", "cpu.max": "600000 100000"},
            6,
            id="both",
        ),
        pytest.param("", {"cpu.max": "100000 100000\n"}, MASK, id="in no cgroup"),
    ],
)  # fmt: skip
def test_budget_is_the_smallest_of_mask_and_quotas(
    tmp_path: Path, self_cgroup: str, files: dict[str, str], expected: int
) -> None:
    assert budget(tmp_path, self_cgroup, files) == expected


def test_machine_without_cgroups_has_its_mask(tmp_path: Path) -> None:
    assert cpu_budget(tmp_path / "none", tmp_path / "none") == MASK


@pytest.mark.parametrize(
    ("mask", "quota", "expected"),
    [({0, 1, 2, 3}, "max", 4), (set(range(8)), "max", 4), ({0, 1, 4, 5}, "max", 2), (set(range(8)), "300000", 3)],
    ids=["one of each core", "both of each core", "two cores", "quota"],
)
def test_cores_count_once_however_many_processors_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: set[int], quota: str, expected: int
) -> None:
    """Processors 0 and 4 are one core, 1 and 5 another."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mask)
    siblings = {f"cpu{number}/topology/thread_siblings_list": f"{number % 4},{number % 4 + 4}" for number in range(8)}
    write(tmp_path / "cpu", siblings)
    write(tmp_path, {"self": "0::/\n", "cgroup/cpu.max": f"{quota} 100000\n"})
    assert core_budget(tmp_path / "cgroup", tmp_path / "self", tmp_path / "cpu") == expected


def test_processors_without_a_known_core_count_as_cores(tmp_path: Path) -> None:
    assert core_budget(tmp_path / "none", tmp_path / "none", tmp_path / "none") == MASK


def test_current_process_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 <= core_budget() <= cpu_budget() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("budget", "on_gpu", "inter_op_threads", "expected"),
    [(8, False, 1, 8), (8, False, 3, 6), (2, False, 4, 1), (1, False, 1, 1), (8, True, 1, 1)],
)
def test_run_uses_the_budget_and_no_more(budget: int, on_gpu: bool, inter_op_threads: int, expected: int) -> None:
    assert intra_op_threads(budget, on_gpu=on_gpu, inter_op_threads=inter_op_threads) == expected


MACHINE = 8 * 1024**3


@pytest.mark.parametrize(
    ("self_cgroup", "files", "expected"),
    [
        pytest.param("0::/\n", {"memory.max": "max\n"}, MACHINE, id="v2 without limit"),
        pytest.param("0::/\n", {}, MACHINE, id="v2 root has no file"),
        pytest.param("0::/\n", {"memory.max": "1073741824\n"}, 2**30, id="v2"),
        pytest.param("0::/\n", {"memory.max": str(2**50)}, MACHINE, id="beyond the machine"),
        pytest.param("0::/a/b\n", {"a/memory.max": "1000\n", "a/b/memory.max": "max\n"}, 1000, id="v2 on the way up"),
        pytest.param("0::/a\n", {"b/memory.max": "1000\n"}, MACHINE, id="v2 of a neighbour"),
        pytest.param("0::/\n", {"memory.max": "rubbish\n"}, MACHINE, id="v2 no number"),
        pytest.param("4:cpu:/x\n3:memory:/x\n", {"memory/x/memory.limit_in_bytes": "5000\n"}, 5000, id="v1"),
        pytest.param(
            "3:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE, id="v1 without limit"
        ),
    ],
)
def test_smallest_limit_counts(tmp_path: Path, self_cgroup: str, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "self").write_text(self_cgroup)
    (tmp_path / "meminfo").write_text(f"MemTotal:       {MACHINE // 1024} kB\nMemFree:  12 kB\n")
    assert memory_limit(tmp_path / "cgroup", tmp_path / "self", tmp_path / "meminfo") == expected


def test_limit_on_address_space_counts() -> None:
    command = [sys.executable, "-c", "from ortserve.engine.process_limits import memory_limit; print(memory_limit())"]
    limit = 2 * 1024**3

    def limit_child() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    output = subprocess.run(command, preexec_fn=limit_child, capture_output=True, text=True, check=True).stdout
    assert int(output) <= limit


S = 1_000_000_000


def test_throttled_periods_count_for_ten_seconds(tmp_path: Path) -> None:
    file = tmp_path / "cpu.stat"
    file.write_text("usage_usec 9\nnr_periods 8\nnr_throttled 3\nthrottled_usec 5\n")
    throttling = Throttling([file], S)
    assert not throttling.is_recent(3 * S)
    file.write_text("usage_usec 9\nnr_periods 8\nnr_throttled 4\nthrottled_usec 5\n")
    assert not throttling.is_recent(3 * S + 1)  # it was read within the last second
    assert throttling.is_recent(4 * S)
    assert throttling.is_recent(13 * S)
    assert not throttling.is_recent(14 * S)


def test_without_a_quota_nothing_is_read(tmp_path: Path) -> None:
    assert not Throttling([], S).is_recent(5 * S)
    assert not Throttling([tmp_path / "missing"], S).is_recent(5 * S)
