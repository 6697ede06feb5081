"""What of inference messages differs from call to call, in the bytes of the wire: raw contents and ids."""

from typing import Final

from ortserve._pb.grpc_service_pb2 import ModelInferRequest, ModelInferResponse

# The wire format (protobuf.dev/programming-guides/encoding): a message is a run of fields, each a tag varint and, for
# strings, bytes and messages, a length varint and that many bytes.
_LENGTH_DELIMITED: Final = 2
_RAW_INPUT_TAG: Final = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_ID_TAG: Final = ModelInferRequest.ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_RAW_OUTPUT_TAG: Final = bytes([ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_ANSWER_ID_TAG: Final = bytes([ModelInferResponse.ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


_FRONT_BYTES: Final = 16 * 1024
"""Of a message that is a view, what is read byte by byte. No client's head is as long."""

_MAX_SIZE_BYTES: Final = 5


def split_request(data: bytes | memoryview) -> tuple[bytes, str, list[memoryview]] | None:
    """Split a serialized ``ModelInferRequest`` into what is neither its id nor raw contents, its id, and the latter.

    Returns:
        The first as a message of its own, the id, and views on the raw contents, which fill ``data`` to its end; None
        where there are none, or the message is not built as clients build it (fields in the order of their numbers,
        all known), or is broken: protobuf itself has the last word on those.
    """
    front = data if isinstance(data, bytes) else bytes(data[:_FRONT_BYTES])
    position = 0
    id_start = id_end = 0
    request_id = ""
    try:
        while True:
            start = position
            tag = front[position]
            if tag == _RAW_INPUT_TAG:
                break
            size = front[position + 1]
            position += 2
            if size > 127:
                size, position = _long_size(front, position - 1)
            if tag & 7 != _LENGTH_DELIMITED or tag > 127:
                return None
            if tag == _ID_TAG:
                id_start, id_end = start, position + size
                request_id = front[position:id_end].decode()
            position += size
        raw = _raw_contents(data, start)
    except (IndexError, UnicodeDecodeError):
        return None
    return front[:id_start] + front[id_end:start], request_id, raw


def _raw_contents(data: bytes | memoryview, position: int) -> list[memoryview]:
    """Views on the raw contents that fill ``data`` from ``position`` on. Raises IndexError where anything else does."""
    view = memoryview(data)
    end = len(data)
    contents: list[memoryview] = []
    while position < end:
        begin = bytes(data[position : position + 1 + _MAX_SIZE_BYTES])
        if begin[0] != _RAW_INPUT_TAG:
            raise IndexError
        size, length = _long_size(begin, 1)
        position += length
        contents.append(view[position : position + size])
        position += size
    if position > end:
        raise IndexError
    return contents


def _long_size(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint at ``position`` and where it ends. Raises IndexError where it does not, or is over 5 bytes."""
    value = 0
    for shift in range(0, 35, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise IndexError


def answer_id(request_id: str) -> bytes:
    """The field of a ``ModelInferResponse`` that names its request; nothing for a request without an id."""
    if not request_id:
        return b""
    text = request_id.encode()
    return _ANSWER_ID_TAG + varint(len(text)) + text


def raw_output(size: int) -> bytes:
    """What stands before an output's ``size`` bytes in a ``ModelInferResponse``."""
    return _RAW_OUTPUT_TAG + varint(size)


def varint(value: int) -> bytes:
    """Spell a length, or any number that is not negative, as the wire format does."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
