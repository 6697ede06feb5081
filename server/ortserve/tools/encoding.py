"""Encodes requests to bytes before a measurement, and decodes the answers that are compared. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import orjson
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from ortserve._pb import grpc_service_pb2 as pb
from ortserve.codecs.binary_tensor import BYTE_SIZE, OFFSET, REGION, decode_binary_tensor, encode_binary_tensor
from ortserve.codecs.json_text import decode_json_data, encode_json_data, parse_json, write_json
from ortserve.core.dtypes import DATATYPES
from ortserve.core.region import RegionSpan
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import Tensor, is_absent
from ortserve.errors import ErrorKind, ServeError

_PARAMETER_FIELDS: Final = {bool: "bool_param", int: "int64_param", str: "string_param"}
"""Fields of gRPC's ``InferParameter``."""

_JSON: Final = {"content-type": "application/json"}

Outputs: TypeAlias = Mapping[str, Tensor]
Parameters: TypeAlias = Mapping[str, str | int]
Placed: TypeAlias = tuple[Tensor, RegionSpan]
"""A tensor and its place in shared memory."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The body of a request, and the headers that it needs over REST."""

    body: bytes
    headers: Mapping[str, str]


def tensors_of(signature: ModelSignature, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """The inputs of a request; absent optional ones are left out."""
    pairs = zip(signature.inputs, arrays, strict=True)
    return [Tensor(spec.name, spec.datatype, array) for spec, array in pairs if not is_absent(array)]


def encode_rest(tensors: Sequence[Tensor], parameters: Parameters | None = None, *, is_binary: bool) -> Encoded:
    """A REST request with its parameters. A binary one also asks for binary outputs."""
    parameters = parameters or {}
    if not is_binary:
        inputs = [_declared(tensor, data=encode_json_data(tensor.array, tensor.datatype)) for tensor in tensors]
        document = {"inputs": inputs} | ({"parameters": parameters} if parameters else {})
        return Encoded(bytes(write_json(document, tensors)), _JSON)
    pieces = [encoded(tensor) for tensor in tensors]
    sizes = ({"binary_data_size": len(piece)} for piece in pieces)
    inputs = [_declared(tensor, parameters=size) for tensor, size in zip(tensors, sizes, strict=True)]
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, **parameters}})
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    return Encoded(head + b"".join(pieces), headers)


def encode_grpc(model: str, version: str, tensors: Sequence[Tensor], parameters: Parameters | None = None) -> Encoded:
    """A gRPC request with its parameters and raw contents."""
    document = {"inputs": [_declared(tensor) for tensor in tensors], "parameters": _for_grpc(parameters or {})}
    return _encode_message(model, version, document, map(encoded, tensors))


def encode_shared(
    model: str, version: str, inputs: Iterable[Placed], outputs: Iterable[Placed], *, is_grpc: bool
) -> Encoded:
    """A request whose inputs and outputs are in shared memory."""

    def parameters(place: RegionSpan) -> Mapping[str, Any]:
        found: Parameters = {REGION: place.region, OFFSET: place.offset, BYTE_SIZE: place.byte_size}
        return _for_grpc(found) if is_grpc else found

    document = {
        "inputs": [_declared(tensor, parameters=parameters(place)) for tensor, place in inputs],
        "outputs": [{"name": tensor.name, "parameters": parameters(place)} for tensor, place in outputs],
    }
    return _encode_message(model, version, document) if is_grpc else Encoded(orjson.dumps(document), _JSON)


def _for_grpc(parameters: Parameters) -> dict[str, Any]:
    return {name: {_PARAMETER_FIELDS[type(value)]: value} for name, value in parameters.items()}


def _encode_message(model: str, version: str, document: Mapping[str, Any], contents: Iterable[bytes] = ()) -> Encoded:
    request = ParseDict({"model_name": model, "model_version": version, **document}, pb.ModelInferRequest())
    request.raw_input_contents.extend(contents)
    return Encoded(request.SerializeToString(), {})


def decode_rest(body: bytes, json_size: int | None) -> Outputs:
    """The outputs of a REST answer by name. Raises ServeError: internal, if the answer is malformed."""
    try:
        document = parse_json(body[:json_size])
        outputs: dict[str, Tensor] = {}
        offset = json_size or 0
        for one in document["outputs"]:
            name, datatype, shape = one["name"], DATATYPES[one["datatype"]], tuple(one["shape"])
            if "data" in one:
                array = decode_json_data(one["data"], datatype, shape, name)
            else:
                size = one["parameters"]["binary_data_size"]
                array = decode_binary_tensor(body[offset : offset + size], datatype, shape, name, "")
                offset += size
            outputs[name] = Tensor(name, datatype, array)
    except (ServeError, LookupError, TypeError, ValueError) as error:
        raise _no_answer(error) from None
    return outputs


def decode_grpc(body: bytes) -> Outputs:
    """The outputs of a gRPC answer by name. Raises ServeError: internal, if the answer is malformed."""
    try:
        answer = pb.ModelInferResponse.FromString(body)
        outputs: dict[str, Tensor] = {}
        for index, one in enumerate(answer.outputs):
            datatype, shape = DATATYPES[one.datatype], tuple(one.shape)
            if answer.raw_output_contents:
                array = decode_binary_tensor(answer.raw_output_contents[index], datatype, shape, one.name, "")
            else:  # typed contents, which some servers send
                (field, values), *_ = one.contents.ListFields()
                texts = [value.decode() for value in values] if field.name == "bytes_contents" else list(values)
                array = np.array(texts, datatype.numpy).reshape(shape)
            outputs[one.name] = Tensor(one.name, datatype, array)
    except (ServeError, DecodeError, LookupError, ValueError) as error:
        raise _no_answer(error) from None
    return outputs


def encoded(tensor: Tensor) -> bytes:
    """The bytes of a tensor in the binary protocols."""
    return bytes(encode_binary_tensor(tensor.array, tensor.datatype))


def _no_answer(error: Exception) -> ServeError:
    return ServeError(ErrorKind.INTERNAL, f"an answer cannot be read: {error!r}")


def _declared(tensor: Tensor, **more: Any) -> dict[str, Any]:
    return {"name": tensor.name, "shape": tensor.array.shape, "datatype": tensor.datatype.value, **more}
