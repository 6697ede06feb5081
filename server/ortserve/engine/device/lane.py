"""What a session on a device has to itself: its compute stream, and a stream for copies each way."""

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from ortserve.engine.device.devices import OpenDevice
from ortserve.engine.device.failures import give_back


class Lane:
    """The streams of one session. Made before the session, which is told of them, and closed after it."""

    def __init__(self, opened: OpenDevice) -> None:
        """On the calling thread, inside the gate."""
        self.opened = opened
        self.device = opened.device
        self.device.use()
        self.free_bytes = self.device.memory().free_bytes
        """What nobody had when it was made, and its session was not."""
        self.compute = self.device.make_stream()
        self.inward = self.device.make_stream()
        self.outward = self.device.make_stream()

    def provider_options(self, *, captures: bool) -> Mapping[str, str]:
        """What the session's execution provider is to be told."""
        return self.device.provider_options(self.compute, captures=captures)

    def close(self, session: "weakref.ref[Any] | None" = None) -> None:
        """Give the streams back. A session that is still there, as for who holds the traceback of what it raised, may
        use them yet: then they are left to it.
        """
        if session is not None and session() is not None:
            return
        streams = (self.compute, self.inward, self.outward)
        give_back(*[partial(self.device.destroy_stream, stream) for stream in streams])
