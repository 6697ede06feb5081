"""A blocked event loop is reported; a loop with one waiting client polls for it."""

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import hpack
import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from liveness import LivenessCaller, asking_for_liveness
from models import builders
from ortserve.frontends.grpc.native import frames
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    freezing,
    json_input,
    read_metrics,
    rest_url,
    serving,
    starting,
    triton_clients,
    wait_for_sample,
)

ROW = np.array([[1, 2, 3, 4]], np.float32)


@pytest.mark.parametrize(("way", "step"), [("call", "is blocked"), ("lock", "continues after a stall")])
def test_stall_is_logged_and_counted(tmp_path: Path, way: str, step: str) -> None:
    """A call that holds the interpreter lock blocks all logging, so its stall is reported afterwards."""
    with serving(tmp_path, env=freezing(way, seconds=1.5)) as server:
        server.send(signal.SIGUSR1)
        line = server.wait_for_line("the event loop", step)
        assert way == "lock" or "stack=" in line
        assert way == "lock" or "sitecustomize._freeze:" in line
        assert " seconds=" in server.wait_for_line("the event loop continues after a stall")
        samples = read_metrics(server)
        assert samples.value("ortserve_event_loop_stalls_total") >= 1
        assert samples.value("ortserve_event_loop_stall_seconds_total") > 1


def test_processor_time_of_the_loop_is_counted(tmp_path: Path) -> None:
    """Without threads for other work, nearly all processor time of a server that answers small requests."""
    add_model(tmp_path, "m", builders.identity)
    with serving(tmp_path, *SHORT_WARMUP) as server, httpx.Client(timeout=LONG_S) as client:
        name, process = "ortserve_event_loop_cpu_seconds_total", psutil.Process(server.pid)
        before, loop_before = sum(process.cpu_times()[:2]), wait_for_sample(server, name, lambda value: value > 0)
        document = {"inputs": [json_input("x", ROW)]}
        while sum(process.cpu_times()[:2]) < before + 0.3:
            client.post(rest_url(server, "m"), json=document).raise_for_status()
        loop_cpu_s = wait_for_sample(server, name, lambda value: value > loop_before + 0.15) - loop_before
        assert loop_cpu_s <= sum(process.cpu_times()[:2]) - before + 0.1


def test_stall_is_reported_while_it_lasts(tmp_path: Path) -> None:
    with starting(tmp_path, env=freezing("call")) as server:
        server.wait_until_loaded()
        # The loop answers once it has finished its last line; a loop that freezes in the middle of a line holds the
        # log.
        assert httpx.get(f"{server.url}/v2/health/live", timeout=LONG_S).status_code == 200
        server.send(signal.SIGUSR1)
        server.wait_for_line("the event loop is blocked")
        # The metrics port has its own thread.
        seconds = wait_for_sample(server, "ortserve_event_loop_stall_seconds_total", lambda value: value > 0)
        wait_for_sample(server, "ortserve_event_loop_stall_seconds_total", lambda value: value > seconds)
        server.send(signal.SIGTERM)
        server.wait_until_delivered(signal.SIGTERM)
        server.send(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("turns")
    add_model(repository, "m", builders.identity)
    (add_model(repository, "wide", builders.many_tensors, count=2000) / "model.yaml").write_text("warmup_s: 0\n")
    with serving(repository, *SHORT_WARMUP) as server:
        yield server


CHUNKED: Final = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CALL: Final = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)
PART: Final = b"0123456789abcdef0123"


def chunks(count: int) -> bytes:
    """An infer request over HTTP whose body arrives in chunks of 20 bytes."""
    return CHUNKED + b"14\r\n%b\r\n" % PART * count


def data_frames(count: int) -> bytes:
    """An infer request over gRPC whose message arrives in frames of 20 bytes."""
    head = frames.header_block(1, hpack.Encoder().encode(CALL), frames.MIN_FRAME_SIZE, is_end=False)
    message = frames.frame(frames.DATA, 0, 1, b"\0" + (60_000_000).to_bytes(4, "big"))
    return frames.PREFACE + frames.settings({}) + head + message + frames.frame(frames.DATA, 0, 1, PART) * count


def leaves_others_their_turns(liveness: LivenessCaller, act: Callable[[], object]) -> bool:
    """Whether others wait less than 0.15 s in one of the trials; another program may occupy the processor in some."""
    for _ in range(10):
        liveness.longest_wait_s()
        act()
        if liveness.longest_wait_s() < 0.15:
            return True
    return False


@pytest.mark.parametrize(("port", "make"), [("http", chunks), ("grpc", data_frames)], ids=["http", "grpc"])
def test_request_in_tiny_parts_leaves_others_their_turns(
    server: ServerProcess, port: str, make: Callable[[int], bytes]
) -> None:
    with asking_for_liveness(server.http) as liveness:
        host, _, number = getattr(server, port).rpartition(":")

        def send() -> None:
            with (
                socket.create_connection((host, int(number))) as connection,
                suppress(ConnectionError),  # the gRPC port may treat it as a flood
            ):
                connection.sendall(make(600_000))
                time.sleep(0.2)

        assert leaves_others_their_turns(liveness, send)


def test_request_in_tiny_chunks_is_answered_and_so_is_the_next_one(server: ServerProcess) -> None:
    """Meanwhile the connection is read in short parts."""
    body = json.dumps({"inputs": [json_input("x", ROW)]}).encode().ljust(300_000)
    chunked = CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    sized = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(body)) + body
    host, _, port = server.http.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=LONG_S) as connection,
        connection.makefile("rb") as answers,
    ):
        connection.sendall((chunked + sized) * 2)
        for _ in range(4):
            assert answers.readline().startswith(b"HTTP/1.1 200 ")
            headers = dict(line.lower().split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
            answer = json.loads(answers.read(int(headers[b"content-length"])))
            assert answer["outputs"][0]["data"] == [1, 2, 3, 4]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_configuration_of_thousands_of_tensors_leaves_others_their_turns(server: ServerProcess, protocol: str) -> None:
    with (
        asking_for_liveness(server.http) as liveness,
        triton_clients(server) as (http, grpc),
    ):
        client = http if protocol == "http" else grpc
        assert leaves_others_their_turns(liveness, lambda: client.get_model_config("wide"))


@pytest.fixture(scope="module")
def polling_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that polls for up to 10 ms, in which even a test's client sends its next request."""
    repository = tmp_path_factory.mktemp("polling")
    add_model(repository, "identity", builders.identity)
    with serving(repository, *SHORT_WARMUP, "--busy-poll-us", "10000") as server:
        yield server


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_loop_polls_for_a_client_that_sends_again_at_once(polling_server: ServerProcess, protocol: str) -> None:
    before = polls(polling_server)["hit"]
    with kept(polling_server, protocol) as infer:
        for _ in range(200):
            for _ in range(20):
                infer()
            if polls(polling_server)["hit"] > before:
                break
        else:
            raise AssertionError("no request was polled for")
    assert read_metrics(polling_server).value("ortserve_busy_poll_seconds_total") > 0


def test_loop_sleeps_once_no_request_arrives(polling_server: ServerProcess) -> None:
    with kept(polling_server, "http") as infer:
        for _ in range(20):
            infer()
    # The loop polls for at most 10 ms; one of these requests to another thread takes at least a third of that.
    seconds = [read_metrics(polling_server).value("ortserve_busy_poll_seconds_total") for _ in range(30)]
    assert seconds[-1] == seconds[-10]


def test_loop_with_polling_off_never_polls(tmp_path: Path) -> None:
    add_model(tmp_path, "identity", builders.identity)
    with serving(tmp_path, *SHORT_WARMUP, "--busy-poll-us", "0") as server:
        with kept(server, "http") as infer:
            for _ in range(50):
                infer()
        assert polls(server) == {"hit": 0, "miss": 0}


@contextmanager
def kept(server: ServerProcess, protocol: str) -> Iterator[Callable[[], None]]:
    """Returns a function that makes a request on a persistent connection and checks its answer."""
    module: Any = triton_http if protocol == "http" else triton_grpc
    address = server.http if protocol == "http" else server.grpc
    inputs = [module.InferInput("x", list(ROW.shape), "FP32")]
    inputs[0].set_data_from_numpy(ROW)
    with module.InferenceServerClient(address) as client:

        def infer() -> None:
            np.testing.assert_array_equal(client.infer("identity", inputs).as_numpy("y"), ROW)

        yield infer


def polls(server: ServerProcess) -> dict[str, float]:
    samples = read_metrics(server)
    return {result: samples.value("ortserve_busy_polls_total", result=result) for result in ("hit", "miss")}
