"""How much a TLS peer may send that brings no data: new keys, alerts, padding.

A key update of TLS 1.3 has 27 bytes, makes OpenSSL derive keys and answer, and no protocol behind the session ever
learns of it. A peer changes its keys every some millions of records; 48 KiB of nothing but that are 1,800 of them.
"""

from typing import Final

from ortserve.clock import Clock

_RECORD_BYTES: Final = 5 + 16 * 1024 + 256
"""The longest record, with its head (RFC 8446, section 5.2): as much may have come of one whose data has not."""

_BURST_BYTES: Final = 32 * 1024
_BYTES_PER_S: Final = 32 * 1024
"""1,200 key updates. Padding counts, too: a client that fills all its records up may send
some in a second. None that we know of does so unless told to."""

_HEAD_BYTES: Final = {"TLSv1.3": 5 + 1 + 16}
"""What a record of data has besides: head, type and tag, so that a record of one byte brings enough. Not more than
that, which would pay for others."""
_HEAD_BYTES_OF_12: Final = 5 + 8 + 16
"""Of AES-GCM, with the part of its nonce that is sent; ChaCha20 has less."""


class EmptyBytes:
    """The account of one session. Loop thread only."""

    def __init__(self, version: str | None, clock: Clock) -> None:
        """``version`` is what the session speaks, in OpenSSL's words."""
        self._head_bytes = _HEAD_BYTES.get(version or "", _HEAD_BYTES_OF_12)
        self._clock = clock
        self._unexplained = 0
        self._tokens = float(_BURST_BYTES)
        self._filled_ns = clock()

    def are_too_many(self, came: int, *, data: int, records: int) -> bool:
        """Count what came, and of it the data and the records that had any; whether the peer is to be cut off."""
        unexplained = self._unexplained + came - data - records * self._head_bytes
        if unexplained <= _RECORD_BYTES:
            self._unexplained = max(unexplained, 0)
            return False
        self._unexplained = _RECORD_BYTES
        now_ns = self._clock()
        refilled = self._tokens + (now_ns - self._filled_ns) * _BYTES_PER_S / 1e9
        self._filled_ns = now_ns
        self._tokens = min(_BURST_BYTES, refilled) - (unexplained - _RECORD_BYTES)
        return self._tokens < 0

    def forgo_refill(self) -> None:
        """For the time until now: the peer does not read what its records are answered with, which adds up."""
        self._filled_ns = self._clock()
