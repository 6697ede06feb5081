"""Header blocks: HPACK by the ``hpack`` library, read once where the same bytes come again, and written by hand.

A block means the same as long as the table that it refers to is the same. So what a block was read as is kept under the
table's generation, which counts insertions and changes of size, and the block's bytes; a block that itself inserts or
resizes is read each time.
"""

from typing import Any, Final

import hpack
from hpack.table import HeaderTable

from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError

_KEPT_BLOCKS: Final = 64
"""Of one connection; a client has a few, one for each method and set of metadata."""

_MAX_KEPT_BYTES: Final = 2048
"""Of a block that is kept."""

_set_maxsize: Final[Any] = HeaderTable.__dict__["maxsize"].fset

RESIZED_TO_NOTHING: Final = b"\x20"
"""Begins a block whose sender keeps no table from now on (RFC 7541, section 6.3)."""

Headers = tuple[tuple[bytes, bytes], ...]


class _CountedTable(HeaderTable):
    """A dynamic table whose ``generation`` changes whenever its content may."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.generation += 1
        super().add(name, value)

    @property
    def maxsize(self) -> int:
        return int(self._maxsize)

    @maxsize.setter
    def maxsize(self, size: int) -> None:
        self.generation += 1
        _set_maxsize(self, size)


class HeaderReader:
    """Reads the header blocks of one connection, each exactly once and in their order."""

    def __init__(self, max_list_bytes: int) -> None:
        """``max_list_bytes`` bounds a block's headers as RFC 9113, section 10.5.1, counts them."""
        self._decoder = hpack.Decoder(max_header_list_size=max_list_bytes)
        self._table = _CountedTable()
        self._decoder.header_table = self._table
        self._kept: dict[bytes, Headers] = {}
        self._kept_generation = 0

    def read(self, block: bytes) -> Headers:
        """Names and values, in their order.

        Raises:
            Http2ConnectionError: It is no header block, or one that is too large; later blocks cannot be read either.
        """
        table = self._table
        generation = table.generation
        if generation != self._kept_generation:
            self._kept.clear()
            self._kept_generation = generation
        else:
            kept = self._kept.get(block)
            if kept is not None:
                return kept
        try:
            decoded = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large") from None
        except (hpack.HPACKError, IndexError, ValueError, UnicodeError):
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, "the header block cannot be read") from None
        headers: Headers = tuple([(bytes(name), bytes(value)) for name, value in decoded])
        if table.generation == generation and len(block) <= _MAX_KEPT_BYTES:
            if len(self._kept) >= _KEPT_BLOCKS:
                self._kept.clear()
            self._kept[block] = headers
        return headers


def literal(name: bytes, value: bytes) -> bytes:
    """A header that no table is asked for nor learns of (RFC 7541, section 6.2.2)."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    length = len(text)
    if length < 0x7F:
        return bytes((length,)) + text
    rest = length - 0x7F
    prefix = bytearray(b"\x7f")
    while rest >= 0x80:
        prefix.append(rest & 0x7F | 0x80)
        rest >>= 7
    prefix.append(rest)
    return bytes(prefix) + text
