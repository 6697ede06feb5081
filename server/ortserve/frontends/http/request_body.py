"""Request bodies: received in parts, accounted, inflated, and never kept beyond their limit."""

import contextlib
from typing import Any, Final

from starlette.types import Receive

from ortserve.codecs.compression import Encoding, Inflater
from ortserve.codecs.json_text import parse_object
from ortserve.errors import ErrorKind, ServeError, out_of_memory
from ortserve.frontends.large_body import EARNEST_BYTES, LargeBody, begin_large, inflate_all
from ortserve.service.gate import Hold, body_too_large

SMALL_BYTES: Final = 64 * 1024
"""Limit of the body of a control call, except one that brings a model."""


class IncomingBody:
    """The body of one request while it is received. Loop thread only."""

    __slots__ = ("_announced_bytes", "_hold", "_large", "_max_bytes", "_parts", "_size")

    def __init__(self, hold: Hold, *, max_bytes: int, announced_bytes: int = 0) -> None:
        """Keep nothing yet.

        Args:
            hold: Reserves the announced bytes.
            max_bytes: The option ``max_body_bytes``.
            announced_bytes: 0 if unknown, as for a chunked body, and if ``place_rest`` is never called.
        """
        self._hold = hold
        self._max_bytes = max_bytes
        self._announced_bytes = announced_bytes
        self._size = 0
        self._parts: list[bytes] = []
        self._large: LargeBody | None = None

    def keep(self, part: bytes) -> None:
        """Keep the next bytes.

        Raises:
            ServeError: too_large, before more than the limit is kept; overloaded.
        """
        self.count(len(part))
        if self._large is not None:
            self._large.put(part)
            return
        self._parts.append(part)
        if self._announced_bytes == 0 and self._size >= EARNEST_BYTES:
            self._join_parts()

    def count(self, nbytes: int) -> None:
        """Account for the next bytes, which were received into the memory from ``place_rest``.

        Raises:
            ServeError: As ``keep``.
        """
        size = self._size + nbytes
        if size > self._max_bytes:
            raise body_too_large(size, self._max_bytes)
        if size > self._hold.size:
            self._hold.resize(size)
        self._size = size

    def settle(self) -> None:
        """Reserve only the received bytes: a caller that announces a large body and sends little blocks no others."""
        if self._hold.size > self._size:
            self._hold.count(self._size)

    def place_rest(self) -> LargeBody | None:
        """Memory into which the rest is received; None if the rest arrives in parts, or is placed already."""
        if self._large is not None:
            return None
        self._large = begin_large(self._announced_bytes, self._parts, self._size, self._hold.memory)
        if self._large is not None:
            self._parts = []
        return self._large

    def _join_parts(self) -> None:
        """Copy the parts of a body of unknown length into one block now; joining all at its end blocks the loop.

        There may be a million of them, which only ``join`` copies quickly.
        """
        with contextlib.suppress(MemoryError):
            joined = b"".join(self._parts)
            self._large = LargeBody(self._max_bytes, self._hold.memory)
            self._large.put(joined)
            self._parts = []

    def take(self) -> bytes | memoryview:
        """The whole body, now that it is complete. Raises ServeError: overloaded, if no memory can hold it."""
        if self._large is not None:
            return self._large.content()
        try:
            return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        except MemoryError:
            raise out_of_memory("receiving a request") from None

    def drop(self) -> None:
        """Keep nothing of the body, including its rest."""
        self._parts = []
        if self._large is not None:
            self._large.drop()


async def inflate(
    body: bytes | memoryview, encoding: Encoding, hold: Hold, *, max_bytes: int, max_json_bytes: int | None = None
) -> bytes | memoryview:
    """Inflate the body of a request. ``hold`` has reserved the compressed bytes, and grows by the inflated ones.

    ``max_json_bytes`` is the limit of a body that is only JSON, None for another.

    Raises:
        ServeError: too_large, as soon as the limit is reached; overloaded; invalid_input for malformed data.
    """
    option = "max_body_bytes"
    if max_json_bytes is not None and max_json_bytes < max_bytes:
        max_bytes, option = max_json_bytes, "max_json_bytes"
    inflater = Inflater(body, encoding, max_bytes, option=option)
    return await inflate_all(inflater, came_bytes=len(body), hold=hold.grow, memory=hold.memory)


async def read_body(receive: Receive, hold: Hold, *, max_bytes: int) -> bytes | memoryview:
    """Read a whole body from ASGI.

    ``hold`` has reserved the announced bytes. While the body arrives it reserves only the received ones.

    Raises:
        ServeError: too_large, before more than ``max_bytes`` are kept; overloaded; cancelled if the caller left.
    """
    body = IncomingBody(hold, max_bytes=max_bytes)
    while True:
        part, is_last = await _next_part(receive)
        body.keep(part)
        if is_last:
            return body.take()
        body.settle()


async def read_json_object(receive: Receive) -> dict[str, Any]:
    """Read a small JSON object from ASGI; its content type is ignored, and an empty body counts as ``{}``.

    Raises:
        ServeError: too_large, cancelled, or invalid_input if the body is not a JSON object.
    """
    body = bytearray()
    is_last = False
    while not is_last:
        part, is_last = await _next_part(receive)
        body += part
        if len(body) > SMALL_BYTES:
            raise ServeError(
                ErrorKind.TOO_LARGE, f"expected a body of at most {SMALL_BYTES} bytes for this call, got more"
            )
    return parse_object(body)


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    """The next bytes of a body, and whether they are the last. Raises ServeError: cancelled if the caller left."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ServeError(ErrorKind.CANCELLED, "the caller left before its body was complete")
    return message.get("body", b""), not message.get("more_body", False)
