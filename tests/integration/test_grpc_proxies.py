"""Real proxies in front of the gRPC port; they use HTTP/2 differently than clients.

The tests need nginx, HAProxy and Envoy (packages nginx and haproxy; Envoy is fetched), and skip those that are missing.
"""

import queue
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from apart import UnavailableError
from models import builders
from ortserve.config.options import ServerOptions
from ortserve.frontends.grpc.calls import SERVICE_NAME
from proxies import find_proxy
from servers import LONG_S, SHORT_WARMUP, ServerProcess, add_model, read_metrics, serving

NGINX: Final = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr;
events {{ }}
http {{
    access_log off; client_max_body_size 0;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream ortserve {{ server {server}; keepalive 8; }}
    server {{ listen 127.0.0.1:{port} http2; location / {{ grpc_pass grpc://ortserve; }} }}
}}
"""
HAPROXY: Final = """
global
    maxconn 200
    tune.bufsize {bufsize}
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
frontend grpc
    bind 127.0.0.1:{port} proto h2
    default_backend ortserve
backend ortserve
    server one {server} proto h2
"""
ENVOY: Final = """
static_resources:
  listeners:
  - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: grpc
          codec_type: HTTP2
          route_config:
            virtual_hosts:
            - {{ name: all, domains: ["*"], routes: [{{ match: {{ prefix: "/" }},
                route: {{ cluster: ortserve, timeout: 60s }} }}] }}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{ "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
  clusters:
  - name: ortserve
    type: STATIC
    load_assignment:
      cluster_name: ortserve
      endpoints: [{{ lb_endpoints: [{{ endpoint: {{ address: {{ socket_address: {{ address: {host},
        port_value: {server_port} }} }} }} }}] }}]
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{ http2_protocol_options: {{}} }}
"""
PROXIES: Final = {
    "nginx": (NGINX, ("nginx", "-p", "{folder}", "-c")),
    "haproxy": (HAPROXY.replace("{bufsize}", "16384"), ("haproxy", "-db", "-f")),
    # The value of deploy/proxies.
    "haproxy with larger buffers": (HAPROXY.replace("{bufsize}", "65536"), ("haproxy", "-db", "-f")),
    "envoy": (ENVOY, ("envoy", "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning", "-c")),
}

BEHIND: Final = [*(("native", name) for name in PROXIES), ("grpcio", "nginx")]
"""gRPC transports with a proxy in front. grpcio's HTTP/2 is tested elsewhere, so one proxy suffices for it."""


@contextmanager
def proxying(name: str, address: str, folder: Path) -> Iterator[str]:
    """Run a proxy in front of an address. Yields the address of the proxy."""
    config, command = PROXIES[name]
    try:
        _, program = find_proxy(command[0])
    except UnavailableError as error:
        pytest.skip(f"{name} cannot be had here: {error}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    host, server_port = address.split(":")
    file = folder / f"{name}.yaml"
    file.write_text(config.format(folder=folder, port=port, server=address, host=host, server_port=server_port))
    arguments = [str(program), *(part.format(folder=folder) for part in command[1:])]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen([*arguments, str(file)], stdout=log, stderr=log)
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(LONG_S)
            yield f"127.0.0.1:{port}"
        except BaseException as error:
            error.add_note((folder / "log").read_text())
            raise
        finally:
            process.terminate()
            process.wait(LONG_S)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ServerProcess]]:
    """Starts a server of each gRPC transport once."""
    repository = tmp_path_factory.mktemp("proxies")
    add_model(repository, "identity", builders.identity)
    add_model(repository, "counting", builders.counting)
    with ExitStack() as stack:
        yield cache(
            lambda transport: stack.enter_context(serving(repository, *SHORT_WARMUP, f"--grpc-transport={transport}"))
        )


@pytest.fixture(scope="module", params=BEHIND, ids="-".join)
def behind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """One of ``BEHIND``."""
    transport, proxy = request.param
    return transport, proxy


@pytest.fixture(scope="module")
def server(servers: Callable[[str], ServerProcess], behind: tuple[str, str]) -> ServerProcess:
    return servers(behind[0])


@pytest.fixture(scope="module")
def proxy(server: ServerProcess, behind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with proxying(behind[1], server.grpc, tmp_path_factory.mktemp("proxy")) as address:
        yield address


def inputs(array: np.ndarray) -> list[triton.InferInput]:
    tensor = triton.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return [tensor]


@pytest.mark.parametrize("rows", [1, 10, 10_000, 1_000_000])
def test_request_and_answer_of_any_size_are_transmitted(proxy: str, rows: int) -> None:
    array = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    with triton.InferenceServerClient(proxy) as client:
        for _ in range(20 if rows < 1000 else 1):
            result = client.infer("identity", inputs(array))
            assert result is not None
            np.testing.assert_array_equal(result.as_numpy("y"), array)


@pytest.mark.parametrize(("size", "calls"), [(600 * 1024, 100), (20 * 2**20, 4)])
def test_large_answers_are_sent_concurrently(proxy: str, server: ServerProcess, size: int, calls: int) -> None:
    """Windows differ by proxy: HAProxy returns the window of a large answer in uneven, partly tiny increments."""
    count = triton.InferInput("x", [1], "INT32")
    count.set_data_from_numpy(np.array([size // 4], np.int32))
    expected = np.arange(size // 4, dtype=np.int32)
    with triton.InferenceServerClient(proxy) as client, ThreadPoolExecutor(4) as threads:
        for result in threads.map(lambda _: client.infer("counting", [count]), range(calls)):
            assert result is not None
            np.testing.assert_array_equal(result.as_numpy("y"), expected)
    metrics = read_metrics(server)
    assert not metrics.by_labels("ortserve_grpc_connection_errors_total", "code")
    assert not metrics.by_labels("ortserve_grpc_cut_answers_total", "cause")


def test_stream_is_transmitted_in_both_directions(proxy: str) -> None:
    answers: queue.Queue[object] = queue.Queue()
    with triton.InferenceServerClient(proxy) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for number in range(200):
            client.async_stream_infer("identity", inputs(np.full((1, 4), number, np.float32)))
            answer = answers.get(timeout=LONG_S)
            assert isinstance(answer, triton.InferResult), answer
            assert answer.as_numpy("y")[0, 0] == number
        client.stop_stream()


def test_status_and_details_are_transmitted(proxy: str) -> None:
    with (
        triton.InferenceServerClient(proxy) as client,
        pytest.raises(triton.InferenceServerException) as caught,
    ):
        client.infer("nowhere", inputs(np.zeros((1, 4), np.float32)))
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert caught.value.message() == "Request for unknown model: 'nowhere' is not found"


def test_status_of_an_answer_before_the_end_of_its_request_is_transmitted(proxy: str) -> None:
    with grpc.insecure_channel(proxy) as channel:
        infer: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE_NAME}/ModelInfer")
        too_large = bytes(ServerOptions().max_body_bytes + 1)
        for _ in range(3):
            code: grpc.StatusCode = infer.future(too_large, timeout=LONG_S).code()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_many_concurrent_calls_are_answered(proxy: str) -> None:
    with triton.InferenceServerClient(proxy) as client:

        def one(number: int) -> float:
            result = client.infer("identity", inputs(np.full((1, 4), number, np.float32)))
            assert result is not None
            return float(result.as_numpy("y")[0, 0])

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(one, range(400))) == list(range(400))
