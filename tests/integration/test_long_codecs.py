"""Bodies that take long to decode or encode are correct. ``contract/test_bounds_on_messages`` checks their bounds."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from models import builders
from ortserve._pb.grpc_service_pb2 import ModelInferRequest, ModelInferResponse
from ortserve.codecs.binary_tensor import decode_bytes_elements
from ortserve.core.dtypes import DataType
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, json_input, rest_url, serving, triton_clients
from transports import ON_BOTH_TRANSPORTS

WIDE: Final = ("batch", "n")


@pytest.fixture(scope="module")
def server(ways: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Identities of several datatypes, each with a free second axis."""
    repository = tmp_path_factory.mktemp("models")
    for datatype in (DataType.FP32, DataType.INT64, DataType.BYTES):
        add_model(repository, datatype.value, builders.identity, datatype=datatype, shape=WIDE)
    with serving(repository, *SHORT_WARMUP, *ways) as process:
        yield process


def ask(server: ServerProcess, model: str, array: np.ndarray, **options: Any) -> np.ndarray:
    answer = httpx.post(rest_url(server, model), json={"inputs": [json_input("x", array)]}, timeout=LONG_S, **options)
    assert answer.status_code == 200, answer.text[:500]
    (output,) = answer.json()["outputs"]
    assert output["shape"] == list(array.shape)
    return np.array(output["data"], array.dtype).reshape(array.shape)


@pytest.mark.parametrize("size", [100, 20_000, 300_000])
def test_json_of_every_size_is_returned_unchanged(server: ServerProcess, size: int) -> None:
    rng = np.random.default_rng(size)
    floats = rng.standard_normal((1, size), dtype=np.float32)
    assert ask(server, "FP32", floats).tobytes() == floats.tobytes()
    integers = rng.integers(-(2**62), 2**62, (2, size // 2))
    assert (ask(server, "INT64", integers) == integers).all()


def test_non_finite_numbers_of_a_long_answer_are_tokens(server: ServerProcess) -> None:
    array = np.arange(40_000, dtype=np.float32).reshape(1, -1)
    array[0, [0, 5_000, 39_999]] = np.nan, np.inf, -np.inf
    with triton_http.InferenceServerClient(server.http, network_timeout=LONG_S) as client:
        given = triton_http.InferInput("x", array.shape, "FP32")
        given.set_data_from_numpy(array)
        wanted = triton_http.InferRequestedOutput("y", binary_data=False)
        assert np.array_equal(client.infer("FP32", [given], outputs=[wanted]).as_numpy("y"), array, equal_nan=True)


@ON_BOTH_TRANSPORTS
@pytest.mark.parametrize("count", [10, 5_000, 100_000])
def test_any_number_of_strings_is_returned_in_every_encoding(server: ServerProcess, count: int) -> None:
    texts = np.array([f"text {index} ä" for index in range(count)], object).reshape(1, -1)
    assert (ask(server, "BYTES", texts) == texts).all()
    encoded = np.array([text.encode() for text in texts[0]], object).reshape(1, -1)
    with triton_clients(server) as (http_client, grpc_client):
        for client, module in ((http_client, triton_http), (grpc_client, triton_grpc)):
            given = module.InferInput("x", texts.shape, "BYTES")
            given.set_data_from_numpy(texts)
            assert (client.infer("BYTES", [given]).as_numpy("y") == encoded).all()
    assert typed(server, "BYTES", "bytes_contents", encoded[0].tolist()) == encoded[0].tolist()


@ON_BOTH_TRANSPORTS
def test_any_number_of_typed_integers_is_returned(server: ServerProcess) -> None:
    for count in (10, 300_000):
        numbers = np.random.default_rng(count).integers(-(2**40), 2**40, count).tolist()
        assert typed(server, "INT64", "int64_contents", numbers) == numbers


def typed(server: ServerProcess, model: str, field: str, values: list[Any]) -> list[Any]:
    """Send values as typed contents. Returns the elements of the answer."""
    message = ModelInferRequest(model_name=model)
    entry = message.inputs.add(name="x", datatype=model, shape=[1, len(values)])
    getattr(entry.contents, field).extend(values)
    answer = ModelInferResponse.FromString(call(server, message.SerializeToString()))
    output, raw = answer.outputs[0], answer.raw_output_contents[0]
    if output.datatype == "BYTES":
        return [text.encode() for text in decode_bytes_elements(raw, (len(values),), "y")]
    numbers: list[Any] = np.frombuffer(raw, np.int64).tolist()
    return numbers


def call(server: ServerProcess, message: bytes) -> bytes:
    """Call ModelInfer with the bytes of a message."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc, options) as channel:
        infer: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        return bytes(infer(message, timeout=LONG_S))


def test_errors_of_long_json_are_those_of_short_json(server: ServerProcess) -> None:
    def message(size: int, value: str) -> str:
        body = f'{{"id":"7","inputs":[{{"name":"x","datatype":"INT64","shape":[1,{size}],"data":[{value}'
        body += ",1" * (size - 1) + "]}]}"
        answer = httpx.post(rest_url(server, "INT64"), content=body, timeout=LONG_S)
        assert answer.status_code == 400
        return str(answer.json()["error"])

    for value in ("1.5", "true", '"a"', "null", "1e400", "9223372036854775808"):
        long, short = message(40_000, value), message(2, value)
        assert re.sub(r"40000|at \d+", "", long) == re.sub(r"\b2\b|at \d+", "", short)


def test_long_request_for_an_unknown_model_is_an_error(server: ServerProcess) -> None:
    body = {"inputs": [json_input("x", np.zeros((1, 100_000), np.float32))]}
    answer = httpx.post(rest_url(server, "none"), json=body, timeout=LONG_S)
    assert (answer.status_code, "none" in answer.text) == (404, True)


def json_numbers(count: int) -> bytes:
    head = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],"data":[0.5' % count
    return head + b",0.5" * (count - 1) + b"]}]}"


def test_killed_decoder_process_fails_at_most_one_request(server: ServerProcess, tmp_path: Path) -> None:
    ask(server, "FP32", np.zeros((1, 50_000), np.float32))  # starts the decoder process
    body = json_numbers(4_000_000)
    statuses: list[int] = []

    def send() -> None:
        statuses.append(httpx.post(rest_url(server, "FP32"), content=body, timeout=LONG_S).status_code)

    sending = threading.Thread(target=send)
    sending.start()
    while sending.is_alive() and not statuses:
        for child in psutil.Process(server.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # killed in the previous round, and reaped meanwhile
                if child.cpu_times().user > 0.3 or child.memory_info().rss > 2**28:
                    child.kill()
        time.sleep(0.001)
    sending.join()
    assert statuses[0] in (200, 429)
    array = np.ones((1, 50_000), np.float32)
    assert (ask(server, "FP32", array) == array).all()
