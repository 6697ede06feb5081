"""The states of sequences in device memory, which only the device reads and writes between the runs of a sequence.

In batches an object array takes the place of each state: one ``StateSlot`` for each row. A run reads the slots of its
rows, and its states among the outputs are copied to new slots. So the states before a run stay as they were until
nothing refers to them, and a failed request can be repeated.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Final

import numpy as np

from ortserve.core.batch import Arrays, Batch
from ortserve.device.accounting import Account
from ortserve.device.protocol import Device, release_all

_BLOCK_BYTES: Final = 2**20
_MOST_SLOTS: Final = 1024
"""Bounds of one allocation, which holds at least one slot."""
_ALIGNMENT: Final = 256  # of addresses that cudaMalloc returns, which kernels may rely on


class StateSlot:
    """A state of one sequence. Its memory is free again when nothing refers to it; any thread may drop it.

    Attributes:
        address: Of the state.
        block: The address of the allocation that contains the slot.
        nbytes: The size of the state, at most that of the slot.
        shape: Of the state, in the form of batches.
    """

    __slots__ = ("_free", "address", "block", "nbytes", "shape")

    def __init__(
        self, free: deque[tuple[int, int]], address: int, block: int, nbytes: int, shape: tuple[int, ...]
    ) -> None:
        """``free`` takes the address and the block of a slot that is free again."""
        self._free: Final = free
        self.address: Final = address
        self.block: Final = block
        self.nbytes: Final = nbytes
        self.shape: Final = shape

    def __len__(self) -> int:
        """The size of the state in bytes."""
        return self.nbytes

    def __del__(self) -> None:
        self._free.append((self.address, self.block))

    @property
    def is_aligned(self) -> bool:
        """Whether a tensor of a run may be at its address."""
        return (self.address - self.block) % _ALIGNMENT == 0


class _SlotPool:
    """Slots of one size. Any thread frees slots; only the owner of the lock of all pools takes them.

    The slot that is free for the longest time is taken first. So sequences whose requests run together keep their
    slots side by side, and are copied together.
    """

    __slots__ = ("blocks", "free", "slot_nbytes", "slots_of_block")

    def __init__(self, slot_nbytes: int) -> None:
        self.slot_nbytes: Final = slot_nbytes
        self.slots_of_block: Final = min(_MOST_SLOTS, max(1, _BLOCK_BYTES // slot_nbytes))
        self.free: Final[deque[tuple[int, int]]] = deque()
        """Addresses of slots, each with that of its block."""
        self.blocks: Final[set[int]] = set()

    @property
    def block_nbytes(self) -> int:
        return self.slots_of_block * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        return len(self.blocks) * self.block_nbytes

    def add_block(self, block: int) -> None:
        self.blocks.add(block)
        self.free.extend([(block + number * self.slot_nbytes, block) for number in range(self.slots_of_block)])

    def remove_empty_blocks(self) -> list[int]:
        """Remove the blocks whose slots are all free, and return them."""
        slots = [self.free.popleft() for _ in range(len(self.free))]
        counts = Counter([block for _, block in slots])
        empty = {block for block, count in counts.items() if count == self.slots_of_block}
        self.free.extend([slot for slot in slots if slot[1] not in empty])
        self.blocks.difference_update(empty)
        return list(empty)


class DeviceStates:
    """The states of one load of a model on its device: its last inputs, and its last outputs in the same order.

    The instances' workers call all methods, and hold the capture lock. The instances share the memory, which is freed
    with the last of them.
    """

    def __init__(self, device: Device, account: Account, initial: Arrays, *, is_fixed: bool) -> None:
        """Make slots for the first states of a sequence, and for those of rows without a request.

        Args:
            device: Of the instances.
            account: Of the first instance.
            initial: The first states of a sequence.
            is_fixed: Whether states keep the size of the first. Slots have exactly this size then, so that states side
                by side are copied together. Other slots are up to a quarter larger than their states.

        Raises:
            ServeError: overloaded: the device has no room.
        """
        self.count: Final = len(initial)
        self._device: Final = device
        self._account: Final = account
        self._dtypes: Final = [array.dtype for array in initial]
        self._lock = threading.Lock()
        self._users = 0
        self._fixed: Final = [_SlotPool(array.nbytes) for array in initial] if is_fixed else []
        self._by_size: Final[dict[int, _SlotPool]] = {}
        self._undo: Final[list[Callable[[], object]]] = []
        try:
            self._stream = device.make_stream()
            self._undo.append(partial(device.destroy_stream, self._stream))
            self._event = device.make_event()
            self._undo.append(partial(device.destroy_event, self._event))
            self.first: Final = self.upload(initial)
            self.padding: Final = self.upload(tuple([np.zeros_like(array) for array in initial]))
            """The states of rows without a request: zeros, in the shape of the first states."""
        except BaseException:
            self.close()
            raise

    def are_in(self, batch: Batch) -> bool:
        """Whether slots take the place of the states. Warm-up runs on states of the host."""
        return batch.parts[-1][0].dtype.hasobject

    def read(self, columns: Sequence[Arrays], addresses: Sequence[int], bucket: int, stream: int) -> None:
        """Enqueue copies of the states of a batch to its inputs. Padding rows repeat the last row.

        Args:
            columns: For each state the slots of the requests.
            addresses: Of the inputs.
            bucket: Rows to run.
            stream: Of the copies.
        """
        for arrays, address in zip(columns, addresses, strict=True):
            slots = [slot for array in arrays for slot in array]
            slots += [slots[-1]] * (bucket - len(slots))
            for row, place, nbytes in _spans(slots):
                self._device.copy_within(address + row * slots[0].nbytes, place, nbytes, stream)

    def write(self, addresses: Sequence[int], shapes: Sequence[tuple[int, ...]], rows: int, stream: int) -> Arrays:
        """Enqueue copies of the states among the outputs of a run, and return their slots.

        Args:
            addresses: Of the outputs.
            shapes: Of one state of each output, in the form of batches.
            rows: Of the batch, without padding.
            stream: Of the copies, which waits for the outputs.

        Raises:
            ServeError: overloaded: the device has no room.
        """
        kept = tuple([self._take(index, shape, rows) for index, shape in enumerate(shapes)])
        for slots, address in zip(kept, addresses, strict=True):
            for row, place, nbytes in _spans(slots.tolist()):
                self._device.copy_within(place, address + row * slots[0].nbytes, nbytes, stream)
        return kept

    def take(self, nbytes: int, shape: tuple[int, ...]) -> StateSlot:
        """An aligned slot with arbitrary content.

        Raises:
            ServeError: overloaded: the device has no room.
        """
        with self._lock:
            return self._take_from(self._pool_of(nbytes), nbytes, shape)

    def upload(self, arrays: Arrays) -> Arrays:
        """Copy a state of the host, of one sequence, for each state to a new slot, and wait for the copies."""
        kept = tuple([self._take(index, array.shape, 1) for index, array in enumerate(arrays)])
        contiguous = [np.ascontiguousarray(array) for array in arrays]
        with self._lock:
            for (slot,), array in zip(kept, contiguous, strict=True):
                if array.nbytes:
                    self._device.copy_in(slot.address, array, self._stream)
            self._wait()
        return kept

    def download(self, index: int, slots: np.ndarray) -> np.ndarray:
        """The content of slots of one state on the host, where the preparation compares it."""
        first: StateSlot = slots[0]
        states = [np.empty(first.shape, self._dtypes[index]) for _ in slots]
        with self._lock:
            for state, slot in zip(states, slots, strict=True):
                if state.nbytes:
                    self._device.copy_out(state, slot.address, self._stream)
            self._wait()
        return states[0] if len(states) == 1 else np.concatenate(states)

    def begin_use(self) -> None:
        """An instance uses the states."""
        with self._lock:
            self._users += 1

    def end_use(self) -> None:
        """An instance is closed; the last one frees the memory."""
        with self._lock:
            self._users -= 1
            is_used = self._users > 0
        if not is_used:
            self.close()

    def close(self) -> None:
        """Free the memory. Slots that are still referred to must not be used again."""
        device = self._device
        release_all(*[partial(device.free, block) for pool in self._pools() for block in pool.blocks], *self._undo)
        self._account.enter("states", 0)

    def _pools(self) -> list[_SlotPool]:
        return [*self._fixed, *self._by_size.values()]

    def _take(self, index: int, shape: tuple[int, ...], rows: int) -> np.ndarray:
        """Slots for ``rows`` rows of one state, with arbitrary content."""
        nbytes = prod(shape) * self._dtypes[index].itemsize
        slots = np.empty(rows, object)
        with self._lock:
            pool = self._fixed[index] if self._fixed else self._pool_of(nbytes)
            for row in range(rows):
                slots[row] = self._take_from(pool, nbytes, shape)
        return slots

    def _pool_of(self, nbytes: int) -> _SlotPool:
        """The aligned slots for states of this size."""
        slot_nbytes = _slot_nbytes(nbytes)
        pool = self._by_size.get(slot_nbytes)
        if pool is None:
            pool = self._by_size[slot_nbytes] = _SlotPool(slot_nbytes)
        return pool

    def _take_from(self, pool: _SlotPool, nbytes: int, shape: tuple[int, ...]) -> StateSlot:
        if not pool.free:
            self._add_block(pool)
        return StateSlot(pool.free, *pool.free.popleft(), nbytes, shape)

    def _add_block(self, pool: _SlotPool) -> None:
        """Allocate a block. First free empty ones, if most memory is free, or if the device has no room."""
        pools, nbytes = self._pools(), pool.block_nbytes
        total = sum([one.nbytes for one in pools])
        unused = sum([len(one.free) * one.slot_nbytes for one in pools])
        if 2 * unused > total or nbytes > self._device.memory().free_bytes:
            empty = [block for one in pools for block in one.remove_empty_blocks()]
            release_all(*[partial(self._device.free, block) for block in empty])
            self._enter()
        self._account.check_room({"states": nbytes})
        pool.add_block(self._device.allocate(nbytes))
        self._enter()

    def _enter(self) -> None:
        self._account.enter("states", sum([pool.nbytes for pool in self._pools()]))

    def _wait(self) -> None:
        self._device.record(self._event, self._stream)
        self._device.wait(self._event)


def _slot_nbytes(nbytes: int) -> int:
    """The size of a slot for a state: aligned, and a quarter of a power of 2 or a multiple of it.

    So states of similar sizes share the slots of one size, and a state that grows takes few sizes.
    """
    step = max(_ALIGNMENT, 1 << max(0, nbytes.bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


def _spans(slots: Sequence[StateSlot]) -> Iterator[tuple[int, int, int]]:
    """Join states that follow one another in a block: the index of the first, its address, and the bytes of all."""
    first = 0
    for row in range(1, len(slots) + 1):
        before = slots[row - 1]
        end = before.address + before.nbytes
        if row == len(slots) or slots[row].address != end or slots[row].block != before.block:
            if end > slots[first].address:
                yield first, slots[first].address, end - slots[first].address
            first = row
