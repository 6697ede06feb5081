"""Which requests are traced and when their traces are written, as one choice of trace settings says."""

from collections.abc import Sequence
from typing import Final, Protocol

_GROWING_BYTES: Final = 64 * 1024
_NUMBERED_BYTES: Final = 4 * 1024 * 1024
"""Of traces that wait to be written together: beyond it they are written however many they were to be."""


class Files(Protocol):
    """Where traces go: ``telemetry.trace_files``."""

    def append(self, records: Sequence[bytes]) -> None: ...
    def number(self, records: Sequence[bytes]) -> None: ...


class Sampling:
    """Counts the requests that its settings hold for and gathers the traces of those it takes. Loop thread only.

    Settings are never changed but replaced, by a sampling that counts from the beginning.
    """

    def __init__(self, files: Files | None, *, is_on: bool, rate: int, count: int, log_frequency: int) -> None:
        """Take settings over.

        Args:
            files: Where traces go; None only if it is not on.
            is_on: Whether anything is traced.
            rate: One of so many requests is.
            count: How many will be; -1 for any number.
            log_frequency: How many traces make a numbered file; 0 for one file that grows, unless ``count`` ends them,
                which makes a numbered file of all of them.
        """
        self.is_on: Final = is_on and files is not None
        self.rate: Final = rate
        self.count = count
        """How many are still to be taken; -1 for any number."""
        self.log_frequency: Final = log_frequency
        self._files = files
        self._seen = 0
        self._under_way = 0
        self._records: list[bytes] = []
        self._size = 0
        self._is_closed = False

    def take(self) -> bool:
        """Count a request, and say whether it is traced, the ``rate``-th first; if so, ``collect`` is to follow."""
        if not self.is_on or not self.count:
            return False
        self._seen += 1
        if self._seen % self.rate:
            return False
        if self.count > 0:
            self.count -= 1
        self._under_way += 1
        return True

    def collect(self, record: bytes) -> None:
        """Gather the trace of a request that was taken."""
        self._under_way -= 1
        self._records.append(record)
        self._size += len(record)
        if self._is_closed:
            self._write_rest()
        elif self.log_frequency or self.count >= 0:
            is_last = self.count == 0 and not self._under_way
            if is_last or self._size >= _NUMBERED_BYTES or 0 < self.log_frequency <= len(self._records):
                self._write(numbered=True)
        elif self._size >= _GROWING_BYTES:
            self._write(numbered=False)

    def close(self) -> None:
        """Write what was gathered: other settings hold from now on. Requests that were taken may still be collected."""
        self._is_closed = True
        self._write_rest()

    def _write_rest(self) -> None:
        if self._records:
            self._write(numbered=self.log_frequency > 0)

    def _write(self, *, numbered: bool) -> None:
        assert self._files is not None
        records, self._records, self._size = self._records, [], 0
        if numbered:
            self._files.number(records)
        else:
            self._files.append(records)
