"""How many bytes of answers wait for their callers, of all connections, and who goes when these are too many.

They are counted apart from requests (``service/gate``): whoever takes no answers shall not keep others from asking. And
since the answers are there already, room is not refused but made: the connection that has most unsent loses its oldest
calls, so that callers who take their answers are seldom touched, however many others there are.
"""

import asyncio
from typing import Final, Protocol

_SHARES: Final = 4
"""Of the room; a holder of more than one of them is the first to be refused."""


class Holder(Protocol):
    """A connection, as the room sees it."""

    @property
    def unsent_bytes(self) -> int: ...

    def end_oldest_unsent(self, text: str, *, is_alone: bool) -> bool:
        """End the oldest call that has something unsent, but not the only one where nobody else has anything unsent.

        Returns:
            Whether one was ended.
        """
        ...


class UnsentRoom:
    """Loop thread only.

    Attributes:
        max_bytes: From which on room is made.
        held_bytes: Of messages that no window or transport has room for yet; holders count here what they hold.
    """

    __slots__ = ("_holders", "_is_due", "held_bytes", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._holders: set[Holder] = set()
        self._is_due = False

    def enter(self, holder: Holder) -> None:
        self._holders.add(holder)

    def leave(self, holder: Holder) -> None:
        """Once it holds nothing any more."""
        self._holders.discard(holder)

    def is_exceeded_by(self, unsent_bytes: int) -> bool:
        """Whether a holder of so much holds more than its share, now that half of the room is used.

        While more of it is free a share is no bound: behind a proxy one connection carries the answers of many callers.
        """
        return unsent_bytes * _SHARES > self.max_bytes and self.held_bytes * 2 > self.max_bytes

    def look(self) -> None:
        """Have room made in the next turn of the loop where too much is held; for who has just counted more."""
        if self.held_bytes > self.max_bytes and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._make_room)

    def _make_room(self) -> None:
        self._is_due = False
        while self.held_bytes > self.max_bytes and self._holders:
            text = (
                f"grpc_unsent_bytes: callers have not taken {self.held_bytes} bytes of answers, and {self.max_bytes} "
                "may wait for them"
            )
            largest = max(self._holders, key=lambda holder: holder.unsent_bytes)
            if not largest.end_oldest_unsent(text, is_alone=largest.unsent_bytes == self.held_bytes):
                return
