"""Inference requests and answers as bytes, as clients write and read them.

It uses nothing from the server except the names of datatypes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2

from ortserve.core.dtypes import DataType

TYPED_FIELDS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Fields of InferTensorContents by datatype; FP16 and BF16 have none."""


@dataclass(frozen=True, slots=True)
class Body:
    """A body. ``json_size`` is the value of REST's header, or None without it."""

    data: bytes
    json_size: int | None = None


def samples() -> Mapping[str, tuple[DataType, np.ndarray]]:
    """Arrays as the server holds them, by name: each datatype with its difficult values, and unusual shapes."""
    made: dict[str, tuple[DataType, np.ndarray]] = {
        "BOOL": (DataType.BOOL, np.array([[True, False], [False, True]])),
        "BYTES": (DataType.BYTES, np.array([["", "añb"], ["\0", "😀 \u2028\n"]], object)),
        "BF16": (DataType.BF16, np.array([[0x0000, 0x8000], [0x3DCD, 0x7F7F]], np.uint16)),
        "BF16 without a value": (DataType.BF16, np.array([0x7FC0, 0x7F80, 0xFF80], np.uint16)),
    }
    for datatype in DataType:
        if datatype.value in made:
            continue
        if datatype.numpy.kind == "f":
            limits = np.finfo(datatype.numpy)
            finite = [[0.0, -0.0, 0.1], [limits.max, limits.smallest_subnormal, -1.5]]
            made[datatype.value] = (datatype, np.array(finite, datatype.numpy))
            tokens = np.array([np.nan, np.inf, -np.inf], datatype.numpy)
            made[f"{datatype.value} without a value"] = (datatype, tokens)
        else:
            bounds = np.iinfo(datatype.numpy)
            made[datatype.value] = (datatype, np.array([[bounds.min, 0], [1, bounds.max]], datatype.numpy))
    made["no rows"] = (DataType.FP32, np.empty((0, 4), np.float32))
    made["no texts"] = (DataType.BYTES, np.empty((2, 0), object))
    made["scalar"] = (DataType.INT64, np.array(-7))
    return made


def rest_json_request(datatype: DataType, array: np.ndarray) -> Body:
    """Nested data in a JSON document, as Python's json module writes it."""
    entry = {"name": "x", "shape": list(array.shape), "datatype": datatype.value, "data": _json_data(datatype, array)}
    return Body(json.dumps(_document(entry)).encode())


def rest_binary_request(datatype: DataType, array: np.ndarray) -> Body:
    """A binary tensor after a JSON document."""
    tail = raw_bytes(datatype, array)
    entry = {"name": "x", "shape": list(array.shape), "datatype": datatype.value}
    head = json.dumps(_document(entry | {"parameters": {"binary_data_size": len(tail)}})).encode()
    return Body(head + tail, len(head))


def grpc_raw_request(datatype: DataType, array: np.ndarray) -> Body:
    """A request with raw contents."""
    message = _message(datatype, array)
    message.raw_input_contents.append(raw_bytes(datatype, array))
    return Body(message.SerializeToString())


def grpc_typed_request(datatype: DataType, array: np.ndarray) -> Body | None:
    """A request with typed contents; None for a datatype without a field."""
    if datatype.value not in TYPED_FIELDS:
        return None
    message = _message(datatype, array)
    contents = message.inputs[0].contents
    contents.SetInParent()
    elements = array.ravel().tolist()
    getattr(contents, TYPED_FIELDS[datatype.value]).extend(
        [element.encode() for element in elements] if datatype is DataType.BYTES else elements
    )
    return Body(message.SerializeToString())


def read_rest_answer(body: Body) -> tuple[np.ndarray, dict[str, Any]]:
    """Output ``y`` as tritonclient's array, and the JSON document."""
    result = triton_http.InferenceServerClient.parse_response_body(body.data, header_length=body.json_size)
    return result.as_numpy("y"), result.get_response()


def read_grpc_answer(data: bytes) -> tuple[np.ndarray, service_pb2.ModelInferResponse]:
    """Output ``y`` as tritonclient's array, and the message."""
    result = triton_grpc.InferResult(service_pb2.ModelInferResponse.FromString(data))
    return result.as_numpy("y"), result.get_response()


def as_client_sees(datatype: DataType, array: np.ndarray) -> np.ndarray:
    """The array that tritonclient returns for the server's array: BF16 as float32, texts as bytes."""
    if datatype is DataType.BF16:
        return _widened(array)
    if datatype is DataType.BYTES:
        encoded = np.empty(array.shape, object)
        encoded.ravel()[:] = [element.encode() for element in array.ravel()]
        return encoded
    return array


def raw_bytes(datatype: DataType, array: np.ndarray) -> bytes:
    """The bytes of a binary tensor."""
    if datatype is DataType.BYTES:
        encoded = [element.encode() for element in array.ravel()]
        return b"".join(len(element).to_bytes(4, "little") + element for element in encoded)
    return array.tobytes()


def _widened(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers whose upper halves are these BF16 bit patterns."""
    numbers: np.ndarray = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers


def _json_data(datatype: DataType, array: np.ndarray) -> Any:
    if datatype is DataType.BF16:
        array = _widened(array)
    data = array.tolist()
    return data if isinstance(data, list) else [data]


def _document(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "7",
        "parameters": {"own": "x", "priority": 1},
        "inputs": [entry],
        "outputs": [{"name": "y"}, {"name": "z", "parameters": {"classification": 2}}],
    }


def _message(datatype: DataType, array: np.ndarray) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name="m", model_version="3", id="7")
    message.parameters["own"].string_param = "x"
    message.parameters["priority"].uint64_param = 1
    message.inputs.add(name="x", datatype=datatype.value, shape=array.shape)
    message.outputs.add(name="y")
    message.outputs.add(name="z").parameters["classification"].int64_param = 2
    return message
