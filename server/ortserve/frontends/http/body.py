"""Reading a request's body from ASGI, no more of it than is allowed."""

from starlette.types import Receive

from ortserve.frontends.http.incoming_body import IncomingBody
from ortserve.service.gate import Hold


async def read_body(receive: Receive, hold: Hold, *, max_bytes: int) -> bytes | memoryview | None:
    """Read the whole body; None when the caller left before its end.

    Args:
        receive: ASGI's.
        hold: Holds the announced bytes; while they come, as many as came: who announced them could keep others out.
        max_bytes: Of the body; the option ``max_body_bytes``.

    Raises:
        ServeError: too_large, before more than the limit is kept; overloaded.
    """
    body = IncomingBody(hold, max_bytes=max_bytes)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body.keep(message.get("body", b""))
        if not message.get("more_body", False):
            return body.take()
        body.settle()
