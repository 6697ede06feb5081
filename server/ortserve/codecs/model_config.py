"""Triton's model configuration in three forms: the message, proto3 JSON, and text (``config.pbtxt``)."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.config.declaration import did_you_mean
from ortserve.errors import invalid_input

MAX_JSON_LENGTH: Final = 2 * 1024 * 1024
"""Maximum length of a configuration as JSON, whose parser holds the interpreter lock. The configuration of 2,048 inputs
and as many outputs has half of it."""

_UNKNOWN_FIELD: Final = re.compile(r'Message type "(?P<message>[\w.]+)" has no field named "(?P<field>\w+)"')


def config_json(message: Message) -> dict[str, Any]:
    """Convert a message to JSON values, with the field names of the proto, for ``GET .../config``.

    The printer of protobuf writes 64-bit integers as texts, which breaks clients that compute with ``dims``. Here,
    integers of any size are numbers, enums are names, and keys of maps are texts. Unset scalars and lists appear with
    their defaults. Unset messages and members of a ``oneof`` are omitted, because clients check whether a key exists.
    """
    # The stubs have two descriptor classes for the same class.
    fields = cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields)
    return {
        field.name: _value(field, getattr(message, field.name))
        for field in fields
        if not field.has_presence or message.HasField(field.name)
    }


def parse_config_json(text: str | bytes) -> ModelConfig:
    """Parse the proto3 JSON of a configuration. Integers may be texts; names may be ``snake_case`` or ``camelCase``.

    Raises:
        ServeError: invalid_input for a text that is too long or not a JSON object, an unknown field, or an invalid
            value.
    """
    if len(text) > MAX_JSON_LENGTH:
        raise invalid_input(f"config: expected at most {MAX_JSON_LENGTH} characters, got {len(text)}")
    if text.lstrip()[:1] not in ("{", b"{"):  # protobuf reads an empty list or text as an empty configuration
        raise invalid_input(f"config: expected a JSON object, got {text[:40]!r}")
    try:
        return json_format.Parse(text, ModelConfig())
    # protobuf raises UnicodeDecodeError for invalid UTF-8, and RecursionError for too deep nesting.
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        reason, _, _ = str(error).partition(" Available Fields")
        raise invalid_input(f"config: {' '.join(_with_suggestion(reason).split())}") from None


def _value(field: FieldDescriptor, value: Any) -> Any:
    of_values = _map_values(field)
    if of_values is not None:
        return {str(key): _single(of_values, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_single(field, item) for item in value]
    return _single(field, value)


def _single(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return config_json(value)
    if field.enum_type is not None:
        name = field.enum_type.values_by_number.get(value)
        return name.name if name is not None else value
    return value


def parse_config_text(content: bytes) -> ModelConfig:
    """Parse a ``config.pbtxt``.

    In this format, ``{}`` of a map is an entry without key and value. Some authors copy an empty map from the JSON of a
    configuration, so such entries are removed.

    Raises:
        ServeError: invalid_input; the message contains line and column of the error.
    """
    try:
        config = text_format.Parse(content.decode("utf-8-sig"), ModelConfig())
    except UnicodeDecodeError:
        raise invalid_input("is not valid UTF-8") from None
    except text_format.ParseError as error:
        # The author of the file does not know the package name of the messages.
        raise invalid_input(" ".join(_with_suggestion(str(error)).replace("inference.", "").split())) from None
    _remove_empty_entries(config)
    return config


def _remove_empty_entries(message: Message) -> None:
    for field, value in message.ListFields():
        for part in _parts(field, value):
            _remove_empty_entries(part)
        if _map_values(field) is not None:
            for key, item in list(value.items()):
                if not key and not (item.ByteSize() if isinstance(item, Message) else item):
                    del value[key]


def _with_suggestion(problem: str) -> str:
    """Return the problem that protobuf found. For an unknown field, a similar field of the message is appended."""
    unknown = _UNKNOWN_FIELD.search(problem)
    if unknown is None:
        return problem
    known = ModelConfig.DESCRIPTOR.file.pool.FindMessageTypeByName(unknown["message"]).fields_by_name
    suggestion = did_you_mean(unknown["field"], known)
    return problem.strip().removesuffix(".") + suggestion if suggestion else problem


def set_fields(message: Message, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields that differ from their defaults; a message comes before its fields.

    A path is for example ``dynamic_batching.preferred_batch_size``. Indices of lists and keys of maps are not part of a
    path.
    """
    for field, value in message.ListFields():
        path = prefix + field.name
        yield path
        for part in _parts(field, value):
            yield from set_fields(part, f"{path}.")


def _parts(field: FieldDescriptor, value: Any) -> list[Message]:
    """Return the messages in a field: the value itself, the items of a list, or the values of a map."""
    of_values = _map_values(field)
    if (field if of_values is None else of_values).message_type is None:
        return []
    if of_values is not None:
        return list(value.values())
    return list(value) if field.is_repeated else [value]


def _map_values(field: FieldDescriptor) -> FieldDescriptor | None:
    if field.message_type is None or not field.message_type.GetOptions().map_entry:
        return None
    values: FieldDescriptor = field.message_type.fields_by_name["value"]
    return values
