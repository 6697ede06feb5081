"""Clients of the gRPC port that close their sending side, or the whole socket, during their calls."""

import socket
from collections.abc import Iterator
from contextlib import closing

import h2.config
import h2.connection
import h2.events
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from models import builders
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, decisions, serving, wait_for_queue, wait_for_sample

CALLS = 10
PATH = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose model ``slow`` runs one row in about 70 ms."""
    repository = tmp_path_factory.mktemp("half_close")
    (add_model(repository, "slow", builders.slow, steps=20_000) / "model.yaml").write_text("max_rows: 1\n")
    with serving(repository, *SHORT_WARMUP) as server:
        yield server


def call(server: ServerProcess, calls: int) -> tuple[socket.socket, h2.connection.H2Connection]:
    """A connection that has sent its calls."""
    request = service_pb2.ModelInferRequest(model_name="slow")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(np.zeros((1, 4), np.float32).tobytes())
    body = request.SerializeToString()
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
    connection.initiate_connection()
    for number in range(calls):
        stream = 2 * number + 1
        head = {":method": "POST", ":scheme": "http", ":path": PATH, ":authority": "x", "te": "trailers"}
        connection.send_headers(stream, list((head | {"content-type": "application/grpc"}).items()))
        connection.send_data(stream, b"\x00" + len(body).to_bytes(4, "big") + body, end_stream=True)
    host, _, port = server.grpc.rpartition(":")
    peer = socket.create_connection((host, int(port)), LONG_S)
    peer.sendall(connection.data_to_send())
    return peer, connection


def test_half_closed_connection_gets_all_answers_then_ends(server: ServerProcess) -> None:
    peer, connection = call(server, CALLS)
    statuses: list[str] = []
    with closing(peer):
        peer.shutdown(socket.SHUT_WR)
        while data := peer.recv(65536):
            events = connection.receive_data(data)
            trailers = [event for event in events if isinstance(event, h2.events.TrailersReceived)]
            statuses += [str(dict(event.headers)[b"grpc-status"], "ascii") for event in trailers]
    assert statuses == ["0"] * CALLS


def test_calls_of_a_closed_connection_leave_the_queue(server: ServerProcess) -> None:
    left = decisions(server, "slow")["left"]
    peer, _ = call(server, CALLS)
    wait_for_queue(server, "slow", CALLS - 2)
    peer.close()
    name = "ortserve_batching_decisions_total"
    wanted = left + CALLS - 6  # one runs, and some may end before the server notices the disconnect
    wait_for_sample(server, name, lambda value: value >= wanted, model="slow", version="1", decision="left")
