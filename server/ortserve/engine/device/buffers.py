"""The buffers of one batch on its way through a device: they stay where they are for as long as the model is loaded."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from ortserve.engine.device.protocol import Device
from ortserve.engine.output_buffers import RowLayout

_ALIGNMENT = 256  # of what cudaMalloc returns, which kernels may count on


class BufferSet:
    """Device memory for the inputs and outputs of a batch, host memory its rows are gathered in, and its events.

    Batches of all sizes use the same memory, from its front on. Not for two batches at once.

    Attributes:
        staging: Host arrays of all rows, one an input.
        inputs: Addresses on the device.
        outputs: The same.
        copied_in: Stands for the inputs being on the device,
        computed: for the outputs being there,
        copied_out: and for the outputs being on the host.
    """

    def __init__(
        self, device: Device, index: int, inputs: Sequence[RowLayout], outputs: Sequence[RowLayout], rows: int
    ) -> None:
        """Room for ``rows`` rows; all or nothing is allocated. ``index`` tells an instance's sets apart."""
        self.index = index
        with ExitStack() as undo:
            block = device.allocate(device_nbytes([*inputs, *outputs], rows))
            undo.callback(device.free, block)
            addresses = list(_addresses(block, [*inputs, *outputs], rows))
            self.inputs = addresses[: len(inputs)]
            self.outputs = addresses[len(inputs) :]
            host = device.allocate_host(device_nbytes(inputs, rows))
            undo.callback(device.free_host, host)
            self.staging = [
                host[start : start + layout.nbytes * rows].view(layout.dtype).reshape(rows, *layout.item)
                for start, layout in zip(_addresses(0, inputs, rows), inputs, strict=True)
            ]
            events = []
            for _ in range(3):
                events.append(device.make_event())
                undo.callback(device.destroy_event, events[-1])
            self.copied_in, self.computed, self.copied_out = events
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Give everything back. Nothing enqueued may still use it."""
        self.staging = []
        self._undo.close()


def device_nbytes(layouts: Sequence[RowLayout], rows: int) -> int:
    """What the tensors of a batch of ``rows`` rows take on a device."""
    return max(1, sum(_aligned(layout.nbytes * rows) for layout in layouts))


def _addresses(start: int, layouts: Sequence[RowLayout], rows: int) -> Iterator[int]:
    for layout in layouts:
        yield start
        start += _aligned(layout.nbytes * rows)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def inverted(array: np.ndarray) -> np.ndarray:
    """An array of bytes that differs from this one in every bit."""
    return np.invert(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
