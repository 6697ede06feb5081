"""Compressed bodies of requests and answers, and the limit of their decompressed size."""

import gzip
import zlib
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_aio

from encodings_of_requests import triton_inputs
from servers import LONG_S, SHORT_WARMUP, ServerProcess, json_input, rest_url, serving

Compress = Callable[[bytes], bytes]
COMPRESSIONS: dict[str, Compress] = {"gzip": gzip.compress, "deflate": zlib.compress}
LARGE = np.arange(200_000, dtype=np.float32).reshape(2, -1) % 7
"""800 kB of compressible data; threads inflate and compress it."""
SMALL = np.arange(8, dtype=np.float32).reshape(2, 4)
NOISE = np.random.default_rng(0).standard_normal((2, 50_000), np.float32)
BODY_LIMIT = 100_000


@pytest.fixture(scope="module")
def narrow_server() -> Iterator[ServerProcess]:
    with serving("--example", *SHORT_WARMUP, "--max-body-bytes", str(BODY_LIMIT)) as server:
        yield server


def binary_request(array: np.ndarray) -> tuple[bytes, dict[str, str]]:
    inputs = triton_inputs(triton_http, {"x": array})
    body, size = triton_http.InferenceServerClient.generate_request_body(inputs)
    assert size is not None
    return body, {"Inference-Header-Content-Length": str(size)}


def post(server: ServerProcess, body: bytes, headers: dict[str, str]) -> httpx.Response:
    # httpx requests compression by default.
    return httpx.post(
        rest_url(server, "echo"), content=body, headers={"Accept-Encoding": "identity"} | headers, timeout=LONG_S
    )


def arrays(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    size = int(answer.headers["inference-header-content-length"])
    result = triton_http.InferenceServerClient.parse_response_body(answer.content, header_length=size)
    array: np.ndarray = result.as_numpy("y")
    return array


@pytest.mark.parametrize("encoding", COMPRESSIONS)
@pytest.mark.parametrize("array", [SMALL, LARGE, NOISE], ids=["small", "large", "noise"])
def test_compressed_request_gets_the_same_answer(server: ServerProcess, encoding: str, array: np.ndarray) -> None:
    body, headers = binary_request(array)
    plain = post(server, body, headers)
    answer = post(server, COMPRESSIONS[encoding](body), headers | {"Content-Encoding": encoding})
    assert np.array_equal(arrays(answer), array)
    assert answer.content == plain.content
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("encoding", COMPRESSIONS)
def test_compressed_json_request_is_answered(server: ServerProcess, encoding: str) -> None:
    document = httpx.Request("POST", "http://x", json={"inputs": [json_input("x", SMALL)]}).content
    answer = post(server, COMPRESSIONS[encoding](document), {"Content-Encoding": encoding})
    assert answer.json()["outputs"][0]["data"] == SMALL.ravel().tolist()


@pytest.mark.parametrize("encoding", COMPRESSIONS)
def test_large_answer_is_compressed_whole_if_requested(server: ServerProcess, encoding: str) -> None:
    body, headers = binary_request(LARGE)
    answer = post(server, body, headers | {"Accept-Encoding": encoding})
    assert answer.headers["content-encoding"] == encoding
    assert int(answer.headers["content-length"]) < LARGE.nbytes / 10
    assert np.array_equal(arrays(answer), LARGE)  # httpx undid it: the length of the JSON part is that of plain bytes


@pytest.mark.parametrize(
    ("array", "asked"),
    [(SMALL, "gzip"), (NOISE, "gzip"), (LARGE, "identity"), (LARGE, "br"), (LARGE, "identity, gzip;q=0.9")],
    ids=["small", "noise", "identity", "unknown", "identity-preferred"],
)
def test_answer_is_plain_if_compression_gains_nothing_or_is_not_requested(
    server: ServerProcess, array: np.ndarray, asked: str
) -> None:
    body, headers = binary_request(array)
    answer = post(server, body, headers | {"Accept-Encoding": asked})
    assert "content-encoding" not in answer.headers
    assert np.array_equal(arrays(answer), array)


def test_errors_and_other_routes_are_never_compressed(server: ServerProcess) -> None:
    asking = {"Accept-Encoding": "gzip"}
    assert "content-encoding" not in post(server, b"{", asking).headers
    metadata = httpx.get(f"http://{server.http}/v2/models/text_stats", headers=asking, timeout=LONG_S)
    assert "content-encoding" not in metadata.headers


@pytest.mark.parametrize("encoding", COMPRESSIONS)
@pytest.mark.parametrize("array", [SMALL, LARGE], ids=["small", "large"])
def test_unmodified_client_compresses_both_ways(server: ServerProcess, encoding: str, array: np.ndarray) -> None:
    with triton_http.InferenceServerClient(server.http) as client:
        result = client.infer(
            "echo",
            triton_inputs(triton_http, {"x": array}),
            request_compression_algorithm=encoding,
            response_compression_algorithm=encoding,
        )
        assert np.array_equal(result.as_numpy("y"), array)


async def test_asyncio_client_that_always_requests_compression_reads_either_answer(server: ServerProcess) -> None:
    async with triton_aio.InferenceServerClient(server.http) as client:
        for array in (SMALL, LARGE):
            for encoding in (None, *COMPRESSIONS):
                result = await client.infer(
                    "echo", triton_inputs(triton_aio, {"x": array}), request_compression_algorithm=encoding
                )
                assert np.array_equal(result.as_numpy("y"), array)


@pytest.mark.parametrize("encoding", COMPRESSIONS)
def test_body_inflating_past_the_limit_is_rejected_with_413(narrow_server: ServerProcess, encoding: str) -> None:
    for size in (BODY_LIMIT + 1, 50_000_000):
        answer = post(narrow_server, COMPRESSIONS[encoding](bytes(size)), {"Content-Encoding": encoding})
        assert answer.status_code == 413
        assert "max_body_bytes" in answer.json()["error"]
        assert encoding in answer.json()["error"]
    answer = post(narrow_server, COMPRESSIONS[encoding](bytes(BODY_LIMIT)), {"Content-Encoding": encoding})
    assert answer.status_code == 400  # read to its end, but not JSON


@pytest.mark.parametrize("encoding", COMPRESSIONS)
@pytest.mark.parametrize("body", [b"", b"{}", b"\x1f\x8b", b"x" * 100_000])
def test_body_in_another_encoding_than_announced_is_400_and_the_connection_stays(
    server: ServerProcess, encoding: str, body: bytes
) -> None:
    good, headers = binary_request(SMALL)
    with httpx.Client(timeout=LONG_S) as client:
        url = rest_url(server, "echo")
        answer = client.post(url, content=body, headers={"Content-Encoding": encoding})
        assert answer.status_code == 400
        assert encoding in answer.json()["error"]
        again = client.post(url, content=good, headers=headers)
        assert np.array_equal(arrays(again), SMALL)
