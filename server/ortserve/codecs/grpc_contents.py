"""Typed contents: the elements of a gRPC request's tensor in a field of their datatype."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from ortserve._pb.grpc_service_pb2 import InferTensorContents
from ortserve.codecs.bytes_elements import decode_element, object_array
from ortserve.core.dtypes import DataType
from ortserve.errors import invalid_input

_CONTENTS_FIELDS: Final = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}
"""The field that holds a datatype's elements; FP16 and BF16 have none."""

_FIELD_DATATYPES: Final = {
    "bool_contents": DataType.BOOL,
    "int_contents": DataType.INT32,
    "int64_contents": DataType.INT64,
    "uint_contents": DataType.UINT32,
    "uint64_contents": DataType.UINT64,
    "fp32_contents": DataType.FP32,
    "fp64_contents": DataType.FP64,
    "bytes_contents": DataType.BYTES,
}
"""The datatype as wide as a field's elements."""


_AS_IN_MEMORY: Final = frozenset((DataType.FP32, DataType.FP64))
"""Datatypes whose elements are as wide on the wire as in memory; integers are varints."""


def decode_contents(
    contents: InferTensorContents, datatype: DataType, shape: tuple[int, ...], name: str, model: str
) -> np.ndarray:
    """Read typed contents; none at all are a tensor without elements, whatever its datatype.

    Raises:
        ServeError: invalid_input, for the field of another datatype, for several, and for elements that do not fill the
            shape or are out of the datatype's range.
    """
    filled = contents.ListFields()
    if len(filled) > 1:
        raise invalid_input(
            f"unexpected explicit tensor data for input tensor '{name}' for model '{model}', "
            "binary data was already supplied."
        )
    values: Sequence[object] = ()
    wide = datatype
    if filled:
        field_name = filled[0][0].name
        values = filled[0][1]
        wide = _FIELD_DATATYPES[field_name]
        if field_name != _CONTENTS_FIELDS.get(datatype):
            raise invalid_input(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' "
                f"of type '{wide.value}', expected datatype '{datatype.value}'"
            )
    count = math.prod(shape)
    if datatype is DataType.BYTES:
        if len(values) != count:
            raise invalid_input(
                f"expected {count} string elements for inference input '{name}' for model '{model}', got {len(values)}"
            )
        elements: Sequence[bytes] = values  # type: ignore[assignment]  # the field's type
        return object_array([decode_element(item, i, name) for i, item in enumerate(elements)], shape)
    if len(values) != count:
        raise invalid_input(
            f"input byte size mismatch for input '{name}' for model '{model}'. "
            f"Expected {count * datatype.itemsize}, got {len(values) * datatype.itemsize}"
        )
    if count and wide in _AS_IN_MEMORY:
        return _packed(contents, wide, count).reshape(shape)
    array = np.fromiter(values, wide.numpy, count)
    if wide is not datatype and count:
        bounds = np.iinfo(datatype.numpy)
        for value in (int(array.min()), int(array.max())):
            if not bounds.min <= value <= bounds.max:
                raise invalid_input(
                    f"value {value} of input '{name}' for model '{model}' is out of the range of {datatype.value}"
                )
        array = array.astype(datatype.numpy)
    return array.reshape(shape)


def _packed(contents: InferTensorContents, datatype: DataType, count: int) -> np.ndarray:
    """The floats of contents, out of the bytes that they travel as: read from the field, each would be an object."""
    contents.DiscardUnknownFields()
    data = contents.SerializeToString()  # one field alone is filled: its elements are the last of it
    return np.frombuffer(data, datatype.numpy, offset=len(data) - count * datatype.itemsize)
