"""Time slices and nice levels of threads, as the kernel reports them."""

import ctypes
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from models import builders
from ortserve.core.batch import Batch
from ortserve.core.thread_pool import ThreadPool
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.provider_options import CPU
from ortserve.engine.thread_priority import LONGEST_SLICE_NS, LOOP_SLICE_NS, RUN_SLACK_NS, put_load_last, set_slice
from servers import LONG_S

OWN_LEVEL = os.getpriority(os.PRIO_PROCESS, 0)
MAY_LOWER = subprocess.run(["nice", "-n", "-10", "nice"], capture_output=True, check=True).stdout == b"-10\n"
_GET_TIMER_SLACK = 30
"""``PR_GET_TIMERSLACK`` of prctl(2)."""

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


def slack_ns() -> int:
    """The timer slack of the calling thread."""
    return int(ctypes.CDLL(None).prctl(_GET_TIMER_SLACK, 0, 0, 0, 0))


def test_threads_of_a_load_wait_long_for_the_interpreter_lock_and_the_worker_that_they_start_does_not(
    tmp_path: Path,
) -> None:
    """The latency that warm-up and the speed gate measure on the worker must not include such waits."""
    session = ort.InferenceSession(builders.identity(tmp_path / "model.onnx"), providers=[CPU])
    found: list[int] = []
    is_done = threading.Event()

    def done(_: object) -> None:
        found.append(slack_ns())
        is_done.set()

    def load() -> None:
        found.append(slack_ns())
        instance = Instance(session, read_signature(session), name="m", intra_op_threads=1, clock=time.monotonic_ns)
        instance.start(Batch(((np.zeros((1, 4), np.float32),),), 1, 1), done)
        assert is_done.wait(LONG_S)
        instance.close()

    with ThreadPool(1, "load", put_load_last) as threads:
        threads.submit(load).result()
    assert found == [5_000_000, RUN_SLACK_NS]
