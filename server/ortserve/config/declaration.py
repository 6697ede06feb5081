"""What all declarations of options share: their configuration, their description in words, and the check of values.

``--help``, error messages and the reference page use the same descriptions, so they cannot disagree.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from ortserve.config.yaml_file import MAX_LEVELS

DECLARATION: Final = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
"""The configuration of declarations: unknown keys are errors, and the text below a field is its description."""

_Declared = TypeVar("_Declared", bound=BaseModel)

_TYPE_WORDS: Final = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
}
_MAX_VALUE_LENGTH: Final = 200
"""Maximum number of characters of a value in an error, because logs and answers contain errors."""
_MAX_KEYS: Final = 8
"""Maximum number of known keys that an error lists if an unknown key is similar to none of them."""
_MAX_SUGGESTIONS: Final = 3
_UNITS: Final = {"_s": "seconds", "_bytes": "bytes", "_rows": "rows"}


def describe_option(name: str, field: FieldInfo) -> str:
    """Describe the values of a field with their unit: ``number, 0 to 60, in seconds``."""
    unit = describe_unit(name)
    return describe_values(field) + (f", in {unit}" if unit else "")


def describe_values(field: FieldInfo) -> str:
    """Describe the values of a field: ``integer, 0 to 65535``, or the ``expects`` of its declaration."""
    if expects := _expects(field):
        return expects
    lowest = next((mark.ge for mark in field.metadata if isinstance(mark, annotated_types.Ge)), None)
    above = next((mark.gt for mark in field.metadata if isinstance(mark, annotated_types.Gt)), None)
    highest = next((mark.le for mark in field.metadata if isinstance(mark, annotated_types.Le)), None)
    words = _describe_type(field.annotation)
    if highest is None:
        return words
    return f"{words}, above {above} and up to {highest}" if lowest is None else f"{words}, {lowest} to {highest}"


def describe_unit(name: str) -> str:
    """The unit at the end of a field's name, spelled out; empty if there is none."""
    is_rate = name.endswith("_per_s")
    return "" if is_rate else next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")


def describe_default(field: FieldInfo) -> str:
    """The default as a user would type it; empty for None and an empty default."""
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


class InvalidValuesError(Exception):
    """Values that do not match a declaration. ``problems`` has one phrase per invalid key."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {problem}" for name, problem in problems.items()))
        self.problems: Final = problems


def validate(
    declared: type[_Declared], given: Mapping[str, object], inherited: Mapping[str, object] | None = None
) -> _Declared:
    """Validate ``given`` values; keys that it lacks are taken from ``inherited``.

    Raises:
        InvalidValuesError: A value does not match the declaration.
    """
    if deep := [name for name, value in given.items() if _is_deep(value)]:
        raise InvalidValuesError(dict.fromkeys(deep, f"nested too deep: expected at most {MAX_LEVELS} levels"))
    # Validate JSON text: strict validation then accepts a list for a tuple, but no text or boolean for a number.
    text = json.dumps({**(inherited or {}), **given}, default=str)
    try:
        return declared.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise InvalidValuesError(describe_problems(error, declared.model_fields, given)) from None


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_LEVELS):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return False
    return True


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def describe_problems(
    error: ValidationError, fields: Mapping[str, FieldInfo], given: Mapping[str, object]
) -> dict[str, str]:
    """Convert pydantic's errors to one phrase per invalid key: ``expected integer, 0 to 65535, got 70000``.

    Args:
        error: The error that validating ``given`` raised.
        fields: The declaration.
        given: The original values, by key.
    """
    problems: dict[str, str] = {}
    for finding in error.errors(include_url=False):
        name, field, value = _locate(finding["loc"], fields, given)
        if finding["type"] == "value_error":  # from a validator of this package, whose message is complete
            problems.setdefault(name, str(finding["ctx"]["error"]))
        elif field is not None:
            problems.setdefault(name, f"expected {describe_option(name, field)}, got {_shown(value)}")
        else:
            problems.setdefault(name, f"unknown key{_suggestion(finding['loc'], fields)}")
    return problems


def _shown(value: object) -> str:
    text = "nothing" if value is None else _literal(value)
    text = re.sub("//.*@", "//…@", text)  # a user and a password in a URL
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}…"


def _literal(value: object) -> str:
    """A value, with items of lists that are null as a file writes them."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "null" if value is None else repr(value)


def _suggestion(loc: tuple[int | str, ...], fields: Mapping[str, FieldInfo]) -> str:
    """Suggest a similar key from the same level of the declaration, or list all keys of the level if they are few."""
    *outer, key = [part for part in loc if isinstance(part, str)]
    known: Mapping[str, FieldInfo] | None = fields
    for name in outer:
        field = (known or {}).get(name)
        known = None if field is None else nested_fields(field)
    keys = list(known or ())
    return did_you_mean(key, keys) or (f"; expected one of {', '.join(keys)}" if 0 < len(keys) <= _MAX_KEYS else "")


def nested_fields(field: FieldInfo) -> Mapping[str, FieldInfo] | None:
    """The fields of a value that is a mapping, or of the values of a list or mapping; None for plain values."""
    if _expects(field):
        return None
    candidates = (field.annotation, *get_args(field.annotation))
    return next((one.model_fields for one in candidates if _is_model(one)), None)


def _expects(field: FieldInfo) -> str:
    """The description of a field's values that its declaration gives; empty without one."""
    extra = field.json_schema_extra
    return str(extra.get("expects", "")) if isinstance(extra, dict) else ""


def _locate(
    loc: tuple[int | str, ...], fields: Mapping[str, FieldInfo], given: object
) -> tuple[str, FieldInfo | None, object]:
    """The path of the invalid key, its declaration (None for an unknown key) and the value.

    An error inside a plain value (an item of a list, one member of a union) is reported for the whole value.
    """
    name = str(loc[0])
    field = fields.get(name)
    value = given.get(name) if isinstance(given, Mapping) else given
    if field is None or len(loc) == 1:
        return name, field, value
    inner = nested_fields(field)
    if inner is None:
        return name, field, value
    rest, path = loc[1:], name
    if not any(_is_model(one) for one in (field.annotation, *_if_set(field.annotation))):
        # A list or mapping: the index or key comes first.
        path += f"[{rest[0]}]" if isinstance(rest[0], int) else f".{rest[0]}"
        value = _item(value, rest[0])
        rest = rest[1:]
    if not rest or not isinstance(value, Mapping):
        return path, field, value
    name, found, value = _locate(rest, inner, value)
    return f"{path}.{name}", found, value


def _is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _if_set(annotation: object) -> tuple[object, ...]:
    """The members of a union, such as a type that may be None; empty for lists and mappings."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()


def _item(values: object, key: int | str) -> object:
    if isinstance(values, Mapping):
        return values.get(key, values.get(int(key)) if str(key).isdecimal() else None)
    return values[key] if isinstance(values, list | tuple) and isinstance(key, int) and key < len(values) else values


def _describe_type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe_type(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        item = _describe_type(arguments[0])
        return f"list of {item}s" if item in _TYPE_WORDS.values() else f"list of {item}"
    if origin is Mapping:
        return f"mapping of {_describe_type(arguments[0])} to {_describe_type(arguments[1])}"
    if origin in (Union, UnionType):
        words = dict.fromkeys(_describe_type(argument) for argument in arguments if argument is not NoneType)
        return " or ".join(words)
    if issubclass(annotation, Enum):
        return "one of " + ", ".join(str(member.value) for member in annotation)
    if issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return _TYPE_WORDS[annotation]


def with_suggestions(message: str, flags: Iterable[str]) -> str:
    """Add suggestions of similar flags to a message of argparse about unknown flags."""
    known = [flag.removeprefix("--") for flag in flags if flag.startswith("--")]
    is_about_flags = message.startswith("unrecognized arguments:")
    unknown = [word[2:].partition("=")[0] for word in message.split() if is_about_flags and word.startswith("--")]
    return message + "".join(did_you_mean(flag, known, prefix="--") for flag in unknown)


def did_you_mean(given: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of a message, ``; did you mean 'x'?``; empty if no known name is similar or has ``given`` as a word.

    If all names begin with ``prefix``, pass ``given`` and ``known`` without it: a common prefix would make all names
    similar.
    """
    names = list(known)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.65)
    close = close or [name for name in names if given in re.split("[-_.]", name)][:_MAX_SUGGESTIONS]
    *first, last = [f"'{prefix}{name}'" for name in close] or [""]
    either = f"{', '.join(first)} or " if first else ""
    return f"; did you mean {either}{last}?" if last else ""
