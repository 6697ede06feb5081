"""Request bodies: receives them in parts, reserves their memory, enforces their limits, and inflates them."""

import contextlib
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Receive

from ortserve.codecs.compression import Encoding, Inflater
from ortserve.codecs.json_text import parse_object
from ortserve.errors import ErrorKind, ServeError, out_of_memory
from ortserve.frontends.large_body import MIN_RECEIVED_BYTES, LargeBody, begin_large, inflate_all
from ortserve.service.gate import Reservation, body_too_large

SMALL_BYTES: Final = 64 * 1024
"""Maximum size of the body of a control call, except calls that load a model."""


class IncomingBody:
    """The body of one request while it is received. Loop thread only."""

    __slots__ = ("_announced_bytes", "_large", "_max_bytes", "_parts", "_reservation", "_size")

    def __init__(self, reservation: Reservation, *, max_bytes: int, announced_bytes: int = 0) -> None:
        """Begin with an empty body.

        Args:
            reservation: Reservation of the announced bytes.
            max_bytes: Maximum size of the body.
            announced_bytes: Announced size of the body; 0 if it is unknown (a chunked body) or ``place_rest`` is never
                called.
        """
        self._reservation = reservation
        self._max_bytes = max_bytes
        self._announced_bytes = announced_bytes
        self._size = 0
        self._parts: list[bytes] = []
        self._large: LargeBody | None = None

    def keep(self, part: bytes) -> None:
        """Store the next bytes.

        Raises:
            ServeError: too_large, before more than the limit is stored; overloaded if the memory limit is reached.
        """
        self.count(len(part))
        if self._large is not None:
            self._large.put(part)
            return
        self._parts.append(part)
        if self._announced_bytes == 0 and self._size >= MIN_RECEIVED_BYTES:
            self._join_parts()

    def count(self, nbytes: int) -> None:
        """Account for the next bytes without storing them. The memory from ``place_rest`` holds them already.

        Raises:
            ServeError: As from ``keep``.
        """
        size = self._size + nbytes
        if size > self._max_bytes:
            raise body_too_large(size, self._max_bytes)
        if size > self._reservation.size:
            self._reservation.resize(size)
        self._size = size

    def settle(self) -> None:
        """Shrink the reservation to the received bytes, so that announcements alone do not block other callers."""
        if self._reservation.size > self._size:
            self._reservation.set_unchecked(self._size)

    def place_rest(self) -> LargeBody | None:
        """Return memory for the rest of the body; None if the rest arrives in parts, or has its memory already."""
        if self._large is not None:
            return None
        self._large = begin_large(self._announced_bytes, self._parts, self._size, self._reservation.memory)
        if self._large is not None:
            self._parts = []
        return self._large

    def _join_parts(self) -> None:
        """Copy the parts of a body of unknown length into one block.

        Copying all parts at the end of a large body would block the event loop. There may be a million parts, which
        only ``join`` copies quickly.
        """
        with contextlib.suppress(MemoryError):
            joined = b"".join(self._parts)
            self._large = LargeBody(self._max_bytes, self._reservation.memory)
            self._large.put(joined)
            self._parts = []

    def take(self) -> bytes | memoryview:
        """Return the complete body. Raises ServeError: overloaded if memory is too short."""
        if self._large is not None:
            return self._large.content()
        try:
            return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        except MemoryError:
            raise out_of_memory("receiving a request") from None

    def drop(self) -> None:
        """Release the received bytes, and drop the rest when it arrives."""
        self._parts = []
        if self._large is not None:
            self._large.drop()


async def inflate(
    body: bytes | memoryview,
    encoding: Encoding,
    reservation: Reservation,
    *,
    max_bytes: int,
    max_json_bytes: int | None = None,
) -> bytes | memoryview:
    """Inflate the body of a request.

    Args:
        body: The compressed body.
        encoding: Compression of the body.
        reservation: Reservation of the compressed bytes, which grows by the inflated ones.
        max_bytes: Maximum size of the inflated body.
        max_json_bytes: Maximum size of an inflated body that is only JSON; None for any other body.

    Raises:
        ServeError: too_large, as soon as a limit is reached; overloaded if memory is too short; invalid_input for
            malformed data.
    """
    option = "max_body_bytes"
    if max_json_bytes is not None and max_json_bytes < max_bytes:
        max_bytes, option = max_json_bytes, "max_json_bytes"
    inflater = Inflater(body, encoding, max_bytes, option=option)
    return await inflate_all(inflater, compressed_bytes=len(body), reserve=reservation.grow, memory=reservation.memory)


async def read_body(receive: Receive, reservation: Reservation, *, max_bytes: int) -> bytes | memoryview:
    """Read a whole body from ASGI.

    ``reservation`` is the reservation of the announced bytes. It shrinks to the received bytes while the body arrives.

    Raises:
        ServeError: too_large, before more than ``max_bytes`` are stored; overloaded if memory is too short; cancelled
            if the caller left.
    """
    body = IncomingBody(reservation, max_bytes=max_bytes)
    while True:
        part, is_last = await _next_part(receive)
        body.keep(part)
        if is_last:
            return body.take()
        body.settle()


def check_uncompressed(request: Request) -> None:
    """Check that the body of a control call is not compressed. Raises ServeError: unsupported."""
    encoding = request.headers.get("content-encoding", "")
    if encoding.strip().lower() not in ("", "identity"):
        text = f"Content-Encoding '{encoding:.100}' is not supported for this call: expected identity"
        raise ServeError(ErrorKind.UNSUPPORTED, text)


async def read_json_object(request: Request) -> dict[str, Any]:
    """Read a small JSON object from ASGI. The content type is ignored, and an empty body counts as ``{}``.

    Raises:
        ServeError: unsupported for a compressed body; too_large; cancelled if the caller left; invalid_input if the
            body is not a JSON object.
    """
    check_uncompressed(request)
    body = bytearray()
    is_last = False
    while not is_last:
        part, is_last = await _next_part(request.receive)
        body += part
        if len(body) > SMALL_BYTES:
            raise ServeError(
                ErrorKind.TOO_LARGE, f"expected a body of at most {SMALL_BYTES} bytes for this call, got more"
            )
    return parse_object(body)


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    """Return the next bytes, and whether they are the last. Raises ServeError: cancelled if the caller left."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ServeError(ErrorKind.CANCELLED, "the caller disconnected before its body was complete")
    return message.get("body", b""), not message.get("more_body", False)
