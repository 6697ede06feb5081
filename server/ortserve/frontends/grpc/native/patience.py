"""How much of what costs us, and brings nobody an answer, a connection may send."""

from typing import Final

_BURST: Final = 2_000
_PER_S: Final = 1_000
"""Calls that are reset at once, pings, settings, empty frames and the like. A client that measures its bandwidth sends
some hundreds in a second; what attacks by them (CVE-2023-44487 and its kin) sends a hundred thousand. One costs up to
some 50 µs, so that a connection takes 5 % of a processor at most beside its calls."""


class Patience:
    """A bucket of tokens. Loop thread only."""

    def __init__(self, now_ns: int) -> None:
        self._tokens = float(_BURST)
        self._filled_ns = now_ns

    def is_lost(self, now_ns: int, earned: int = 0) -> bool:
        """Take a token, after as many as were earned were put in; whether there was none."""
        self._tokens = min(_BURST, self._tokens + earned + (now_ns - self._filled_ns) * _PER_S / 1e9)
        self._filled_ns = now_ns
        if self._tokens < 1:
            return True
        self._tokens -= 1
        return False
