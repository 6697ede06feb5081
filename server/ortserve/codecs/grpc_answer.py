"""gRPC answers: core to serialized ``ModelInferResponse`` and, on streams, ``ModelStreamInferResponse``.

Tensors are joined with the head once and never put into protobuf messages, whose byte fields are copies. Many answers
have the same head, so the latest heads are cached.

Every model answers a request once. So each message of a stream is the final one of its request, and is marked as final.
A request for an empty final response therefore gets no further message.
"""

from functools import lru_cache
from typing import Final

from ortserve._pb.grpc_service_pb2 import ModelInferResponse, ModelStreamInferResponse
from ortserve.codecs.binary_tensor import encode_binary_tensor
from ortserve.codecs.bounds import INLINE_BINARY_BYTES, INLINE_TEXTS
from ortserve.codecs.grpc_infer import read_names
from ortserve.codecs.grpc_wire import LENGTH_DELIMITED, varint
from ortserve.core.batch import deep_bytes
from ortserve.core.dtypes import DataType
from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import InferRequest, InferResponse
from ortserve.errors import ServeError, invalid_input

MAX_MESSAGE_BYTES: Final = 2**31 - 1
"""Maximum size of a message in gRPC and protobuf."""

_ID_TAG: Final = bytes([ModelInferResponse.ID_FIELD_NUMBER << 3 | LENGTH_DELIMITED])
_RAW_OUTPUT_TAG: Final = bytes([ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | LENGTH_DELIMITED])

_CACHED_HEADS: Final = 1024
"""Maximum number of cached heads of answers. The least recently used one is evicted first."""


class GrpcEncoder:
    """Encodes unary answers as ``ModelInferResponse``, with raw contents for each output. An ``AnswerEncoder``."""

    def is_long(self, _request: InferRequest, response: InferResponse) -> bool:
        texts = sum([tensor.array.size for tensor in response.outputs if tensor.datatype is DataType.BYTES])
        arrays = tuple([tensor.array for tensor in response.outputs])
        return texts > INLINE_TEXTS or deep_bytes(arrays) > INLINE_BINARY_BYTES

    def encode(
        self, request: InferRequest, response: InferResponse, memory: LargeMemory | None = None
    ) -> bytes | memoryview:
        """Serialize an answer. The message is written to ``memory``, if given.

        Raises:
            ServeError: invalid_input if the answer exceeds ``MAX_MESSAGE_BYTES``.
        """
        in_regions = response.in_regions
        announced = []
        raw: list[bytes | memoryview] = []
        for tensor in response.outputs:
            array = tensor.array
            announced.append((tensor.name, tensor.datatype, array.shape))
            # Clients expect one entry of raw contents per output, even if it is empty.
            content = b"" if tensor.name in in_regions else encode_binary_tensor(array, tensor.datatype, memory)
            raw.append(_RAW_OUTPUT_TAG + varint(len(content)))
            raw.append(content)
        names, outputs = _answer_head(response.model_name, response.model_version, tuple(announced))
        pieces = [names, _id_field(response.id) if response.id else b"", outputs, *raw]
        size = sum(map(len, pieces))
        if size > MAX_MESSAGE_BYTES:
            raise _too_large(size)
        return b"".join(pieces) if memory is None else memory.join(pieces)


def _too_large(size: int) -> ServeError:
    return invalid_input(f"Response has byte size {size} which exceeds gRPC's byte size limit {MAX_MESSAGE_BYTES}.")


def _id_field(request_id: str) -> bytes:
    text = request_id.encode()
    return _ID_TAG + varint(len(text)) + text


@lru_cache(maxsize=_CACHED_HEADS)
def _answer_head(
    model: str, version: str, outputs: tuple[tuple[str, DataType, tuple[int, ...]], ...]
) -> tuple[bytes, bytes]:
    """Serialize the parts of an answer's head before and after the id."""
    message = ModelInferResponse()
    for name, datatype, shape in outputs:
        message.outputs.add(name=name, datatype=datatype.value, shape=shape)
    return ModelInferResponse(model_name=model, model_version=version).SerializeToString(), message.SerializeToString()


_FINAL: Final = "triton_final_response"


def _final_parameter() -> bytes:
    message = ModelInferResponse()
    message.parameters[_FINAL].bool_param = True
    return message.SerializeToString()


_ANSWER_TAG: Final = bytes([ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | LENGTH_DELIMITED])
_FINAL_PARAMETER: Final = _final_parameter()


class StreamEncoder(GrpcEncoder):
    """Encodes the answer of one request on a stream. An ``AnswerEncoder``."""

    def encode(
        self, request: InferRequest, response: InferResponse, memory: LargeMemory | None = None
    ) -> bytes | memoryview:
        answer = super().encode(request, response, memory)
        # Fields of a message may come in any order, so the parameter can follow the tensors.
        size = len(answer) + len(_FINAL_PARAMETER)
        head = _ANSWER_TAG + varint(size)
        if len(head) + size > MAX_MESSAGE_BYTES:
            raise _too_large(len(head) + size)
        parts = [head, answer, _FINAL_PARAMETER]
        return b"".join(parts) if memory is None else memory.join(parts)


def encode_stream_error(request: bytes | memoryview, text: str, version: str = "") -> bytes:
    """Serialize the error of a request on a stream, with the id and model in the bytes of the request.

    ``version`` is the version of the model; empty to use the version in the request.
    """
    names = read_names(request)
    message = ModelStreamInferResponse(error_message=text or "unknown error")  # an empty message means success
    answer = message.infer_response
    answer.id, answer.model_name, answer.model_version = names.id, names.model_name, version or names.model_version
    answer.parameters[_FINAL].bool_param = True
    return message.SerializeToString()
