"""A declaration in words: which values a field takes, its unit, its default, and what to say of a value it refuses.

``--help``, error messages and the reference page all speak through here, so that they cannot disagree.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_TYPE_WORDS: Final = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
}
_UNITS: Final = {"_s": "seconds", "_bytes": "bytes", "_rows": "rows"}


def describe_values(field: FieldInfo) -> str:
    """Say which values a field takes: ``integer, 0 to 65535``, or the ``expects`` of its declaration."""
    if isinstance(field.json_schema_extra, dict):
        return str(field.json_schema_extra["expects"])
    lowest = next((mark.ge for mark in field.metadata if isinstance(mark, annotated_types.Ge)), None)
    highest = next((mark.le for mark in field.metadata if isinstance(mark, annotated_types.Le)), None)
    words = _describe_type(field.annotation)
    return words if highest is None else f"{words}, {lowest} to {highest}"


def describe_unit(name: str) -> str:
    """The unit a field's name ends in, spelled out; empty where it has none."""
    return next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")


def describe_default(field: FieldInfo) -> str:
    """Spell a default as it would be typed; empty where the field has none to show."""
    default = field.get_default(call_default_factory=True)
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, BaseModel):
        return json.dumps(default.model_dump()).replace('"', "")
    return "" if default is None else str(default)


def describe_problems(
    error: ValidationError, fields: Mapping[str, FieldInfo], given: Mapping[str, object]
) -> dict[str, str]:
    """Turn pydantic's findings into one phrase per offending key: ``expected integer, 0 to 65535, got 70000``.

    Args:
        error: What the validation of ``given`` raised.
        fields: The declaration.
        given: The values as they came, by key.
    """
    # A finding inside a value (one item of a list, one form of a union) is told as one about the whole value.
    names = dict.fromkeys(str(finding["loc"][0]) for finding in error.errors(include_url=False))
    return {
        name: f"expected {describe_values(fields[name])}, got {given.get(name)!r}" if name in fields else "unknown key"
        for name in names
    }


def _describe_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        return f"list of {_describe_type(arguments[0])}s"
    if origin in (Union, UnionType):
        return _describe_type(next(argument for argument in arguments if argument is not NoneType))
    return _TYPE_WORDS[annotation]
