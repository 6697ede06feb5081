"""The raw contents of inference messages in the bytes of the wire, where no protobuf message copies them."""

from typing import Final

from ortserve._pb.grpc_service_pb2 import ModelInferRequest, ModelInferResponse

# The wire format (protobuf.dev/programming-guides/encoding): a message is a run of fields, each a tag varint and, for
# strings, bytes and messages, a length varint and that many bytes.
_LENGTH_DELIMITED: Final = 2
_RAW_INPUT_TAG: Final = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
RAW_OUTPUT_TAG: Final = bytes([ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


def raw_contents_start(data: bytes) -> int | None:
    """Return where the raw contents begin that fill the message to its end.

    None when the message is not built as clients build it (fields in the order of their numbers, all known) or is
    broken: protobuf itself has the last word on those.
    """
    position, end = 0, len(data)
    start: int | None = None
    try:
        while position < end:
            tag = data[position]
            if tag == _RAW_INPUT_TAG:
                if start is None:
                    start = position
            elif start is not None or tag & 7 != _LENGTH_DELIMITED or tag > 127:
                return None
            size = data[position + 1]
            position += 2
            if size > 127:
                size, position = _long_size(data, position - 1)
            position += size
    except IndexError:
        return None
    if position != end:
        return None
    return end if start is None else start


def raw_contents(data: bytes, position: int) -> list[memoryview]:
    """Views on the raw contents that ``raw_contents_start`` found from ``position`` on."""
    view = memoryview(data)
    end = len(data)
    contents: list[memoryview] = []
    while position < end:
        size, position = _long_size(data, position + 1)
        contents.append(view[position : position + size])
        position += size
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


def varint(value: int) -> bytes:
    """Spell a length, or any number that is not negative, as the wire format does."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
