"""Flow control: the receive windows of HTTP/2, and one budget for the unsent answers of all connections."""

import asyncio
from typing import Final, Protocol

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


_SHARES: Final = 4
"""Number of shares of the budget. A connection that uses more than one share gets no new calls while more than half of
the budget is used."""


class AnswerHolder(Protocol):
    """A connection, as the budget sees it."""

    @property
    def unsent_bytes(self) -> int: ...

    def end_oldest_unsent(self, text: str, *, is_alone: bool) -> bool:
        """End the oldest call with unsent bytes. With ``is_alone``, the only such call is not ended.

        Returns:
            Whether a call was ended.
        """
        ...


class UnsentBudget:
    """Limits the bytes of answers that callers of all connections have not read. Loop thread only.

    Answers are counted apart from requests (``service/gate``), so that unread answers do not use up the memory of
    requests. The answers exist already, so the budget cannot reject them. It ends the oldest calls of the connection
    with the most unsent bytes, which seldom affects calls whose answers are read.

    Attributes:
        max_bytes: Bytes above which calls are ended.
        held_bytes: Bytes of messages that neither a window nor a transport has accepted. Connections update it.
    """

    __slots__ = ("_holders", "_is_due", "held_bytes", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._holders: set[AnswerHolder] = set()
        self._is_due = False

    def add(self, holder: AnswerHolder) -> None:
        self._holders.add(holder)

    def remove(self, holder: AnswerHolder) -> None:
        """Remove a connection, which has no unsent bytes any more."""
        self._holders.discard(holder)

    def is_exceeded_by(self, unsent_bytes: int) -> bool:
        """Whether a connection with ``unsent_bytes`` has more than its share, and more than half of the budget is used.

        While less is used, shares do not apply: behind a proxy, one connection carries the answers of many callers.
        """
        return unsent_bytes * _SHARES > self.max_bytes and self.held_bytes * 2 > self.max_bytes

    def enforce_soon(self) -> None:
        """End calls in the next turn of the loop if the budget is exceeded. Call this after ``held_bytes`` grew."""
        if self.held_bytes > self.max_bytes and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._enforce)

    def _enforce(self) -> None:
        self._is_due = False
        while self.held_bytes > self.max_bytes and self._holders:
            text = (
                f"grpc_unsent_bytes: expected at most {self.max_bytes} bytes of unsent answers, got {self.held_bytes}"
            )
            largest = max(self._holders, key=lambda holder: holder.unsent_bytes)
            if not largest.end_oldest_unsent(text, is_alone=largest.unsent_bytes == self.held_bytes):
                return
