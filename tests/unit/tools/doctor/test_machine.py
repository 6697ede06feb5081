"""Machines, read from simulated trees of files."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from machines import ARM_FEATURES, HEALTHY, limits, write_machine
from ortserve.tools.doctor.machine import Files, parse_list, read_memory, read_processors, read_system
from ortserve.tools.doctor.result import Memory, Processors, System


def read(root: Path, environment: Mapping[str, str] = {}) -> tuple[Processors, Memory, System]:
    files = Files(root)
    return read_processors(files), read_memory(files), read_system(environment)


def test_machine_without_limits(tmp_path: Path) -> None:
    processors, memory, _ = read(write_machine(tmp_path))

    assert (processors.model, processors.online, processors.cores) == ("Fast 9000", 4, 4)
    assert (processors.allowed, processors.quota, processors.budget) == ((0, 1, 2, 3), None, 4)
    assert processors.instruction_sets["avx512_vnni"]
    assert not processors.instruction_sets["amx_bf16"]
    assert (processors.governor, processors.highest_mhz) == ("performance", 3600)
    assert processors.numa_nodes == {0: (0, 1, 2, 3)}
    assert (memory.limit_bytes, memory.used_bytes, memory.killed_processes) == (None, None, None)
    assert memory.free_bytes == memory.available_bytes
    assert (memory.huge_pages, memory.huge_pages_defrag, memory.allocator) == ("madvise", "madvise", "glibc")


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_limits_of_a_cgroup_are_read(version: Literal["v1", "v2"], tmp_path: Path) -> None:
    group = limits(version, group="/kubepods/pod1", quota="150000", memory=str(2**30), used="900000000", throttled=17)

    processors, memory, _ = read(write_machine(tmp_path, group))

    assert (processors.quota, processors.budget, processors.throttled_periods) == (1.5, 2, 17)
    assert (memory.limit_bytes, memory.used_bytes, memory.killed_processes) == (2**30, 900_000_000, 2)
    assert replace(memory, available_bytes=2**40).free_bytes == 2**30 - 900_000_000


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_limits_in_a_container_whose_path_is_that_of_the_host(version: Literal["v1", "v2"], tmp_path: Path) -> None:
    group = limits(version, group="/", quota="50000", memory=str(2**29), used="1", throttled=0)
    own = "0::/docker/abc\n" if version == "v2" else "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n"

    processors, memory, _ = read(write_machine(tmp_path, group | {"proc/self/cgroup": own}))

    assert (processors.quota, processors.budget, memory.limit_bytes) == (0.5, 1, 2**29)


def test_smallest_limit_of_all_levels_counts(tmp_path: Path) -> None:
    inner = limits("v2", group="/a/b", quota="max", memory="max", used="5", throttled=0)
    outer = limits("v2", group="/a", quota="200000", memory="7000", used="6", throttled=3)

    processors, memory, _ = read(write_machine(tmp_path, inner | outer | {"proc/self/cgroup": "0::/a/b\n"}))

    assert (processors.quota, processors.throttled_periods) == (2.0, 3)
    assert (memory.limit_bytes, memory.used_bytes, memory.free_bytes) == (7000, 6, 6994)


def test_hybrid_cgroups_follow_version_1(tmp_path: Path) -> None:
    group = limits("v1", group="/", quota="-1", memory="9223372036854771712", used="5", throttled=0)
    own = group["proc/self/cgroup"] + "0::/\n"

    processors, memory, _ = read(write_machine(tmp_path, group | {"proc/self/cgroup": own}))

    assert (processors.quota, processors.throttled_periods, memory.limit_bytes) == (None, None, None)


def test_arm_processors_show_their_instruction_sets(tmp_path: Path) -> None:
    processors, _, _ = read(write_machine(tmp_path, {"proc/cpuinfo": f"processor : 0\nFeatures\t: {ARM_FEATURES}\n"}))

    assert processors.model is None
    assert processors.instruction_sets["asimddp"]
    assert not processors.instruction_sets["i8mm"]


def test_affinity_numa_nodes_and_siblings_are_read(tmp_path: Path) -> None:
    folder = "sys/devices/system"
    processors, _, _ = read(
        write_machine(
            tmp_path,
            {
                "proc/self/status": "Cpus_allowed_list:\t1-2\n",
                f"{folder}/node/online": "0-2\n",
                f"{folder}/node/node0/cpulist": "0-1\n",
                f"{folder}/node/node1/cpulist": "2-3\n",
                f"{folder}/node/node2/cpulist": "",
                **{f"{folder}/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 2},{n % 2 + 2}\n" for n in range(4)},
            },
        )
    )

    assert (processors.allowed, processors.budget) == ((1, 2), 2)
    assert processors.numa_nodes == {0: (1,), 1: (2,)}
    assert processors.cores == 2


@pytest.mark.parametrize(
    ("maps", "name"),
    [
        ("7f /usr/lib/libjemalloc.so.2\n7f /usr/lib/libc.so.6", "jemalloc"),
        ("7f /usr/lib/libc-2.31.so", "glibc"),
        ("7f /lib/ld-musl-x86_64.so.1\n7f /opt/libtcmalloc.so", "tcmalloc"),
        ("7f /lib/ld-musl-x86_64.so.1", "musl"),
        ("7f /usr/bin/python", None),
    ],
)
def test_allocator_is_detected_from_mapped_libraries(maps: str, name: str | None, tmp_path: Path) -> None:
    _, memory, _ = read(write_machine(tmp_path, {"proc/self/maps": maps}))

    assert memory.allocator == name


def test_only_variables_that_matter_are_shown(tmp_path: Path) -> None:
    shown = {"LD_PRELOAD": "x", "OMP_NUM_THREADS": "4", "ORT_X": "1"}
    hidden = {"AWS_SECRET": "s", "NVIDIA_API_KEY": "s", "ORTSERVE_HOST": "h"}

    *_, system = read(write_machine(tmp_path), shown | hidden)

    assert system.environment == shown


def test_machine_without_any_file_is_unknown(tmp_path: Path) -> None:
    processors, memory, _ = read(tmp_path)

    assert (processors.online, processors.budget, processors.instruction_sets, processors.quota) == (
        None,
        None,
        {},
        None,
    )
    assert (memory.limit_bytes, memory.huge_pages, memory.allocator) == (None,) * 3


def test_this_machine_is_as_other_libraries_see_it() -> None:
    processors, memory, system = read(Path("/"))

    assert set(processors.allowed) == os.sched_getaffinity(0)
    assert memory.total_bytes == psutil.virtual_memory().total
    assert processors.online == psutil.cpu_count()
    assert Path("/proc/sys/kernel/osrelease").read_text().strip() == system.kernel
    assert f"{system.open_files} {system.open_files_hard}" in " ".join(Path("/proc/self/limits").read_text().split())


CONTENT = st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode(errors="replace"))
LINES = st.lists(
    st.sampled_from([line for text in HEALTHY.values() for line in text.splitlines()]) | st.text(max_size=30)
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(st.sampled_from(sorted(HEALTHY)), CONTENT, min_size=1), cgroup=LINES)
def test_no_content_of_any_file_is_an_error(
    files: dict[str, bytes], cgroup: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    group = limits("v2", group="/", quota="max", memory="max", used="5", throttled=0)
    root = write_machine(tmp_path_factory.mktemp("machine"), group)
    for name, content in files.items():
        (root / name).write_bytes(content)
    (root / "proc/self/cgroup").write_text("\n".join(cgroup), errors="replace")

    processors, memory, _ = read(root)

    assert processors.budget is None or processors.budget >= 1
    assert memory.free_bytes >= 0


@given(st.text(alphabet="0123456789-, \nmax:[]abc.=", max_size=40))
def test_any_text_is_a_list(text: str) -> None:
    assert list(parse_list(text)) == sorted(set(parse_list(text)))


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=40))
def test_lists_are_read_in_the_form_of_the_kernel(numbers: set[int]) -> None:
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    text = ",".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else f"{group[0]}" for group in groups)

    assert set(parse_list(text)) == numbers
