"""Reading the JSON body of a small control call, whatever its content type says: clients send any, or none."""

from typing import Any, Final

from fastapi import Request
from starlette.requests import ClientDisconnect

from ortserve.codecs.json_text import parameters_of, parse_object
from ortserve.errors import ErrorKind, ServeError

SMALL_BYTES: Final = 64 * 1024
"""Most bytes of the body of a control call, but of one that brings a model."""


async def read_json_object(request: Request) -> dict[str, Any]:
    """Read a body that holds a small JSON object; an empty one counts as ``{}``.

    Raises:
        ServeError: too_large, cancelled, or invalid_input for what is no JSON object.
    """
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > SMALL_BYTES:
                raise ServeError(
                    ErrorKind.TOO_LARGE, f"expected a body of at most {SMALL_BYTES} bytes for this call, got more"
                )
    except ClientDisconnect:
        raise caller_left() from None
    return parse_object(body)


async def read_parameters(request: Request) -> dict[str, Any]:
    """Read the ``parameters`` of a small body; a body without them has none.

    Raises:
        ServeError: As ``read_json_object``, and invalid_input for parameters that are no object.
    """
    return parameters_of(await read_json_object(request))


def caller_left() -> ServeError:
    """The error for a caller that left before its body was whole."""
    return ServeError(ErrorKind.CANCELLED, "the caller left before its body was complete")
