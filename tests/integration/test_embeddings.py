"""``/v1/embeddings`` with the unmodified client of OpenAI, against a real server."""

import asyncio
import base64
import json
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from held_files import held_file
from http_wire import wait_until
from models import builders
from models.members import add_ensemble
from ortserve.codecs.bounds import INLINE_BYTES, INLINE_ELEMENTS
from ortserve.codecs.embeddings import MAX_TEXTS
from ortserve.core.dtypes import DataType
from servers import LONG_S, ServerProcess, add_model, read_metrics, serving, wait_for_sample

WORDS = ("red", "green", "blue")
"""The vector of each word is the row of an identity matrix."""
WIDE = INLINE_ELEMENTS + 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("embeddings")
    add_model(folder, "words", builders.word_counts)
    limited = add_model(folder, "limited", builders.word_counts)
    (limited / "model.yaml").write_text("max_rows: 3\n")
    short = add_model(folder, "short_queue", builders.word_counts)
    (short / "model.yaml").write_text("max_queue_rows: 32\n")
    alone = add_model(folder, "alone", builders.word_counts)
    (alone / "model.yaml").write_text("batched: false\n")
    add_model(folder, "wide", builders.word_counts, words=[f"w{number}" for number in range(WIDE)])
    add_model(folder, "one_text", builders.identity, datatype=DataType.BYTES, shape=(1,))
    add_model(folder, "mlp", builders.mlp)
    add_model(folder, "long_texts", builders.word_counts, words=["x" * INLINE_BYTES])
    steps = [("one_text", {"x": "text"}, {"y": "token"}), ("words", {"text": "token"}, {"counts": "vector"})]
    add_ensemble(folder, "sentences", ["text"], ["vector"], steps)
    with serving(folder) as served:
        yield served


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LONG_S)


def post(server: ServerProcess, document: Any, **headers: str) -> httpx.Response:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return httpx.post(f"{server.url}/v1/embeddings", content=body, headers=headers, timeout=LONG_S)


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
@pytest.mark.parametrize("model", ["words", "sentences"])
def test_one_vector_for_each_text_in_their_order(client: openai.OpenAI, model: str, encoding: Any) -> None:
    answer = client.embeddings.create(model=model, input=["blue", "other", "red"], **encoding)
    assert (answer.object, answer.model) == ("list", model)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    vectors = [entry.embedding for entry in answer.data]
    if encoding.get("encoding_format") == "base64":
        vectors = [np.frombuffer(base64.b64decode(str(vector)), "<f4").tolist() for vector in vectors]
    assert vectors == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (0, 0)


def test_single_text_and_options_without_effect(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="words", input="green", dimensions=3, user="someone")
    assert [entry.embedding for entry in answer.data] == [[0, 1, 0]]


@pytest.mark.parametrize("model", ["words", "sentences"])
def test_long_list_is_answered_in_order_beside_another(server: ServerProcess, model: str) -> None:
    texts = [WORDS[number % 3] for number in range(MAX_TEXTS)]

    async def call() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LONG_S) as client:
            return await asyncio.gather(*[client.embeddings.create(model=model, input=texts) for _ in range(2)])

    for answer in asyncio.run(call()):
        assert [entry.index for entry in answer.data] == list(range(MAX_TEXTS))
        found = np.array([entry.embedding for entry in answer.data])
        np.testing.assert_array_equal(found, np.eye(3)[np.arange(MAX_TEXTS) % 3])


@pytest.mark.parametrize(("model", "rows"), [("words", None), ("limited", 3), ("alone", 1)])
def test_texts_are_as_many_rows_of_a_request_as_the_model_runs_together(
    server: ServerProcess, model: str, rows: int | None
) -> None:
    def requests() -> float:
        return read_metrics(server).by_labels("nv_inference_request_success", "model").get(model, 0)

    before = requests()
    answer = post(server, {"model": model, "input": ["red"] * 130})
    assert answer.status_code == 200, answer.text[:200]
    assert [entry["embedding"] for entry in answer.json()["data"]] == [[1, 0, 0]] * 130
    if rows is None:  # warm-up chose the maximum
        assert 3 <= requests() - before < 130
    else:
        assert requests() - before == -(-130 // rows)


def test_long_vectors_are_encoded_beside_the_loop_and_streamed(client: openai.OpenAI) -> None:
    texts = [f"w{number}" for number in range(0, WIDE, 500)]
    answer = client.embeddings.create(model="wide", input=texts, encoding_format="float")
    assert [np.flatnonzero(entry.embedding).tolist() for entry in answer.data] == [[n] for n in range(0, WIDE, 500)]


def test_long_body_is_decoded_in_another_process(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="long_texts", input=["x" * INLINE_BYTES, "y" * INLINE_BYTES, "é"])
    assert [entry.embedding for entry in answer.data] == [[1], [0], [0]]


@pytest.mark.parametrize(
    ("document", "status", "text"),
    [
        (b"{", 400, "failed to parse the request JSON buffer"),
        (b"[]", 400, "expected an object"),
        ({"input": "a"}, 400, "Unable to parse 'model': expected the name of a model, got nothing"),
        ({"model": "words"}, 400, "Unable to parse 'input': expected a text, or an array with at least one text"),
        ({"model": "words", "input": []}, 400, "at least one text and nothing else, got an array"),
        (
            {"model": "words", "input": [[1, 2]]},
            400,
            "expected texts, got token ids: LangChain's",
        ),
        ({"model": "words", "input": [1, 2]}, 400, "expected texts, got token ids: LangChain's"),
        ({"model": "words", "input": [["a"]]}, 400, "at least one text and nothing else, got an array"),
        ({"model": "words", "input": ["a", 1]}, 400, "expected strings for BYTES, got 1"),
        ({"model": "words", "input": ["a"] * (MAX_TEXTS + 1)}, 400, f"at most {MAX_TEXTS} texts, got {MAX_TEXTS + 1}"),
        ({"model": "words", "input": "a", "encoding_format": "hex"}, 400, "expected 'float' or 'base64', got 'hex'"),
        ({"model": "words", "input": "a", "dimensions": 0}, 400, "expected a positive integer, got 0"),
        ({"model": "words", "input": "a", "dimensions": 2}, 400, "the vectors of model 'words' have 3, got 2"),
        ({"model": "words", "input": "a", "truncate": True}, 400, "unexpected key 'truncate': expected model, input"),
        ({"model": "absent", "input": "a"}, 404, "'absent'"),
        ({"model": "mlp", "input": "a"}, 400, "model 'mlp' takes no texts: expected one input of datatype BYTES"),
        ({"model": "one_text", "input": "a"}, 400, "model 'one_text' returns no embeddings"),
    ],
)
def test_error_names_what_was_expected(server: ServerProcess, document: Any, status: int, text: str) -> None:
    answer = post(server, document)
    assert answer.status_code == status, answer.text
    assert text in answer.json()["error"]["message"]


def test_client_shows_the_reason_of_an_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"Error code: 404 - .*'absent'") as raised:
        client.embeddings.create(model="absent", input="a")
    assert (raised.value.type, raised.value.code) == ("invalid_request_error", "not_found")


def test_models_that_return_embeddings_are_listed(client: openai.OpenAI) -> None:
    listed = list(client.models.list())
    assert [model.id for model in listed] == [
        "alone",
        "limited",
        "long_texts",
        "sentences",
        "short_queue",
        "wide",
        "words",
    ]
    assert {(model.object, model.owned_by) for model in listed} == {("model", "ortserve")}
    assert all(0 <= time.time() - model.created < 3600 for model in listed)  # seconds since 1970
    assert client.models.retrieve("words") == next(model for model in listed if model.id == "words")


@pytest.mark.parametrize(("name", "text"), [("absent", "'absent'"), ("mlp", "model 'mlp' takes no texts")])
def test_other_models_are_not_found(client: openai.OpenAI, name: str, text: str) -> None:
    with pytest.raises(openai.NotFoundError, match=text) as raised:
        client.models.retrieve(name)
    assert raised.value.code == "not_found"


def test_model_on_demand_is_listed_while_it_is_in_memory(tmp_path: Path) -> None:
    add_model(tmp_path, "words", builders.word_counts)
    with serving(tmp_path, "--load-policy", "on_demand") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LONG_S)
        assert list(client.models.list()) == []
        assert client.models.retrieve("words").id == "words"
        assert [model.id for model in client.models.list()] == ["words"]


@pytest.mark.parametrize(
    ("request_line", "rest", "status"),
    [
        (b"GET /v1/embeddings", b"\r\n", 405),
        (b"DELETE /v1/models/words", b"\r\n", 405),
        (b"POST /v1/embeddings", b"Transfer-Encoding: chunked\r\n\r\nz\r\n", 400),
        (b"POST /v1/embeddings", b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST /v1/embeddings", b"A: b\r\n" * 101, 431),
        (b"GET /v1/models", b"Host: y\r\n\r\n", 400),
    ],
)
def test_malformed_request_gets_an_error_in_the_form_of_its_api(
    server: ServerProcess, request_line: bytes, rest: bytes, status: int
) -> None:
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        connection.sendall(request_line + b" HTTP/1.1\r\nHost: x\r\n" + rest)
        connection.shutdown(socket.SHUT_WR)
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status == 501 else "invalid_request_error")


def test_client_shows_why_its_key_is_refused(tmp_path: Path) -> None:
    add_model(tmp_path, "words", builders.word_counts)
    keys = tmp_path / "keys.txt"
    keys.write_text("a-key-of-the-group-infer\n")
    with serving(tmp_path, "--infer-keys-file", str(keys)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0, timeout=LONG_S)
        with pytest.raises(openai.AuthenticationError, match=r"Error code: 401 - .*key") as raised:
            client.embeddings.create(model="words", input="a")
        assert raised.value.code == "unauthenticated"


def test_deadline_counts_for_the_whole_call(server: ServerProcess) -> None:
    """One text meets the deadline, 2,048 do not, whatever the speed of the machine."""
    one = {"model": "sentences", "input": "red"}
    began_s = time.monotonic()
    assert post(server, one).status_code == 200
    limit_ms = 1 + round(2e3 * (time.monotonic() - began_s))
    many = {"model": "sentences", "input": ["red"] * MAX_TEXTS}
    while (answer := post(server, many, **{"X-Request-Timeout-Ms": str(limit_ms)})).status_code == 200:
        limit_ms //= 2
    assert answer.status_code in (429, 504), answer.text[:200]
    assert "deadline" in answer.json()["error"]["message"]


def test_long_list_fits_a_short_queue(server: ServerProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(post, server, {"model": "short_queue", "input": ["red"] * 500}) for _ in range(4)]
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text[:200] for answer in answers]


def test_long_calls_wait_for_memory_to_be_decoded(tmp_path: Path) -> None:
    """Those for whose decoding memory was short were rejected, although each took a hundredth of it afterwards."""
    add_model(tmp_path, "words", builders.word_counts)
    with serving(tmp_path, "--max-inflight-bytes", "8000000") as server, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(post, server, {"model": "words", "input": ["red" * 30] * 1000}) for _ in range(8)]
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text[:200] for answer in answers]


def test_deadline_ends_the_wait_for_a_model_that_is_loaded_on_demand(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "words", builders.word_counts)
    with serving(tmp_path, "--load-policy", "on_demand") as server, held_file(folder / "1" / "model.onnx"):
        for path, document in (
            ("/v1/embeddings", {"model": "words", "input": "red"}),
            ("/v2/models/words/generate", {"text": [["red"]]}),
        ):
            headers = {"X-Request-Timeout-Ms": "100"}
            answer = httpx.post(f"{server.url}{path}", json=document, headers=headers, timeout=LONG_S)
            assert answer.status_code == 503, answer.text
            assert "is loaded on demand, which takes longer than the request may wait" in answer.text


def test_caller_that_leaves_while_the_model_is_loaded_is_counted(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "words", builders.word_counts)
    body = b'{"model": "words", "input": "red"}'
    with serving(tmp_path, "--load-policy", "on_demand") as server, held_file(folder / "1" / "model.onnx") as file:
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port)), timeout=LONG_S) as caller:
            caller.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: file.is_awaited)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        name = "ortserve_request_duration_seconds_count"
        wait_for_sample(server, name, lambda count: count == 1, protocol="http", outcome="cancelled")
