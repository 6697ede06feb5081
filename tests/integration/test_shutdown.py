"""Shutdown under load: every admitted request gets its correct and complete answer."""

import asyncio
import json
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import onnxruntime
import pytest
from tritonclient.grpc import service_pb2

from certificates import Secret
from encodings_of_requests import grpc_raw, rest_json
from models import builders
from servers import (
    LONG_S,
    SHORT_WARMUP,
    add_model,
    freezing,
    json_input,
    rest_url,
    serving,
    starting,
    starting_batch,
    triton_clients,
    wait_for_queue,
    wait_for_sample,
)
from transports import ON_BOTH_TRANSPORTS

HTTP_CALLERS = 24
GRPC_CALLERS = 24
ANSWERS_BEFORE_THE_SIGNAL = 200
VARIETY = 16


@dataclass
class Traffic:
    """The callers' view of a shutdown.

    ``answers`` holds the outputs FP32 [10] by request id. ``untaken`` holds the ids of requests whose connection ended
    without a byte of an answer, so that a caller may safely repeat them elsewhere. With a ``secret`` callers use TLS.
    """

    secret: Secret | None = None
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    answers: dict[str, np.ndarray] = field(default_factory=dict)
    untaken: set[str] = field(default_factory=set)

    def answered(self, request_id: str, output: np.ndarray) -> None:
        self.answers[request_id] = output
        if len(self.answers) >= ANSWERS_BEFORE_THE_SIGNAL:
            self.enough.set()


def row_of(request_id: str) -> int:
    """The index of the row that a request carries."""
    return int(request_id.split("-")[1]) % VARIETY


async def call_by_http(address: str, caller: int, rows: np.ndarray, traffic: Traffic) -> None:
    """Send one request after the other on persistent connections until the server accepts no new one."""
    host, port = address.split(":")
    context = traffic.secret.client_context() if traffic.secret else None
    number = 0
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        except ConnectionError:
            return
        is_kept = True
        try:
            while is_kept:
                number += 1
                request_id = f"http{caller}-{number}"
                body = _json_body(request_id, rows[row_of(request_id)])
                head = f"POST /v2/models/heavy/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
                answer = await _exchange(reader, writer, head.encode() + body)
                if answer is None:
                    traffic.untaken.add(request_id)
                    break
                head_text, document = answer
                assert head_text.startswith("HTTP/1.1 200 "), (head_text, document)
                assert document["id"] == request_id
                traffic.answered(request_id, np.array(document["outputs"][0]["data"], np.float32))
                is_kept = "connection: close" not in head_text.lower()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def call_by_grpc(address: str, caller: int, rows: np.ndarray, traffic: Traffic) -> None:
    """Send one request after the other until the server rejects them."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    if traffic.secret:
        credentials = grpc.ssl_channel_credentials(traffic.secret.ca.read_bytes())
        opened = grpc.aio.secure_channel(address, credentials, options)
    else:
        opened = grpc.aio.insecure_channel(address, options)
    async with opened as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        number = 0
        while True:
            number += 1
            request_id = f"grpc{caller}-{number}"
            request = service_pb2.ModelInferRequest(model_name="heavy", id=request_id)
            request.inputs.add(name="x", datatype="FP32", shape=[1, 64])
            request.raw_input_contents.append(rows[row_of(request_id)].tobytes())
            try:
                data = await call(request.SerializeToString(), timeout=LONG_S)
            except grpc.aio.AioRpcError as error:
                # A shutdown cancels a call that grpc has accepted but not passed to the server. The comparison with the
                # server's own counts shows that this call was one of these.
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
                traffic.untaken.add(request_id)
                return
            response = service_pb2.ModelInferResponse.FromString(data)
            assert response.id == request_id
            traffic.answered(request_id, np.frombuffer(response.raw_output_contents[0], np.float32))


@pytest.mark.parametrize(("drain_delay_s", "has_tls"), [("0", False), ("0.5", True)])
async def test_shutdown_under_load_answers_every_admitted_request(
    tmp_path: Path, drain_delay_s: str, has_tls: bool, ways: tuple[str, ...]
) -> None:
    folder = add_model(tmp_path / "models", "heavy", builders.heavy)
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(0).standard_normal((VARIETY, 64)).astype(np.float32)
    expected = session.run(["y"], {"x": rows})[0]
    traffic = Traffic(Secret(tmp_path / "secret") if has_tls else None)
    # Batches are so small that the queue is never empty.
    flags = ("--max-rows", "4", *SHORT_WARMUP, "--access-log", "--drain-delay-s", drain_delay_s, *ways)
    flags += traffic.secret.flags if traffic.secret else ()
    with starting(tmp_path / "models", *flags) as server:
        await asyncio.to_thread(server.wait_until_loaded)
        callers = [
            *(asyncio.create_task(call_by_http(server.http, n, rows, traffic)) for n in range(HTTP_CALLERS)),
            *(asyncio.create_task(call_by_grpc(server.grpc, n, rows, traffic)) for n in range(GRPC_CALLERS)),
        ]
        async with _failing_early(callers):
            await asyncio.wait_for(traffic.enough.wait(), LONG_S)
            before = len(traffic.answers)
            server.send(signal.SIGTERM)
            await asyncio.wait_for(asyncio.gather(*callers), LONG_S)
        assert await asyncio.to_thread(server.wait) == 0
        assert "Traceback" not in server.output
        logged = [line for line in server.lines if " ortserve.access " in line]

    # Each caller had a request in flight when the signal arrived, and most requests were queued.
    assert len(traffic.answers) - before >= (HTTP_CALLERS + GRPC_CALLERS) / 2
    for request_id, output in traffic.answers.items():
        np.testing.assert_allclose(output, expected[row_of(request_id)], rtol=1e-3, atol=1e-4)
    # The server's metrics agree: it answered every accepted request, and each answer arrived.
    outcomes = {_field(line, "request_id"): _field(line, "outcome") for line in logged}
    assert set(outcomes.values()) == {"ok"}
    assert set(outcomes) == set(traffic.answers)
    assert not traffic.untaken & set(outcomes)


@ON_BOTH_TRANSPORTS
def test_slow_requests_under_way_and_in_the_queue_are_answered(tmp_path: Path, ways: tuple[str, ...]) -> None:
    add_model(tmp_path, "slow", builders.slow, steps=40_000)
    row = np.zeros((1, 4), np.float32)
    with serving(tmp_path, "--max-rows", "1", "--warmup-s", "0", *ways) as server, ThreadPoolExecutor(4) as pool:
        expected = rest_json(server, "slow", {"x": row})["y"]
        calls = [
            pool.submit(infer, server, "slow", {"x": row + number})
            for number, infer in enumerate([rest_json, grpc_raw, rest_json, grpc_raw])
        ]
        wait_for_queue(server, "slow", 3)  # the fourth request runs
        server.stop()
        for number, call in enumerate(calls):
            np.testing.assert_allclose(call.result()["y"], expected + number, rtol=1e-5)


def test_pipelined_requests_before_the_signal_are_answered(tmp_path: Path) -> None:
    add_model(tmp_path, "slow", builders.slow, steps=40_000)
    body = json.dumps({"inputs": [json_input("x", np.zeros((1, 4), np.float32))]}).encode()
    infer = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    metadata = b"GET /v2/models/slow HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(tmp_path, "--warmup-s", "0") as server:
        host, _, port = server.http.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
            with starting_batch(server, "slow"):
                connection.sendall(infer + metadata + infer + metadata)
            server.stop()
            answers = connection.makefile("rb").read()
    assert answers.count(b"HTTP/1.1 200 OK") == 4
    assert answers.lower().count(b"connection: close") == 1


def test_readiness_turns_off_at_once_while_requests_are_still_answered(tmp_path: Path, ways: tuple[str, ...]) -> None:
    add_model(tmp_path, "identity", builders.identity)
    row = np.array([[1, 2, 3, 4]], np.float32)
    document = {"inputs": [json_input("x", row)]}
    flags = (*SHORT_WARMUP, "--drain-delay-s", "3600", *ways)
    with starting(tmp_path, *flags) as server, httpx.Client(timeout=LONG_S) as client:
        server.wait_until_loaded()
        before = client.post(rest_url(server, "identity"), json=document)
        assert (before.status_code, before.headers.get("connection")) == (200, None)

        server.send(signal.SIGTERM)
        server.wait_for_line("draining")

        ready = client.get(f"http://{server.http}/v2/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"error": "Server exiting"})
        with triton_clients(server) as (http, grpc_client):
            assert not http.is_server_ready()
            assert not grpc_client.is_server_ready()
            assert not grpc_client.is_server_live()
            # Models stay ready, because they still answer.
            assert http.is_model_ready("identity")
        for _ in range(3):
            answer = client.post(rest_url(server, "identity"), json=document)
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            assert answer.json()["outputs"][0]["data"] == [1, 2, 3, 4]
            np.testing.assert_array_equal(grpc_raw(server, "identity", {"x": row})["y"], row)

        # A second signal has its default effect and ends the server at once.
        server.send(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM


@pytest.mark.parametrize("way", ["python", "call", "lock"])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_a_server_with_a_blocked_loop(tmp_path: Path, way: str, second: signal.Signals) -> None:
    with starting(tmp_path, env=freezing(way)) as server:
        server.wait_for_line("found no models")
        server.send(signal.SIGUSR1)
        server.wait_for_line("freezing")
        server.send(second)
        # Pending signals with the same number merge, so the first must be delivered before the second is sent.
        server.wait_until_delivered(second)
        server.send(second)
        assert server.wait() == -second


def test_server_ends_with_status_0_when_the_drain_delay_is_over() -> None:
    with serving("--example", *SHORT_WARMUP, "--drain-delay-s", "0.2") as server:
        server.stop()
        assert "drained" in server.lines[-1]


@pytest.mark.parametrize("state", ["loading", "warming"])
def test_signal_while_models_are_loading_ends_the_server_with_status_0(tmp_path: Path, state: str) -> None:
    for name in ("a", "b", "c"):
        add_model(tmp_path, name, builders.slow)  # each takes seconds to warm up
    with starting(tmp_path) as server:
        server.wait_for_line("listening", "protocol=metrics ")
        if state == "warming":
            labels = {"model": "a", "version": "1", "state": "warming"}
            wait_for_sample(server, "ortserve_model_state", lambda value: value == 1, **labels)
        server.stop()
        assert "drained" in server.output
        assert "model is ready" not in server.output


def test_long_load_does_not_delay_shutdown(tmp_path: Path) -> None:
    add_model(tmp_path, "slow", builders.slow, steps=30_000_000)  # the first run of its warm-up takes much longer
    with starting(tmp_path, "--warmup-s", "60") as server:
        labels = {"model": "slow", "version": "1", "state": "warming"}
        wait_for_sample(server, "ortserve_model_state", lambda value: value == 1, **labels)
        began_s = time.monotonic()
        server.stop()
        assert time.monotonic() - began_s < 15
        assert "drained" in server.lines[-1]


def test_run_past_the_drain_timeout_does_not_delay_shutdown(tmp_path: Path) -> None:
    add_model(tmp_path, "slow", builders.slow, steps=30_000_000)  # runs much longer
    (tmp_path / "slow" / "model.yaml").write_text("max_rows: 1\n")
    with starting(tmp_path, "--warmup-s", "0", "--drain-timeout-s", "1") as server, ThreadPoolExecutor(3) as pool:
        server.wait_until_loaded()
        row = np.zeros((1, 4), np.float32)
        calls = [pool.submit(infer, server, "slow", {"x": row}) for infer in (rest_json, grpc_raw, rest_json)]
        wait_for_queue(server, "slow", 2)
        began_s = time.monotonic()
        server.send(signal.SIGTERM)
        assert server.wait() == 1
        assert time.monotonic() - began_s < 15
        for protocol, connections in (("http", 2), ("grpc", 1)):
            message = "drain timed out; connections with unanswered requests are closed"
            assert f"{message} protocol={protocol} connections={connections} " in server.output
        assert not any(line.endswith(" drained") for line in server.lines)
        assert "all its requests were cancelled" in server.output
        for call in calls:
            assert call.exception() is not None


@pytest.mark.parametrize("call", [rest_json, grpc_raw])
def test_request_of_one_protocol_that_is_cut_off_shows_in_the_exit_status(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    add_model(tmp_path, "slow", builders.slow, steps=30_000_000)
    with starting(tmp_path, "--warmup-s", "0", "--drain-timeout-s", "0.2") as server, ThreadPoolExecutor(1) as pool:
        server.wait_until_loaded()
        with starting_batch(server, "slow"):
            cut_off = pool.submit(call, server, "slow", {"x": np.zeros((1, 4), np.float32)})
        server.send(signal.SIGTERM)
        assert server.wait() == 1
        assert cut_off.exception() is not None
        protocol = "http" if call is rest_json else "grpc"
        line = server.wait_for_line("connections with unanswered requests are closed")
        assert f" protocol={protocol} connections=1 " in line
        assert server.output.count("connections with unanswered requests are closed") == 1
        assert "runs are abandoned" not in server.output


def _json_body(request_id: str, row: np.ndarray) -> bytes:
    return json.dumps({"id": request_id, "inputs": [json_input("x", row[np.newaxis])]}).encode()


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[str, dict[str, Any]] | None:
    """Send a request and read its whole answer. Returns None if the connection ended before the first byte."""
    try:
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
    except ConnectionError:
        return None
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise AssertionError(f"cut off in the head of an answer: {error.partial!r}") from error
        return None
    length = re.search(rb"content-length: (\d+)", head.lower())
    assert length is not None
    try:
        body = await reader.readexactly(int(length[1]))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise AssertionError("cut off in the body of an answer") from error
    return head.decode(), json.loads(body)


@asynccontextmanager
async def _failing_early(tasks: list[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Stop all clients after a failed test."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _field(line: str, name: str) -> str:
    found = re.search(rf" {name}=(\S+)", line)
    assert found is not None, line
    return found[1]
