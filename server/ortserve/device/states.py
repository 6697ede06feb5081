"""The states of sequences in device memory, which only the device reads and writes between the runs of a sequence.

In batches an object array takes the place of each state: one ``StateSlot`` for each row. A run copies the slots of its
rows to the inputs of its buffer set, and the states among its outputs to new slots. So the states before a run stay as
they were until nothing refers to them, and a failed request can be repeated.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.device.accounting import Account
from ortserve.device.protocol import Device, release_all
from ortserve.engine.output_buffers import RowLayout

_BLOCK_BYTES: Final = 2**20
_MOST_SLOTS: Final = 1024
"""Bounds of one allocation, which holds at least one slot."""


class StateSlot:
    """A state of one sequence. Its memory is free again when nothing refers to it; any thread may drop it."""

    __slots__ = ("_pool", "address", "block")

    def __init__(self, pool: "_SlotPool", address: int, block: int) -> None:
        """``block`` is the address of the allocation that contains the slot."""
        self._pool: Final = pool
        self.address: Final = address
        self.block: Final = block

    def __len__(self) -> int:
        """The size of the state in bytes."""
        return self._pool.nbytes

    def __del__(self) -> None:
        self._pool.free.append((self.address, self.block))


class _SlotPool:
    """The slots of one state of a model. Slots are freed by any thread, and their number only grows.

    The slot that is free for the longest time is taken first. So sequences whose requests run together keep their
    slots side by side, and are copied together.
    """

    def __init__(self, layout: RowLayout, allocate: Callable[[int], int]) -> None:
        self.layout: Final = layout
        self.nbytes: Final = layout.nbytes
        self.free: Final[deque[tuple[int, int]]] = deque()
        """Addresses of slots, each with that of its block."""
        self._allocate: Final = allocate

    def take(self, rows: int) -> np.ndarray:
        """Slots for ``rows`` rows, with arbitrary content."""
        slots = np.empty(rows, object)
        for row in range(rows):
            slots[row] = StateSlot(self, *self._take_one())
        return slots

    def _take_one(self) -> tuple[int, int]:
        while True:
            try:
                return self.free.popleft()
            except IndexError:
                count = min(_MOST_SLOTS, max(1, _BLOCK_BYTES // self.nbytes))
                block = self._allocate(count * self.nbytes)
                self.free.extend([(block + number * self.nbytes, block) for number in range(count)])


class DeviceStates:
    """The states of one load of a model on its device: its last inputs, and its last outputs in the same order.

    The instances' workers call all methods, and hold the capture lock. The instances share the memory, which is freed
    with the last of them.
    """

    def __init__(self, device: Device, account: Account, layouts: Sequence[RowLayout]) -> None:
        """Allocate nothing yet; ``layouts`` are those of a row of each state."""
        self.count: Final = len(layouts)
        self._device: Final = device
        self._account: Final = account
        self._lock = threading.Lock()
        self._blocks: list[int] = []
        self._nbytes = 0
        self._users = 0
        self._pools: Final = [_SlotPool(layout, self._allocate) for layout in layouts]
        self._stream = device.make_stream()
        self._event = device.make_event()

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
        for pool, arrays, address in zip(self._pools, columns, addresses, strict=True):
            slots = [slot for array in arrays for slot in array]
            slots += [slots[-1]] * (bucket - len(slots))
            for row, place, nbytes in _spans(slots):
                self._device.copy_within(address + row * pool.nbytes, place, nbytes, stream)

    def write(self, addresses: Sequence[int], rows: int, stream: int) -> Arrays:
        """Enqueue copies of the states among the outputs of a run, and return their slots.

        Args:
            addresses: Of the outputs.
            rows: Of the batch, without padding.
            stream: Of the copies, which waits for the outputs.

        Raises:
            ServeError: overloaded: the device has no room.
        """
        kept = tuple([pool.take(rows) for pool in self._pools])
        for pool, slots, address in zip(self._pools, kept, addresses, strict=True):
            for row, place, nbytes in _spans(slots.tolist()):
                self._device.copy_within(place, address + row * pool.nbytes, nbytes, stream)
        return kept

    def upload(self, arrays: Arrays) -> Arrays:
        """Copy states of the host, of shape ``(rows, *item)``, to new slots, and wait for the copies."""
        kept = tuple([pool.take(len(array)) for pool, array in zip(self._pools, arrays, strict=True)])
        contiguous = [np.ascontiguousarray(array) for array in arrays]
        with self._lock:
            for slots, array in zip(kept, contiguous, strict=True):
                for slot, row in zip(slots, array, strict=True):
                    self._device.copy_in(slot.address, row[np.newaxis], self._stream)
            self._wait()
        return kept

    def download(self, batch: Batch) -> Batch:
        """The batch with its states on the host, for a run without buffers."""
        columns: list[Arrays] = []
        with self._lock:
            for pool, arrays in zip(self._pools, batch.parts[-self.count :], strict=True):
                slots = [slot for array in arrays for slot in array]
                states = np.empty((len(slots), *pool.layout.item), pool.layout.dtype)
                for row, slot in enumerate(slots):
                    self._device.copy_out(states[row : row + 1], slot.address, self._stream)
                columns.append((states,))
            self._wait()
        return Batch((*batch.parts[: -self.count], *columns), batch.rows, batch.bucket)

    def upload_result(self, result: BatchResult) -> BatchResult:
        """The result with its states on the device, after a run without buffers."""
        outputs = (*result.outputs[: -self.count], *self.upload(result.outputs[-self.count :]))
        return BatchResult(outputs, result.staged_ns, result.computed_ns, result.run_ns)

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
        release_all(
            *[partial(device.free, block) for block in self._blocks],
            partial(device.destroy_event, self._event),
            partial(device.destroy_stream, self._stream),
        )
        self._account.enter("states", 0)

    def _allocate(self, nbytes: int) -> int:
        with self._lock:
            self._account.check_room({"states": nbytes})
            block = self._device.allocate(nbytes)
            self._blocks.append(block)
            self._nbytes += nbytes
            self._account.enter("states", self._nbytes)
        return block

    def _wait(self) -> None:
        self._device.record(self._event, self._stream)
        self._device.wait(self._event)


def make_states(
    device: Device, account: Account, layouts: Sequence[RowLayout], initial: Arrays
) -> tuple[DeviceStates, Arrays, Arrays]:
    """Make memory for states. Returns it, the slots of ``initial``, of one row, and those of zeros."""
    states = DeviceStates(device, account, layouts)
    try:
        return states, states.upload(initial), states.upload(tuple([np.zeros_like(array) for array in initial]))
    except BaseException:
        states.close()
        raise


def _spans(slots: Sequence[StateSlot]) -> Iterator[tuple[int, int, int]]:
    """Join slots that follow one another in a block: the index of the first, its address, and the bytes of all."""
    first = 0
    for row in range(1, len(slots) + 1):
        before = slots[row - 1]
        end = before.address + len(before)
        if row == len(slots) or slots[row].address != end or slots[row].block != before.block:
            yield first, slots[first].address, end - slots[first].address
            first = row
