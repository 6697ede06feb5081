"""The addresses of the ports: IPv4, IPv6, or both."""

import socket
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from models import builders
from servers import LONG_S, SHORT_WARMUP, add_model, starting


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize("transport", ["grpcio", "native"])
@pytest.mark.parametrize(
    ("host", "reached"), [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"]), ("127.0.0.1", ["127.0.0.1"])]
)
def test_every_port_listens_on_its_configured_address_only(
    tmp_path: Path, transport: str, host: str, reached: list[str]
) -> None:
    add_model(tmp_path, "identity", builders.identity)
    with starting(tmp_path, *SHORT_WARMUP, "--host", host, "--grpc-transport", transport) as server:
        server.wait_for_line("initial loading has ended")
        http, rpc, metrics = (address.rpartition(":")[2] for address in (server.http, server.grpc, server.metrics))
        for address in reached:
            for port, path in ((http, "v2/health/ready"), (metrics, "metrics")):
                assert httpx.get(f"http://{address}:{port}/{path}", timeout=LONG_S).status_code == 200
            with grpc.insecure_channel(f"{address}:{rpc}") as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=LONG_S).ready
        # Read the sockets instead of connecting, because another server may use the same port on another address.
        sockets = psutil.Process(server.pid).net_connections("inet")
        addresses = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
        listening = {(address.ip.removeprefix("::ffff:"), address.port) for address in addresses}  # grpcio maps IPv4
        assert listening == {(host, int(port)) for port in (http, rpc, metrics)}
        command = [sys.executable, "-m", "ortserve", "health", "--host", host, "--metrics-port", metrics]
        assert subprocess.run(command, timeout=LONG_S, check=False).returncode == 0
        server.stop()


@pytest.mark.parametrize("option", ["http_port", "grpc_port", "metrics_port"])
def test_error_names_the_port_in_use(tmp_path: Path, option: str) -> None:
    ports = dict.fromkeys(("--http-port", "--grpc-port", "--metrics-port"), "0")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = str(taken.getsockname()[1])
        ports[f"--{option.replace('_', '-')}"] = port
        flags = [part for flag in ports.items() for part in flag]
        with starting(tmp_path, "--host", "::1", "--grpc-transport", "native", *flags) as server:
            assert server.wait() != 0
            assert f"{option}: cannot listen on ::1:{port}: Address already in use" in server.output
