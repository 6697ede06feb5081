"""Time slices of threads, as the kernel reports them."""

import re
import sys
import threading
from pathlib import Path

import pytest

from ortserve.engine.thread_priority import LONGEST_SLICE_NS, SHORTEST_SLICE_NS, set_slice

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has slices of threads")


def slice_ns() -> int | None:
    """The slice of the calling thread; None if the kernel has none for single threads."""
    path = Path("/proc/thread-self/sched")
    found = re.search(r"se\.slice\s*:\s*(\d+)", path.read_text()) if path.is_file() else None
    return int(found[1]) if found else None


@pytest.mark.parametrize("wanted_ns", [SHORTEST_SLICE_NS, LONGEST_SLICE_NS])
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
