"""Quotas as the kernel writes them, in folders made for the test."""

import os
from pathlib import Path

import pytest

from ortserve.engine.cpu_budget import cpu_budget, intra_op_threads

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


def test_this_very_process_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 <= cpu_budget() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("budget", "on_gpu", "inter_op_threads", "expected"),
    [(8, False, 1, 8), (8, False, 3, 6), (2, False, 4, 1), (1, False, 1, 1), (8, True, 1, 1)],
)
def test_run_uses_the_budget_and_no_more(budget: int, on_gpu: bool, inter_op_threads: int, expected: int) -> None:
    assert intra_op_threads(budget, on_gpu=on_gpu, inter_op_threads=inter_op_threads) == expected
