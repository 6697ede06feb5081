"""Python imports this by itself where its folder is in PYTHONPATH: as if the host's memory were that of two GPUs.

What another process shares of "them" is an object in ``/dev/shm``, whose name fills the 64 bytes of the handle.
"""

import mmap
import os
from pathlib import Path

import numpy as np

from ortserve.engine.device import device_region, devices
from ortserve.engine.device.host import HostDevice
from ortserve.engine.device.use import DeviceUse
from ortserve.engine.provider_options import CUDA
from ortserve.engine.row_layout import address_of


class SharingDevice(HostDevice):
    def __init__(self, device_id: int) -> None:
        if device_id > 1:
            raise RuntimeError(f"there is no CUDA device {device_id}: there are 2")
        super().__init__(device_id)

    def open_shared(self, handle: bytes) -> int:
        try:
            descriptor = os.open(Path("/dev/shm") / handle.rstrip(b"\0").decode(), os.O_RDWR)
        except (OSError, ValueError):
            raise RuntimeError("cudaErrorInvalidValue: invalid argument") from None
        memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        os.close(descriptor)
        address = address_of(memory)
        self._memory[address] = memory
        return address

    def close_shared(self, address: int) -> None:
        del self._memory[address]


vars(devices)["DEVICE_USES"] = {CUDA: DeviceUse(SharingDevice)}
vars(device_region)["count_devices"] = lambda: 2
