"""The states of sequences in device memory. Between the runs of a sequence they are not copied to the host.

In batches, an object array with one ``StateSlot`` per row replaces each state tensor. A run reads the slots of its
rows, and the states among its outputs are copied to new slots. So the states before a run stay unchanged as long as an
object refers to them, and a failed request can be repeated.
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
from ortserve.device.protocol import ALIGNMENT, Device, release_all

_BLOCK_BYTES: Final = 2**20
_MAX_SLOTS: Final = 1024
"""Limits of one allocation, which holds at least one slot."""


class StateSlot:
    """A state of one sequence in device memory. The memory is free again once no object refers to the slot.

    Any thread may drop the last reference.

    Attributes:
        address: The address of the state.
        block: The address of the allocation that contains the slot.
        nbytes: The size of the state, at most the size of the slot.
        shape: The shape of the state, with an axis for rows.
    """

    __slots__ = ("_free", "address", "block", "nbytes", "shape")

    def __init__(
        self, free: deque[tuple[int, int]], address: int, block: int, nbytes: int, shape: tuple[int, ...]
    ) -> None:
        """``free`` receives the address and the block of the slot when the slot is free again."""
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
        """Whether a tensor of a run can be bound at the slot's address."""
        return (self.address - self.block) % ALIGNMENT == 0


class _SlotPool:
    """Slots of one size. Any thread frees slots; a thread takes slots only under the lock of ``DeviceStates``.

    The slot that has been free for the longest time is taken first. So sequences whose requests run together keep
    neighbouring slots, which are copied together.
    """

    __slots__ = ("blocks", "free", "slot_nbytes", "slots_of_block")

    def __init__(self, slot_nbytes: int) -> None:
        self.slot_nbytes: Final = slot_nbytes
        self.slots_of_block: Final = min(_MAX_SLOTS, max(1, _BLOCK_BYTES // slot_nbytes))
        self.free: Final[deque[tuple[int, int]]] = deque()
        """The address of each free slot, with the address of its block."""
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
    """The states of one load of a model on its device: the model's last inputs, and last outputs in the same order.

    The instances' workers call all methods, and hold the capture lock. The instances share the memory. The last
    instance to close frees it.
    """

    def __init__(self, device: Device, account: Account, initial: Arrays, *, is_fixed: bool) -> None:
        """Upload the initial states of a sequence, and the states of padding rows.

        Args:
            device: The device of the instances.
            account: The account of the first instance.
            initial: The initial states of a sequence.
            is_fixed: Whether all states have the size of the initial ones. Then slots have exactly this size, so that
                neighbouring states are copied together. Otherwise slots are up to a quarter larger than their states.

        Raises:
            ServeError: overloaded: the device has too little memory.
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
            """The states of padding rows: zeros, in the shape of the initial states."""
        except BaseException:
            self.close()
            raise

    def are_in(self, batch: Batch) -> bool:
        """Whether the batch holds slots. Warm-up batches hold states on the host instead."""
        return batch.parts[-1][0].dtype.hasobject

    def read(self, columns: Sequence[Arrays], addresses: Sequence[int], bucket: int, stream: int) -> None:
        """Enqueue copies of the states of a batch to its inputs. Padding rows repeat the last row.

        Args:
            columns: The slots of the requests, for each state.
            addresses: The addresses of the inputs.
            bucket: Rows of the run, padding included.
            stream: The stream of the copies.
        """
        for arrays, address in zip(columns, addresses, strict=True):
            slots = [slot for array in arrays for slot in array]
            slots += [slots[-1]] * (bucket - len(slots))
            for row, place, nbytes in _spans(slots):
                self._device.copy_within(address + row * slots[0].nbytes, place, nbytes, stream)

    def write(self, addresses: Sequence[int], shapes: Sequence[tuple[int, ...]], rows: int, stream: int) -> Arrays:
        """Enqueue copies of the states among the outputs of a run, and return their slots.

        Args:
            addresses: The addresses of the outputs.
            shapes: The shape of one row's state in each output, with an axis for rows.
            rows: Rows of the batch, without padding.
            stream: The stream of the copies, in which work waits for the outputs.

        Raises:
            ServeError: overloaded: the device has too little memory.
        """
        kept = tuple([self._take(index, shape, rows) for index, shape in enumerate(shapes)])
        for slots, address in zip(kept, addresses, strict=True):
            for row, place, nbytes in _spans(slots.tolist()):
                self._device.copy_within(place, address + row * slots[0].nbytes, nbytes, stream)
        return kept

    def take(self, nbytes: int, shape: tuple[int, ...]) -> StateSlot:
        """Take an aligned slot with arbitrary content.

        Raises:
            ServeError: overloaded: the device has too little memory.
        """
        with self._lock:
            return self._take_from(self._pool_of(nbytes), nbytes, shape)

    def upload(self, arrays: Arrays) -> Arrays:
        """Copy the states of one sequence from the host to new slots, and wait for the copies."""
        kept = tuple([self._take(index, array.shape, 1) for index, array in enumerate(arrays)])
        contiguous = [np.ascontiguousarray(array) for array in arrays]
        with self._lock:
            for (slot,), array in zip(kept, contiguous, strict=True):
                if array.nbytes:
                    self._device.copy_in(slot.address, array, self._stream)
            self._wait()
        return kept

    def download(self, index: int, slots: np.ndarray) -> np.ndarray:
        """Copy the slots of one state to the host, where the preparation compares them."""
        first: StateSlot = slots[0]
        states = [np.empty(first.shape, self._dtypes[index]) for _ in slots]
        with self._lock:
            for state, slot in zip(states, slots, strict=True):
                if state.nbytes:
                    self._device.copy_out(state, slot.address, self._stream)
            self._wait()
        return states[0] if len(states) == 1 else np.concatenate(states)

    def begin_use(self) -> None:
        """Register an instance that uses the states."""
        with self._lock:
            self._users += 1

    def end_use(self) -> None:
        """Deregister an instance. The last one frees the memory."""
        with self._lock:
            self._users -= 1
            is_used = self._users > 0
        if not is_used:
            self.close()

    def close(self) -> None:
        """Free the memory. Remaining slots must not be used again."""
        device = self._device
        release_all(*[partial(device.free, block) for pool in self._pools() for block in pool.blocks], *self._undo)
        self._account.set_bytes("states", 0)

    def _pools(self) -> list[_SlotPool]:
        return [*self._fixed, *self._by_size.values()]

    def _take(self, index: int, shape: tuple[int, ...], rows: int) -> np.ndarray:
        """Take slots for ``rows`` rows of one state, with arbitrary content."""
        nbytes = prod(shape) * self._dtypes[index].itemsize
        slots = np.empty(rows, object)
        with self._lock:
            pool = self._fixed[index] if self._fixed else self._pool_of(nbytes)
            for row in range(rows):
                slots[row] = self._take_from(pool, nbytes, shape)
        return slots

    def _pool_of(self, nbytes: int) -> _SlotPool:
        """The pool of aligned slots for states of this size."""
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
        """Allocate a block. Free empty blocks first if more than half of the memory is unused or the device is full."""
        pools, nbytes = self._pools(), pool.block_nbytes
        total = sum([one.nbytes for one in pools])
        unused = sum([len(one.free) * one.slot_nbytes for one in pools])
        if 2 * unused > total or nbytes > self._device.memory().free_bytes:
            empty = [block for one in pools for block in one.remove_empty_blocks()]
            release_all(*[partial(self._device.free, block) for block in empty])
            self._update_account()
        self._account.check_room({"states": nbytes})
        pool.add_block(self._device.allocate(nbytes))
        self._update_account()

    def _update_account(self) -> None:
        self._account.set_bytes("states", sum([pool.nbytes for pool in self._pools()]))

    def _wait(self) -> None:
        self._device.record(self._event, self._stream)
        self._device.wait(self._event)


def _slot_nbytes(nbytes: int) -> int:
    """The size of a slot for a state: aligned, and one of four sizes per power of 2.

    So states of similar sizes share the slots of one size, and a growing state passes through few sizes.
    """
    step = max(ALIGNMENT, 1 << max(0, nbytes.bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


def _spans(slots: Sequence[StateSlot]) -> Iterator[tuple[int, int, int]]:
    """Join neighbouring states of a block into spans: index and address of the first state, and bytes of the span."""
    first = 0
    for row in range(1, len(slots) + 1):
        before = slots[row - 1]
        end = before.address + before.nbytes
        if row == len(slots) or slots[row].address != end or slots[row].block != before.block:
            if end > slots[first].address:
                yield first, slots[first].address, end - slots[first].address
            first = row
