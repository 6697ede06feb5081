"""Header blocks (HPACK, RFC 7541): cached decoding of requests, and encoding of answers.

The ``hpack`` library provides the static table and the data of the Huffman code. Its decoder would stop in the middle
of a list that is too large, which loses the table and with it the connection. It also copies the rest of a block for
each field, so its time is quadratic in the number of fields. For the Huffman code it takes half a byte at a time: 17 ms
for the largest header block, which blocks all other calls.

Equal blocks have the same meaning as long as the table does not change. So decoded blocks are cached by their bytes for
one generation of the table. Each insertion and resize begins a new generation; a block that inserts or resizes is not
cached.
"""

from base64 import b64encode
from collections import deque
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

import grpc
import numpy as np
from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable

from ortserve.frontends.grpc.calls import MetadataEntry
from ortserve.frontends.grpc.native import frames
from ortserve.frontends.grpc.native.frames import ErrorCode, Http2ConnectionError
from ortserve.frontends.grpc.native.messages import ACCEPTED_ENCODINGS

_KEPT_BLOCKS: Final = 64
"""Maximum number of cached blocks per connection. A client sends a few, one for each method and set of metadata."""

_MAX_KEPT_BYTES: Final = 2048
"""Maximum size of a cached block."""

MAX_LIST_BYTES: Final = 16 * 1024
"""Maximum size of a header list, as RFC 9113, section 10.5.1, counts it; grpc has the same limit. Larger lists are
decoded to their end, which keeps the table correct, and discarded."""

MAX_BLOCK_BYTES: Final = 64 * 1024
"""Maximum size of a header block, in one frame or several; proxies have similar limits (Envoy 60 KiB). A larger block
ends its connection: even the block of a rejected call must be decoded, because later blocks depend on the table."""

_MAX_LIST_BYTES: Final = 2 * MAX_BLOCK_BYTES
"""Maximum size of a list that is decoded. Literals decode to at most 8/5 of their bytes (Huffman code, RFC 7541,
appendix B), plus 32 per header. A larger list repeats entries of the table in few bytes."""

_ENTRY_BYTES: Final = 32
"""Size added to the name and value of each header (RFC 9113, section 10.5.1)."""

_MAX_INTEGER_BITS: Final = 28
"""Maximum bits of encoded lengths, indexes and sizes. A block has at most 64 KiB."""

_MAX_RESIZES_BYTES: Final = 64
"""Position up to which a block may resize the table. Two resizes suffice for all purposes (RFC 7541, section 4.2)."""

RESIZED_TO_NOTHING: Final = b"\x20"
"""Beginning of a block that resizes the table to 0 (RFC 7541, section 6.3)."""

Header = tuple[bytes, bytes]
Headers = tuple[Header, ...]

_STATIC_TABLE: Final[Headers] = HeaderTable.STATIC_TABLE


class _DynamicTable:
    """The static and the dynamic table (RFC 7541, section 2.3). ``generation`` changes whenever entries may change."""

    def __init__(self) -> None:
        self.generation = 0
        self._entries: deque[Header] = deque()
        self._bytes = 0
        self._max_bytes = frames.DEFAULT_TABLE_SIZE

    def entry(self, index: int) -> Header:
        """Return an entry. Raises IndexError, and ValueError for index 0."""
        if index == 0:
            raise ValueError("an entry without a number")
        if index <= len(_STATIC_TABLE):
            return _STATIC_TABLE[index - 1]
        return self._entries[index - len(_STATIC_TABLE) - 1]

    def add(self, header: Header) -> None:
        """Add an entry, and evict the oldest ones until all fit. An entry that is too large empties the table."""
        self.generation += 1
        self._entries.appendleft(header)
        self._bytes += len(header[0]) + len(header[1]) + _ENTRY_BYTES
        self._evict()

    def resize(self, max_bytes: int) -> None:
        self.generation += 1
        self._max_bytes = max_bytes
        self._evict()

    def _evict(self) -> None:
        while self._bytes > self._max_bytes:
            name, value = self._entries.pop()
            self._bytes -= len(name) + len(value) + _ENTRY_BYTES


class HeaderReader:
    """Decodes the header blocks of one connection. Call ``read`` once for each block, in order."""

    def __init__(self) -> None:
        self._table = _DynamicTable()
        self._kept: dict[bytes, Headers] = {}
        self._kept_generation = 0

    def read(self, block: bytes) -> Headers | None:
        """Decode a block.

        Returns:
            Names and values, in order; None if the list exceeds ``MAX_LIST_BYTES``. Later blocks can still be read. The
            same object is returned for a cached block.

        Raises:
            Http2ConnectionError: The block is malformed or far too large; later blocks cannot be read.
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
        except (IndexError, ValueError):
            text = "header block: expected HPACK (RFC 7541), got malformed bytes"
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, text) from None
        if headers is not None and table.generation == generation and len(block) <= _MAX_KEPT_BYTES:
            if len(self._kept) >= _KEPT_BLOCKS:
                self._kept.clear()
            self._kept[block] = headers
        return headers

    def _decode(self, block: bytes) -> Headers | None:
        """Decode a block to its end (RFC 7541, section 6). A malformed block raises various exceptions."""
        table = self._table
        headers: list[Header] = []
        list_bytes = position = 0
        size = len(block)
        while position < size:
            first = block[position]
            name: bytes
            value: bytes
            if first & 0x80:
                index, position = _read_integer(block, position, 0x7F)
                name, value = table.entry(index)
            elif first & 0xE0 == 0x20:
                if list_bytes or position > _MAX_RESIZES_BYTES:
                    raise ValueError("a table size update after the first header, or too many updates")
                table_size, position = _read_integer(block, position, 0x1F)
                if table_size > frames.DEFAULT_TABLE_SIZE:
                    raise ValueError("a table larger than this side allows")
                table.resize(table_size)
                continue
            else:
                is_learned = first & 0x40
                index, position = _read_integer(block, position, 0x3F if is_learned else 0x0F)
                if index:
                    name = table.entry(index)[0]
                else:
                    name, position = _read_string(block, position)
                value, position = _read_string(block, position)
                if is_learned:
                    table.add((name, value))
            list_bytes += len(name) + len(value) + _ENTRY_BYTES
            if list_bytes <= MAX_LIST_BYTES:
                headers.append((name, value))
            elif list_bytes > _MAX_LIST_BYTES:
                text = f"header list: expected at most {_MAX_LIST_BYTES} bytes, got {list_bytes} or more"
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, text)
        return tuple(headers) if list_bytes <= MAX_LIST_BYTES else None


def _read_integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Decode an integer whose prefix has the bits of ``mask`` (RFC 7541, section 5.1). Also return the end position."""
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
        if shift >= _MAX_INTEGER_BITS:
            raise ValueError("an integer that is too long")


def _read_string(block: bytes, position: int) -> tuple[bytes, int]:
    """Decode a string (RFC 7541, section 5.2). Also return the end position."""
    is_huffman = block[position] & 0x80
    length, begin = _read_integer(block, position, 0x7F)
    end = begin + length
    if end > len(block):
        raise ValueError("a string that exceeds its block")
    text = block[begin:end]
    return (decode_huffman(text) if is_huffman else text), end


# The Huffman code (RFC 7541, appendix B), by whole bytes. Its two tables of 0.5 MB are computed from the library's one.

_NO_SYMBOL: Final = 256
"""In place of the symbol of a half that completes none."""
_FAILED: Final = 256
"""The state after a code that does not exist. The other states, 0 to 255, are the inner nodes of the code's tree."""


def _byte_steps() -> tuple[list[int], list[bytes], frozenset[int]]:
    """Join steps of half a byte to steps of a byte.

    Returns:
        By ``state << 8 | byte``: the next states, and the symbols that the byte completes, at most two. Also the states
        in which a string may end.
    """
    half = np.array([*HUFFMAN_TABLE, *[(_FAILED, HUFFMAN_FAIL, 0)] * 16], np.int64).reshape(-1, 16, 3)
    target, flags, symbol = half[..., 0], half[..., 1], half[..., 2]
    target = np.where(flags & HUFFMAN_FAIL, _FAILED, target)
    symbol = np.where(flags & HUFFMAN_EMIT_SYMBOL, symbol, _NO_SYMBOL)
    middle = np.repeat(target, 16, axis=1)  # after the first half of each byte
    second = np.tile(np.arange(16), 16)
    ends = frozenset(target[(flags & HUFFMAN_COMPLETE) != 0].tolist())
    pairs: list[int] = (np.repeat(symbol, 16, axis=1) << 9 | symbol[middle, second]).ravel().tolist()
    texts = {pair: bytes([code for code in (pair >> 9, pair & 511) if code != _NO_SYMBOL]) for pair in set(pairs)}
    return target[middle, second].ravel().tolist(), [texts[pair] for pair in pairs], ends


_STEPS: Final = _byte_steps()
_NEXT: Final = _STEPS[0]
_SYMBOLS: Final = _STEPS[1]
_ENDS: Final = _STEPS[2]


def decode_huffman(coded: bytes) -> bytes:
    """Decode a string. Raises ValueError for bytes that are not a code."""
    state = 0
    parts: list[bytes] = []
    for byte in coded:
        step = state << 8 | byte
        state = _NEXT[step]
        parts.append(_SYMBOLS[step])
    if state not in _ENDS:
        raise ValueError("a string that is not Huffman code")
    return b"".join(parts)


# Blocks of answers use static entries and literals only, so the peer's dynamic table is never needed.


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a header without using or changing a table (RFC 7541, section 6.2.2)."""
    if len(name) < 0x7F and len(value) < 0x7F:
        return b"".join((b"\x00", bytes((len(name),)), name, bytes((len(value),)), value))
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


RESPONSE_HEADERS: Final = b"\x88" + literal(b"content-type", b"application/grpc")  # 0x88: ":status: 200"
OK_STATUS: Final = literal(b"grpc-status", b"0")

_ACCEPTED: Final = literal(b"grpc-accept-encoding", ACCEPTED_ENCODINGS)
_SAFE: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")

_MAX_DETAILS: Final = 6_000
"""Maximum characters of an encoded status message: peers reject trailers of more than 8 KiB."""


def http_status_block(status: int) -> bytes:
    """Encode the headers of an answer to a request that is not gRPC."""
    return b"\x08\x03%d" % status  # a literal value for entry 8 of the static table, ":status"


def status_block(code: grpc.StatusCode, details: str, metadata: Iterable[MetadataEntry]) -> bytes:
    """Encode the trailers of a call."""
    block = literal(b"grpc-status", b"%d" % code.value[0])
    if details:
        block += literal(b"grpc-message", _percent_encoded(details))
    block += metadata_block(metadata)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        block += _ACCEPTED
    return block


def metadata_block(metadata: Iterable[MetadataEntry]) -> bytes:
    """Encode metadata as a header block."""
    block = b""
    for name, value in metadata:
        if isinstance(value, bytes):
            block += literal(name.encode(), b64encode(value).rstrip(b"="))
        else:
            block += literal(name.encode(), value.encode("latin-1", "replace"))
    return block


def _percent_encoded(details: str) -> bytes:
    """Encode a ``grpc-message``, truncated between characters if it is too long."""
    encoded = quote(details[:_MAX_DETAILS], safe=_SAFE, errors="replace")
    while len(encoded) > _MAX_DETAILS:
        details = details[: min(len(details) - 1, len(details) * _MAX_DETAILS // len(encoded))]
        encoded = quote(details, safe=_SAFE, errors="replace")
    return encoded.strip(" ").encode()  # HTTP/2 allows no field value with a space at an end
