"""gRPC stream messages: an answer or an error, as serialized ``ModelStreamInferResponse``.

Every model answers a request once, so that each message is the last of its request and says so. Where the request asks
for an empty final response there is none to send: its one answer is final already.
"""

from typing import Final

from ortserve._pb.grpc_service_pb2 import ModelInferResponse, ModelStreamInferResponse
from ortserve.codecs.grpc_infer import MAX_MESSAGE_BYTES, GrpcEncoder, encode_response, read_names
from ortserve.codecs.grpc_wire import varint
from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import InferRequest, InferResponse
from ortserve.errors import invalid_input

_FINAL: Final = "triton_final_response"


def _final_parameter() -> bytes:
    message = ModelInferResponse()
    message.parameters[_FINAL].bool_param = True
    return message.SerializeToString()


_LENGTH_DELIMITED: Final = 2
_ANSWER_TAG: Final = bytes([ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_FINAL_PARAMETER: Final = _final_parameter()


def encode_stream_answer(response: InferResponse, memory: LargeMemory | None = None) -> bytes | memoryview:
    """Serialize the answer of one request.

    Raises:
        ServeError: invalid_input, when it is larger than a message may be.
    """
    answer = encode_response(response, memory)
    # Fields of a message may come in any order, so that the parameter can follow the tensors.
    size = len(answer) + len(_FINAL_PARAMETER)
    head = _ANSWER_TAG + varint(size)
    if len(head) + size > MAX_MESSAGE_BYTES:
        raise invalid_input(
            f"Response has byte size {len(head) + size} which exceeds gRPC's byte size limit {MAX_MESSAGE_BYTES}."
        )
    parts = [head, answer, _FINAL_PARAMETER]
    return b"".join(parts) if memory is None else memory.join(parts)


class StreamEncoder(GrpcEncoder):
    """An ``AnswerEncoder`` for streams."""

    def encode(
        self, request: InferRequest, response: InferResponse, memory: LargeMemory | None = None
    ) -> bytes | memoryview:
        return encode_stream_answer(response, memory)


def encode_stream_error(request: bytes | memoryview, text: str, version: str = "") -> bytes:
    """Serialize what is wrong with a request, under the id and model that its bytes give.

    ``version`` is of the model that was to answer; empty for the one that the request names, if any.
    """
    names = read_names(request)
    message = ModelStreamInferResponse(error_message=text or "unknown error")  # an empty one would be no error
    answer = message.infer_response
    answer.id, answer.model_name, answer.model_version = names.id, names.model_name, version or names.model_version
    answer.parameters[_FINAL].bool_param = True
    return message.SerializeToString()
