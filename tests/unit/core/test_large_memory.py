"""Memory for large bodies: it is lent to one body at a time, and held within bounds."""

import gc

import numpy as np
import pytest

from ortserve.core.large_memory import LargeMemory

MIB = 2**20


def test_block_is_lent_again_once_nothing_refers_to_it() -> None:
    memory = LargeMemory()
    first = memory.take(MIB)
    first[:4] = b"seen"
    view = np.frombuffer(first, np.uint8)[:4]
    second = memory.take(MIB)
    second[:4] = b"mine"
    assert view.tobytes() == b"seen"
    address = np.frombuffer(first, np.uint8).ctypes.data
    del first, view
    gc.collect()
    third = memory.take(MIB - 5)
    assert (np.frombuffer(third, np.uint8).ctypes.data, len(third)) == (address, MIB - 5)
    assert bytes(second[:4]) == b"mine"


def test_memory_stays_below_what_may_be_kept() -> None:
    memory = LargeMemory(max_kept_bytes=4 * MIB)
    lent = [memory.take(MIB) for _ in range(10)]
    assert memory.kept_bytes <= 4 * MIB
    for number, room in enumerate(lent):
        room[:] = bytes([number]) * MIB
    assert [set(room) for room in lent] == [{number} for number in range(10)]
    lent.clear()
    memory.take(4 * MIB)
    assert memory.kept_bytes == 4 * MIB


def test_large_block_is_not_lent_for_little() -> None:
    memory = LargeMemory()
    memory.take(64 * MIB)
    little = memory.take(MIB)
    assert memory.kept_bytes == 65 * MIB
    assert len(little) == MIB


def test_block_remembers_what_was_written() -> None:
    memory = LargeMemory()
    block, room = memory.lend(MIB)
    assert block.touched_bytes == 0
    block.touched_bytes = 1000
    del room
    again, _ = memory.lend(MIB)
    assert again is block
    assert again.touched_bytes == 1000


def test_parts_are_joined_in_order() -> None:
    memory = LargeMemory()
    parts: list[bytes | memoryview] = [b"head", b"", np.arange(10_000, dtype=np.float32).view(np.uint8).data, b"tail"]
    joined = memory.join(list(parts))
    assert joined == b"".join(parts)
    assert joined.readonly


def test_more_than_there_are_addresses_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        LargeMemory().take(2**60)
