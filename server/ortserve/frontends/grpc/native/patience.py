"""How much of what costs us, and brings nobody an answer, a connection may send."""

from typing import Final

_BURST: Final = 2_000
_PER_S: Final = 1_000
"""Calls that are reset at once, pings, settings, empty frames and the like. A client that measures its bandwidth sends
some hundreds in a second; what attacks by them (CVE-2023-44487 and its kin) sends a hundred thousand. One costs up to
some 50 µs, so that a connection takes 5 % of a processor at most beside its calls."""


_RAPID_NS: Final = 1_000_000
"""A caller who leaves before this, in the same read of the socket mostly, has asked for no answer: it takes longer to
come (CVE-2023-44487). Whoever stays longer has no more calls begun than may be open, as who waits for the answers."""


class Patience:
    """A bucket of tokens. Loop thread only."""

    def __init__(self, now_ns: int) -> None:
        self._tokens = float(_BURST)
        self._filled_ns = now_ns

    def is_lost(self, now_ns: int, earned: float = 0.0) -> bool:
        """Take a token, after as many as were earned were put in; whether there was none."""
        self._tokens = min(_BURST, self._tokens + earned + (now_ns - self._filled_ns) * _PER_S / 1e9)
        self._filled_ns = now_ns
        if self._tokens < 1:
            return True
        self._tokens -= 1
        return False


_WINDOW_UPDATE_BYTES: Final = 1024
"""What a WINDOW_UPDATE should let flow. Smaller windows cost more frames than the data is worth."""

PART_CREDIT: Final = 2 * _WINDOW_UPDATE_BYTES
"""Added for each part of a message that is sent whole, whatever its size: some peers answer every DATA frame with two
WINDOW_UPDATEs, for the stream and for the connection. A frame that the window cuts counts its bytes alone."""


class WindowUpdates:
    """Bounds the WINDOW_UPDATEs of a connection by the bytes of DATA that it takes, not by their number or sizes.

    Uneven windows are common: HAProxy returns 16,320 bytes, then the 64 that did not fit into its buffer.
    Loop thread only.
    """

    def __init__(self, now_ns: int) -> None:
        self._patience = Patience(now_ns)

    def are_too_many(self, credit_bytes: int, now_ns: int) -> bool:
        """Count a WINDOW_UPDATE. Returns whether the connection exceeds its bound.

        Args:
            credit_bytes: DATA sent since the last call, and ``PART_CREDIT`` for each whole part.
            now_ns: When the frame came.
        """
        return self._patience.is_lost(now_ns, credit_bytes / _WINDOW_UPDATE_BYTES)


class Resets:
    """Of the calls of a connection: which of them cost patience. Loop thread only.

    Attributes:
        begun: Calls so far.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.begun = 0
        self._of_ended = 0
        self._paid_back = 0

    def is_patience_lost(self, begun_ns: int | None, open_calls: int, now_ns: int) -> bool:
        """Note a reset; whether it was one too many.

        Args:
            begun_ns: When its call began; None where that has ended.
            open_calls: That have not ended, this one among them.
            now_ns: When it came.
        """
        if begun_ns is None:
            # The answer has crossed it, or a deadline passed on both sides. There is one of each call at most.
            self._of_ended += 1
            return self._of_ended > self.begun and self._patience.is_lost(now_ns)
        if now_ns - begun_ns >= _RAPID_NS:
            return False
        # Where the server is late, the calls of who has waited long look like this, too: those that ended otherwise
        # speak for their connection.
        ended = self.begun - open_calls
        earned = ended - self._paid_back
        self._paid_back = ended + 1
        return self._patience.is_lost(now_ns, earned)
