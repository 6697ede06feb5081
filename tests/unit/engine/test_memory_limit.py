"""Limits as the kernel writes them, in folders made for the test."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ortserve.engine.memory_limit import memory_limit

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
    command = [sys.executable, "-c", "from ortserve.engine.memory_limit import memory_limit; print(memory_limit())"]
    limit = 2 * 1024**3

    def limit_child() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    output = subprocess.run(command, preexec_fn=limit_child, capture_output=True, text=True, check=True).stdout
    assert int(output) <= limit
