"""What an instance on a device has to itself: the compute stream of its sessions, and a stream for copies each way."""

import weakref
from functools import partial
from typing import Any

from ortserve.engine.device.devices import OpenDevice
from ortserve.engine.device.failures import give_back
from ortserve.engine.device.use import DeviceUse


class Lane:
    """The streams of one instance. Made before its sessions, which are told of them, and closed after them."""

    def __init__(self, opened: OpenDevice, use: DeviceUse) -> None:
        """On the calling thread, inside the gate. ``use`` is that of the sessions' execution provider."""
        self.opened = opened
        self.use = use
        self.device = opened.device
        self.device.use()
        self.free_bytes = self.device.memory().free_bytes
        """What nobody had when it was made, and its sessions were not."""
        self.compute = self.device.make_stream()
        self.inward = self.device.make_stream()
        self.outward = self.device.make_stream()

    def provider_options(self, *, captures: bool) -> dict[str, str]:
        """What the execution provider of one of its sessions is to be told; ``captures`` says whether that captures."""
        return self.use.provider_options(self.compute, captures=captures)

    def close(self, *sessions: "weakref.ref[Any]") -> None:
        """Give the streams back. A session that is still there, as for who holds the traceback of what it raised, may
        use them yet: then they are left to it.
        """
        if any(session() is not None for session in sessions):
            return
        streams = (self.compute, self.inward, self.outward)
        give_back(*[partial(self.device.destroy_stream, stream) for stream in streams])
