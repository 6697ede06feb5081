"""Bounds of the server: full queues, byte limits, and requests whose client disconnects."""

import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from encodings_of_requests import grpc_raw, rest_json
from models import builders
from ortserve.core.dtypes import DataType
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    decisions,
    json_input,
    read_metrics,
    rest_url,
    serving,
    starting,
    wait_for_queue,
)

MAX_QUEUE_ROWS = 2
ROW = np.zeros((1, 4), np.float32)


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that runs one row at a time, slowly, with a short queue."""
    repository = tmp_path_factory.mktemp("narrow")
    add_model(repository, "slow", builders.slow, steps=60_000)
    flags = ("--warmup-s", "0", "--max-queue-rows", str(MAX_QUEUE_ROWS))
    (repository / "slow" / "model.yaml").write_text("max_rows: 1\n")
    with serving(repository, *flags) as server:
        yield server


def message(rows: np.ndarray) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="slow")
    request.inputs.add(name="x", datatype="FP32", shape=rows.shape)
    request.raw_input_contents.append(rows.tobytes())
    data: bytes = request.SerializeToString()
    return data


def test_full_queue_rejects_on_both_protocols_and_answers_admitted_requests(narrow_server: ServerProcess) -> None:
    callers = 10  # per protocol; during one run, one request runs and two wait
    constant = rest_json(narrow_server, "slow", {"x": ROW})["y"]

    def by_rest(number: int) -> httpx.Response:
        document = {"inputs": [json_input("x", ROW + number)]}
        return httpx.post(rest_url(narrow_server, "slow"), json=document, timeout=LONG_S)

    def by_grpc(number: int) -> bytes | grpc.Call:
        with grpc.insecure_channel(narrow_server.grpc) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            try:
                return call(message(ROW + number), timeout=LONG_S)
            except grpc.RpcError as error:
                return cast("grpc.Call", error)

    with ThreadPoolExecutor(2 * callers) as pool:
        rest_calls = [pool.submit(by_rest, number) for number in range(callers)]
        grpc_calls = [pool.submit(by_grpc, number) for number in range(callers)]
    refusals = {"http": 0, "grpc": 0}
    for number, answer in enumerate(call.result() for call in rest_calls):
        if answer.status_code == 200:
            np.testing.assert_allclose(answer.json()["outputs"][0]["data"], constant[0] + number, rtol=1e-5)
        else:
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert "Exceeds maximum queue size" in answer.json()["error"]
            refusals["http"] += 1
    for number, came in enumerate(call.result() for call in grpc_calls):
        if isinstance(came, bytes):
            response = service_pb2.ModelInferResponse.FromString(came)
            got = np.frombuffer(response.raw_output_contents[0], np.float32)
            np.testing.assert_allclose(got, constant[0] + number, rtol=1e-5)
        else:
            assert came.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "Exceeds maximum queue size" in (came.details() or "")
            assert "grpc-retry-pushback-ms" in dict(came.trailing_metadata() or ())
            refusals["grpc"] += 1
    assert refusals["http"] > 0
    assert refusals["grpc"] > 0
    samples = read_metrics(narrow_server)
    assert samples.value("ortserve_rejected_requests_total", model="slow", reason="overloaded") == sum(
        refusals.values()
    )


def test_disconnects_affect_no_other_request(narrow_server: ServerProcess) -> None:
    host, port = narrow_server.http.split(":")
    body = httpx.Request("POST", "http://x", json={"inputs": [json_input("x", ROW)]}).content
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    leaver = socket.create_connection((host, int(port)), timeout=LONG_S)
    leaver.sendall(head.encode() + body)
    with grpc.insecure_channel(narrow_server.grpc) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        under_way = call.future(message(ROW), timeout=LONG_S)
        wait_for_queue(narrow_server, "slow", 1)  # one request runs, the other waits
        leaver.close()
        under_way.cancel()
        assert under_way.cancelled()
    expected = rest_json(narrow_server, "slow", {"x": ROW})["y"]
    np.testing.assert_array_equal(grpc_raw(narrow_server, "slow", {"x": ROW})["y"], expected)
    samples = read_metrics(narrow_server)
    assert samples.value("ortserve_queue_rows", model="slow", version="1") == 0
    outcomes = samples.by_labels("ortserve_request_duration_seconds_count", "protocol", "outcome")
    assert outcomes["grpc cancelled"] == 1


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that holds few bytes of bodies and queued tensors; a run takes long."""
    repository = tmp_path_factory.mktemp("small")
    add_model(repository, "slow", builders.slow, steps=60_000)
    (repository / "slow" / "model.yaml").write_text(f"max_rows: 1\nmax_queue_bytes: {MAX_QUEUE_BYTES}\n")
    with serving(repository, "--warmup-s", "0", "--max-inflight-bytes", str(MAX_INFLIGHT_BYTES)) as server:
        yield server


MAX_QUEUE_BYTES = 3 * ROW.nbytes
MAX_INFLIGHT_BYTES = 100_000


def post_padded(server: ServerProcess, size: int) -> httpx.Response:
    """Send a body of ``size`` bytes, most of them blanks."""
    body = httpx.Request("POST", "http://x", json={"inputs": [json_input("x", ROW)]}).content
    return httpx.post(rest_url(server, "slow"), content=body.ljust(size), timeout=LONG_S)


def test_bodies_past_the_byte_limit_are_rejected_unread(small_server: ServerProcess) -> None:
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(post_padded, small_server, 45_000) for _ in range(2)]
        wait_for_queue(small_server, "slow", 1)  # one runs, the other waits
        answer = post_padded(small_server, 20_000)
        with grpc.insecure_channel(small_server.grpc) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            request = service_pb2.ModelInferRequest.FromString(message(ROW))
            request.id = "i" * 20_000
            with pytest.raises(grpc.RpcError) as caught:
                call(request.SerializeToString(), timeout=LONG_S)
        assert not all(call.done() for call in held)
    assert [call.result().status_code for call in held] == [200, 200]
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "max_inflight_bytes" in answer.json()["error"]
    refusal = cast("grpc.Call", caught.value)
    assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_inflight_bytes" in (refusal.details() or "")
    assert "grpc-retry-pushback-ms" in dict(refusal.trailing_metadata() or ())


def test_chunked_body_counts_as_it_grows(small_server: ServerProcess) -> None:
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(post_padded, small_server, 45_000) for _ in range(2)]
        wait_for_queue(small_server, "slow", 1)
        chunks = iter([b" " * 4_000] * 5)
        answer = httpx.post(rest_url(small_server, "slow"), content=chunks, timeout=LONG_S)
    assert [call.result().status_code for call in held] == [200, 200]
    assert answer.status_code == 429
    assert "max_inflight_bytes" in answer.json()["error"]


def test_tensors_past_the_queued_byte_limit_are_rejected(small_server: ServerProcess) -> None:
    callers = 10
    with ThreadPoolExecutor(callers) as pool:
        answers = list(pool.map(lambda _: post_padded(small_server, 500), range(callers)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 1 <= len(refused) <= callers - 4
    for answer in refused:
        assert answer.status_code == 429
        assert f"max_queue_bytes {MAX_QUEUE_BYTES}" in answer.json()["error"]
    assert decisions(small_server, "slow")["refused_full"] >= len(refused)


def test_rejected_and_disconnected_requests_release_their_bytes(small_server: ServerProcess) -> None:
    host, port = small_server.http.split(":")
    body = httpx.Request("POST", "http://x", json={"inputs": [json_input("x", ROW)]}).content.ljust(40_000)
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for sent in (head + body, head + body[:20_000], head):  # disconnects while waiting, and in the middle of the body
        leavers = [socket.create_connection((host, int(port)), timeout=LONG_S) for _ in range(4)]
        for leaver in leavers:
            leaver.sendall(sent)
        post_padded(small_server, 500)
        for leaver in leavers:
            leaver.close()
    # Once the server has detected the disconnects, it rejects no request, although that request needs all bytes.
    assert any(post_padded(small_server, 500).status_code == 200 for _ in range(100))
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: post_padded(small_server, 49_000), range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]


def test_too_many_empty_rows_are_rejected_at_once(tmp_path: Path) -> None:
    add_model(tmp_path, "wide", builders.identity, datatype=DataType.UINT8, shape=("batch", "width"))
    with serving(tmp_path, *SHORT_WARMUP) as server:
        for rows in (5_000, 10**8, 2**40):
            with pytest.raises(InferenceServerException, match="at most max_queue_rows 4096 rows of less"):
                grpc_raw(server, "wide", {"x": np.empty((rows, 0), np.uint8)})
            document = {"inputs": [{"name": "x", "datatype": "UINT8", "shape": [rows, 0], "data": []}]}
            answer = httpx.post(rest_url(server, "wide"), json=document, timeout=LONG_S)
            assert answer.status_code == 400
        few, many = np.empty((4096, 0), np.uint8), np.arange(300_000, dtype=np.uint8).reshape(-1, 1)
        for array in (few, many):
            assert np.array_equal(grpc_raw(server, "wide", {"x": array})["y"], array)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_soft_limit_of_open_files_is_raised_and_a_low_hard_limit_is_logged(kind: str, tmp_path: Path) -> None:
    hard = 300 if kind == "hard" else resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with serving(tmp_path, limits={resource.RLIMIT_NOFILE: (300, hard)}) as server, ExitStack() as stack:
        warnings = [line for line in server.lines if "fewer open files than connections are allowed" in line]
        if kind == "hard":
            (line,) = warnings
            assert line.endswith("open_files=300 connections=8192")
            return
        assert warnings == []
        host, _, port = server.http.partition(":")
        for _ in range(400):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=LONG_S))
        assert httpx.get(f"http://{server.metrics}/v2/health/ready", timeout=LONG_S).status_code == 200


@pytest.mark.parametrize("files", [6, 15, 16])
def test_start_that_the_limit_of_open_files_prevents_is_one_error_and_status_1(files: int) -> None:
    """The limit is too low for any server, or the loop runs and misses a descriptor for a listener."""
    with starting("--example", limits={resource.RLIMIT_NOFILE: (files, files)}) as server:
        assert server.wait() == 1
    errors = [line for line in server.lines if "ERROR" in line and " asyncio " not in line]
    assert len(errors) == 1
    assert "the server cannot start" in errors[0]
    assert "Too many open files" in errors[0]
    assert "Traceback" not in server.output
    assert "never awaited" not in server.output
