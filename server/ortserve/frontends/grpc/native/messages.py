"""gRPC messages and their compression. A flag and a length of four bytes precede each ("Length-Prefixed-Message").

``MessageReader`` finds the messages in the bytes of DATA, for any division into frames. ``inflate`` and ``compress``
run on the loop for short messages and on a thread for long ones.
"""

import asyncio
from functools import partial
from typing import Final

import grpc

from ortserve.codecs import compression
from ortserve.codecs.compression import Encoding, Inflater
from ortserve.core.large_memory import LargeMemory
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.native.limits import STREAM_WINDOW
from ortserve.frontends.grpc.router import too_large
from ortserve.frontends.large_body import LargeBody, begin_large, inflate_all
from ortserve.service.gate import Reservation

PREFIX_BYTES: Final = 5

_SMALL_BYTES: Final = 4096
"""Parts up to this size are joined as they arrive, because a separate object costs about 50 bytes more."""

_ENCODINGS: Final = {b"gzip": Encoding.GZIP, b"deflate": Encoding.DEFLATE}

ACCEPTED_ENCODINGS: Final = b"identity,deflate,gzip"
"""The value of ``grpc-accept-encoding`` in answers."""

_COMPRESSED_INLINE_BYTES: Final = 32 * 1024
"""Messages up to this size are compressed on the loop, in less than 1 ms."""

Message = tuple[bytes | memoryview, bool]
"""A message, and whether it is compressed. A large message is a view on the memory into which it was received."""


class RejectedMessageError(Exception):
    """A message that ends its call with a status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class MessageReader:
    """Reads the messages of one stream. Pure.

    Attributes:
        max_bytes: Maximum size of a message; a change applies to messages that begin later.
        length: Size of the incomplete message; -1 between messages.
        kept_bytes: Received bytes of the incomplete message.
        prefix: Received part of an incomplete prefix.
        large: Memory of the incomplete message if it is large; otherwise None.
    """

    __slots__ = ("_is_compressed", "_memory", "_parts", "kept_bytes", "large", "length", "max_bytes", "prefix")

    def __init__(self, max_bytes: int, memory: LargeMemory) -> None:
        """``memory`` provides the memory of large messages."""
        self.max_bytes = max_bytes
        self._memory = memory
        self.prefix = b""
        self.length = -1
        self._is_compressed = False
        self._parts: list[bytes] = []
        self.large: LargeBody | None = None
        self.kept_bytes = 0

    def feed(self, data: bytes, begin: int, end: int) -> list[Message]:
        """Read the bytes of ``data`` from ``begin`` to ``end``. Returns the messages that these bytes complete.

        Raises:
            RejectedMessageError: The message is malformed or too large. The stream cannot be read any further.
        """
        messages: list[Message] = []
        position = begin
        while position < end:
            if self.large is not None:
                position = self._place(self.large, data, position, end)
                messages += self._completed()
                continue
            if self.length < 0:
                if self.prefix or end - position < PREFIX_BYTES:
                    missing = PREFIX_BYTES - len(self.prefix)
                    part = data[position : min(position + missing, end)]
                    self.prefix += part
                    position += len(part)
                    if len(self.prefix) < PREFIX_BYTES:
                        break
                    prefix, self.prefix = self.prefix, b""
                else:
                    prefix = data[position : position + PREFIX_BYTES]
                    position += PREFIX_BYTES
                flag, length = prefix[0], int.from_bytes(prefix[1:], "big")
                if flag > 1:
                    raise RejectedMessageError(grpc.StatusCode.INTERNAL, f"message flags: expected 0 or 1, got {flag}")
                if length > self.max_bytes:
                    text = too_large(self.max_bytes, length).message
                    raise RejectedMessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
                self.length = length
                self._is_compressed = flag == 1
            stop = position + self.length - self.kept_bytes
            if stop > end:
                self._keep(data, position, end)
                break
            message = data[position:stop]
            position = stop
            if self._parts:
                self._parts.append(message)
                message = b"".join(self._parts)
                self.clear()
            else:
                self.length = -1
            messages.append((message, self._is_compressed))
        return messages

    def add(self, count: int) -> list[Message]:
        """Account for ``count`` bytes that were written to ``large``. Returns the message if it is complete."""
        assert self.large is not None
        self.large.add(count)
        self.kept_bytes = self.large.received_bytes
        return self._completed()

    def clear(self) -> None:
        """Free the incomplete message."""
        self.length = -1
        self._parts = []
        self.large = None
        self.kept_bytes = 0

    def _completed(self) -> list[Message]:
        if self.large is None or not self.large.is_whole:
            return []
        message = self.large.content(), self._is_compressed
        self.clear()
        return [message]

    def _place(self, large: LargeBody, data: bytes, begin: int, end: int) -> int:
        """Copy the next bytes into ``large``. Returns the position after them."""
        stop = min(end, begin + large.size - large.received_bytes)
        large.put(memoryview(data)[begin:stop])
        self.kept_bytes = large.received_bytes
        return stop

    def _keep(self, data: bytes, begin: int, end: int) -> None:
        large = begin_large(self.length, self._parts, self.kept_bytes, self._memory)
        if large is not None:
            self._parts, self.large = [], large
            self._place(large, data, begin, end)
            return
        part = data[begin:end]
        self.kept_bytes += len(part)
        parts = self._parts
        if parts and len(parts[-1]) + len(part) <= _SMALL_BYTES:
            parts[-1] += part
        else:
            parts.append(part)


async def inflate(
    message: bytes | memoryview, encoding: bytes, reservation: Reservation, *, max_bytes: int
) -> bytes | memoryview:
    """Decompress a message; ``reservation`` grows by its compressed and inflated bytes.

    Up to the size of a stream's window, memory is counted without a limit. The handler that reads the message applies
    the limit and rejects one request; a rejection here would end the whole stream.

    Raises:
        RejectedMessageError: The encoding is unknown or not announced, the bytes are malformed, or the result exceeds
            ``max_bytes``. At most one byte more is inflated.
        ServeError: overloaded if memory is too short.
    """
    if encoding == b"identity":
        text = "a message is compressed, and grpc-encoding names no encoding"
        raise RejectedMessageError(grpc.StatusCode.INTERNAL, text)
    known = _ENCODINGS.get(encoding)
    if known is None:
        text = f"grpc-encoding: expected one of {ACCEPTED_ENCODINGS.decode()}, got {encoding.decode('latin-1')}"
        raise RejectedMessageError(grpc.StatusCode.UNIMPLEMENTED, text)
    inflater = Inflater(message, known, max_bytes, subject="a message", header="grpc-encoding")
    reservation.set_unchecked(len(message))
    reserve = partial(_reserve_inflated, reservation, len(message) + STREAM_WINDOW)
    try:
        return await inflate_all(inflater, compressed_bytes=len(message), reserve=reserve, memory=reservation.memory)
    except ServeError as error:
        if error.kind is ErrorKind.TOO_LARGE:
            text = too_large(max_bytes, None, "decompressed message").message
            raise RejectedMessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, text) from None
        if error.kind is ErrorKind.INVALID_INPUT:
            raise RejectedMessageError(grpc.StatusCode.INTERNAL, error.message) from None
        raise


def _reserve_inflated(reservation: Reservation, unchecked_bytes: int, part_bytes: int) -> None:
    """Count inflated bytes. Raises ServeError: overloaded, only beyond ``unchecked_bytes`` in total."""
    size = reservation.size + part_bytes
    if size <= unchecked_bytes:
        reservation.set_unchecked(size)
    else:
        reservation.grow(part_bytes)


async def compress(message: bytes | memoryview, encoding: bytes, memory: LargeMemory) -> Message:
    """Return the compressed message, a long one in ``memory``; the message itself if compression does not shrink it."""
    smaller: bytes | memoryview
    if len(message) <= _COMPRESSED_INLINE_BYTES:
        smaller = compression.compress(message, _ENCODINGS[encoding])
    else:
        loop = asyncio.get_running_loop()
        compress_long = compression.compress_long
        smaller = await loop.run_in_executor(None, compress_long, message, _ENCODINGS[encoding], memory)
    return (smaller, True) if len(smaller) < len(message) else (message, False)
