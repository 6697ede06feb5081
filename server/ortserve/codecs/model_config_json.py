"""A model's configuration as JSON: the form that ``GET …/config`` shows, and the form that a load request brings.

protobuf's own printer will not do for the first: it writes 64-bit integers as texts, which breaks clients that count
with ``dims``.
"""

from collections.abc import Sequence
from typing import Any, cast

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.errors import invalid_input


def config_json(message: Message) -> dict[str, Any]:
    """The message as JSON values, with the names of the proto.

    Scalars and lists are there with their defaults; messages that are not set and unchosen members of a ``oneof`` are
    left out, because clients decide by the presence of a key. Enums are names, integers of any size numbers, keys of
    maps texts.
    """
    # The stubs name two classes of descriptors, of which there is one.
    fields = cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields)
    return {
        field.name: _value(field, getattr(message, field.name))
        for field in fields
        if not field.has_presence or message.HasField(field.name)
    }


def parse_config_json(text: str | bytes) -> ModelConfig:
    """Read the proto3 JSON of a configuration: integers may be texts, names ``snake_case`` or ``camelCase``.

    Raises:
        ServeError: invalid_input, for what is no JSON, no such field, or no value for it.
    """
    try:
        return json_format.Parse(text, ModelConfig())
    # The last two: how protobuf tells of texts that are no UTF-8, and of nesting deeper than the interpreter's stack.
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        reason, _, _ = str(error).partition(" Available Fields")
        raise invalid_input(f"config: {' '.join(reason.split())}") from None


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_values = field.message_type.fields_by_name["value"]
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
