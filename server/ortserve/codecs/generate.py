"""The generate extension. Keys of a request's JSON object are inputs of the model; keys of the answer are its outputs.

Other keys of a request are parameters, as in infer. Parameters of text sampling are rejected: an ONNX model cannot
receive them, and without them the answer would differ from the one that the caller requested.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ortserve.codecs.bounds import (
    INLINE_BYTES,
    INLINE_ELEMENTS,
    JSON_GROWTH,
    MAX_ID_LENGTH,
    too_many,
)
from ortserve.codecs.json_text import (
    decode_json_data,
    encode_json_data,
    encode_json_text,
    has_long_texts,
    parse_json,
    write_json,
)
from ortserve.codecs.rest import A_PARAMETER, read_parameters
from ortserve.core.dtypes import DataType
from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import DecodingPlace, InferRequest, InferResponse, Parameter
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import Tensor, format_shape
from ortserve.errors import ErrorKind, ServeError, invalid_input

_SAMPLING: Final = frozenset(
    {
        *("max_tokens", "max_new_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "random_seed", "n"),
        *("stop", "stop_words", "bad_words", "beam_width", "details", "logprobs", "return_log_probs"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "stream"),
    }
)
"""Sampling parameters of the protocol's draft and of language model servers. They are rejected."""


def decode_generate_request(
    body: bytes | memoryview, model_name: str, model_version: str, inputs: Sequence[TensorSpec], is_stream: bool
) -> InferRequest:
    """Decode a request.

    A number, string or boolean is a tensor of one element; a nested array is a tensor of the same shape. Leading
    dimensions of 1 are added up to the rank of the model's input, or to the least rank if it declares no shape, so that
    a flat array is one row. If each row of the input has one element, the elements of a flat array are rows: a column
    of a table.

    Args:
        body: A JSON object. Keys other than inputs are parameters. The keys of the object ``parameters`` are read in
            the same way, as Triton does. A key whose value is null counts as absent.
        model_name: Name of the model in the path.
        model_version: Version or label in the path; ``""`` without one.
        inputs: Inputs of the model.
        is_stream: Whether the answer is a stream; the parameter ``stream`` must agree.

    Raises:
        ServeError: invalid_input for a malformed request; too_large for too many texts; unsupported for a sampling
            parameter.
    """
    document = parse_json(body or b"{}")
    if type(document) is not dict:
        raise invalid_input("failed to parse the request JSON buffer: expected an object")
    tensors = _take_inputs(document, inputs, model_name)
    document = {key: value for key, value in document.items() if value is not None}
    request_id = document.pop("id", "")
    if type(request_id) is not str:
        raise invalid_input("Unable to parse 'id': expected a string")
    if len(request_id) > MAX_ID_LENGTH:
        raise too_many("characters of id", MAX_ID_LENGTH, len(request_id))
    nested = document.pop("parameters", {})
    if type(nested) is not dict:
        raise invalid_input("Unable to parse 'parameters': expected an object")
    names = {tensor.name for tensor in tensors}
    for tensor in _take_inputs(nested, inputs, model_name):
        if tensor.name in names:
            raise invalid_input(f"input '{tensor.name}' already exists in request")
        tensors.append(tensor)
    given = document | {key: value for key, value in nested.items() if value is not None}
    parameters = _parameters(given, inputs, model_name, is_stream=is_stream)
    return InferRequest(model_name, model_version, request_id, tensors, (), parameters)


class WholeJson:
    """A request whose body is one JSON document: the part of a ``JsonRequest`` that depends on the body alone."""

    def __init__(self, body: bytes | memoryview, model_name: str) -> None:
        """``model_name`` is the name in the path; empty if only the body names the model."""
        self._body = body
        self.model_name = model_name
        self.is_short = len(body) <= INLINE_BYTES

    def decoding_place(self) -> DecodingPlace:
        """Choose the place to decode: another process for more than ``INLINE_BYTES``."""
        return DecodingPlace.INLINE if self.is_short else DecodingPlace.PROCESS

    @property
    def json_bytes(self) -> int:
        return len(self._body)

    @property
    def body_bytes(self) -> int:
        return len(self._body)

    @property
    def growth_bytes(self) -> int:
        return (JSON_GROWTH + 1) * len(self._body)  # a thread may use the body after its call has ended


class GenerateRequest(WholeJson):
    """A generate request: the body, and values from the path. A ``JsonRequest``."""

    def __init__(
        self,
        body: bytes | memoryview,
        model_name: str,
        model_version: str,
        inputs: Callable[[], Sequence[TensorSpec]],
        *,
        is_stream: bool,
    ) -> None:
        """The arguments are those of ``decode_generate_request``. ``read`` raises the errors of ``inputs``."""
        super().__init__(body, model_name)
        self._model_version = model_version
        self._inputs = inputs
        self._is_stream = is_stream

    def read(self) -> InferRequest:
        """Decode the request, as ``decode_generate_request``."""
        return decode_generate_request(
            self._body, self.model_name, self._model_version, self._inputs(), self._is_stream
        )

    def for_process(self) -> tuple[str, bytes | memoryview, tuple[Any, ...]]:
        return "generate", self._body, (self.model_name, self._model_version, self._inputs(), self._is_stream)


def encode_generate_response(response: InferResponse, *, in_steps: bool = False) -> bytes:
    """Encode the answer. An output of one element is written as this element, others as flat arrays.

    ``in_steps`` is for threads, which must not hold the interpreter lock for long.
    """
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    for tensor in response.outputs:
        is_one = tensor.array.size == 1
        if is_one and tensor.datatype is DataType.BYTES:
            document[tensor.name] = encode_json_text(tensor.array.item())
            continue
        data: Any = encode_json_data(tensor.array, tensor.datatype, in_steps=in_steps and not is_one)
        document[tensor.name] = _bare(data[0]) if is_one else data
    return bytes(write_json(document, response.outputs))


class GenerateEncoder:
    """Encodes answers; with ``is_stream`` as server-sent events. An ``AnswerEncoder``."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream

    def is_long(self, _request: InferRequest, response: InferResponse) -> bool:
        elements = sum([tensor.array.size for tensor in response.outputs])
        texts = [tensor.array for tensor in response.outputs if tensor.datatype is DataType.BYTES]
        return elements > INLINE_ELEMENTS or has_long_texts(texts)

    def encode(self, request: InferRequest, response: InferResponse, memory: LargeMemory | None = None) -> bytes:
        answer = encode_generate_response(response, in_steps=memory is not None)
        # A stream of one server-sent event, because an ONNX model answers once.
        return b"data: %b\n\n" % answer if self._is_stream else answer


def _bare(element: np.generic) -> Any:
    if not np.isfinite(element):  # ``write_json`` encodes non-finite values as tokens
        return element
    if isinstance(element, np.float16 | np.float32):
        return float(str(element))  # 0.1 instead of 0.10000000149
    return element.item()


def _take_inputs(document: dict[str, Any], inputs: Sequence[TensorSpec], model: str) -> list[Tensor]:
    """Remove the inputs that are not null from ``document`` and return their tensors."""
    given = [spec for spec in inputs if document.get(spec.name) is not None]
    return [_tensor(document.pop(spec.name), spec, model) for spec in given]


def _tensor(value: object, spec: TensorSpec, model: str) -> Tensor:
    rank = len(spec.shape)
    dims: list[int] = []
    level = value
    while type(level) is list:
        dims.append(len(level))
        level = level[0] if level else None
    if spec.has_any_shape:
        rank = max(len(dims), spec.least_axes)
    elif len(dims) > rank and dims != [1]:  # [x] is accepted for a scalar
        raise invalid_input(
            f"unexpected shape for input '{spec.name}' for model '{model}'. "
            f"Expected {format_shape(spec.shape)}, got {format_shape(tuple(dims))}"
        )
    added = (1,) * (rank - len(dims))
    is_column = len(dims) == 1 and spec.shape == (-1, *added)
    shape = (*dims, *added) if is_column else (*added, *dims[:rank])
    data = value if type(value) is list else [value]
    return Tensor(spec.name, spec.datatype, decode_json_data(data, spec.datatype, shape, spec.name))


def _parameters(
    given: dict[str, object], inputs: Sequence[TensorSpec], model: str, *, is_stream: bool
) -> dict[str, Parameter]:
    stream = given.get("stream")
    if stream is False or (stream is True and is_stream):
        del given["stream"]
    for key in given:
        if key in _SAMPLING:
            raise ServeError(
                ErrorKind.UNSUPPORTED,
                f"parameter '{key}' is not supported: it is not an input of model '{model}', "
                "and ONNX models have no sampling parameters",
            )
    names = ", ".join(f"'{spec.name}'" for spec in inputs)
    expected = f"{A_PARAMETER}, or an input of model '{model}', which takes {names}"
    return read_parameters(given, "parameters", expected)
