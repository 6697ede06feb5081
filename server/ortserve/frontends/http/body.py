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
    body = bytearray(first)
    hold.count(len(body))
    while message.get("more_body", False):
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise body_too_large(len(body), max_bytes)
        hold.resize(len(body))
    return bytes(body)
