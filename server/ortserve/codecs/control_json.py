"""The JSON of control calls: an object, its parameters, and the files of a load, which are base64 there."""

import base64
import binascii
from typing import Any, TypeAlias

import orjson

from ortserve.errors import invalid_input

LoadParameter: TypeAlias = bool | int | str | bytes
"""Of a load: a file's bytes, or what JSON has."""


def parse_object(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse an object; no bytes at all count as ``{}``. Raises ServeError: invalid_input."""
    if not body:
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid_input(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}") from None
    if not isinstance(document, dict):
        raise invalid_input(f"expected a JSON object, got {type(document).__name__}")
    return document


def parameters_of(document: dict[str, Any]) -> dict[str, Any]:
    """The object ``parameters``, empty where there is none. Raises ServeError: invalid_input, for anything else."""
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise invalid_input(f"Unable to parse 'parameters': expected an object, got {type(parameters).__name__}")
    return parameters


def decode_load_body(body: bytes | memoryview) -> dict[str, LoadParameter]:
    """Read the parameters of a load, with the bytes of each file. Raises ServeError: invalid_input."""
    decoded: dict[str, LoadParameter] = {}
    for name, value in parameters_of(parse_object(body)).items():
        if name.startswith("file:"):
            try:
                value = base64.b64decode("".join(value.split()), validate=True)  # some tools break it into lines
            except (AttributeError, ValueError, binascii.Error):
                raise invalid_input(f"parameter '{name}': expected a file's bytes in base64") from None
        elif not isinstance(value, str | bool | int):
            raise invalid_input(f"parameter '{name}': expected a text, number or boolean, got {type(value).__name__}")
        decoded[name] = value
    return decoded
