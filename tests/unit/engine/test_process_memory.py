"""The memory of the process, as the kernel counts it."""

import subprocess
import sys
from pathlib import Path

from ortserve.engine.process_memory import HeldMemory, read_held_memory


def test_counters_are_read_in_bytes(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmRSS:\t  900 kB\nRssAnon:\t     500 kB\nRssFile:\t     300 kB\nRssShmem:\t 100 kB\n")
    assert read_held_memory(status) == HeldMemory(500 * 1024, 300 * 1024)
    status.write_text("Name:\tx\n")
    assert read_held_memory(status) == HeldMemory(0, 0)


def test_blocks_of_weights_are_given_back_whatever_their_size() -> None:
    """In a new process, whose malloc no other test has used: a freed block raises glibc's limits by default."""
    script = """
import ctypes
from ortserve.engine.process_memory import give_back_freed, read_held_memory, return_large_blocks
return_large_blocks()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.malloc(1 << 16)
before = read_held_memory().private
for _ in range(2):
    blocks = [libc.malloc(size << 20) for size in (1, 3, 20, 31) * 2]
    for block, size in zip(blocks, (1, 3, 20, 31) * 2):
        ctypes.memset(block, 1, size << 20)
    held = read_held_memory().private - before
    for block in blocks:
        libc.free(block)
give_back_freed()
print(held, read_held_memory().private - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    held, left = map(int, done.stdout.split())
    assert held > 100 << 20
    assert left < 4 << 20
