"""The server sends no telemetry: ONNX Runtime's wheels send it unless it is disabled before their import."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from encodings_of_requests import grpc_raw, rest_json
from servers import LONG_S, SHORT_WARMUP, read_metrics, serving

ONES = {"INPUT0": np.ones((1, 16), np.int32), "INPUT1": np.ones((1, 16), np.int32)}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment in which all of a user's folders are under ``tmp_path``."""
    folders = {"HOME": "home", "XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "data"}
    for folder in folders.values():
        (tmp_path / folder).mkdir()
    return {name: str(tmp_path / folder) for name, folder in folders.items()}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def test_server_writes_nothing_to_its_users_folders(tmp_path: Path, home: dict[str, str]) -> None:
    with serving("--example", *SHORT_WARMUP, env=home) as server:
        rest_json(server, "simple", ONES)
        grpc_raw(server, "simple", ONES)
        assert files(tmp_path) == []
    assert files(tmp_path) == []


WATCH_THE_IMPORT = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            print("disabled", os.environ.get("ORT_DISABLE_TELEMETRY"))

sys.meta_path.insert(0, Watch())
import ortserve.app.run
"""


def test_telemetry_is_disabled_before_onnxruntime_is_imported() -> None:
    """The wheels send telemetry from their import on, so the order matters; the test's environment is not inherited."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORT_")}
    run = subprocess.run(
        [sys.executable, "-c", WATCH_THE_IMPORT], env=environment, check=True, timeout=LONG_S, capture_output=True
    )
    assert run.stdout == b"disabled 1\n"


def test_server_opens_no_socket_but_those_of_its_own_ports(home: dict[str, str]) -> None:
    with serving("--example", *SHORT_WARMUP, env=home) as server:
        own = {int(address.rsplit(":", 1)[1]) for address in (server.http, server.grpc, server.metrics)}
        process = psutil.Process(server.pid)
        for _ in range(20):
            rest_json(server, "simple", ONES)
            grpc_raw(server, "simple", ONES)
            read_metrics(server)
            connections = process.net_connections("inet")
            assert own <= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
            assert [each for each in connections if each.laddr.port not in own] == []
        assert process.children(recursive=True) == []
