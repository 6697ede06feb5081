"""Reading the JSON body of a control call, whatever its content type says: clients send any, or none.

It is parsed on the loop, however large it is: orjson keeps the interpreter's lock, so that a thread would spare nobody.
"""

from typing import Any

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect

from ortserve.errors import ErrorKind, ServeError, invalid_input


async def read_json_object(request: Request, *, max_body_bytes: int) -> dict[str, Any]:
    """Read a body that holds a JSON object; an empty one counts as ``{}``.

    Raises:
        ServeError: too_large, cancelled, or invalid_input for what is no JSON object.
    """
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_body_bytes:
                raise ServeError(
                    ErrorKind.TOO_LARGE, f"max_body_bytes: expected a body of at most {max_body_bytes} bytes, got more"
                )
    except ClientDisconnect:
        raise ServeError(ErrorKind.CANCELLED, "the caller left before its body was complete") from None
    if not body:
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid_input(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}") from None
    if not isinstance(document, dict):
        raise invalid_input(f"expected a JSON object, got {type(document).__name__}")
    return document


async def read_parameters(request: Request, *, max_body_bytes: int) -> dict[str, Any]:
    """Read the ``parameters`` of a body; a body without them has none.

    Raises:
        ServeError: As ``read_json_object``, and invalid_input for parameters that are no object.
    """
    document = await read_json_object(request, max_body_bytes=max_body_bytes)
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise invalid_input(f"Unable to parse 'parameters': expected an object, got {type(parameters).__name__}")
    return parameters
