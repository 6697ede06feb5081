"""Time slices and nice levels of threads, as the kernel reports them."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ortserve.engine.thread_priority import LONGEST_SLICE_NS, LOOP_SLICE_NS, set_slice

OWN_LEVEL = os.getpriority(os.PRIO_PROCESS, 0)
MAY_LOWER = subprocess.run(["nice", "-n", "-10", "nice"], capture_output=True, check=True).stdout == b"-10\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has slices of threads")


def slice_ns() -> int | None:
    """The slice of the calling thread; None if the kernel does not support slices of single threads."""
    path = Path("/proc/thread-self/sched")
    found = re.search(r"se\.slice\s*:\s*(\d+)", path.read_text()) if path.is_file() else None
    return int(found[1]) if found else None


@pytest.mark.parametrize("wanted_ns", [LOOP_SLICE_NS, LONGEST_SLICE_NS])
def test_thread_has_the_slice_and_those_it_starts_have_the_default(wanted_ns: int) -> None:
    slices: list[int | None] = []

    def change() -> None:
        before = slice_ns()
        assert set_slice(wanted_ns)
        slices.extend([before, slice_ns()])
        child = threading.Thread(target=lambda: slices.append(slice_ns()))
        child.start()
        child.join()

    thread = threading.Thread(target=change)
    thread.start()
    thread.join()

    before, own, child = slices
    if before is None:
        pytest.skip("the kernel does not report slices (Linux 6.12)")
    assert own == wanted_ns
    assert child == before


_REPORT = """
import json, os, resource, subprocess, threading
{before}
from ortserve.engine.thread_priority import own_nice, put_loop_first
{after}

def level():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

put_loop_first()
levels = {{"loop": level(), "own": own_nice()}}
thread = threading.Thread(target=lambda: levels.update(thread=level()))
thread.start()
thread.join()
levels["child"] = int(subprocess.check_output(["nice"]))
print(json.dumps(levels))
"""


def nice_levels(*, before: str = "", after: str = "") -> dict[str, int]:
    """Nice levels of a process that runs these Python statements before and after it imports the package."""
    code = _REPORT.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=60)
    levels: dict[str, int] = json.loads(done.stdout)
    return levels


@pytest.mark.skipif(OWN_LEVEL != 0, reason="the tests were started with a nice level of their own")
@pytest.mark.skipif(not MAY_LOWER, reason="needs CAP_SYS_NICE or RLIMIT_NICE")
def test_loop_alone_has_a_lower_nice_level() -> None:
    assert nice_levels() == {"loop": -10, "own": 0, "thread": 0, "child": 0}


@pytest.mark.skipif(OWN_LEVEL != 0, reason="the tests were started with a nice level of their own")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become an unprivileged user")
def test_loop_of_an_unprivileged_process_keeps_its_nice_level() -> None:
    levels = nice_levels(after="resource.setrlimit(resource.RLIMIT_NICE, (0, 0)); os.setuid(65534)")

    assert levels == {"loop": 0, "own": 0, "thread": 0, "child": 0}


def test_process_with_a_nice_level_of_its_own_keeps_it() -> None:
    level = OWN_LEVEL + 3
    assert nice_levels(before="os.nice(3)") == dict.fromkeys(("loop", "own", "thread", "child"), level)
