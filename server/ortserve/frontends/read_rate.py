"""Measures how fast a caller reads its answers: connections that are read slowly yield to new ones at the limit."""

from typing import Final

SLOW_SHARE: Final = 1 / 6
"""Share of a timeout from which a caller below the minimum rate may lose its connection to a new one."""


class ReadRate:
    """Measures how fast the caller of one connection reads what is unsent. Pure; noted once a tick."""

    def __init__(self, min_bytes_per_s: int, timeout_s: float) -> None:
        """A connection read below ``min_bytes_per_s`` for ``SLOW_SHARE`` of ``timeout_s`` is slow."""
        self._min_bytes_per_s = min_bytes_per_s
        self._timeout_s = timeout_s
        self._subject: object = None
        self._since_ns = 0
        self._position = 0
        self._read_bytes = 0
        self._has_unsent = False
        self._was_slow = False

    def note(self, now_ns: int, subject: object, position: int, *, has_unsent: bool) -> None:
        """Count the bytes that were read since the last call.

        Args:
            now_ns: Monotonic time.
            subject: What is read, by identity; another one restarts the measurement.
            position: A number that grows by the bytes that are read. It shrinks by those that are written if it is the
                negated number of unsent bytes.
            has_unsent: Whether the caller has not read all that was written.
        """
        if not self._has_unsent or subject is not self._subject:
            self._restart(now_ns, was_slow=False)
        else:
            self._read_bytes += max(0, position - self._position)
            if now_ns - self._since_ns >= self._timeout_s * 1e9:
                self._restart(now_ns, was_slow=self.is_slow(now_ns))
        self._subject, self._position, self._has_unsent = subject, position, has_unsent

    def is_slow(self, now_ns: int) -> bool:
        """Whether the caller has read below the minimum rate for a part of the timeout."""
        if not self._has_unsent:
            return False
        waited_s = (now_ns - self._since_ns) / 1e9
        late_s = SLOW_SHARE * self._timeout_s
        if self._was_slow:
            waited_s = max(waited_s, late_s)
        return waited_s >= late_s and self._read_bytes < waited_s * self._min_bytes_per_s

    def _restart(self, now_ns: int, *, was_slow: bool) -> None:
        self._since_ns, self._read_bytes, self._was_slow = now_ns, 0, was_slow
