"""REST inference bodies: a JSON document, followed by the binary tensors that it declares.

Request and response follow the Open Inference Protocol over REST and its binary tensor extension. Every value of a
document is validated before it is used. A key whose value is null counts as absent: the libraries of several languages
write null for a field without a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ortserve.codecs.binary_tensor import REGION, decode_binary_tensor, encode_binary_tensor, read_span
from ortserve.codecs.bounds import (
    CHARACTER_BYTES,
    INLINE_BINARY_BYTES,
    INLINE_BYTES,
    INLINE_ELEMENTS,
    INLINE_FLAG_BYTES,
    INLINE_TEXTS,
    JSON_GROWTH,
    MAX_ID_LENGTH,
    MAX_PARAMETERS,
    MAX_TENSORS,
    MIN_TEXT_BYTES,
    too_many,
)
from ortserve.codecs.json_text import decode_json_data, encode_json_data, has_long_texts, parse_json, write_json
from ortserve.core.batch import deep_bytes
from ortserve.core.dtypes import DATATYPES, DataType
from ortserve.core.large_memory import LargeMemory
from ortserve.core.region import RegionInput, RegionSpan, RegionUse
from ortserve.core.request import DecodingPlace, InferRequest, InferResponse, Parameter, RequestedOutput
from ortserve.core.tensor import MAX_DIMS, Tensor, shape_fault
from ortserve.errors import ContentsError, ServeError, invalid_input


@dataclass(slots=True, init=False)
class EncodedResponse:
    """A response body. ``json_size`` is the size of the JSON part in bytes if binary tensors follow; otherwise None."""

    body: Final[bytes | memoryview]
    json_size: Final[int | None]

    def __init__(self, body: bytes | memoryview, json_size: int | None) -> None:
        self.body = body
        self.json_size = json_size


class RestRequest:
    """An infer request over REST: the body, and values from path and headers. An ``EncodedRequest``."""

    __slots__ = ("_body", "_json_size", "_model_version", "is_short", "model_name")

    def __init__(self, body: bytes | memoryview, json_size: int | None, model_name: str, model_version: str) -> None:
        """Store the values, which ``read`` decodes.

        Args:
            body: The whole uncompressed body. The tensors of the request may be views on it.
            json_size: Value of ``Inference-Header-Content-Length``; None without this header. If it is 0, the whole
                body is the raw tensor of the model's only input.
            model_name: Name of the model in the path.
            model_version: Version or label in the path; ``""`` without one.
        """
        self._body = body
        self._json_size = json_size
        self.model_name = model_name
        self._model_version = model_version
        self.is_short = len(body) <= MIN_TEXT_BYTES * INLINE_TEXTS

    def decoding_place(self) -> DecodingPlace:
        """Choose the place to decode: another process for large JSON, a thread for many texts and BOOL values."""
        json_bytes = self.json_bytes
        if json_bytes > INLINE_BYTES:
            return DecodingPlace.PROCESS
        if not self._may_have_texts():
            is_quick = len(self._body) <= INLINE_FLAG_BYTES or b"BOOL" not in bytes(self._body[:json_bytes])
            return DecodingPlace.INLINE if is_quick else DecodingPlace.THREAD
        # The length of each text contains two zeros. Counting them takes 0.05 ms, and needs no valid document.
        is_quick = (
            len(self._body) - json_bytes <= INLINE_BYTES
            and bytes(self._body[json_bytes:]).count(b"\0\0") <= INLINE_TEXTS
        )
        return DecodingPlace.INLINE if is_quick else DecodingPlace.THREAD

    @property
    def body_bytes(self) -> int:
        return len(self._body)

    @property
    def growth_bytes(self) -> int:
        json_bytes = self.json_bytes
        if json_bytes <= INLINE_BYTES and not self._may_have_texts():
            return 0
        return JSON_GROWTH * json_bytes + CHARACTER_BYTES * (len(self._body) - json_bytes) + len(self._body)

    @property
    def json_bytes(self) -> int:
        return len(self._body) if self._json_size is None else min(self._json_size, len(self._body))

    def _may_have_texts(self) -> bool:
        """Whether a short head may declare binary texts. JSON may escape letters of their datatype."""
        head = bytes(self._body[: self.json_bytes])
        return b"BYTES" in head or b"\\" in head

    def read(self) -> InferRequest:
        """Decode the request.

        Raises:
            ServeError: invalid_input for a malformed request; too_large for too many texts.
        """
        body, json_size = self._body, self._json_size
        model_name, model_version = self.model_name, self._model_version
        if json_size is None:
            document, tail = parse_json(body), _NO_BYTES
        elif json_size == 0:
            return InferRequest(model_name, model_version, "", (), (), {}, binary_output=True, raw_input=body)
        elif json_size > len(body):
            raise invalid_input(f"inference header size should be in range (0, {len(body)}), got: {json_size}")
        else:
            view = memoryview(body)
            document, tail = parse_json(view[:json_size]), view[json_size:]
        if type(document) is not dict:
            raise parse_error("request", "an object", document)

        given = document.get("parameters")
        parameters = {} if given is None else read_parameters(given, "parameters")
        binary_output = parameters.pop("binary_data_output", False) if parameters else False
        if type(binary_output) is not bool:
            raise parse_error("binary_data_output", "a boolean", binary_output)
        request_id = document.get("id")
        if request_id is None:
            request_id = ""
        elif type(request_id) is not str:
            raise parse_error("id", "a string", request_id)
        if len(request_id) > MAX_ID_LENGTH:
            raise too_many("characters of id", MAX_ID_LENGTH, len(request_id))
        region_inputs: list[RegionInput] = []
        region_outputs: dict[str, RegionSpan] = {}
        return InferRequest(
            model_name,
            model_version,
            request_id,
            _inputs(document.get("inputs"), tail, model_name, model_version, request_id, region_inputs),
            _outputs(document.get("outputs"), region_outputs, binary_output=binary_output),
            parameters,
            binary_output,
            regions=RegionUse(region_inputs, region_outputs) if region_inputs or region_outputs else None,
        )

    def for_process(self) -> tuple[str, bytes | memoryview, tuple[Any, ...]]:
        return "infer", self._body, (self._json_size, self.model_name, self._model_version)


class RestEncoder:
    """Encodes responses of REST. An ``AnswerEncoder``."""

    def is_long(self, request: InferRequest, response: InferResponse) -> bool:
        elements = binary_texts = 0
        texts: list[np.ndarray] = []  # in JSON
        binary: list[np.ndarray] = []
        for index, tensor in enumerate(response.outputs):
            is_binary = request.outputs[index].binary if request.outputs else request.binary_output
            is_text = tensor.datatype is DataType.BYTES
            if is_binary:
                binary.append(tensor.array)
                binary_texts += tensor.array.size if is_text else 0
            else:
                elements += tensor.array.size
                if is_text:
                    texts.append(tensor.array)
        return (
            elements > INLINE_ELEMENTS
            or binary_texts > INLINE_TEXTS
            or has_long_texts(texts)
            or deep_bytes(tuple(binary)) > INLINE_BINARY_BYTES
        )

    def encode(
        self, request: InferRequest, response: InferResponse, memory: LargeMemory | None = None
    ) -> EncodedResponse:
        """Encode each output as JSON or binary, as the request asks; with ``memory`` in steps, for a thread."""
        in_regions = response.in_regions
        outputs: list[dict[str, Any]] = []
        tail: list[bytes | memoryview] = []
        for index, tensor in enumerate(response.outputs):
            is_binary = request.outputs[index].binary if request.outputs else request.binary_output
            entry: dict[str, Any] = {
                "name": tensor.name,
                "datatype": tensor.datatype.value,
                "shape": tensor.array.shape,
            }
            outputs.append(entry)
            if tensor.name in in_regions:
                continue
            if is_binary:
                piece = encode_binary_tensor(tensor.array, tensor.datatype, memory)
                entry["parameters"] = {"binary_data_size": len(piece)}
                tail.append(piece)
            else:
                entry["data"] = encode_json_data(tensor.array, tensor.datatype, in_steps=memory is not None)
        document: dict[str, Any] = {
            "model_name": response.model_name,
            "model_version": response.model_version,
            "outputs": outputs,
        }
        if response.id:
            document["id"] = response.id
        head = write_json(document, response.outputs, memory)
        if not any(map(len, tail)):  # all binary outputs are empty; Triton answers with plain JSON then
            return EncodedResponse(head, None)
        parts = [head, *tail]
        head_size = len(head)
        return EncodedResponse(b"".join(parts) if memory is None else memory.join(parts), head_size)


_NO_BYTES = memoryview(b"")
_NO_PARAMETERS: Final[Mapping[str, Parameter]] = {}


def parse_error(key: str, expected: str, got: object) -> ServeError:
    """Return the error for a key of a JSON document that has another type or value than expected."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "nothing"}
    return invalid_input(f"Unable to parse '{key}': expected {expected}, got {names.get(type(got), repr(got))}")


A_PARAMETER: Final = "a string, number or boolean parameter"


def read_parameters(value: object, where: str, expected: str = A_PARAMETER) -> dict[str, Parameter]:
    """Validate a JSON object of parameters, and omit those that are null.

    ``expected`` describes a valid parameter in errors.

    Raises:
        ServeError: invalid_input; the message contains ``where`` or the name of the parameter.
    """
    if type(value) is not dict:
        raise parse_error(where, "an object", value)
    if len(value) > MAX_PARAMETERS:
        raise too_many(where, MAX_PARAMETERS, len(value))
    if None in value.values():
        value = {key: item for key, item in value.items() if item is not None}
    for key, item in value.items():
        if type(item) not in (str, int, float, bool):
            raise parse_error(key, expected, item)
        if key.startswith("triton_"):
            raise invalid_input(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified: "
                f"'{key}'"
            )
    return value


def _inputs(
    value: object, tail: memoryview, model: str, version: str, request_id: str, region_inputs: list[RegionInput]
) -> list[Tensor]:
    """Decode the array ``inputs``. ``tail`` holds the binary tensors, in its order and without gaps.

    Inputs in shared memory are added to ``region_inputs`` instead. The other arguments are for errors.
    """
    if type(value) is not list:
        raise parse_error("inputs", "an array", value)
    if len(value) > MAX_TENSORS:
        raise too_many("inputs", MAX_TENSORS, len(value))
    tensors: list[Tensor] = []
    names: set[str] = set()
    offset = 0
    for entry in value:
        name = _name(entry, "inputs")
        if name in names:
            raise invalid_input(f"input '{name}' already exists in request")
        names.add(name)
        shape = _shape(entry.get("shape"), name)
        datatype_name = entry.get("datatype")
        datatype = DATATYPES.get(datatype_name) if type(datatype_name) is str else None
        if datatype is None:
            raise _datatype_error(name, datatype_name)
        given = entry.get("parameters")
        parameters = _NO_PARAMETERS if given is None else read_parameters(given, "parameters")
        data = entry.get("data")
        size: Parameter | None = None
        if parameters:
            size = parameters.get("binary_data_size")
            if REGION in parameters:
                if data is not None or size is not None:
                    raise _source_error(name, data, size, is_in_region=True)
                region_inputs.append(RegionInput(name, datatype, shape, read_span(parameters, f"input '{name}'")))
                continue
        if (data is None) == (size is None):
            raise _source_error(name, data, size, is_in_region=False)
        if size is None:
            if type(data) is not list:
                raise parse_error("data", f"an array for input '{name}'", data)
            array = decode_json_data(data, datatype, shape, name)
        else:
            if type(size) is not int or size < 0:
                raise parse_error("binary_data_size", f"an unsigned integer for input '{name}'", size)
            end = offset + size
            if end > len(tail):
                raise invalid_input(
                    f"unexpected size for input '{name}', expecting {end - len(tail)} additional bytes "
                    f"for model '{model}'"
                )
            try:
                array = decode_binary_tensor(tail[offset:end], datatype, shape, name, model)
            except ServeError as error:
                raise ContentsError(error, request_id, model, version) from None
            offset = end
        tensors.append(Tensor(name, datatype, array))
    if offset != len(tail):
        raise invalid_input(
            f"unexpected additional input data for model '{model}': {len(tail) - offset} bytes belong to no input"
        )
    return tensors


def _outputs(value: object, region_outputs: dict[str, RegionSpan], *, binary_output: bool) -> list[RequestedOutput]:
    """Decode the array ``outputs``. The regions of those in shared memory are added to ``region_outputs``.

    ``binary_output`` is the encoding of outputs that select none.
    """
    if value is None:
        return []
    if type(value) is not list:
        raise parse_error("outputs", "an array", value)
    if len(value) > MAX_TENSORS:
        raise too_many("outputs", MAX_TENSORS, len(value))
    outputs: list[RequestedOutput] = []
    names: set[str] = set()
    for entry in value:
        name = _name(entry, "outputs")
        if name in names:
            raise invalid_input(f"output '{name}' already exists in request")
        names.add(name)
        given = entry.get("parameters")
        parameters = _NO_PARAMETERS if given is None else read_parameters(given, "parameters")
        classes = _classes(parameters, name) if "classification" in parameters else 0
        binary = parameters.get("binary_data", binary_output)
        if type(binary) is not bool:
            raise parse_error("binary_data", f"a boolean for output '{name}'", binary)
        if parameters and REGION in parameters:
            if parameters.get("binary_data"):
                raise invalid_input(f"output '{name}': 'binary_data' and '{REGION}' exclude each other")
            region_outputs[name] = read_span(parameters, f"output '{name}'")
        outputs.append(RequestedOutput(name, binary, classes))
    return outputs


def _classes(parameters: Mapping[str, Parameter], output: str) -> int:
    classes = parameters["classification"]
    if type(classes) is not int or classes < 1:
        raise parse_error("classification", f"an unsigned integer above 0 for output '{output}'", classes)
    if REGION in parameters:
        raise invalid_input(f"Output can't set both '{REGION}' and 'classification': '{output}'")
    return classes


def _name(entry: object, where: str) -> str:
    if type(entry) is not dict:
        raise parse_error(where, "an array of objects", entry)
    name = entry.get("name")
    if type(name) is not str:
        raise parse_error("name", f"a string in each of '{where}'", name)
    return name


def _shape(value: object, name: str) -> tuple[int, ...]:
    if type(value) is not list:
        raise parse_error("shape", f"an array for input '{name}'", value)
    if len(value) > MAX_DIMS:
        raise invalid_input(f"Unable to parse 'shape' of input '{name}': {shape_fault(value)}")
    for dim in value:
        if type(dim) is not int or dim < 0:
            raise invalid_input(
                f"Unable to parse 'shape' of input '{name}': attempt to access JSON non-unsigned-integer as "
                f"unsigned-integer: {dim!r}"
            )
    fault = shape_fault(value)
    if fault is not None:
        raise invalid_input(f"Unable to parse 'shape' of input '{name}': {fault}")
    return tuple(value)


def _datatype_error(name: str, got: object) -> ServeError:
    if type(got) is not str:
        return parse_error("datatype", f"a string for input '{name}'", got)
    return invalid_input(
        f"Unable to parse 'datatype' of input '{name}': unknown datatype '{got}': expected one of "
        f"{', '.join(DATATYPES)}"
    )


def _source_error(name: str, data: object, size: object, *, is_in_region: bool) -> ServeError:
    """Return the error for an input whose elements are given nowhere or twice."""
    is_given = {"data": data is not None, "binary_data_size": size is not None, REGION: is_in_region}
    fields = " ".join([f"'{field}'" for field, is_set in is_given.items() if is_set])
    got = f"But set {fields}" if fields else "But no field is set"
    return invalid_input(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. {got} for input '{name}'"
    )
