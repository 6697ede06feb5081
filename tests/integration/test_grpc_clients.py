"""The unmodified Triton client, sync and aio, streaming and not, against a real server with real models."""

import asyncio
import queue
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from models import builders
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    read_metrics,
    serving,
    starting,
    wait_for_queue,
    wait_for_sample,
)
from transports import ON_BOTH_TRANSPORTS


def row(number: float) -> np.ndarray:
    return np.full((1, 4), number, np.float32)


def inputs(array: np.ndarray) -> list[triton.InferInput]:
    tensor = triton.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return [tensor]


@dataclass
class Relayed:
    """Bytes that a server sent."""

    total: int = 0


@contextmanager
def relaying(address: str) -> Iterator[tuple[str, Relayed]]:
    """Relay between clients and a server, one connection after the other, and count the server's bytes."""
    relayed = Relayed()
    host, port = address.split(":")

    def pump(source: socket.socket, target: socket.socket, *, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if counts:
                    relayed.total += len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, socket.create_connection((host, int(port))) as server:
                    there = threading.Thread(target=pump, args=(client, server), kwargs={"counts": False})
                    there.start()
                    pump(server, client, counts=True)
                    there.join()

    listener = socket.create_server(("127.0.0.1", 0))
    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", relayed
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(LONG_S)


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory, grpc_transport: str) -> Iterator[ServerProcess]:
    """A server on which one row of ``slow`` runs at a time and takes long; ``identity`` answers at once."""
    repository = tmp_path_factory.mktemp("slow")
    add_model(repository, "slow", builders.slow, steps=60_000)
    add_model(repository, "identity", builders.identity)
    (repository / "slow" / "model.yaml").write_text("max_rows: 1\n")
    with serving(repository, f"--grpc-transport={grpc_transport}", "--warmup-s", "0") as server:
        yield server


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_stream_of_the_sync_client_answers_in_order(zoo_server: ServerProcess, compression: str | None) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(zoo_server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), compression_algorithm=compression)
        for number in range(50):
            model = "nowhere" if number % 10 == 7 else "identity_fp32"
            client.async_stream_infer(
                model,
                inputs(row(number)),
                request_id=str(number),
                enable_empty_final_response=True,
            )
        for number in range(50):
            result, error = answers.get(timeout=LONG_S)
            if number % 10 == 7:
                assert "Request for unknown model: 'nowhere' is not found" in error.message()
                continue
            assert error is None
            response = result.get_response()
            assert (response.id, response.model_name, response.model_version) == (str(number), "identity_fp32", "1")
            assert response.parameters["triton_final_response"].bool_param
            np.testing.assert_array_equal(result.as_numpy("y"), row(number))
        client.stop_stream()
    assert answers.empty()


async def test_stream_of_the_aio_client_answers_in_order(zoo_server: ServerProcess) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(50):
            yield {"model_name": "identity_fp32", "inputs": inputs(row(number)), "request_id": str(number)}

    async with triton_aio.InferenceServerClient(zoo_server.grpc) as client:
        number = 0
        async for result, error in client.stream_infer(requests(), stream_timeout=LONG_S):
            assert error is None
            assert result.get_response().id == str(number)
            np.testing.assert_array_equal(result.as_numpy("y"), row(number))
            number += 1
    assert number == 50


def test_requests_of_one_stream_share_a_batch(tmp_path: Path, grpc_transport: str) -> None:
    (add_model(tmp_path, "slow", builders.slow, steps=20_000) / "model.yaml").write_text("batched: true\n")
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with (
        serving(tmp_path, f"--grpc-transport={grpc_transport}", "--warmup-s", "0", "--max-rows", "16") as server,
        triton.InferenceServerClient(server.grpc) as client,
    ):
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(16):
            client.async_stream_infer("slow", inputs(row(number)), request_id=str(number))
        for number in range(16):
            result, error = answers.get(timeout=LONG_S)
            assert error is None
            assert result.get_response().id == str(number)
        client.stop_stream()
        samples = read_metrics(server)
    assert sum(samples.by_labels("ortserve_batch_rows_count", "model").values()) < 16


def test_cancelled_stream_removes_its_requests_from_the_queue(slow_server: ServerProcess) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(slow_server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(8):
            client.async_stream_infer("slow", inputs(row(number)))
        wait_for_queue(slow_server, "slow", 3)
        client.stop_stream(cancel_requests=True)
    wait_for_sample(slow_server, "ortserve_queue_rows", lambda rows: rows == 0, model="slow", version="1")


def test_stream_timeout_of_the_client_ends_the_stream(slow_server: ServerProcess) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(slow_server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=0.5)
        for number in range(200):
            client.async_stream_infer("slow", inputs(row(number)))
        errors: list[InferenceServerException] = []
        while not errors or errors[-1].status() != "StatusCode.DEADLINE_EXCEEDED":
            _, error = answers.get(timeout=LONG_S)
            if error is not None:
                errors.append(error)
        client.stop_stream()
    wait_for_sample(slow_server, "ortserve_queue_rows", lambda rows: rows == 0, model="slow", version="1")


def test_async_infer_calls_back_also_when_cancelled(slow_server: ServerProcess) -> None:
    answered: Future[tuple[Any, Any]] = Future()
    cancelled: Future[tuple[Any, Any]] = Future()
    with triton.InferenceServerClient(slow_server.grpc) as client:
        first = client.async_infer("slow", inputs(row(1)), lambda result, error: answered.set_result((result, error)))
        second = client.async_infer("slow", inputs(row(2)), lambda result, error: cancelled.set_result((result, error)))
        wait_for_queue(slow_server, "slow", 1)
        second.cancel()
        assert first is not None
        result, error = answered.result(LONG_S)
        assert error is None
        assert result.as_numpy("y").shape == (1, 4)
        result, error = cancelled.result(LONG_S)
        assert result is None
        assert error.status() == "StatusCode.CANCELLED"
    wait_for_sample(slow_server, "ortserve_queue_rows", lambda rows: rows == 0, model="slow", version="1")


def test_client_timeout_is_a_deadline(slow_server: ServerProcess) -> None:
    with (
        triton.InferenceServerClient(slow_server.grpc) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer("slow", inputs(row(1)), client_timeout=0.001)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"


async def test_cancelled_aio_infer_leaves_the_queue(slow_server: ServerProcess) -> None:
    async with triton_aio.InferenceServerClient(slow_server.grpc) as client:
        calls = [asyncio.create_task(client.infer("slow", inputs(row(number)))) for number in range(4)]
        await asyncio.to_thread(wait_for_queue, slow_server, "slow", 2)
        for call in calls:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await asyncio.to_thread(
        wait_for_sample, slow_server, "ortserve_queue_rows", lambda rows: rows == 0, model="slow", version="1"
    )


def test_keepalive_options_of_the_client_are_served(zoo_server: ServerProcess) -> None:
    options = triton.KeepAliveOptions(keepalive_time_ms=10_000, keepalive_timeout_ms=5_000)
    with triton.InferenceServerClient(zoo_server.grpc, keepalive_options=options) as client:
        result = client.infer("identity_fp32", inputs(row(3)))
        assert result is not None
        np.testing.assert_array_equal(result.as_numpy("y"), row(3))


@ON_BOTH_TRANSPORTS
@pytest.mark.parametrize("answers", ["gzip", "deflate"])
def test_answer_compression_follows_the_option_not_the_request(
    tmp_path: Path, answers: str, grpc_transport: str
) -> None:
    add_model(tmp_path, "identity", builders.identity)
    array = np.zeros((10_000, 4), np.float32)
    flags = ("--warmup-s", "0", "--max-rows", "10000", "--grpc-response-compression", answers)
    with (
        serving(tmp_path, f"--grpc-transport={grpc_transport}", *flags) as server,
        relaying(server.grpc) as (address, relayed),
    ):
        for compression in (None, "gzip", "deflate"):
            before = relayed.total
            with triton.InferenceServerClient(address) as client:
                result = client.infer("identity", inputs(array), compression_algorithm=compression)
                assert result is not None
                np.testing.assert_array_equal(result.as_numpy("y"), array)
            assert 0 < relayed.total - before < array.nbytes / 10


async def test_many_streams_are_answered_and_released(zoo_server: ServerProcess) -> None:
    streams, requests = 40, 50

    async def one(client: triton_aio.InferenceServerClient, stream: int, *, leaves_after: int) -> int:
        async def send() -> AsyncIterator[dict[str, Any]]:
            for number in range(requests):
                yield {
                    "model_name": "identity_fp32",
                    "inputs": inputs(row(stream * requests + number)),
                    "request_id": str(number),
                }

        count = 0
        answers = client.stream_infer(send())
        async for result, error in answers:
            assert error is None
            assert result.get_response().id == str(count)
            assert result.as_numpy("y")[0, 0] == stream * requests + count
            count += 1
            if count == leaves_after:
                answers.cancel()
                break
        return count

    async with triton_aio.InferenceServerClient(zoo_server.grpc) as client:
        for _ in range(3):
            counts = await asyncio.gather(
                *(one(client, stream, leaves_after=7 if stream % 4 == 0 else 0) for stream in range(streams))
            )
            assert counts == [7 if stream % 4 == 0 else requests for stream in range(streams)]
    await asyncio.to_thread(wait_for_sample, zoo_server, "ortserve_grpc_streams", lambda value: value == 0)
    samples = await asyncio.to_thread(read_metrics, zoo_server)
    assert samples.value("ortserve_grpc_streams") == 0
    assert samples.value("ortserve_queue_rows", model="identity_fp32", version="1") == 0


@ON_BOTH_TRANSPORTS
def test_open_stream_is_answered_and_delays_no_shutdown(tmp_path: Path, grpc_transport: str) -> None:
    add_model(tmp_path, "slow", builders.slow, steps=60_000)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with (
        starting(
            tmp_path,
            f"--grpc-transport={grpc_transport}",
            "--warmup-s",
            "0",
            "--max-rows",
            "1",
            "--drain-timeout-s",
            "3600",
        ) as server,
        triton.InferenceServerClient(server.grpc) as client,
    ):
        server.wait_until_loaded()
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(4):
            client.async_stream_infer("slow", inputs(row(number)), request_id=str(number))
        wait_for_queue(server, "slow", 3)
        server.send(signal.SIGTERM)
        for number in range(4):
            result, error = answers.get(timeout=LONG_S)
            assert error is None
            assert result.get_response().id == str(number)
        _, error = answers.get(timeout=LONG_S)
        assert error.status() == "StatusCode.UNAVAILABLE"
        assert "the server is shutting down" in error.message()
        client.stop_stream()
        assert server.wait() == 0
        assert "Traceback" not in server.output


async def test_health_is_watched_from_loading_to_the_end(tmp_path: Path, grpc_transport: str) -> None:
    add_model(tmp_path, "identity", builders.identity)
    with starting(tmp_path, f"--grpc-transport={grpc_transport}", *SHORT_WARMUP) as server:
        address = await asyncio.to_thread(lambda: server.grpc)
        async with grpc.aio.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            statuses: list[int] = []

            async def listen() -> None:
                async for answer in watch:
                    statuses.append(answer.status)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        server.send(signal.SIGTERM)

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(listen(), LONG_S / 2)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert statuses[0] == health_pb2.HealthCheckResponse.NOT_SERVING
        assert statuses.count(health_pb2.HealthCheckResponse.SERVING) == 1
        assert await asyncio.to_thread(server.wait) == 0
        assert "Traceback" not in server.output
