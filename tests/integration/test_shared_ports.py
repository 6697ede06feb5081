"""Several servers of one machine on the same ports, with ``reuse_port``."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from encodings_of_requests import grpc_raw, rest_json
from http_wire import wait_until
from models import builders
from servers import SHORT_WARMUP, ServerProcess, add_model, read_metrics, serving, starting

ROW = {"x": np.array([[1, 2, 3, 4]], np.float32)}
CALLS = 32


@contextmanager
def serving_twice(repository: Path, transport: str) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    flags = (*SHORT_WARMUP, "--reuse-port", "--grpc-transport", transport)
    with serving(repository, *flags) as first:
        ports = [part for name in ("http", "grpc") for part in (f"--{name}-port", getattr(first, name).split(":")[1])]
        with serving(repository, *flags, *ports, "--metrics-port", "0") as second:
            yield first, second


def call(server: ServerProcess) -> None:
    """One request on each protocol, on connections of their own."""
    for send in (rest_json, grpc_raw):
        np.testing.assert_array_equal(send(server, "m", ROW)["y"], ROW["x"])


def requests_of(server: ServerProcess, protocol: str) -> float:
    counts = read_metrics(server).by_labels("ortserve_request_duration_seconds_count", "protocol", "outcome")
    return counts.get(f"{protocol} ok", 0)


@pytest.mark.parametrize("transport", ["native", "grpcio"])
def test_each_server_gets_some_of_the_connections(tmp_path: Path, transport: str) -> None:
    add_model(tmp_path, "m", builders.identity)
    with serving_twice(tmp_path, transport) as servers:
        for _ in range(CALLS):
            call(servers[0])
        for protocol in ("http", "grpc"):
            counts = [requests_of(server, protocol) for server in servers]
            assert sum(counts) == CALLS
            assert min(counts) > 0


def test_no_request_fails_while_one_of_the_servers_drains(tmp_path: Path) -> None:
    add_model(tmp_path, "m", builders.identity)
    is_over = Event()
    answered: list[None] = []

    def keep_calling(server: ServerProcess) -> None:
        while not is_over.is_set():
            call(server)
            answered.append(None)

    with serving_twice(tmp_path, "native") as (first, second), ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(keep_calling, first) for _ in range(4)]
        try:
            wait_until(lambda: len(answered) > CALLS or any(one.done() for one in calls))
            second.stop()
            before = len(answered)
            wait_until(lambda: len(answered) > before + CALLS or any(one.done() for one in calls))
        finally:
            is_over.set()
        for one in calls:
            one.result()  # raises the error of a failed call


def test_port_is_shared_only_by_servers_that_both_ask_for_it(tmp_path: Path) -> None:
    add_model(tmp_path, "m", builders.identity)
    for flags, others in ((("--reuse-port",), ()), ((), ("--reuse-port",))):
        with serving(tmp_path, *SHORT_WARMUP, *flags) as first:
            port = first.http.split(":")[1]
            with starting(tmp_path, *others, "--http-port", port, "--grpc-port", "0", "--metrics-port", "0") as second:
                assert second.wait() != 0
                assert f"http_port: cannot listen on 127.0.0.1:{port}: Address already in use" in second.output
