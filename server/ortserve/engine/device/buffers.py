"""The buffers of one batch on its way through a device: they stay where they are for as long as the model is loaded."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ortserve.engine.device.failures import give_back
from ortserve.engine.device.protocol import Device
from ortserve.engine.row_layout import RowLayout, offsets

_ALIGNMENT = 256  # of what cudaMalloc returns, which kernels may count on


class BufferSet:
    """Device memory for the inputs and outputs of a batch, host memory its rows are gathered in, and its events.

    Batches of all sizes use the same memory, from its front on. Not for two batches at once.

    Attributes:
        staging: Host arrays of all rows, one an input,
        staging_nbytes: and what they take together.
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
        self._undo: list[Callable[[], object]] = []
        try:
            block = device.allocate(device_nbytes([*inputs, *outputs], rows))
            self._undo.append(partial(device.free, block))
            addresses = [block + start for start in offsets([*inputs, *outputs], rows, _ALIGNMENT)[:-1]]
            self.inputs = addresses[: len(inputs)]
            self.outputs = addresses[len(inputs) :]
            self.staging_nbytes = device_nbytes(inputs, rows)
            host = device.allocate_host(self.staging_nbytes)
            self._undo.append(partial(device.free_host, host))
            self.staging = [
                host[start:][: layout.nbytes * rows].view(layout.dtype).reshape(rows, *layout.item)
                for layout, start in zip(inputs, offsets(inputs, rows, _ALIGNMENT), strict=False)
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
        """Give everything back. Nothing enqueued may still use it."""
        self.staging = []
        give_back(*self._undo)
        self._undo.clear()


def device_nbytes(layouts: Sequence[RowLayout], rows: int) -> int:
    """What the tensors of a batch of ``rows`` rows take on a device."""
    return max(1, offsets(layouts, rows, _ALIGNMENT)[-1])


def inverted(array: np.ndarray) -> np.ndarray:
    """An array of bytes that differs from this one in every bit."""
    return np.invert(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
