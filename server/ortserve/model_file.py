"""Reading a model file as what it is, one protobuf message, without the package ``onnx``, which users need not have.

Only what is asked for is looked at: weights are skipped, and the file is mapped, not read.
"""

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

LENGTH_DELIMITED: Final = 2
"""The wire type of texts, messages and packed numbers (protobuf.dev/programming-guides/encoding)."""
VARINT: Final = 0
"""The wire type of single numbers."""
_FIXED64: Final = 1
_FIXED32: Final = 5


def read_model(path: Path, find: Callable[[memoryview], Iterator[T]]) -> list[T]:
    """All that ``find`` yields of a file's content; nothing where it is no model. Blocks on the file."""
    if not path.is_file():  # a pipe can be read only once, by ONNX Runtime
        return []
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            view = memoryview(content)
            try:
                return list(find(view))
            finally:
                view.release()
    except (OSError, ValueError, IndexError):  # unreadable, empty, or no protobuf message
        return []


def text(data: memoryview, start: int, end: int, number: int) -> str:
    """The text field of a number; empty where the message has none."""
    return "".join(bytes(data[slice(*span)]).decode() for span in messages(data, start, end, number))


def messages(data: memoryview, start: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    """Where the length-delimited fields of a number begin and end, in the message from ``start`` to ``end``.

    Raises:
        ValueError: It is no such message.
        IndexError: Likewise.
    """
    for found, wire_type, span in fields(data, start, end):
        if found == number and wire_type == LENGTH_DELIMITED:
            yield span


def fields(data: memoryview, start: int, end: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Number and wire type of each field of a message, and where its value begins and ends.

    Raises:
        ValueError: It is no message.
        IndexError: Likewise.
    """
    while start < end:
        tag = data[start]  # nearly all tags and sizes are numbers of one byte
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
            raise ValueError("no protobuf message")
        yield tag >> 3, wire_type, (start, after)
        start = after
    if start != end:
        raise ValueError("no protobuf message")


def varint(data: memoryview, start: int) -> tuple[int, int]:
    """A number, and where the next field begins."""
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
            raise ValueError("no protobuf message")
