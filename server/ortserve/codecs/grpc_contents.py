"""Decodes typed contents of gRPC tensors, elements in a field of their datatype, from the bytes of the wire.

numpy decodes integers in steps of 64 KiB, so that no step holds the interpreter lock for long
(``loadtests/codec_cost.py``).
"""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from ortserve._pb.grpc_service_pb2 import InferTensorContents
from ortserve.codecs.binary_tensor import (
    TextArray,
    check_text_count,
    check_text_size,
    decode_element,
    object_array,
)
from ortserve.codecs.bounds import MAX_TEXTS
from ortserve.codecs.grpc_wire import FIXED32, FIXED64, LENGTH_DELIMITED, VARINT, malformed, read_field, read_varint
from ortserve.core.dtypes import DataType
from ortserve.errors import ServeError, invalid_input

_FIELD_DATATYPES: Final = {
    InferTensorContents.BOOL_CONTENTS_FIELD_NUMBER: DataType.BOOL,
    InferTensorContents.INT_CONTENTS_FIELD_NUMBER: DataType.INT32,
    InferTensorContents.INT64_CONTENTS_FIELD_NUMBER: DataType.INT64,
    InferTensorContents.UINT_CONTENTS_FIELD_NUMBER: DataType.UINT32,
    InferTensorContents.UINT64_CONTENTS_FIELD_NUMBER: DataType.UINT64,
    InferTensorContents.FP32_CONTENTS_FIELD_NUMBER: DataType.FP32,
    InferTensorContents.FP64_CONTENTS_FIELD_NUMBER: DataType.FP64,
    InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER: DataType.BYTES,
}
"""Datatype of the elements of a field, by field number."""

_FIELD_OF: Final = {
    **{datatype: datatype for datatype in _FIELD_DATATYPES.values()},
    DataType.INT8: DataType.INT32,
    DataType.INT16: DataType.INT32,
    DataType.UINT8: DataType.UINT32,
    DataType.UINT16: DataType.UINT32,
}
"""Datatype of the field that holds the elements of a datatype. FP16 and BF16 have no field."""

_ELEMENT_WIRE: Final = {DataType.FP32: FIXED32, DataType.FP64: FIXED64, DataType.BYTES: LENGTH_DELIMITED}
"""Wire type of unpacked elements. Other datatypes use varints."""

_FLOATS: Final = (DataType.FP32, DataType.FP64)
"""Datatypes with the same width on the wire and in memory."""

_MAX_PIECES: Final = 1024
"""Maximum number of pieces of a packed field. Clients send one piece."""

_SMALL_BYTES: Final = 2 * 1024
"""protobuf decodes contents up to this size. For a few elements it takes a tenth of the time of numpy."""

_PARSED_BYTES: Final = 64 * 1024
"""protobuf decodes texts up to this size, much faster than a scan in steps, and contents up to this size in an unusual
encoding. Larger ones in an unusual encoding are rejected."""

_STEP_BYTES: Final = 64 * 1024
_MAX_VARINT_BYTES: Final = 10
_MIN_TEXT_BYTES: Final = 2
_TEXT_TAG: Final = InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER << 3 | LENGTH_DELIMITED

_UNUSUAL: Final = IndexError("an unusual encoding")


def decode_contents(
    contents: bytes | memoryview, datatype: DataType, shape: tuple[int, ...], name: str, model: str
) -> np.ndarray:
    """Decode serialized ``InferTensorContents``. Empty contents are a tensor of any datatype without elements.

    Returns:
        An array of ``shape`` and ``datatype.numpy``, possibly a read-only view on ``contents``.

    Raises:
        ServeError: invalid_input for the field of another datatype, for several fields, and for elements that do not
            fill the shape or exceed the range of the datatype; too_large for too many or too long texts.
    """
    count = math.prod(shape)
    if datatype is DataType.BYTES:
        if count > MAX_TEXTS and count * _MIN_TEXT_BYTES > len(contents):
            raise invalid_input(
                f"expected {count} string elements for inference input '{name}' for model '{model}', "
                f"got {len(contents)} bytes"
            )
        check_text_count(count, name)
    array = _read(memoryview(contents), datatype, count, name, model)
    if array.size != count:
        if datatype is DataType.BYTES:
            raise invalid_input(
                f"expected {count} string elements for inference input '{name}' for model '{model}', got {array.size}"
            )
        raise invalid_input(
            f"input byte size mismatch for input '{name}' for model '{model}'. "
            f"Expected {count * datatype.itemsize}, got {array.size * datatype.itemsize}"
        )
    if array.dtype != datatype.numpy:
        bounds = np.iinfo(datatype.numpy)
        for value in (int(array.min()), int(array.max())):
            if not bounds.min <= value <= bounds.max:
                raise invalid_input(
                    f"value {value} of input '{name}' for model '{model}' is out of the range of {datatype.value}"
                )
        array = array.astype(datatype.numpy)
    return array.reshape(shape)


def _read(view: memoryview, datatype: DataType, count: int, name: str, model: str) -> np.ndarray:
    """Decode the only field with elements, in the datatype of that field. ``count`` elements are expected.

    Returns:
        All elements; from large contents at most ``count`` + 1 texts.
    """
    if len(view) > (_PARSED_BYTES if datatype is DataType.BYTES else _SMALL_BYTES):
        try:
            wide, pieces, is_run = _find_field(view, name, model)
        except IndexError:
            if len(view) > _PARSED_BYTES:
                text = f"contents of input '{name}' for model '{model}': expected the packed elements of one field"
                raise invalid_input(text) from None
        else:
            if wide is None:
                return np.empty(0, datatype.numpy)
            _check_field(wide, datatype, name, model)
            return _read_pieces(pieces, wide, count, name, is_run=is_run)
    try:
        filled = InferTensorContents.FromString(bytes(view)).ListFields()
    except DecodeError:
        raise malformed(InferTensorContents.DESCRIPTOR.full_name) from None
    if not filled:
        return np.empty(0, datatype.numpy)
    if len(filled) > 1:
        raise _several_fields(name, model)
    ((field, values),) = filled
    wide = _FIELD_DATATYPES[field.number]
    _check_field(wide, datatype, name, model)
    if wide is not DataType.BYTES:
        return np.fromiter(values, wide.numpy, len(values))
    try:
        return object_array([element.decode() for element in values], (len(values),))
    except UnicodeDecodeError:
        for index, element in enumerate(values):
            decode_element(element, index, name)
        raise


def _check_field(wide: DataType, datatype: DataType, name: str, model: str) -> None:
    """Raise ServeError: invalid_input if a tensor of ``datatype`` has its elements in the field of ``wide``."""
    if wide is not _FIELD_OF.get(datatype):
        raise invalid_input(
            f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' "
            f"of type '{wide.value}', expected datatype '{datatype.value}'"
        )


def _several_fields(name: str, model: str) -> ServeError:
    return invalid_input(
        f"unexpected explicit tensor data for input tensor '{name}' for model '{model}', "
        "binary data was already supplied."
    )


def _read_pieces(pieces: list[memoryview], wide: DataType, count: int, name: str, *, is_run: bool) -> np.ndarray:
    try:
        if wide is DataType.BYTES:
            return _texts(pieces[0], count, name)
        if wide in _FLOATS:
            return _floats(pieces, wide, is_run=is_run)
        return _integers(pieces, wide, is_run=is_run)
    except IndexError:
        raise malformed(InferTensorContents.DESCRIPTOR.full_name) from None


def _find_field(view: memoryview, name: str, model: str) -> tuple[DataType | None, list[memoryview], bool]:
    """Find the only field with elements.

    Returns:
        The datatype of the field (None if all fields are empty), the pieces of its packed elements, and False. Or, if
        each element has a tag, as texts always have: the datatype, one piece, and True.

    Raises:
        IndexError: The encoding is unusual.
        ServeError: invalid_input for several fields.
    """
    found: DataType | None = None
    pieces: list[memoryview] = []
    position, end = 0, len(view)
    while position < end:
        begin = position
        tag, start, position = read_field(view, begin, end)
        datatype = _FIELD_DATATYPES.get(tag >> 3)
        wire = tag & 7
        is_packed = wire == LENGTH_DELIMITED and datatype is not DataType.BYTES
        if datatype is None or not (is_packed or wire == _ELEMENT_WIRE.get(datatype, VARINT)):
            raise _UNUSUAL
        if is_packed and start == position:
            continue
        if found is not None and found is not datatype:
            raise _several_fields(name, model)
        found = datatype
        if is_packed:
            pieces.append(view[start:position])
        elif not pieces and (datatype is DataType.BYTES or _is_run(view[begin:], tag, datatype)):
            return datatype, [view[begin:]], True
        else:
            raise _UNUSUAL
        if len(pieces) > _MAX_PIECES:
            raise _UNUSUAL
    return found, pieces, False


def _is_run(view: memoryview, tag: int, datatype: DataType) -> bool:
    """Whether ``view`` is a sequence of elements that each have the tag ``tag``."""
    if datatype in _FLOATS:
        record = _record(datatype)
        return len(view) % record.itemsize == 0 and bool((np.frombuffer(view, record)["tag"] == tag).all())
    try:
        return all(not step.size % 2 and bool((step[::2] == tag).all()) for step in _varints(view, pairs=True))
    except IndexError:
        return False


def _record(datatype: DataType) -> np.dtype[np.void]:
    return np.dtype([("tag", np.uint8), ("value", datatype.numpy)])


def _floats(pieces: list[memoryview], datatype: DataType, *, is_run: bool) -> np.ndarray:
    if is_run:
        return np.ascontiguousarray(np.frombuffer(pieces[0], _record(datatype))["value"])
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if len(data) % datatype.itemsize:
        raise _UNUSUAL
    return np.frombuffer(data, datatype.numpy)


def _integers(pieces: list[memoryview], datatype: DataType, *, is_run: bool) -> np.ndarray:
    """Decode varints as protobuf does: values that exceed the datatype lose their upper bits.

    The result is allocated once and filled in steps. Joining an array per step takes twice the memory.
    """
    every = 2 if is_run else 1
    values = np.empty(sum(_count_varints(piece) for piece in pieces) // every, datatype.numpy)
    filled = 0
    for piece in pieces:
        for step in _varints(piece, pairs=is_run):
            elements = step[every - 1 :: every]
            part = values[filled : filled + elements.size]
            if datatype is DataType.BOOL:
                np.not_equal(elements, 0, out=part)
            else:
                np.copyto(part, elements, casting="unsafe")
            filled += elements.size
    return values


def _count_varints(data: memoryview) -> int:
    """Count the last bytes of varints."""
    steps = range(0, len(data), _STEP_BYTES)
    return sum(int(np.count_nonzero(np.frombuffer(data[at : at + _STEP_BYTES], np.int8) >= 0)) for at in steps)


def _varints(data: memoryview, *, pairs: bool) -> Iterator[np.ndarray]:
    """Decode varints in steps. With ``pairs``, each step has an even number of varints.

    Raises:
        IndexError: A varint is incomplete or longer than 10 bytes.
    """
    position, end = 0, len(data)
    while position < end:
        step = np.frombuffer(data[position : position + _STEP_BYTES], np.uint8)
        lasts = np.flatnonzero(step < 128)
        if pairs and lasts.size % 2:
            lasts = lasts[:-1]
        if not lasts.size:
            raise _UNUSUAL
        read = int(lasts[-1]) + 1
        if read != step.size and position + step.size == end:
            raise _UNUSUAL
        position += read
        yield _read_step(step[:read], lasts)


def _read_step(step: np.ndarray, lasts: np.ndarray) -> np.ndarray:
    """Decode the varints in ``step`` as 64-bit integers. Their last bytes are at the positions ``lasts``."""
    if lasts.size == step.size:
        return step.astype(np.uint64)
    firsts = np.empty_like(lasts)
    firsts[0] = 0
    firsts[1:] = lasts[:-1] + 1
    lengths = lasts - firsts + 1
    longest = int(lengths.max())
    if longest > _MAX_VARINT_BYTES:
        raise _UNUSUAL
    values: np.ndarray = (step[firsts] & 127).astype(np.uint64)
    for index in range(1, longest):
        longer = np.flatnonzero(lengths > index)
        values[longer] |= (step[firsts[longer] + index] & 127).astype(np.uint64) << np.uint64(7 * index)
    return values


def _texts(view: memoryview, count: int, name: str) -> np.ndarray:
    """Decode up to ``count`` + 1 texts, each with a tag and a length."""
    texts = TextArray(count + 1)
    position, end = 0, len(view)
    while position < end and texts.filled <= count:
        size, start = view[position + 1], position + 2
        if size > 127:
            size, start = read_varint(view, position + 1)
        if view[position] != _TEXT_TAG or start + size > end:
            raise _UNUSUAL
        check_text_size(size, texts.filled, name)
        position = start + size
        texts.add(decode_element(view[start:position], texts.filled, name))
    return texts.array()
