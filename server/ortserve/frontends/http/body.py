"""Reading a request's body from ASGI, no more of it than is allowed."""

from starlette.types import Receive

from ortserve.frontends.http.answers import body_too_large
from ortserve.service.gate import Hold


async def read_body(receive: Receive, hold: Hold, *, max_bytes: int) -> bytes | None:
    """Read the whole body; None when the caller left before its end.

    Args:
        receive: ASGI's.
        hold: Holds the announced bytes; while they come, as many as came: who announced them could keep others out.
        max_bytes: Of the body; the option ``max_body_bytes``.

    Raises:
        ServeError: too_large, before more than the limit is kept; overloaded.
    """
    message = await receive()
    if message["type"] == "http.disconnect":
        return None
    first: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(first) > max_bytes:
            raise body_too_large(len(first), max_bytes)
        return first
    parts, size = [first], len(first)
    hold.count(size)
    while message.get("more_body", False):
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise body_too_large(size, max_bytes)
        hold.resize(size)
    return b"".join(parts)
