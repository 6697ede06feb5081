"""Requests whose client disconnects leave the queue without effects on others, on both protocols.

Over HTTP/1.1 the client sends a reset. A FIN alone cancels only if the option enables it (``test_half_closed``).
"""

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

import grpc
import h2.connection
import h2.errors
import h2.events
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from encodings_of_requests import json_array, rest_json
from models import builders
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    decisions,
    json_input,
    read_metrics,
    serving,
    wait_for_queue,
    wait_for_sample,
)

MAX_ROWS: Final = 4
FIRST: Final = 20
STORM: Final = 100
WIDE: Final = 2**16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, ways: tuple[str, ...]) -> Iterator[ServerProcess]:
    """``slow`` runs four rows in about 100 ms; ``long`` takes three times as long; ``identity`` answers at once."""
    repository = tmp_path_factory.mktemp("leaving")
    (add_model(repository, "slow", builders.slow, steps=30_000) / "model.yaml").write_text(f"max_rows: {MAX_ROWS}\n")
    (add_model(repository, "long", builders.slow, steps=100_000) / "model.yaml").write_text("warmup_s: 0\n")
    add_model(repository, "identity", builders.identity)
    add_model(repository, "wide", builders.identity, shape=("batch", WIDE))
    with serving(repository, *SHORT_WARMUP, *ways) as server:
        yield server


class Caller:
    """An HTTP connection that writes requests and reads answers independently."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def connect(server: ServerProcess, buffered: int = 2**16) -> "Caller":
        """Connect. Kernel and caller buffer about ``buffered`` bytes each of answers that are not read."""
        host, port = server.http.split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffered)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        return Caller(*await asyncio.open_connection(sock=connection, limit=buffered))

    async def send(self, *requests: bytes) -> None:
        self._writer.write(b"".join(requests))
        await self._writer.drain()

    async def receive(self) -> tuple[int, dict[str, str], Any]:
        """Read the next answer. Returns its status, headers and document."""
        status, headers = await self.receive_head()
        return status, headers, json.loads(await self.receive_body(headers))

    async def receive_head(self) -> tuple[int, dict[str, str]]:
        head = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), LONG_S)).decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        return int(head[0].split(" ")[1]), headers

    async def receive_body(self, headers: dict[str, str]) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(int(headers["content-length"])), LONG_S)

    async def leave(self) -> None:
        """Disconnect with a reset, unless already disconnected."""
        if not self._writer.is_closing():
            linger = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        await self.close()

    async def close(self) -> None:
        """Disconnect with a FIN."""
        self._writer.close()
        await self._writer.wait_closed()


@pytest.fixture
async def callers(server: ServerProcess) -> AsyncIterator[list[Caller]]:
    """``FIRST + STORM`` connected clients; those still connected disconnect at the end."""
    callers = [await Caller.connect(server) for _ in range(FIRST + STORM)]
    yield callers
    for caller in callers:
        await caller.leave()


def http_request(model: str, document: object, *headers: str) -> bytes:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "\r\n"]).encode() + body


def row(number: int) -> np.ndarray:
    return np.full((1, 4), number, np.float32)


def asking(number: int, model: str = "slow", *headers: str) -> bytes:
    return http_request(model, {"id": str(number), "inputs": [json_input("x", row(number))]}, *headers)


def rows_run(server: ServerProcess) -> float:
    return read_metrics(server).value("ortserve_batch_rows_sum", model="slow", version="1")


async def wait_until_left(server: ServerProcess, count: int) -> None:
    """Poll until ``count`` requests have left the queue of ``slow``."""
    labels = {"model": "slow", "version": "1", "decision": "left"}
    name = "ortserve_batching_decisions_total"
    await asyncio.to_thread(wait_for_sample, server, name, lambda left: left >= count, **labels)


async def check_answers(callers: Sequence[Caller], numbers: Sequence[int], constant: np.ndarray) -> None:
    """Each caller receives the answer for the row of its number, bit for bit as if it ran alone."""
    for number in numbers:
        status, _, document = await callers[number].receive()
        assert (status, document.get("id")) == (200, str(number)), document
        np.testing.assert_array_equal(json_array(document["outputs"][0]), row(number) + constant)


async def test_disconnected_requests_are_not_run(server: ServerProcess, callers: list[Caller]) -> None:
    constant = rest_json(server, "slow", {"x": row(0)})["y"]
    left, wasted, ran = decisions(server, "slow")["left"], decisions(server, "slow")["wasted_rows"], rows_run(server)
    # The remaining requests are sent first, so that no request to be cancelled is already in a batch.
    for number in range(FIRST):
        await callers[number].send(asking(number))
    await asyncio.to_thread(wait_for_queue, server, "slow", FIRST - 2 * MAX_ROWS)
    for number in range(FIRST, FIRST + STORM):
        await callers[number].send(asking(number))
    await asyncio.to_thread(wait_for_queue, server, "slow", STORM)
    leavers = np.random.default_rng(0).choice(np.arange(FIRST, FIRST + STORM), (FIRST + STORM) // 2, replace=False)
    for number in leavers:
        await callers[number].leave()

    await check_answers(callers, sorted(set(range(FIRST + STORM)) - set(leavers.tolist())), constant)
    await wait_until_left(server, left + len(leavers))
    assert decisions(server, "slow")["left"] == left + len(leavers)
    ran = rows_run(server) - ran
    assert decisions(server, "slow")["wasted_rows"] - wasted <= 1
    assert ran <= (FIRST + STORM) // 2 + 1
    samples = read_metrics(server)
    assert samples.value("ortserve_queue_rows", model="slow", version="1") == 0
    outcomes = samples.by_labels("ortserve_request_duration_seconds_count", "model", "protocol", "outcome")
    assert outcomes["slow http cancelled"] == len(leavers)


async def test_cancelled_grpc_calls_leave_the_queue(server: ServerProcess) -> None:
    constant = rest_json(server, "slow", {"x": row(0)})["y"]
    left, wasted, ran = decisions(server, "slow")["left"], decisions(server, "slow")["wasted_rows"], rows_run(server)
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        send = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def start(number: int) -> "grpc.aio.UnaryUnaryCall[bytes, bytes]":
            request = service_pb2.ModelInferRequest(model_name="slow")
            request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
            request.raw_input_contents.append(row(number).tobytes())
            return send(request.SerializeToString(), timeout=LONG_S)

        staying = [start(number) for number in range(FIRST)]
        await asyncio.to_thread(wait_for_queue, server, "slow", FIRST - 2 * MAX_ROWS)
        leaving = [start(number) for number in range(FIRST)]
        await asyncio.to_thread(wait_for_queue, server, "slow", FIRST)
        for leaver in leaving:
            leaver.cancel()
        for number, call in enumerate(staying):
            answer = service_pb2.ModelInferResponse.FromString(await call)
            np.testing.assert_array_equal(
                np.frombuffer(answer.raw_output_contents[0], np.float32), number + constant[0]
            )
        await wait_until_left(server, left + FIRST)
    assert rows_run(server) - ran == FIRST
    assert decisions(server, "slow")["wasted_rows"] == wasted


async def test_disconnect_during_the_run_wastes_only_its_row(
    server: ServerProcess,
) -> None:
    leaver = await Caller.connect(server)
    await leaver.send(asking(1, "long"))
    runs = {"model": "long", "version": "1", "decision": "batches"}
    name = "ortserve_batching_decisions_total"
    await asyncio.to_thread(wait_for_sample, server, name, lambda batches: batches == 1, **runs)
    await leaver.leave()
    first, second = (rest_json(server, "long", {"x": row(number)})["y"] for number in (0, 3))
    np.testing.assert_allclose(second - first, 3, rtol=1e-5)
    taken = decisions(server, "long")
    assert (taken["batches"], taken["wasted_rows"], taken["left"]) == (3, 1, 0)


async def test_grpc_calls_of_no_rows_that_are_cancelled_at_once_do_not_run(server: ServerProcess) -> None:
    name, runs = "ortserve_batching_decisions_total", {"model": "long", "version": "1", "decision": "batches"}
    before = decisions(server, "long")
    busy = await Caller.connect(server)
    await busy.send(asking(0, "long"))
    await asyncio.to_thread(wait_for_sample, server, name, lambda batches: batches > before["batches"], **runs)
    request = service_pb2.ModelInferRequest(model_name="long", raw_input_contents=[b""])
    request.inputs.add(name="x", datatype="FP32", shape=[0, 4])
    message = request.SerializeToString()
    path = "/inference.GRPCInferenceService/ModelInfer"
    head = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    client = h2.connection.H2Connection()
    client.initiate_connection()
    for stream in range(1, 2 * FIRST, 2):  # the server reads the end of each call with its request
        client.send_headers(stream, [*head.items(), ("content-type", "application/grpc")])
        client.send_data(stream, b"\x00" + len(message).to_bytes(4, "big") + message, end_stream=True)
        client.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
    client.ping(bytes(8))
    reader, writer = await asyncio.open_connection(*server.grpc.split(":"))
    writer.write(client.data_to_send())
    events: list[h2.events.Event] = []
    while not any(isinstance(event, h2.events.PingAckReceived) for event in events):
        events += client.receive_data(await asyncio.wait_for(reader.read(65536), LONG_S))
    writer.close()
    assert (await busy.receive())[0] == 200
    await busy.leave()
    rest_json(server, "long", {"x": row(0)})  # runs after everything that was queued before it
    after = decisions(server, "long")
    assert (after["batches"] - before["batches"], after["left"] - before["left"]) == (2, FIRST)


async def test_connection_stays_usable_after_errors(server: ServerProcess) -> None:
    caller = await Caller.connect(server)
    for request, expected in (
        (asking(1, "identity"), 200),
        (http_request("identity", b"{"), 400),
        (asking(2, "nowhere"), 404),
        (asking(3, "identity", "X-Request-Timeout-Ms: 0"), 504),
        (http_request("identity", {"inputs": [json_input("x", np.ones((1, 5), np.float32))]}), 400),
        (asking(4, "identity"), 200),
    ):
        await caller.send(request)
        status, headers, _ = await caller.receive()
        assert (status, headers.get("connection")) == (expected, None)
    await caller.leave()


async def test_pipelined_requests_are_answered_in_their_order(server: ServerProcess) -> None:
    caller = await Caller.connect(server)
    models = ("slow", "identity", "nowhere", "slow", "identity")
    await caller.send(*(asking(number, model) for number, model in enumerate(models)))
    constant = rest_json(server, "slow", {"x": row(0)})["y"]
    for number, model in enumerate(models):
        status, _, document = await caller.receive()
        if model == "nowhere":
            assert status == 404
            continue
        assert (status, document["id"]) == (200, str(number))
        expected = row(number) + constant if model == "slow" else row(number)
        np.testing.assert_array_equal(json_array(document["outputs"][0]), expected)
    await caller.leave()


async def test_disconnect_drops_pipelined_requests(server: ServerProcess) -> None:
    before = decisions(server, "slow")
    others = [await Caller.connect(server) for _ in range(3 * MAX_ROWS)]
    for number, other in enumerate(others):
        await other.send(asking(number))
    await asyncio.to_thread(wait_for_queue, server, "slow", MAX_ROWS)
    leaver = await Caller.connect(server)
    await leaver.send(asking(1), asking(2), asking(3))
    await asyncio.to_thread(wait_for_queue, server, "slow", 2 * MAX_ROWS - 3)
    await leaver.leave()
    constant = rest_json(server, "slow", {"x": row(0)})["y"]
    await check_answers(others, range(len(others)), constant)
    assert decisions(server, "slow")["wasted_rows"] - before["wasted_rows"] <= 1
    for other in others:
        await other.leave()


async def test_slow_readers_get_their_own_bytes_while_others_leave_and_time_out(server: ServerProcess) -> None:
    """Answers of up to 768 KiB wait for callers with small buffers while the next batches run."""
    draw = np.random.default_rng(0)
    sent = [draw.standard_normal((1 + number % 3, WIDE), np.float32) for number in range(96)]

    async def ask(number: int) -> str:
        rows = sent[number].tobytes()
        entry: dict[str, Any] = {"name": "x", "shape": sent[number].shape, "datatype": "FP32"}
        entry |= {"parameters": {"binary_data_size": len(rows)}}
        document = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
        headers = [f"Inference-Header-Content-Length: {len(document)}"]
        headers += ["X-Request-Timeout-Ms: 5"] * (number % 8 == 5)
        caller = await Caller.connect(server, 4096)
        await caller.send(http_request("wide", document + rows, *headers))
        status, answered = await caller.receive_head()
        if status == 200 and number % 4 != 3:
            body = await caller.receive_body(answered)
            assert body[int(answered["inference-header-content-length"]) :] == rows
        await caller.leave()
        return f"left {status}" if number % 4 == 3 else str(status)

    outcomes = Counter(await asyncio.gather(*map(ask, range(len(sent)))))
    assert outcomes.keys() <= {"200", "left 200", "429", "504"}
    assert outcomes["200"] >= len(sent) // 2
    assert outcomes["left 200"] == len(sent) // 4
