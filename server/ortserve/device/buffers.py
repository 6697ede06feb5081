"""The streams of an instance, and the buffers of one batch: device memory, staging memory and events.

Buffers are allocated when the instance is prepared, and keep their addresses as long as the model is loaded.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ortserve.device.accounting import DeviceCounts
from ortserve.device.devices import DeviceProvider, OpenDevice
from ortserve.device.protocol import ALIGNMENT, Device, release_all
from ortserve.engine.output_buffers import RowLayout, offsets


class InstanceStreams:
    """The compute stream of an instance's sessions, and one copy stream for each direction.

    They are created before the sessions, whose options name the compute stream, and closed after them.
    """

    def __init__(self, opened: OpenDevice, provider: DeviceProvider) -> None:
        """Create the streams for sessions of ``provider``. The calling thread holds the capture lock."""
        self.opened = opened
        self.provider = provider
        self.device = opened.device
        self.device.use()
        self.free_bytes = self.device.memory().free_bytes
        """Free memory of the device before the sessions were opened."""
        self._streams: list[int] = []
        try:
            for _ in range(3):
                self._streams.append(self.device.make_stream())
        except BaseException:
            self.close()
            raise
        self.compute, self.copy_in, self.copy_out = self._streams

    def provider_options(self, *, captures: bool) -> dict[str, str]:
        """Options of the execution provider for one of the sessions; ``captures`` says whether it captures graphs."""
        return self.provider.provider_options(self.compute, captures=captures)

    def close(self, *sessions: "weakref.ref[Any]") -> None:
        """Destroy the streams, unless one of ``sessions`` still exists.

        A stored traceback may refer to a session, which may still use the streams. Then the streams are leaked.
        """
        if any(session() is not None for session in sessions):
            return
        release_all(*[partial(self.device.destroy_stream, stream) for stream in self._streams])


class BufferSet:
    """Device memory for the inputs and outputs of a batch, host memory to stage rows, and events.

    A batch of any size uses each buffer from its start. Only one batch may use the set at a time.

    Attributes:
        staging: One host array for each input, with room for all rows.
        staging_nbytes: The size of the staging memory.
        inputs: Device addresses of the inputs.
        outputs: Device addresses of the outputs.
        copied_in: Event: the inputs are on the device.
        computed: Event: the outputs are on the device.
        copied_out: Event: the outputs are on the host.
    """

    def __init__(
        self, device: Device, index: int, inputs: Sequence[RowLayout], outputs: Sequence[RowLayout], rows: int
    ) -> None:
        """Allocate memory for ``rows`` rows; if an allocation fails, free all. ``index`` identifies the set."""
        self.index = index
        self._undo: list[Callable[[], object]] = []
        try:
            block = device.allocate(device_nbytes([*inputs, *outputs], rows))
            self._undo.append(partial(device.free, block))
            addresses = [block + start for start in offsets([*inputs, *outputs], rows, ALIGNMENT)[:-1]]
            self.inputs = addresses[: len(inputs)]
            self.outputs = addresses[len(inputs) :]
            self.staging_nbytes = device_nbytes(inputs, rows)
            host = device.allocate_host(self.staging_nbytes)
            self._undo.append(partial(device.free_host, host))
            self.staging = [
                host[start:][: layout.nbytes * rows].view(layout.dtype).reshape(rows, *layout.item)
                for layout, start in zip(inputs, offsets(inputs, rows, ALIGNMENT), strict=False)
            ]
            events = []
            for _ in range(3):
                events.append(device.make_event())
                self._undo.append(partial(device.destroy_event, events[-1]))
            self.copied_in, self.computed, self.copied_out = events
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release everything. Enqueued work must no longer use it."""
        self.staging = []
        release_all(*self._undo)
        self._undo.clear()


class CopyTiming:
    """Timed events around the copies of one buffer set. They cost more than plain ones, so few batches use them."""

    def __init__(self, streams: InstanceStreams) -> None:
        self._streams = streams
        self._device = streams.device
        self._events: list[int] = []
        try:
            for _ in range(4):
                self._events.append(self._device.make_event(is_timed=True))
        except BaseException:
            self.close()
            raise

    def begin_copy_in(self) -> None:
        self._device.record(self._events[0], self._streams.copy_in)

    def end_copy_in(self) -> None:
        self._device.record(self._events[1], self._streams.copy_in)

    def begin_copy_out(self) -> None:
        self._device.record(self._events[2], self._streams.copy_out)

    def end_copy_out(self) -> None:
        self._device.record(self._events[3], self._streams.copy_out)

    def count(self, counts: DeviceCounts, bytes_in: int, bytes_out: int) -> None:
        """Add the times and bytes of a batch whose copies are complete."""
        counts.timed_in_ns += self._device.elapsed_ns(self._events[0], self._events[1])
        counts.timed_in_bytes += bytes_in
        counts.timed_out_ns += self._device.elapsed_ns(self._events[2], self._events[3])
        counts.timed_out_bytes += bytes_out

    def close(self) -> None:
        release_all(*[partial(self._device.destroy_event, event) for event in self._events])


def device_nbytes(layouts: Sequence[RowLayout], rows: int) -> int:
    """Bytes of device memory for the tensors of a batch of ``rows`` rows."""
    return max(1, offsets(layouts, rows, ALIGNMENT)[-1])


def inverted(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, with every bit inverted."""
    return np.invert(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
