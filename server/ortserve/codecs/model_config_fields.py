"""Walking the fields of a configuration by their path: ``dynamic_batching.preferred_batch_size``.

Indices of lists and keys of maps are not part of a path.
"""

from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def set_fields(message: Message, prefix: str = "") -> Iterator[str]:
    """The paths of what is set to something else than its default, those of messages before what is in them."""
    for field, value in message.ListFields():
        path = prefix + field.name
        yield path
        of_values = _map_values(field)
        if of_values is not None and of_values.message_type is None:
            continue
        if of_values is not None:
            items = list(value.values())
        elif field.message_type is None:
            continue
        else:
            items = list(value) if field.is_repeated else [value]
        for item in items:
            yield from set_fields(item, f"{path}.")


def _map_values(field: FieldDescriptor) -> FieldDescriptor | None:
    if field.message_type is None or not field.message_type.GetOptions().map_entry:
        return None
    values: FieldDescriptor = field.message_type.fields_by_name["value"]
    return values
