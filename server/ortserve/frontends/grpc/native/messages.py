"""gRPC messages in a stream of bytes: a flag, a length of four bytes, and the message, however they were cut. Pure."""

from typing import Final

import grpc

from ortserve.core.large_memory import LargeMemory
from ortserve.frontends.grpc.router import too_large
from ortserve.frontends.large_body import LargeBody, begin_large

PREFIX_BYTES: Final = 5

_SMALL_BYTES: Final = 4096
"""Parts up to this size are put together at once: each costs some 50 bytes more than it brings."""

Message = tuple[bytes | memoryview, bool]
"""A message, and whether it is compressed. A large one is a view on the memory that it was received into."""


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
        large: Where it is, if it is a large one; else None.
    """

    __slots__ = ("_is_compressed", "_memory", "_parts", "_prefix", "kept_bytes", "large", "length", "max_bytes")

    def __init__(self, max_bytes: int, memory: LargeMemory) -> None:
        """``memory`` is for large messages."""
        self.max_bytes = max_bytes
        self._memory = memory
        self._prefix = b""
        self.length = -1
        self._is_compressed = False
        self._parts: list[bytes] = []
        self.large: LargeBody | None = None
        self.kept_bytes = 0

    @property
    def is_between_messages(self) -> bool:
        return self.length < 0 and not self._prefix

    def feed(self, data: bytes, begin: int, end: int) -> list[Message]:
        """Take the next bytes, those of ``data`` from ``begin`` to ``end``; the messages that are whole now.

        Raises:
            RefusedMessageError: A message that is none or too large; nothing after it can be read.
        """
        messages: list[Message] = []
        position = begin
        while position < end:
            if self.large is not None:
                position = self._place(self.large, data, position, end)
                messages += self._whole()
                continue
            if self.length < 0:
                if self._prefix or end - position < PREFIX_BYTES:
                    missing = PREFIX_BYTES - len(self._prefix)
                    part = data[position : min(position + missing, end)]
                    self._prefix += part
                    position += len(part)
                    if len(self._prefix) < PREFIX_BYTES:
                        break
                    prefix, self._prefix = self._prefix, b""
                else:
                    prefix = data[position : position + PREFIX_BYTES]
                    position += PREFIX_BYTES
                self._begin(prefix)
            stop = position + self.length - self.kept_bytes
            if stop > end:
                self._keep(data, position, end)
                break
            message = data[position:stop]
            if self._parts:
                self._parts.append(message)
                message = b"".join(self._parts)
            position = stop
            messages.append((message, self._is_compressed))
            self.clear()
        return messages

    def add(self, count: int) -> list[Message]:
        """The next ``count`` bytes were written to ``large`` already; the message, if it is whole now."""
        assert self.large is not None
        self.large.add(count)
        self.kept_bytes = self.large.came
        return self._whole()

    def clear(self) -> None:
        """Let go of a message that is not whole."""
        self.length = -1
        self._parts = []
        self.large = None
        self.kept_bytes = 0

    def _whole(self) -> list[Message]:
        if self.large is None or not self.large.is_whole:
            return []
        message = self.large.content(), self._is_compressed
        self.clear()
        return [message]

    def _place(self, large: LargeBody, data: bytes, begin: int, end: int) -> int:
        """Put the next bytes where they belong; how far they go."""
        stop = min(end, begin + large.size - large.came)
        large.put(memoryview(data)[begin:stop])
        self.kept_bytes = large.came
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

    def _begin(self, prefix: bytes) -> None:
        length = int.from_bytes(prefix[1:], "big")
        if prefix[0] > 1:
            raise RefusedMessageError(grpc.StatusCode.INTERNAL, f"message flags: expected 0 or 1, got {prefix[0]}")
        if length > self.max_bytes:
            raise RefusedMessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, too_large(self.max_bytes, length).message)
        self.length = length
        self._is_compressed = prefix[0] == 1
