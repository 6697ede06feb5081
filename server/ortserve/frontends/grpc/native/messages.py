"""gRPC messages in a stream of bytes: a flag, a length of four bytes, and the message, however they were cut. Pure."""

from typing import Final

import grpc

from ortserve.frontends.grpc.message_limits import too_large

PREFIX_BYTES: Final = 5

_SMALL_BYTES: Final = 4096
"""Parts up to this size are put together at once: each costs some 50 bytes more than it brings."""

Message = tuple[bytes, bool]
"""A message, and whether it is compressed."""


class RefusedMessageError(Exception):
    """A message that ends its call with a status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class MessageReader:
    """Puts the messages of one stream together.

    Attributes:
        max_bytes: Of a message that begins.
        length: Of the message that has begun and is not whole, -1 where there is none.
        kept_bytes: Of that message, what is here.
    """

    __slots__ = ("_is_compressed", "_parts", "_prefix", "kept_bytes", "length", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._prefix = b""
        self.length = -1
        self._is_compressed = False
        self._parts: list[bytes] = []
        self.kept_bytes = 0

    @property
    def is_between_messages(self) -> bool:
        return self.length < 0 and not self._prefix

    def feed(self, data: bytes) -> list[Message]:
        """Take the next bytes; the messages that are whole now.

        Raises:
            RefusedMessageError: A message that is none or too large; nothing after it can be read.
        """
        messages: list[Message] = []
        size = len(data)
        position = 0
        while position < size:
            if self.length < 0:
                if self._prefix or size - position < PREFIX_BYTES:
                    missing = PREFIX_BYTES - len(self._prefix)
                    self._prefix += data[position : position + missing]
                    position += missing
                    if len(self._prefix) < PREFIX_BYTES:
                        break
                    prefix, self._prefix = self._prefix, b""
                else:
                    prefix = data[position : position + PREFIX_BYTES]
                    position += PREFIX_BYTES
                self._begin(prefix)
            end = position + self.length - self.kept_bytes
            if end > size:
                if position < size:
                    self._keep(data[position:])
                break
            message = data[position:end]
            if self._parts:
                self._parts.append(message)
                message = b"".join(self._parts)
            position = end
            messages.append((message, self._is_compressed))
            self.clear()
        return messages

    def clear(self) -> None:
        """Let go of a message that is not whole."""
        self.length = -1
        self._parts = []
        self.kept_bytes = 0

    def _keep(self, part: bytes) -> None:
        self.kept_bytes += len(part)
        parts = self._parts
        if parts and len(parts[-1]) + len(part) <= _SMALL_BYTES:
            parts[-1] += part
        else:
            parts.append(part)

    def _begin(self, prefix: bytes) -> None:
        length = int.from_bytes(prefix[1:], "big")
        if prefix[0] > 1:
            raise RefusedMessageError(grpc.StatusCode.INTERNAL, f"message flags: expected 0 or 1, got {prefix[0]}")
        if length > self.max_bytes:
            raise RefusedMessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, too_large(self.max_bytes, length).message)
        self.length = length
        self._is_compressed = prefix[0] == 1
