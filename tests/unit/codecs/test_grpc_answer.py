"""Stream messages, parsed with the client library's own messages."""

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from interpreted import interpreted_only
from ortserve.codecs import grpc_answer
from ortserve.codecs.grpc_answer import StreamEncoder, encode_stream_error
from ortserve.core.dtypes import DataType
from ortserve.core.request import InferRequest, InferResponse
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError


def encode_stream_answer(response: InferResponse) -> bytes | memoryview:
    return StreamEncoder().encode(InferRequest("m", "", "", [], [], {}), response)


def read(data: bytes) -> service_pb2.ModelStreamInferResponse:
    return service_pb2.ModelStreamInferResponse.FromString(data)


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_answer_is_the_unary_one_with_the_final_marker(size: int) -> None:
    array = np.arange(size, dtype=np.float32)
    message = read(bytes(encode_stream_answer(InferResponse("m", "3", "id", [Tensor("y", DataType.FP32, array)]))))
    answer = message.infer_response
    assert message.error_message == ""
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "3", "id")
    assert list(answer.outputs[0].shape) == [size]
    np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32), array)
    assert {key: value.bool_param for key, value in answer.parameters.items()} == {"triton_final_response": True}


@interpreted_only
def test_answer_over_the_message_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    response = InferResponse("m", "1", "", [Tensor("y", DataType.FP32, np.zeros(10, np.float32))])
    size = len(encode_stream_answer(response))
    monkeypatch.setattr(grpc_answer, "MAX_MESSAGE_BYTES", size)
    assert len(encode_stream_answer(response)) == size
    monkeypatch.setattr(grpc_answer, "MAX_MESSAGE_BYTES", size - 1)
    with pytest.raises(ServeError, match=f"Response has byte size {size} which exceeds") as caught:
        encode_stream_answer(response)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


@pytest.mark.parametrize("raw", [b"", b"abcd" * 1000])
def test_error_has_the_id_and_model_of_its_request(raw: bytes) -> None:
    request = service_pb2.ModelInferRequest(model_name="m", model_version="3", id="id", raw_input_contents=[raw])
    message = read(encode_stream_error(request.SerializeToString(), "no good"))
    assert message.error_message == "no good"
    answer = message.infer_response
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "3", "id")
    assert answer.parameters["triton_final_response"].bool_param
    assert not answer.outputs


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05m", b"\x0a\x01\xff"])
def test_error_of_a_malformed_message_has_no_names(data: bytes) -> None:
    message = read(encode_stream_error(data, "no good"))
    assert (message.error_message, message.infer_response.id) == ("no good", "")


def test_error_without_a_text_stays_an_error() -> None:
    assert read(encode_stream_error(b"", "")).error_message


def test_error_names_the_version_if_it_is_known() -> None:
    request = service_pb2.ModelInferRequest(model_name="m", id="7")
    assert read(encode_stream_error(request.SerializeToString(), "no good")).infer_response.model_version == ""
    assert read(encode_stream_error(request.SerializeToString(), "no good", "3")).infer_response.model_version == "3"
