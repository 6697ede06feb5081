"""Header blocks (HPACK, RFC 7541): read once where the same bytes come again, and written by hand.

Tables and Huffman's code are the ``hpack`` library's; the fields of a block are found here, for the library's decoder
stops in the middle of a list that is too large, where the table is lost and with it the connection, and copies the rest
of a block for each field, so that its time grows with the square of their number.

A block means the same as long as the table that it refers to is the same. So what a block was read as is kept under the
table's generation, which counts insertions and changes of size, and the block's bytes; a block that itself inserts or
resizes is read each time.
"""

from typing import Any, Final

import hpack
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frame_reader import MAX_BLOCK_BYTES
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError

_KEPT_BLOCKS: Final = 64
"""Of one connection; a client has a few, one for each method and set of metadata."""

_MAX_KEPT_BYTES: Final = 2048
"""Of a block that is kept."""

MAX_LIST_BYTES: Final = 16 * 1024
"""Of a block's headers as RFC 9113, section 10.5.1, counts them, and as grpc has it. Larger lists are read to their end
for the table's sake, and thrown away."""

_MOST_LIST_BYTES: Final = 2 * MAX_BLOCK_BYTES
"""Of a list that is read. What a block says in its own bytes is at most 8/5 of these (Huffman's code, RFC 7541,
appendix B), and 32 for each header; a larger list is made of a few bytes by the table."""

_ENTRY_BYTES: Final = 32
"""What a header counts beside its name and value (RFC 9113, section 10.5.1)."""

_MOST_INTEGER_BITS: Final = 28
"""Of lengths, indexes and sizes on the wire; a block has 64 KiB."""

_MOST_RESIZES_BYTES: Final = 64
"""Where a block's last change of the table's size may begin; two are all that anybody needs (RFC 7541, section 4.2)."""

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

    def __init__(self) -> None:
        self._table = _CountedTable()
        self._kept: dict[bytes, Headers] = {}
        self._kept_generation = 0

    def read(self, block: bytes) -> Headers | None:
        """Names and values, in their order; None where these are more than are kept, and later blocks can be read.

        Raises:
            Http2ConnectionError: It is no header block, or one with more than is read; later ones cannot be read.
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
            headers = self._decode(block)
        except (hpack.HPACKError, IndexError, ValueError, UnicodeError):
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, "the header block cannot be read") from None
        if headers is not None and table.generation == generation and len(block) <= _MAX_KEPT_BYTES:
            if len(self._kept) >= _KEPT_BLOCKS:
                self._kept.clear()
            self._kept[block] = headers
        return headers

    def _decode(self, block: bytes) -> Headers | None:
        """Follow a block to its end (RFC 7541, section 6). Raises whatever is wrong with it."""
        table = self._table
        headers: list[tuple[bytes, bytes]] = []
        list_bytes = position = 0
        size = len(block)
        while position < size:
            first = block[position]
            name: bytes
            value: bytes
            if first & 0x80:
                index, position = _read_integer(block, position, 0x7F)
                name, value = table.get_by_index(index)
            elif first & 0xE0 == 0x20:
                if list_bytes or position > _MOST_RESIZES_BYTES:
                    raise ValueError("a table size behind the first header, or one too many")
                table_size, position = _read_integer(block, position, 0x1F)
                if table_size > frames.DEFAULT_TABLE_SIZE:
                    raise ValueError("a table larger than ours")
                table.maxsize = table_size
                continue
            else:
                is_learned = first & 0x40
                index, position = _read_integer(block, position, 0x3F if is_learned else 0x0F)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, position = _read_string(block, position)
                value, position = _read_string(block, position)
                if is_learned:
                    table.add(name, value)
            list_bytes += len(name) + len(value) + _ENTRY_BYTES
            if list_bytes <= MAX_LIST_BYTES:
                headers.append((name, value))
            elif list_bytes > _MOST_LIST_BYTES:
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large")
        return tuple(headers) if list_bytes <= MAX_LIST_BYTES else None


def _read_integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """An integer that begins in the bits of ``mask`` (RFC 7541, section 5.1), and where it ends."""
    number = block[position] & mask
    position += 1
    if number < mask:
        return number, position
    shift = 0
    while True:
        byte = block[position]
        position += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
        if shift >= _MOST_INTEGER_BITS:
            raise ValueError("an integer that is too long")


def _read_string(block: bytes, position: int) -> tuple[bytes, int]:
    """A string (RFC 7541, section 5.2), and where it ends."""
    is_huffman = block[position] & 0x80
    length, begin = _read_integer(block, position, 0x7F)
    end = begin + length
    if end > len(block):
        raise ValueError("a string that ends behind its block")
    text = block[begin:end]
    return (bytes(decode_huffman(text)) if is_huffman else text), end


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
