"""gRPC messages in a stream of bytes: a flag, a length of four bytes, and the message, however they were cut. Pure."""

import zlib
from collections.abc import Callable
from typing import Final

import grpc

from ortserve.errors import ServeError

PREFIX_BYTES: Final = 5

_WINDOW_BITS: Final = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}

ENCODINGS: Final = b"identity,deflate,gzip"
"""What a ``grpc-accept-encoding`` of ours says."""


class RefusedMessageError(Exception):
    """A message that ends its call with a status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class MessageReader:
    """Puts the messages of one stream together.

    ``admit`` is asked with the length of each message that is longer than what comes at once, before it is kept; it
    raises ServeError, or returns what lets the bytes go again.
    """

    __slots__ = ("_admit", "_got", "_is_compressed", "_length", "_max_bytes", "_parts", "_prefix", "_release")

    def __init__(self, max_bytes: int, admit: Callable[[int], Callable[[], None]]) -> None:
        self._max_bytes = max_bytes
        self._admit = admit
        self._prefix = b""
        self._length = -1
        self._is_compressed = False
        self._parts: list[bytes] = []
        self._got = 0
        self._release: Callable[[], None] | None = None

    @property
    def is_between_messages(self) -> bool:
        return self._length < 0 and not self._prefix

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """Take the next bytes; the messages that are whole now, each with whether it is compressed.

        Raises:
            RefusedMessageError: A message that is too large, for ever or for now; nothing after it can be read.
        """
        messages = []
        while data:
            if self._length < 0:
                if self._prefix or len(data) < PREFIX_BYTES:
                    missing = PREFIX_BYTES - len(self._prefix)
                    self._prefix += data[:missing]
                    data = data[missing:]
                    if len(self._prefix) < PREFIX_BYTES:
                        break
                    prefix, self._prefix = self._prefix, b""
                else:
                    prefix, data = data[:PREFIX_BYTES], data[PREFIX_BYTES:]
                self._begin(prefix, len(data))
            missing = self._length - self._got
            if len(data) < missing:
                self._parts.append(data)
                self._got += len(data)
                break
            if self._parts:
                self._parts.append(data[:missing])
                message = b"".join(self._parts)
            else:
                message = data if len(data) == missing else data[:missing]
            data = data[missing:] if len(data) > missing else b""
            messages.append((message, self._is_compressed))
            self.clear()
        return messages

    def clear(self) -> None:
        """Let go of a message that is not whole."""
        self._length = -1
        self._parts = []
        self._got = 0
        if self._release is not None:
            self._release()
            self._release = None

    def _begin(self, prefix: bytes, at_hand: int) -> None:
        length = int.from_bytes(prefix[1:], "big")
        if prefix[0] > 1:
            raise RefusedMessageError(grpc.StatusCode.INTERNAL, f"message flags: expected 0 or 1, got {prefix[0]}")
        if length > self._max_bytes:
            raise RefusedMessageError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"message is larger than max_body_bytes: expected at most {self._max_bytes} bytes, got {length}",
            )
        if length > at_hand:
            try:
                self._release = self._admit(length)
            except ServeError as error:
                raise RefusedMessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message) from error
        self._length = length
        self._is_compressed = prefix[0] == 1


def inflate(message: bytes, encoding: bytes, max_bytes: int) -> bytes:
    """Undo the compression of a message. Any thread; 1 MB takes some milliseconds.

    Raises:
        RefusedMessageError: An encoding that is not known or not announced, bytes that are none of it, or a message
            that grows too large; it is never inflated beyond the limit.
    """
    if encoding == b"identity":
        raise RefusedMessageError(grpc.StatusCode.INTERNAL, "a message is compressed, but grpc-encoding names nothing")
    if encoding not in _WINDOW_BITS:
        raise RefusedMessageError(
            grpc.StatusCode.UNIMPLEMENTED,
            f"grpc-encoding: expected one of {ENCODINGS.decode()}, got {encoding.decode('latin-1')}",
        )
    inflater = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        inflated = inflater.decompress(message, max_bytes + 1)
    except zlib.error as error:
        raise RefusedMessageError(grpc.StatusCode.INTERNAL, f"a message is no {encoding.decode()}: {error}") from None
    if len(inflated) > max_bytes:
        raise RefusedMessageError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"message is larger than max_body_bytes: expected at most {max_bytes} bytes, got more",
        )
    if not inflater.eof:
        raise RefusedMessageError(grpc.StatusCode.INTERNAL, f"a message is {encoding.decode()} that ends too early")
    return inflated
