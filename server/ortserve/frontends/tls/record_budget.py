"""The limit on bytes without data in a TLS session."""

from typing import Final

from ortserve.clock import Clock

_RECORD_BYTES: Final = 5 + 16 * 1024 + 256
"""Maximum size of an encrypted record with its header (RFC 8446, section 5.2): an incomplete one may have so many bytes
before its data counts."""

_BURST_BYTES: Final = 32 * 1024
_BYTES_PER_S: Final = 32 * 1024
"""1,200 key updates. Padding counts, too: a client that pads all its records uses this up at some records a second. No
known client does so by default."""

_OVERHEAD_BYTES: Final = {"TLSv1.3": 5 + 1 + 16}
"""Bytes of a data record besides its data: header, type and tag, so that records of one byte are free. A higher value
would credit other records."""
_OVERHEAD_BYTES_OF_12: Final = 5 + 8 + 16
"""Of AES-GCM, with the explicit part of its nonce; ChaCha20 has less."""


class RecordBudget:
    """Limits the bytes without data that the peer of one session sends: key updates, alerts, padding.

    A key update of TLS 1.3 has 27 bytes, makes OpenSSL derive keys and answer, and no protocol over the session sees
    it. A normal peer changes its keys once in millions of records; a burst of 48 KiB is 1,800 updates.
    """

    def __init__(self, version: str | None, clock: Clock) -> None:
        """``version`` is that of the session, in OpenSSL's words."""
        self._overhead_bytes = _OVERHEAD_BYTES.get(version or "", _OVERHEAD_BYTES_OF_12)
        self._clock = clock
        self._unexplained = 0
        self._tokens = float(_BURST_BYTES)
        self._filled_ns = clock()

    def is_exceeded(self, came: int, *, data: int, records: int) -> bool:
        """Count received bytes, the data in them and the records with data; True if the session must be aborted."""
        unexplained = self._unexplained + came - data - records * self._overhead_bytes
        if unexplained <= _RECORD_BYTES:
            self._unexplained = max(unexplained, 0)
            return False
        self._unexplained = _RECORD_BYTES
        now_ns = self._clock()
        refilled = self._tokens + (now_ns - self._filled_ns) * _BYTES_PER_S / 1e9
        self._filled_ns = now_ns
        self._tokens = min(_BURST_BYTES, refilled) - (unexplained - _RECORD_BYTES)
        return self._tokens < 0

    def skip_refill(self) -> None:
        """Do not refill for the time until now: the peer does not read the responses to its records, which pile up."""
        self._filled_ns = self._clock()
