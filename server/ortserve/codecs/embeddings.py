"""The embeddings call of OpenAI's API: a text or a list of texts in, one vector for each text out."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson

from ortserve.codecs.binary_tensor import object_array
from ortserve.codecs.bounds import INLINE_ELEMENTS, too_many
from ortserve.codecs.generate import WholeJson
from ortserve.codecs.json_text import decode_json_data, encode_json_data, parse_json, write_json
from ortserve.codecs.rest import parse_error
from ortserve.core.dtypes import DataType, widen
from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import DecodingPlace, InferRequest, InferResponse, Parameter, RequestedOutput
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import Tensor, format_shape
from ortserve.errors import invalid_input

MAX_TEXTS: Final = 2048
"""Maximum number of texts of one call, as in OpenAI's API."""

INPUT: Final = "input"
FORMAT: Final = "encoding_format"
DIMENSIONS: Final = "dimensions"
_KEYS: Final = ("model", INPUT, FORMAT, DIMENSIONS, "user")

_SEND_TEXTS: Final = "LangChain's OpenAIEmbeddings sends texts with check_embedding_ctx_length=False"

_USUAL_OUTPUT: Final = "sentence_embedding"
"""The name that exporters of sentence-transformers give to the vector of a text."""
_FLOATS: Final = (DataType.FP16, DataType.BF16, DataType.FP32, DataType.FP64)


def decode_embeddings_request(body: bytes | memoryview) -> InferRequest:
    """Decode a call.

    Returns:
        The name of the model; the texts as the tensor ``INPUT``, BYTES of shape ``(texts,)``; and the parameters
        ``FORMAT``, ``float`` or ``base64``, and ``DIMENSIONS`` if the call has it. ``user`` has no effect.

    Raises:
        ServeError: invalid_input for a malformed call.
    """
    document = parse_json(body or b"{}")
    if type(document) is not dict:
        raise invalid_input("failed to parse the request JSON buffer: expected an object")
    given = {key: value for key, value in document.items() if value is not None}
    for key in given:
        if key not in _KEYS:
            raise invalid_input(f"unexpected key '{key}': expected {', '.join(_KEYS)}")
    model = given.get("model")
    if type(model) is not str:
        raise parse_error("model", "the name of a model", model)
    texts = given.get(INPUT)
    if type(texts) is str:
        texts = [texts]
    if type(texts) is not list or not texts or type(texts[0]) is not str:
        if type(texts) is list and _begins_with_token_id(texts):
            raise invalid_input(f"Unable to parse '{INPUT}': expected texts, got token ids: {_SEND_TEXTS}")
        raise parse_error(INPUT, "a text, or an array with at least one text and nothing else", texts)
    if len(texts) > MAX_TEXTS:
        raise too_many("texts", MAX_TEXTS, len(texts))
    encoding = given.get(FORMAT, "float")
    if encoding not in ("float", "base64"):
        raise invalid_input(f"Unable to parse '{FORMAT}': expected 'float' or 'base64', got {repr(encoding)[:100]}")
    parameters: dict[str, Parameter] = {FORMAT: encoding}
    if DIMENSIONS in given:
        size = given[DIMENSIONS]
        if type(size) is not int or size < 1:
            raise parse_error(DIMENSIONS, "a positive integer", size)
        parameters[DIMENSIONS] = size
    array = decode_json_data(texts, DataType.BYTES, (len(texts),), INPUT)
    return InferRequest(model, "", "", (Tensor(INPUT, DataType.BYTES, array),), (), parameters)


class EmbeddingsRequest(WholeJson):
    """A call of several texts. A ``JsonRequest``."""

    def __init__(self, body: bytes | memoryview) -> None:
        super().__init__(body, "")

    def read(self) -> InferRequest:
        """Decode the call, as ``decode_embeddings_request``."""
        return decode_embeddings_request(self._body)

    def for_process(self) -> tuple[str, bytes | memoryview, tuple[Any, ...]]:
        return "embeddings", self._body, ()


class TextsRequest:
    """The request of some texts of a call, each a row, to a model with one input. An ``EncodedRequest``."""

    body_bytes: Final = 0
    json_bytes: Final = 0
    growth_bytes: Final = 0

    def __init__(self, model_name: str, text_input: TensorSpec, output: str, texts: list[str]) -> None:
        self.model_name = model_name
        self.is_short = True
        self._input = text_input
        self._output = output
        self._texts = texts

    def decoding_place(self) -> DecodingPlace:
        return DecodingPlace.INLINE

    def read(self) -> InferRequest:
        shape = [1] * len(self._input.shape)
        if self._input.batch_axis is not None:
            shape[self._input.batch_axis] = len(self._texts)
        tensor = Tensor(self._input.name, DataType.BYTES, object_array(self._texts, tuple(shape)))
        return InferRequest(self.model_name, "", "", (tensor,), (RequestedOutput(self._output),), {})


def find_text_input(model: str, inputs: Sequence[TensorSpec]) -> TensorSpec:
    """Return the input of a model that takes the text. Raises ServeError: invalid_input if it takes others, too."""
    required = [spec for spec in inputs if not spec.is_optional]
    if len(required) != 1 or required[0].datatype is not DataType.BYTES:
        raise invalid_input(
            f"model '{model}' takes no texts: expected one input of datatype BYTES, got {_show(required)}"
        )
    return required[0]


def find_vector_output(model: str, outputs: Sequence[TensorSpec]) -> TensorSpec:
    """Return the output of a model that is the vector. Raises ServeError: invalid_input."""
    floats = [spec for spec in outputs if spec.datatype in _FLOATS]
    for spec in floats:
        if len(floats) == 1 or spec.name == _USUAL_OUTPUT:
            return spec
    raise invalid_input(
        f"model '{model}' returns no embeddings: expected one output of floating-point numbers, or one with the name "
        f"'{_USUAL_OUTPUT}', got {_show(outputs)}"
    )


def _begins_with_token_id(values: Sequence[object]) -> bool:
    first = values[0] if values else None
    return type(first) is int or (type(first) is list and len(first) > 0 and type(first[0]) is int)


def _show(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"'{spec.name}' {spec.datatype.value}{format_shape(spec.shape)}" for spec in specs) or "none"


class VectorEncoder:
    """Encodes the vectors of some texts as entries of the answer's ``data``. An ``AnswerEncoder``."""

    def __init__(self, first: int, count: int, parameters: Mapping[str, Parameter]) -> None:
        """``first`` is the position of the first text; ``parameters`` are those of ``decode_embeddings_request``."""
        self._first = first
        self._count = count
        self._parameters = parameters

    def is_long(self, _request: InferRequest, response: InferResponse) -> bool:
        return response.outputs[0].array.size > INLINE_ELEMENTS

    def encode(
        self, request: InferRequest, response: InferResponse, memory: LargeMemory | None = None
    ) -> list[bytes | memoryview]:
        """Encode each vector as an array, or as base64 of FP32 in little-endian order.

        Raises:
            ServeError: invalid_input, if the output is no vector, or has another size than the call expects.
        """
        tensor = response.outputs[0]
        array, model = tensor.array, response.model_name
        size = max(array.shape[1:] if self._count > 1 else array.shape, default=1)
        if array.size != self._count * size:
            raise invalid_input(
                f"model '{model}' returns no embeddings: expected a vector for each text, got output '{tensor.name}' "
                f"of shape {format_shape(array.shape)} for {self._count} of them"
            )
        check_size(model, size, self._parameters)
        entries = []
        for index, vector in enumerate(array.reshape(self._count, size), self._first):
            value: Any
            if self._parameters[FORMAT] == "base64":
                numbers = widen(vector) if tensor.datatype is DataType.BF16 else vector
                with np.errstate(over="ignore"):  # numbers of FP64 beyond the range of FP32 become infinite
                    value = base64.b64encode(np.ascontiguousarray(numbers, "<f4").data).decode()
            else:
                value = encode_json_data(vector, tensor.datatype)
            entry = {"object": "embedding", "index": index, "embedding": value}
            entries.append(write_json(entry, response.outputs, memory))
        return entries


def check_size(model: str, size: int, parameters: Mapping[str, Parameter]) -> None:
    """Check that a call expects vectors of this size; -1 for an unknown one. Raises ServeError: invalid_input."""
    expected = parameters.get(DIMENSIONS, size)
    if size != -1 and size != expected:
        raise invalid_input(f"{DIMENSIONS}: the vectors of model '{model}' have {size}, got {expected}")


def embeddings_answer(model: str, entries: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the parts of the answer with the encoded ``entries``. Its ``usage`` is 0: the server counts no tokens."""
    parts: list[bytes | memoryview] = [b'{"object":"list","model":%b,"data":[' % orjson.dumps(model)]
    for entry in entries:
        parts += (entry, b",")
    parts[-1] = b'],"usage":{"prompt_tokens":0,"total_tokens":0}}'
    return parts
