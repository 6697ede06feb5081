"""Reading the JSON body of a control call, whatever its content type says: clients send any, or none.

It is parsed on the loop, however large it is: orjson keeps the interpreter's lock, so that a thread would spare nobody.
"""

from typing import Any, Final

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.http.body import read_body
from ortserve.service.gate import Hold

SMALL_BYTES: Final = 64 * 1024
"""Most bytes of the body of a control call, but of one that brings a model: nobody counts what these hold together."""


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
        raise _caller_left() from None
    return _parsed(body)


async def read_parameters(request: Request) -> dict[str, Any]:
    """Read the ``parameters`` of a small body; a body without them has none.

    Raises:
        ServeError: As ``read_json_object``, and invalid_input for parameters that are no object.
    """
    return _parameters_of(await read_json_object(request))


async def read_large_parameters(request: Request, hold: Hold, *, max_body_bytes: int) -> dict[str, Any]:
    """Read the ``parameters`` of a body that may hold files.

    Args:
        request: Unread.
        hold: As ``read_body`` has it.
        max_body_bytes: The option.

    Raises:
        ServeError: As ``read_parameters``; overloaded.
    """
    body = await read_body(request.receive, hold, max_bytes=max_body_bytes)
    if body is None:
        raise _caller_left()
    return _parameters_of(_parsed(body))


def _parsed(body: bytes | bytearray) -> dict[str, Any]:
    if not body:
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid_input(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}") from None
    if not isinstance(document, dict):
        raise invalid_input(f"expected a JSON object, got {type(document).__name__}")
    return document


def _parameters_of(document: dict[str, Any]) -> dict[str, Any]:
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise invalid_input(f"Unable to parse 'parameters': expected an object, got {type(parameters).__name__}")
    return parameters


def _caller_left() -> ServeError:
    return ServeError(ErrorKind.CANCELLED, "the caller left before its body was complete")
