"""Limits the bytes without data that a peer sends in a TLS session."""

from typing import Final

from ortserve.clock import Clock

_RECORD_BYTES: Final = 5 + 16 * 1024 + 256
"""Maximum size of an encrypted record with its header (RFC 8446, section 5.2). Bytes without data are not charged up to
this size, because they may belong to an incomplete record."""

_BURST_BYTES: Final = 32 * 1024
_BYTES_PER_S: Final = 32 * 1024
"""Refill rate: 1,200 key updates a second. Padding counts, too, so a client that pads all records exceeds it at some
records a second. No known client pads records by default."""

_OVERHEAD_BYTES: Final = {"TLSv1.3": 5 + 1 + 16}
"""Bytes of a data record besides its data: header, type and tag. Not counting them makes records of one byte free. A
higher value would also leave bytes of other records uncounted."""
_OVERHEAD_BYTES_OF_12: Final = 5 + 8 + 16
"""The same for TLS 1.2 with AES-GCM: header, explicit part of the nonce, and tag. ChaCha20 has fewer bytes."""


class RecordBudget:
    """Token bucket for the bytes without data that the peer of one session sends: key updates, alerts, padding.

    A key update of TLS 1.3 has 27 bytes. OpenSSL derives keys and answers it, and no protocol over the session sees it.
    A normal peer changes its keys once in millions of records. A burst of 48 KiB is 1,800 updates.
    """

    def __init__(self, version: str | None, clock: Clock) -> None:
        """``version`` is the TLS version of the session, as OpenSSL names it."""
        self._overhead_bytes = _OVERHEAD_BYTES.get(version or "", _OVERHEAD_BYTES_OF_12)
        self._clock = clock
        self._unexplained = 0
        self._tokens = float(_BURST_BYTES)
        self._filled_ns = clock()

    def is_exceeded(self, received_bytes: int, *, data: int, records: int) -> bool:
        """Count ``received_bytes`` bytes with ``data`` bytes of data in ``records`` data records.

        Returns:
            Whether the session must be aborted.
        """
        unexplained = self._unexplained + received_bytes - data - records * self._overhead_bytes
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
        """Skip the refill for the time until now: the peer does not read the responses to its records."""
        self._filled_ns = self._clock()
