"""Flow control: the receive windows of HTTP/2."""

from typing import Final

STREAM_WINDOW: Final = 1024 * 1024
"""Bytes that a peer may send on one stream before it gets a WINDOW_UPDATE."""

CONNECTION_WINDOW: Final = 16 * 1024 * 1024
"""The same for a whole connection: enough for networks with a long delay, and little enough to hold in memory."""


class ReceiveWindow:
    """Counts the bytes that the peer may still send, on a stream or a connection (RFC 9113, section 5.2).

    At least half of the window is returned to the peer at a time, so that few WINDOW_UPDATEs are sent.
    """

    __slots__ = ("_half", "_left", "_taken")

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self._left = size
        self._taken = 0

    def take(self, size: int) -> bool:
        """Count received bytes. Returns False if the window was too small for them."""
        self._left -= size
        self._taken += size
        return self._left >= 0

    def credit(self) -> int:
        """Return the window to give back to the peer, after all received bytes were consumed; 0 below half of it."""
        taken = self._taken
        if taken < self._half:
            return 0
        self._left += taken
        self._taken = 0
        return taken
