"""Splits an inference message into its parts on the wire: head, id, raw contents and typed contents.

The scan of the bytes counts the parts, so a message of millions of empty fields is rejected before objects are created
for them.
"""

from typing import Final, TypeAlias

from ortserve._pb.grpc_service_pb2 import ModelInferRequest
from ortserve.codecs.bounds import MAX_HEAD_BYTES, MAX_PARAMETERS, MAX_TENSORS, too_many
from ortserve.errors import ServeError, invalid_input

# The wire format (protobuf.dev/programming-guides/encoding): a message is a sequence of fields. Each has a tag varint.
# In strings, bytes and messages, a length varint and the content follow.
VARINT: Final = 0
FIXED64: Final = 1
LENGTH_DELIMITED: Final = 2
FIXED32: Final = 5

_ID: Final = ModelInferRequest.ID_FIELD_NUMBER
_NAMES: Final = (ModelInferRequest.MODEL_NAME_FIELD_NUMBER, ModelInferRequest.MODEL_VERSION_FIELD_NUMBER, _ID)
_PARAMETERS: Final = ModelInferRequest.PARAMETERS_FIELD_NUMBER
_INPUTS: Final = ModelInferRequest.INPUTS_FIELD_NUMBER
_RAW_INPUTS: Final = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_CONTENTS: Final = ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER

_RAW_INPUT_TAG: Final = _RAW_INPUTS << 3 | LENGTH_DELIMITED
_ID_TAG: Final = _ID << 3 | LENGTH_DELIMITED
_INPUT_TAG: Final = bytes([_INPUTS << 3 | LENGTH_DELIMITED])

USUAL_HEAD_BYTES: Final = 1024
"""The fast scan finds heads up to this size with fields in the usual order."""

_MAX_FIELDS: Final = 16 * 1024
"""Maximum number of fields of a message and its inputs. Scanning this number takes 4 ms when compiled."""

_FEW_CONTENTS: Final = 64
"""Maximum number of raw contents that are scanned on the event loop, in 0.1 ms."""

_FEW_FIELDS: Final = 512
"""Maximum number of fields that are scanned on the event loop, which delays all other callers."""

_MAX_SIZE_BYTES: Final = 5
_MAX_VARINT_BYTES: Final = 10

Contents: TypeAlias = dict[int, bytes | memoryview]
"""Typed contents of a request, by the index of their input."""

Parts: TypeAlias = tuple[bytes, str, list[memoryview], Contents]
"""The head; the id; views on the raw contents; the typed contents, as serialized ``InferTensorContents``.

The head is the message without the other parts. With raw contents in the usual order it includes any typed contents.
"""

_NO_CONTENTS: Final[Contents] = {}


def split_request(data: bytes | memoryview) -> Parts:
    """Split a serialized ``ModelInferRequest``.

    Raises:
        ServeError: invalid_input for a malformed message and for too many parts.
    """
    return _split_usual(data) or _split_any(_Scan(memoryview(data), _MAX_FIELDS))


def split_small_request(data: bytes | memoryview) -> Parts | None:
    """Split a request like ``split_request``. Returns None early if the request has many parts."""
    try:
        parts = _split_usual(data, _FEW_CONTENTS)
    except ServeError:  # too many raw contents for this scan
        return None
    if parts is not None:
        return parts
    scan = _Scan(memoryview(data), _FEW_FIELDS)
    try:
        return _split_any(scan)
    except ServeError:
        if scan.fields_left < 0:
            return None
        raise


def _split_any(scan: "_Scan") -> Parts:
    try:
        return scan.split()
    except (IndexError, UnicodeDecodeError):
        raise malformed(ModelInferRequest.DESCRIPTOR.full_name) from None


def usual_head(data: bytes | memoryview) -> bytes | None:
    """Return the head of a message with few raw contents in the usual order; None for any other message."""
    try:
        parts = _split_usual(data, _FEW_CONTENTS)
    except ServeError:  # too many raw contents for this scan
        return None
    return None if parts is None else parts[0]


def name_fields(data: bytes | memoryview) -> bytes:
    """Return the fields with id, model and version, if they are among the first fields of the message."""
    view = memoryview(data)
    found: list[memoryview] = []
    position = fields = 0
    while position < len(view) and fields < MAX_TENSORS:
        begin = position
        tag, _, position = read_field(view, begin, len(view))
        if tag >> 3 in _NAMES and tag & 7 == LENGTH_DELIMITED:
            found.append(view[begin:position])
        fields += 1
    return b"".join(found)


def malformed(message_type: str) -> ServeError:
    """Return the error for bytes that are not a message of ``message_type``."""
    return invalid_input(f"the request is not a valid message of type {message_type}")


def check_field_count(data: bytes | memoryview, message_type: str) -> None:
    """Check the number of fields on the first level of a message, before it is parsed.

    Raises:
        ServeError: invalid_input for too many fields, and for a malformed message.
    """
    view = memoryview(data)
    position, end, left = 0, len(view), _MAX_FIELDS
    try:
        while position < end:
            if not left:
                raise invalid_input(f"{message_type}: expected at most {_MAX_FIELDS} fields, got more")
            left -= 1
            _, _, position = read_field(view, position, end)
    except IndexError:
        raise malformed(message_type) from None


def _split_usual(data: bytes | memoryview, max_contents: int = MAX_TENSORS) -> Parts | None:
    """Split a message with a short head, raw contents, and fields in the usual order.

    Returns:
        The parts as ``split_request`` returns them; None for any other message.
    """
    front = data if isinstance(data, bytes) else bytes(data[: USUAL_HEAD_BYTES + 1])
    position = 0
    id_start = id_end = 0
    request_id = ""
    try:
        while True:
            start = position
            if start > USUAL_HEAD_BYTES:
                return None
            tag = front[position]
            if tag == _RAW_INPUT_TAG:
                break
            size = front[position + 1]
            position += 2
            if size > 127:
                size, position = _read_size(front, position - 1)
            if tag & 7 != LENGTH_DELIMITED or tag > 127:
                return None
            if tag == _ID_TAG:
                id_start, id_end = start, position + size
                request_id = front[position:id_end].decode()
            position += size
        raw = _raw_contents(data, start, max_contents)
    except (IndexError, UnicodeDecodeError):
        return None
    return front[:id_start] + front[id_end:start], request_id, raw, _NO_CONTENTS


def _raw_contents(data: bytes | memoryview, position: int, most: int) -> list[memoryview]:
    """Return views on the raw contents that fill ``data`` from ``position`` on.

    Raises:
        IndexError: ``data`` contains another field, or an incomplete one.
        ServeError: invalid_input for more than ``most`` raw contents.
    """
    view = memoryview(data)
    end = len(data)
    contents: list[memoryview] = []
    while position < end:
        prefix = bytes(data[position : position + 1 + _MAX_SIZE_BYTES])
        if prefix[0] != _RAW_INPUT_TAG:
            raise IndexError
        size, prefix_bytes = _read_size(prefix, 1)
        position += prefix_bytes
        contents.append(view[position : position + size])
        if len(contents) > most:
            raise too_many("raw_input_contents", most)
        position += size
    if position > end:
        raise IndexError
    return contents


def _read_size(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint at ``position`` and its end. Raises IndexError if it is incomplete or longer than 5 bytes."""
    value = 0
    for shift in range(0, 35, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise IndexError


class _Scan:
    """Splits a message with fields in any order. Unknown fields are skipped."""

    def __init__(self, view: memoryview, max_fields: int) -> None:
        self._view = view
        self.fields_left = max_fields
        self._head: list[bytes | memoryview] = []
        self._head_left = MAX_HEAD_BYTES
        self._contents: Contents = {}
        self._counts = [0] * (_RAW_INPUTS + 1)

    def split(self) -> Parts:
        """Split. Raises IndexError or UnicodeDecodeError for a malformed message, and ServeError for too many parts."""
        view = self._view
        position, end = 0, len(view)
        request_id = ""
        raw: list[memoryview] = []
        while position < end:
            begin = position
            self._count_field()
            tag, start, position = read_field(view, begin, end)
            number = tag >> 3
            if tag & 7 != LENGTH_DELIMITED or number > _RAW_INPUTS:
                continue
            if number == _RAW_INPUTS:
                raw.append(view[start:position])
                if len(raw) > MAX_TENSORS:
                    raise too_many("raw_input_contents", MAX_TENSORS)
            elif number == _ID:
                self._take_room(position - start)
                request_id = str(view[start:position], "utf-8")
            elif number == _INPUTS:
                self._take_input(start, position)
            else:
                self._count(number)
                self._keep(view[begin:position])
        return b"".join(self._head), request_id, raw, self._contents

    def _take_input(self, start: int, stop: int) -> None:
        """Store the typed contents of an input separately, and the rest of the input in the head."""
        view = self._view
        kept: list[memoryview] = []
        contents: list[memoryview] = []
        position = start
        while position < stop:
            begin = position
            self._count_field()
            tag, inner, position = read_field(view, begin, stop)
            if tag == _CONTENTS << 3 | LENGTH_DELIMITED:
                contents.append(view[inner:position])
            else:
                kept.append(view[begin:position])
        size = sum([len(part) for part in kept])
        if contents:
            place = self._counts[_INPUTS]
            self._contents[place] = contents[0] if len(contents) == 1 else b"".join(contents)
        self._count(_INPUTS)
        self._keep(_INPUT_TAG + varint(size))
        for part in kept:
            self._keep(part)

    def _keep(self, part: bytes | memoryview) -> None:
        self._take_room(len(part))
        self._head.append(part)

    def _take_room(self, size: int) -> None:
        self._head_left -= size
        if self._head_left < 0:
            raise invalid_input(
                f"request: expected at most {MAX_HEAD_BYTES} bytes of id, names, version, datatypes, shapes and "
                "parameters, got more"
            )

    def _count(self, number: int) -> None:
        most = MAX_PARAMETERS if number == _PARAMETERS else MAX_TENSORS
        self._counts[number] += 1
        if self._counts[number] > most:
            raise too_many(ModelInferRequest.DESCRIPTOR.fields_by_number[number].name, most)

    def _count_field(self) -> None:
        self.fields_left -= 1
        if self.fields_left < 0:
            raise too_many("fields of inputs, outputs, shapes and parameters", _MAX_FIELDS)


def read_field(view: memoryview, position: int, end: int) -> tuple[int, int, int]:
    """Find the field at ``position``.

    Returns:
        The tag, and the positions where the value begins and ends.

    Raises:
        IndexError: The field is incomplete, or is a group, which these messages never contain.
    """
    tag, position = read_varint(view, position)
    wire = tag & 7
    start = position
    if wire == LENGTH_DELIMITED:
        size, start = read_varint(view, position)
        position = start + size
    elif wire == VARINT:
        _, position = read_varint(view, position)
    elif wire == FIXED32:
        position += 4
    elif wire == FIXED64:
        position += 8
    else:
        raise IndexError
    if position > end or tag < 8:
        raise IndexError
    return tag, start, position


def read_varint(view: memoryview, position: int) -> tuple[int, int]:
    """Return the varint at ``position`` and its end. Raises IndexError if it is incomplete or longer than 10 bytes."""
    value = shift = 0
    for _ in range(_MAX_VARINT_BYTES):
        byte = view[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise IndexError


def varint(value: int) -> bytes:
    """Encode a non-negative number as a varint."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
