"""By default the server listens on loopback only; on other addresses it logs the groups of calls that need no key."""

from pathlib import Path

import httpx
import psutil

from servers import LONG_S, SHORT_WARMUP, serving
from transports import ON_BOTH_TRANSPORTS


@ON_BOTH_TRANSPORTS
def test_default_ports_are_on_loopback_and_control_calls_are_off(grpc_transport: str) -> None:
    with serving("--example", *SHORT_WARMUP, f"--grpc-transport={grpc_transport}") as server:
        listening = [one.laddr for one in psutil.Process(server.pid).net_connections() if one.status == "LISTEN"]
        # Grpcio maps IPv4 addresses.
        assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
        assert len(listening) == 3
        load = httpx.post(f"http://{server.http}/v2/repository/models/simple/load", timeout=LONG_S)
        region = {"key": "/x", "byte_size": 1}
        url = f"http://{server.http}/v2/systemsharedmemory/region/x/register"
        share = httpx.post(url, json=region, timeout=LONG_S)
        assert (load.status_code, share.status_code) == (503, 501), (load.text, share.text)
        assert "these groups need no key" not in server.output


def test_server_on_other_addresses_logs_its_open_groups(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a-key-of-inference-0123456789")
    flags = ("--host", "0.0.0.0", "--model-control-mode", "explicit", "--infer-keys-file", tmp_path / "keys")
    with serving("--example", *SHORT_WARMUP, *flags) as server:
        (line,) = [line for line in server.lines if "these groups need no key" in line]
        assert " WARNING " in line
        assert 'open="metadata, control (log settings, labels, loading models), metrics"' in line
        (line,) = [line for line in server.lines if "keys are sent in plain text" in line]
        assert " WARNING " in line
