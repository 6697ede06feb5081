"""gRPC load requests: a serialized ``RepositoryModelLoadRequest`` to a message, and the contents of large files.

protobuf copies contents under the interpreter lock. So large contents become views of the serialized message.
"""

from typing import Final

from ortserve._pb.management_pb2 import ModelRepositoryParameter, RepositoryModelLoadRequest
from ortserve.codecs.bounds import INLINE_BYTES
from ortserve.codecs.grpc_infer import parse_message
from ortserve.codecs.grpc_wire import LENGTH_DELIMITED, check_field_count, read_field

_PARAMETER: Final = RepositoryModelLoadRequest.PARAMETERS_FIELD_NUMBER << 3 | LENGTH_DELIMITED
_FILE_TAGS: Final = (
    1 << 3 | LENGTH_DELIMITED,  # the key of an entry of a map
    2 << 3 | LENGTH_DELIMITED,  # its value
    ModelRepositoryParameter.BYTES_PARAM_FIELD_NUMBER << 3 | LENGTH_DELIMITED,
)


def parse_load(data: bytes | memoryview) -> tuple[RepositoryModelLoadRequest, dict[str, memoryview]]:
    """Parse a load request.

    Returns:
        The message without its large files, and the contents of these by parameter, as views of ``data``.

    Raises:
        ServeError: invalid_input if ``data`` is malformed, or has too many fields.
    """
    if len(data) <= INLINE_BYTES:
        return parse_message(RepositoryModelLoadRequest, data), {}
    check_field_count(data, RepositoryModelLoadRequest.DESCRIPTOR.full_name)
    view = memoryview(data)
    files: dict[str, memoryview] = {}
    others: list[memoryview] = []
    position, end = 0, len(view)
    while position < end:
        begin = position
        tag, start, position = read_field(view, begin, end)
        file = _file(view, start, position) if tag == _PARAMETER and position - start > INLINE_BYTES else None
        if file is None:
            others.append(view[begin:position])
        else:
            files[file[0]] = file[1]
    return parse_message(RepositoryModelLoadRequest, b"".join(others)), files


def _file(view: memoryview, start: int, stop: int) -> tuple[str, memoryview] | None:
    """Return the name and the content of a parameter that is a file in the usual encoding; None for any other one."""
    try:
        key_tag, key_start, key_stop = read_field(view, start, stop)
        value_tag, value_start, value_stop = read_field(view, key_stop, stop)
        content_tag, content_start, content_stop = read_field(view, value_start, value_stop)
        name = str(view[key_start:key_stop], "utf-8")
    except (IndexError, UnicodeDecodeError):
        return None
    is_usual = (key_tag, value_tag, content_tag) == _FILE_TAGS and value_stop == stop and content_stop == value_stop
    return (name, view[content_start:content_stop]) if is_usual and name.startswith("file:") else None
