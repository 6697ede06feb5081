"""Memory for large bodies, used again once nothing refers to it.

The kernel clears fresh memory page by page where it is first written, and takes pages back one by one. For 64 MB both
together take 10 ms on a good machine and over 100 ms on a small virtual one, all of it on the event loop that receives
a body and drops it again (``loadtests/noisy_neighbour.py``). Blocks that stay with the process cost neither.
"""

import mmap
import sys
from threading import Lock
from typing import Final

import numpy as np

MAX_KEPT_BYTES: Final = 128 * 2**20
"""Two bodies of the largest size that is allowed by default."""
_MAX_BLOCKS: Final = 64
_STEPS: Final = 4
"""Sizes of blocks for each power of two, so that a body wastes a fifth of its block at most."""
_MOST_TIMES: Final = 8
"""A block is not lent for less than this part of its size: the next large body would find none."""


class Block:
    """Memory of one body at a time.

    Attributes:
        content: All of it.
        touched_bytes: From its begin, that were written to before: the kernel has cleared these pages already.
    """

    __slots__ = ("content", "touched_bytes")

    def __init__(self, size: int) -> None:
        """Raises MemoryError: There are no such addresses."""
        try:
            # Not numpy's own memory, for which it asks the kernel for pages of 2 MiB: one write would clear so much.
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {size} bytes of addresses") from error
        self.content = np.frombuffer(memory, np.uint8)
        self.touched_bytes = 0


class LargeMemory:
    """Blocks of memory. Any thread.

    A block is free when no reference to its array is left but its own, as in ``engine/output_buffers``; borrowers give
    nothing back.
    """

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        """``max_kept_bytes`` is what all blocks may have together; what is asked for beyond that is not kept."""
        self._max_kept_bytes = max_kept_bytes
        self._lock = Lock()
        self._blocks: list[Block] = []  # used last last
        self._own_references = _references(Block(1))

    @property
    def kept_bytes(self) -> int:
        """Of all blocks, lent and free. Of these, pages that nothing was ever written to take no memory."""
        return sum([block.content.nbytes for block in self._blocks])

    def take(self, size: int) -> memoryview:
        """Room for ``size`` bytes of any content, lent for as long as anything refers to it.

        Raises:
            MemoryError: There are no such addresses.
        """
        return self.lend(size)[1]

    def lend(self, size: int) -> tuple[Block, memoryview]:
        """As ``take``, with the block, which may be kept: references to it do not count."""
        with self._lock:
            index = self._find(size)
            if index >= 0:
                block = self._blocks.pop(index)
                self._blocks.append(block)
            else:
                block = Block(_block_size(size))
                if self._make_room(block.content.nbytes):
                    self._blocks.append(block)
            return block, block.content.data[:size]

    def join(self, parts: list[bytes | memoryview]) -> memoryview:
        """All parts one after the other, read-only. Copies without the interpreter lock, unlike ``bytes.join``.

        ``parts`` is emptied from its end: each part is freed by itself, the last to be made first, so that the kernel
        takes little memory back at a time, and the interpreter lock is free in between.
        """
        end = sum([len(part) for part in parts])
        room = self.take(end)
        joined = np.frombuffer(room, np.uint8)
        while parts:
            part = parts.pop()
            begin = end - len(part)
            joined[begin:end] = np.frombuffer(part, np.uint8)
            end = begin
        return room.toreadonly()

    def _find(self, size: int) -> int:
        """The smallest free block that fits; -1 where there is none."""
        found, least = -1, _MOST_TIMES * _block_size(size) + 1
        for index in range(len(self._blocks)):
            nbytes = self._blocks[index].content.nbytes
            if size <= nbytes < least and self._is_free(index):
                found, least = index, nbytes
        return found

    def _make_room(self, nbytes: int) -> bool:
        """Forget free blocks, the least recently used first, until one of ``nbytes`` may be kept; False if none may."""
        if nbytes > self._max_kept_bytes:
            return False
        kept_bytes, index = self.kept_bytes, 0
        while kept_bytes + nbytes > self._max_kept_bytes or len(self._blocks) >= _MAX_BLOCKS:
            if index == len(self._blocks):
                return False
            if self._is_free(index):
                kept_bytes -= self._blocks[index].content.nbytes
                self._blocks.pop(index)
            else:
                index += 1
        return True

    def _is_free(self, index: int) -> bool:
        return _references(self._blocks[index]) == self._own_references


def _block_size(size: int) -> int:
    """``size`` rounded up to a multiple of a quarter of the power of two below it."""
    step = max(4096, (1 << (max(size, 1).bit_length() - 1)) // _STEPS)
    return -(-size // step) * step


def _references(block: Block) -> int:
    """References to a block's content. In one place, since compiled code holds others than the interpreter."""
    return sys.getrefcount(block.content)
