"""Reusable memory for large bodies. A block is free again when nothing refers to it.

The kernel clears fresh memory page by page on the first write, and reclaims it page by page. For 64 MB both together
take 10 ms on a fast machine and over 100 ms on a small virtual one, on the event loop, which receives and frees the
body (``loadtests/noisy_neighbour.py``). Blocks that stay with the process avoid both.
"""

import mmap
import sys
from threading import Lock
from typing import Final

import numpy as np

MAX_KEPT_BYTES: Final = 128 * 2**20
"""Maximum size of all blocks that stay with the process: two bodies of the default maximum size."""
_MAX_BLOCKS: Final = 64
_STEPS: Final = 4
"""Block sizes per power of two, so that a body wastes at most a fifth of its block."""
_MAX_OVERSIZE: Final = 8
"""Maximum ratio of a block to the requested size; larger blocks stay free for large bodies."""


class Block:
    """Memory for one body at a time.

    Attributes:
        content: The whole block.
        touched_bytes: Number of leading bytes that were written before; the kernel has already cleared their pages.
    """

    __slots__ = ("content", "touched_bytes")

    def __init__(self, size: int) -> None:
        """Raises MemoryError: The address space is exhausted."""
        try:
            # Not numpy's own memory, which uses pages of 2 MiB: a single write would clear a whole page.
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the address space has no room for {size} bytes") from error
        self.content = np.frombuffer(memory, np.uint8)
        self.touched_bytes = 0


class LargeMemory:
    """A pool of blocks. Any thread.

    Borrowers do not return blocks: a block is free when its own reference to its array is the only one, as in
    ``engine/output_buffers``.
    """

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        """``max_kept_bytes`` limits the total size of all blocks; blocks beyond it are not kept."""
        self._max_kept_bytes = max_kept_bytes
        self._lock = Lock()
        self._blocks: list[Block] = []  # most recently used last
        self._own_references = _references(Block(1))

    @property
    def kept_bytes(self) -> int:
        """Total size of all blocks, used and free. Pages that were never written take no memory."""
        return sum([block.content.nbytes for block in self._blocks])

    def take(self, size: int) -> memoryview:
        """Memory of ``size`` bytes with arbitrary content, in use for as long as anything refers to it.

        Raises:
            MemoryError: The address space is exhausted.
        """
        return self.lend(size)[1]

    def lend(self, size: int) -> tuple[Block, memoryview]:
        """Like ``take``, but returns the block, too. References to the block do not keep it in use."""
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
        """Concatenate ``parts``, read-only. Copies without the interpreter lock, unlike ``bytes.join``.

        ``parts`` is emptied from its end, part by part and the newest first, so that the kernel reclaims little memory
        at a time and the interpreter lock is free in between.
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
        """Index of the smallest free block that fits; -1 if there is none."""
        found, least = -1, _MAX_OVERSIZE * _block_size(size) + 1
        for index in range(len(self._blocks)):
            nbytes = self._blocks[index].content.nbytes
            if size <= nbytes < least and self._is_free(index):
                found, least = index, nbytes
        return found

    def _make_room(self, nbytes: int) -> bool:
        """Drop the least recently used free blocks until one of ``nbytes`` fits; False if that is impossible."""
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
    """``size`` rounded up to a multiple of a quarter of the next lower power of two."""
    step = max(4096, (1 << (max(size, 1).bit_length() - 1)) // _STEPS)
    return -(-size // step) * step


def _references(block: Block) -> int:
    """Number of references to a block's content. One function, because compiled code holds other references."""
    return sys.getrefcount(block.content)
