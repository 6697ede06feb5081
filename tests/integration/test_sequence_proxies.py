"""Sequences behind real proxies: the header ``x-sequence-id`` keeps each on one of two servers."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from apart import UnavailableError
from models import sequences
from proxies import HaProxy, Proxy, free_ports, proxying
from servers import LONG_S, add_model, json_input, serving

IDS = [f"caller-{number}" for number in range(12)]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The ports of two servers."""
    folder = tmp_path_factory.mktemp("behind")
    (add_model(folder, "m", sequences.slow, steps=10) / "model.yaml").write_text(
        "batched: true\nmax_rows: 8\nsequences: {max_idle_s: 60, states: [{input: STATE, output: NEXT}]}\n"
    )
    both = free_ports(), free_ports()
    with ExitStack() as stack:
        for own in both:
            at = ("--http-port", str(own.http), "--grpc-port", str(own.grpc), "--metrics-port", str(own.metrics))
            stack.enter_context(serving(folder, *at, "--warmup-s", "0.1", "--drain-timeout-s", "1"))
        yield both


@pytest.fixture(params=["haproxy", "envoy", "nginx"])
def proxy(request: pytest.FixtureRequest, ports: tuple[Any, Any], tmp_path: Path) -> Iterator[Proxy]:
    try:
        with proxying(request.param, tmp_path / "proxy", *ports) as proxy:
            asyncio.run(proxy.wait_until_listening())
            _wait_until_ready(proxy)
            yield proxy
    except UnavailableError as error:
        pytest.skip(str(error))


def _wait_until_ready(proxy: Proxy) -> None:
    for _ in range(100):
        answers = [httpx.get(f"http://{proxy.rest}/v2/health/ready", timeout=LONG_S) for _ in range(4)]
        headers = {"x-sequence-id": "ready"}
        answers.append(httpx.get(f"http://{proxy.rest}/v2/health/ready", timeout=LONG_S, headers=headers))
        if all(answer.status_code == 200 for answer in answers):
            return
    pytest.fail(proxy.log)


def by_rest(proxy: Proxy, name: str, *, start: bool = False) -> int:
    body = {
        "inputs": [json_input("INPUT", np.array([[1]], np.int32))],
        "parameters": {"sequence_id": name, "sequence_start": start},
    }
    url = f"http://{proxy.rest}/v2/models/m/infer"
    answer = httpx.post(url, json=body, timeout=LONG_S, headers={"x-sequence-id": name})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["outputs"][0]["data"][0])


def tensor() -> list[Any]:
    given = triton_grpc.InferInput("INPUT", [1, 1], "INT32")
    given.set_data_from_numpy(np.array([[1]], np.int32))
    return [given]


def by_grpc(client: triton_grpc.InferenceServerClient, name: str, *, start: bool = False) -> int:
    result = client.infer("m", tensor(), sequence_id=name, sequence_start=start, headers={"x-sequence-id": name})
    return int(result.as_numpy("TOTAL")[0, 0])


def by_stream(proxy: Proxy, name: str, *, start: bool = False) -> int:
    answers: Queue[tuple[Any, Any]] = Queue()
    with triton_grpc.InferenceServerClient(proxy.grpc) as client:
        client.start_stream(
            callback=lambda result, error: answers.put((result, error)), headers={"x-sequence-id": name}
        )
        client.async_stream_infer("m", tensor(), sequence_id=name, sequence_start=start)
        result, error = answers.get(timeout=LONG_S)
    assert error is None, error
    return int(result.as_numpy("TOTAL")[0, 0])


def test_each_sequence_stays_on_its_server(proxy: Proxy, ports: tuple[Any, Any]) -> None:
    with triton_grpc.InferenceServerClient(proxy.grpc) as client:
        assert [by_rest(proxy, name, start=True) for name in IDS] == [1] * 12
        assert [by_rest(proxy, name) for name in IDS] == [2] * 12
        own = [f"{name}-grpc" for name in IDS]
        assert [by_grpc(client, name, start=True) for name in own] == [1] * 12
        assert [by_grpc(client, name) for name in own] == [2] * 12
        assert [by_stream(proxy, name) for name in own] == [3] * 12
        if type(proxy).__name__ != "Nginx":  # nginx's choice also depends on the port
            assert [by_grpc(client, name) for name in IDS] == [3] * 12
            assert [by_stream(proxy, name) for name in IDS] == [4] * 12
            assert [by_rest(proxy, name) for name in IDS] == [5] * 12
    assert all(_active(own_ports) for own_ports in ports)


def test_haproxy_keeps_sequences_on_a_server_that_is_drained(ports: tuple[Any, Any], tmp_path: Path) -> None:
    class WithSocket(HaProxy):
        def command(self) -> Any:
            words = super().command()
            file = self._folder / "haproxy.cfg"
            file.write_text(
                file.read_text().replace("global\n", f"global\n    stats socket {self._folder}/admin level admin\n", 1)
            )
            return words

    try:
        with proxying("haproxy", tmp_path / "proxy", *ports, kind=WithSocket) as proxy:
            asyncio.run(proxy.wait_until_listening())
            _wait_until_ready(proxy)
            names = [f"{name}-drained" for name in IDS]
            assert [by_rest(proxy, name, start=True) for name in names] == [1] * 12
            with socket.socket(socket.AF_UNIX) as admin:
                admin.connect(str(tmp_path / "proxy" / "admin"))
                admin.sendall(b"set server rest_sequences/a state drain\n")
                admin.recv(100)
            assert [by_rest(proxy, name) for name in names] == [2] * 12
            before = _active(ports[0])
            assert [by_rest(proxy, f"{name}-new", start=True) for name in names] == [1] * 12
            assert _active(ports[0]) == before
    except UnavailableError as error:
        pytest.skip(str(error))


def _active(own: Any) -> float:
    text = httpx.get(f"http://127.0.0.1:{own.metrics}/metrics", timeout=LONG_S).text
    (line,) = [line for line in text.splitlines() if line.startswith("ortserve_sequences{") and "active" in line]
    return float(line.rpartition(" ")[2])
