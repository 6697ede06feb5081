"""Bounds on the time for which work on texts holds the event loop or the interpreter lock."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ortserve._pb.grpc_service_pb2 import ModelInferRequest
from ortserve.codecs.binary_tensor import decode_bytes_elements, encode_bytes_elements
from ortserve.codecs.bounds import (
    INLINE_BYTES,
    INLINE_ELEMENTS,
    INLINE_FLAG_BYTES,
    INLINE_TEXTS,
    MAX_JSON_HEAD_BYTES,
)
from ortserve.codecs.generate import GenerateEncoder
from ortserve.codecs.grpc_answer import GrpcEncoder
from ortserve.codecs.grpc_infer import GrpcRequest
from ortserve.codecs.json_process import pack_request
from ortserve.codecs.json_text import encode_json_data
from ortserve.codecs.rest import RestEncoder, RestRequest
from ortserve.core.batch import deep_bytes
from ortserve.core.dtypes import DataType
from ortserve.core.large_memory import LargeMemory
from ortserve.core.request import DecodingPlace, InferRequest, InferResponse, RequestedOutput
from ortserve.core.tensor import Tensor
from ortserve.errors import ServeError
from ortserve.service.classification import classify


@pytest.fixture
def compiled_interpreter() -> Iterator[None]:
    """Simulate compiled code: the interpreter lock changes hands only when a thread releases it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("compiled_interpreter")
@pytest.mark.parametrize("work", ["decode", "encode", "write"])
@pytest.mark.parametrize(("count", "size"), [(500, 50_000), (1, 12_000_000)])
def test_few_long_texts_leave_the_interpreter_to_other_threads(work: str, count: int, size: int) -> None:
    texts = np.full(count, "x" * size, object)
    content = encode_bytes_elements(texts)
    works: dict[str, Callable[[], object]] = {
        "decode": lambda: decode_bytes_elements(content, texts.shape, "x"),
        "encode": lambda: encode_bytes_elements(texts),
        "write": lambda: encode_json_data(texts, DataType.BYTES),
    }
    turns = 0
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(works[work])
        while not working.done():
            time.sleep(0)
            turns += 1
    assert turns > 5


@pytest.mark.usefixtures("compiled_interpreter")
def test_many_classes_leave_the_interpreter_to_other_threads() -> None:
    output = Tensor("y", DataType.INT32, np.arange(20_000, dtype=np.int32).reshape(1, -1))
    turns = 0
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(classify, output, 20_000, (), is_batched=True)
        while not working.done():
            time.sleep(0)
            turns += 1
    assert turns > 15


@pytest.mark.usefixtures("compiled_interpreter")
@pytest.mark.parametrize("encoder", [RestEncoder(), GenerateEncoder(is_stream=False)])
def test_many_outputs_leave_the_interpreter_to_other_threads(encoder: RestEncoder | GenerateEncoder) -> None:
    numbers = np.linspace(0, 1, INLINE_ELEMENTS, dtype=np.float32)
    outputs = [Tensor(f"y{index}", DataType.FP32, numbers) for index in range(20)]
    outputs += [Tensor("none", DataType.FP32, numbers[:0]), Tensor("one", DataType.FP32, numbers[:1])]
    response = InferResponse("m", "1", "", outputs)
    turns = 0
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(encoder.encode, InferRequest("m", "", "", (), (), {}), response, LargeMemory())
        while not working.done():
            time.sleep(0)
            turns += 1
    assert turns > 15
    at_once = encoder.encode(InferRequest("m", "", "", (), (), {}), response)
    in_steps, whole = (getattr(answer, "body", answer) for answer in (working.result(), at_once))
    assert in_steps == whole


def rest_request(*texts: np.ndarray) -> RestRequest:
    contents = [encode_bytes_elements(array) for array in texts]
    entries = [
        {
            "name": f"x{index}",
            "datatype": "BYTES",
            "shape": list(array.shape),
            "parameters": {"binary_data_size": len(content)},
        }
        for index, (array, content) in enumerate(zip(texts, contents, strict=True))
    ]
    head = json.dumps({"inputs": entries}).encode()
    return RestRequest(b"".join([head, *contents]), len(head), "m", "")


def grpc_request(*texts: np.ndarray) -> GrpcRequest:
    message = ModelInferRequest(model_name="m")
    for index, array in enumerate(texts):
        message.inputs.add(name=f"x{index}", datatype="BYTES", shape=array.shape)
        message.raw_input_contents.append(bytes(encode_bytes_elements(array)))
    return GrpcRequest(message.SerializeToString())


@pytest.mark.parametrize("encode", [rest_request, grpc_request])
@pytest.mark.parametrize("text", ["a", "ä"])
def test_many_short_texts_are_decoded_off_the_loop(encode: Callable[..., RestRequest | GrpcRequest], text: str) -> None:
    """One long text takes a hundredth of the time of as many bytes in short texts."""

    def is_on_loop(*texts: np.ndarray) -> bool:
        encoded = encode(*texts)
        found = encoded.is_short or encoded.decoding_place() is DecodingPlace.INLINE
        assert [tensor.array.tolist() for tensor in encoded.read().inputs] == [array.tolist() for array in texts]
        return found

    assert is_on_loop(np.full(INLINE_TEXTS, text, object))
    assert not is_on_loop(np.full(INLINE_TEXTS + 1, text, object))
    assert not is_on_loop(*[np.full((2, INLINE_TEXTS // 4 + 1), text, object)] * 2)
    assert not is_on_loop(np.full(INLINE_TEXTS + 1, "", object))
    assert is_on_loop(np.array(["ä" * (INLINE_BYTES // 2 - 200)], object))


@pytest.mark.parametrize("letter", ["B", "Y", "T", "E", "S"])
def test_many_texts_are_decoded_off_the_loop_also_behind_an_escaped_datatype(letter: str) -> None:
    datatype = "BYTES".replace(letter, f"\\u{ord(letter):04x}")
    entry = f'{{"name":"x","datatype":"{datatype}","shape":[5000],"parameters":{{"binary_data_size":20000}}}}'
    head = f'{{"inputs":[{entry}]}}'.encode()
    encoded = RestRequest(head + bytes(20_000), len(head), "m", "")
    assert encoded.decoding_place() is DecodingPlace.THREAD
    numbers = RestRequest(head.replace(datatype.encode(), b"FP32") + bytes(20_000), len(head), "m", "")
    assert numbers.decoding_place() is DecodingPlace.INLINE
    assert encoded.read().inputs[0].datatype is DataType.BYTES


def rest_numbers(datatype: str, count: int) -> RestRequest:
    entry = {"name": "x", "datatype": datatype, "shape": [count], "parameters": {"binary_data_size": count}}
    head = json.dumps({"inputs": [entry]}).encode()
    return RestRequest(head + bytes(count), len(head), "m", "")


def grpc_numbers(datatype: str, count: int) -> GrpcRequest:
    message = ModelInferRequest(model_name="m", raw_input_contents=[bytes(count)])
    message.inputs.add(name="x", datatype=datatype, shape=[count])
    return GrpcRequest(message.SerializeToString())


@pytest.mark.parametrize("encode", [rest_numbers, grpc_numbers])
def test_large_bool_tensors_are_checked_off_the_loop_and_take_no_memory(
    encode: Callable[[str, int], RestRequest | GrpcRequest],
) -> None:
    """All their bytes are read, 5 ms for 64 MiB, and then they are views."""
    request = encode("BOOL", INLINE_FLAG_BYTES + 1)
    assert (request.decoding_place(), request.growth_bytes) == (DecodingPlace.THREAD, 0)
    assert encode("BOOL", INLINE_FLAG_BYTES - 1000).decoding_place() is DecodingPlace.INLINE
    assert encode("INT8", INLINE_FLAG_BYTES + 1).decoding_place() is DecodingPlace.INLINE


@pytest.mark.parametrize("encoder", [RestEncoder(), GrpcEncoder()], ids=["rest", "grpc"])
def test_many_short_texts_are_encoded_off_the_loop(encoder: RestEncoder | GrpcEncoder) -> None:
    request = InferRequest("m", "", "", [], [RequestedOutput("y", binary=True)] * 2, {})
    for count, is_long in ((INLINE_TEXTS // 2, False), (INLINE_TEXTS // 2 + 1, True)):
        outputs = [Tensor("y", DataType.BYTES, np.full(count, "a", object))] * 2
        assert encoder.is_long(request, InferResponse("m", "1", "", outputs)) == is_long


def least_s(work: Callable[[], object]) -> float:
    durations = []
    for _ in range(10):
        began = time.thread_time()
        work()
        durations.append(time.thread_time() - began)
    return min(durations)


def test_choice_of_the_place_to_encode_is_cheaper_than_two_encodings() -> None:
    """The event loop measures the texts of every answer. Their exact memory took twenty times as long as encoding."""
    outputs = [Tensor("y", DataType.BYTES, np.array([str(index) for index in range(INLINE_ELEMENTS)], object))]
    response, encoder = InferResponse("m", "1", "", outputs), RestEncoder()
    request = InferRequest("m", "", "", [], [RequestedOutput("y", binary=False)], {})
    assert not encoder.is_long(request, response)
    assert least_s(lambda: encoder.is_long(request, response)) < 2 * least_s(lambda: encoder.encode(request, response))


def test_memory_of_texts_is_exact_and_quickly_summed() -> None:
    texts = np.array([["", "a", "ä", "€" * 100, "😀" * 7] * 10_000], object)
    assert deep_bytes((texts,)) == texts.nbytes + sum(map(sys.getsizeof, texts[0]))
    encoded = np.array([b"", b"a" * 9], object)
    assert deep_bytes((encoded, texts)) == encoded.nbytes + 2 * sys.getsizeof(b"") + 9 + deep_bytes((texts,))
    assert least_s(lambda: deep_bytes((texts,))) < least_s(lambda: [sys.getsizeof(text) for text in texts[0]])


@pytest.mark.parametrize("part", ["parameter", "name of a parameter", "name of an input", "name of an output"])
def test_long_names_and_parameters_do_not_reach_the_loop(part: str) -> None:
    def parts(size: int) -> list[bytes]:
        text = "x" * size
        entry = {"name": text if part == "name of an input" else "x", "shape": [1], "datatype": "BYTES", "data": [text]}
        parameters = {text: 1} if part == "name of a parameter" else {"a": text if part == "parameter" else ""}
        outputs = [{"name": text if part == "name of an output" else "y"}]
        document = {"inputs": [entry], "outputs": outputs, "parameters": parameters}
        return [bytes(each) for each in pack_request(RestRequest(json.dumps(document).encode(), None, "m", "").read())]

    assert len(parts(MAX_JSON_HEAD_BYTES - 1024)) == 2
    with pytest.raises(ServeError, match=f"at most {MAX_JSON_HEAD_BYTES} bytes of names, shapes and parameters"):
        parts(MAX_JSON_HEAD_BYTES)
