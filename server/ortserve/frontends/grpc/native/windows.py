"""What a peer may still send, of a stream or of a whole connection (RFC 9113, section 5.2). Pure."""


class ReceiveWindow:
    """Bytes that the peer may send before it is given room again, which happens by halves of the window."""

    __slots__ = ("_half", "_room", "_taken")

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self._room = size
        self._taken = 0

    def take(self, size: int) -> bool:
        """Count what came; False where there was no room for it."""
        self._room -= size
        self._taken += size
        return self._room >= 0

    def credit(self) -> int:
        """Bytes to give the peer room for, now that all that came is of no concern any more; 0 where that can wait."""
        taken = self._taken
        if taken < self._half:
            return 0
        self._room += taken
        self._taken = 0
        return taken
