"""Reads and writes fields of messages in protobuf's wire format (protobuf.dev/programming-guides/encoding).

A message is a span of bytes in memory. Readers skip the values of fields that they do not need, such as weights.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Final

from ortserve.errors import out_of_memory
from ortserve.paths import open_file

VARINT: Final = 0
"""The wire type of single numbers."""
_FIXED64: Final = 1
LENGTH_DELIMITED: Final = 2
"""The wire type of texts, messages and packed numbers."""
_FIXED32: Final = 5

_PIECE_BYTES: Final = 1 << 18
"""Bytes that one call of the system reads. A kernel without preemption interrupts no call: one for a whole file would
keep the event loop from its processor."""
_MAX_BYTES: Final = 1 << 31
"""Maximum size of a message (protobuf.dev/programming-guides/proto-limits)."""


@contextmanager
def reading_message(path: Path) -> Iterator[memoryview]:
    """A context with the content of a file, to which nothing should refer when it exits.

    The file is not mapped: a file that another program truncates would end the process (SIGBUS). The content is in
    memory that is unmapped without the interpreter lock. Freeing the same bytes as an object would hold it, and no
    request would be answered meanwhile.

    Raises:
        OSError: The file cannot be read, or is no regular file.
        ValueError: The file is empty, or larger than a message can be.
        ServeError: overloaded, if there is too little memory for it.
    """
    with open_file(path) as file:
        if not 0 < (size := os.fstat(file.fileno()).st_size) <= _MAX_BYTES:
            raise ValueError(f"expected 1 to {_MAX_BYTES} bytes, got {size}")
        try:
            content = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)
        except OSError:
            raise out_of_memory("reading a model file") from None
        try:
            with memoryview(content) as whole:
                count = 0
                while count < size and (read := file.readinto(whole[count : count + _PIECE_BYTES])):  # type: ignore[attr-defined]
                    count += read
                with whole[:count] as data:
                    yield data
        finally:
            with suppress(BufferError):  # after an error, whose traceback refers to it
                content.close()


def fields(data: memoryview, start: int, end: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield number, wire type and span of the value of each field of a message.

    Raises:
        ValueError: The bytes are not a message.
        IndexError: The bytes are not a message.
    """
    while start < end:
        tag = data[start]  # nearly all tags and sizes are varints of one byte
        start += 1
        if tag >= 0x80:
            tag, start = varint(data, start - 1)
        wire_type = tag & 7
        if wire_type == LENGTH_DELIMITED:
            size = data[start]
            start += 1
            if size >= 0x80:
                size, start = varint(data, start - 1)
            after = start + size
        elif wire_type == VARINT:
            _, after = varint(data, start)
        elif wire_type in (_FIXED64, _FIXED32):
            after = start + (8 if wire_type == _FIXED64 else 4)
        else:
            raise ValueError("not a protobuf message")
        yield tag >> 3, wire_type, (start, after)
        start = after
    if start != end:
        raise ValueError("not a protobuf message")


def varint(data: memoryview, start: int) -> tuple[int, int]:
    """Read a varint. Returns the number and the position after it."""
    byte = data[start]
    if byte < 0x80:
        return byte, start + 1
    value = shift = 0
    while True:
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
        shift += 7
        if shift > 63:
            raise ValueError("not a protobuf message")


def signed(value: int) -> int:
    """Convert a varint to the ``int64`` that it encodes."""
    return value - (1 << 64) if value >= 1 << 63 else value


def integers(data: memoryview, wire_type: int, start: int, end: int) -> list[int]:
    """The numbers in one field of a repeated ``int64``: several if they are packed, otherwise one."""
    if wire_type != LENGTH_DELIMITED:
        return [signed(varint(data, start)[0])]
    found: list[int] = []
    while start < end:
        value, start = varint(data, start)
        found.append(signed(value))
    return found


class TextReader:
    """Reads the texts of a message."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.has_invalid = False
        """Whether a text was not valid UTF-8."""

    def read(self, start: int, end: int) -> str:
        """Read a text. Bytes that are not valid UTF-8 are escaped."""
        try:
            return str(self._data[start:end], "utf-8")
        except UnicodeDecodeError:
            self.has_invalid = True
            return str(self._data[start:end], "utf-8", "backslashreplace")


def write_message(number: int, content: bytes) -> bytes:
    """Serialize a length-delimited field."""
    return write_tag(number) + write_varint(len(content)) + content


def write_number(number: int, value: int) -> bytes:
    """Serialize a field with a number that is not negative."""
    return write_varint(number << 3 | VARINT) + write_varint(value)


def write_float(number: int, value: float) -> bytes:
    """A field with an FP32 number."""
    return write_varint(number << 3 | _FIXED32) + struct.pack("<f", value)


def write_tag(number: int) -> bytes:
    """Serialize the tag of a length-delimited field."""
    return write_varint(number << 3 | LENGTH_DELIMITED)


def write_varint(value: int) -> bytes:
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
