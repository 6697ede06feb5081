"""Two servers behind a load balancer, as ``deploy/proxies`` configures it: clients notice no restart and no loss."""

import asyncio
import re
import select
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import grpc
import httpx
import numpy as np
import onnxruntime
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
from tritonclient.utils import InferenceServerException

from apart import UnavailableError
from models import builders
from ortserve.config.options import ServerOptions
from ortserve.frontends.http.request_head import match_infer_path
from pages import DOCS, blocks
from proxies import CONFIGURATIONS, HaProxy, Ports, Proxy, find_proxy, free_ports, proxying, until
from servers import LONG_S, SHORT_WARMUP, Samples, ServerProcess, add_model, serving, starting
from triton_load import CALLERS, Failure, Load, loading

PROXIES: Final = ("haproxy", "nginx", "envoy")
ASKING_PROXIES: Final = ("haproxy", "envoy")

DRAIN_DELAY_S: Final = 4
"""The minimum of ``docs/operations/load-balancers.md`` for its configurations.

It allows two failed checks, a second apart and with a timeout of a second each.
"""

pytestmark = pytest.mark.timeout(400)  # pip installs Envoy once per machine


LIMITS: Final = {"gt 100 ": "gt 3 ", "gt 5000 ": "gt 5 ", "http_req_rate(10s)": "http_req_rate(5m)"}
"""The limits of the page for each caller, and smaller ones, in a time that also suffices on a busy machine."""


class Fleet:
    """Servers ``a`` and ``b`` of one repository behind a proxy."""

    def __init__(self, proxy_name: str, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.repository = folder / "models"
        model = add_model(self.repository, "heavy", builders.heavy, steps=5)
        (model / "model.yaml").write_text("intra_op_threads: 1\n")  # two threads would also take time to synchronize
        self.ports = {"a": free_ports(), "b": free_ports()}
        self.servers: dict[str, ServerProcess] = {}
        self.proxy: Proxy = stack.enter_context(
            proxying(proxy_name, folder / "proxy", self.ports["a"], self.ports["b"])
        )
        rows = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
        session = onnxruntime.InferenceSession(model / "1" / "model.onnx", providers=["CPUExecutionProvider"])
        self.load = Load("heavy", rows, session.run(["y"], {"x": rows})[0])

    @property
    def failures(self) -> list[Failure]:
        """Failures from the client's view; it retries requests whose connection closed before they were read."""
        may_close = not self.proxy.asks_readiness
        return [failure for failure in self.load.failures if not (may_close and failure.is_untaken)]

    def start(self, name: str) -> ServerProcess:
        """Start a server without waiting for its models."""
        ports = self.ports[name]
        at = ("--http-port", str(ports.http), "--grpc-port", str(ports.grpc), "--metrics-port", str(ports.metrics))
        drain = ("--drain-delay-s", str(DRAIN_DELAY_S))
        server = self._stack.enter_context(starting(self.repository, *at, *drain, *SHORT_WARMUP))
        self.servers[name] = server
        return server

    async def start_both(self) -> None:
        """Start both servers, and wait until clients find them ready."""
        for name in ("a", "b"):
            self.start(name)
        for name in ("a", "b"):
            await self.wait_until_loaded(name)
        await self.wait_until_ready()

    async def wait_until_loaded(self, name: str) -> None:
        await asyncio.to_thread(self.servers[name].wait_until_loaded)

    async def wait_until_ready(self) -> None:
        """Wait until clients find a ready server on both protocols."""
        await self.proxy.wait_until_listening()
        async with httpx.AsyncClient() as http, triton_grpc_aio.InferenceServerClient(self.proxy.grpc) as grpc:

            async def is_ready() -> bool:
                answer = await http.get(f"http://{self.proxy.rest}/v2/health/ready")
                return answer.status_code == 200 and await _is_ready(grpc)

            await until(is_ready)

    async def wait_until_in(self, name: str) -> None:
        """Wait until a server receives requests on both protocols."""

        async def is_in() -> bool:
            return {"http ok", "grpc ok"} <= (await answered_by(self.ports[name])).keys()

        await until(is_in)

    async def replace(self, name: str) -> None:
        """Replace a server as an operator or Kubernetes does: the old one ends, the new one serves once it is warm."""
        await self.proxy.take_out(name)
        old = self.servers[name]
        old.send(signal.SIGTERM)
        assert await asyncio.to_thread(old.wait) == 0, old.output
        self.start(name)
        await self.wait_until_loaded(name)
        await self.proxy.put_in(name)
        await self.wait_until_in(name)


class SlowRelay:
    """Accepts connections at once, but forwards nothing on the first before ``may_speak``."""

    def __init__(self, address: str) -> None:
        self._host, self._port = address.split(":")
        self._local_port = 0
        self._ended: list[asyncio.Event] = []
        self.may_speak = asyncio.Event()

    async def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        ended = asyncio.Event()
        self._ended.append(ended)
        proxy, to_proxy = await asyncio.open_connection(self._host, int(self._port))
        self._local_port = self._local_port or to_proxy.get_extra_info("sockname")[1]
        await self.may_speak.wait()
        await asyncio.gather(_pump(client, to_proxy), _pump(proxy, to_client))
        ended.set()

    async def wait_until_ended(self) -> None:
        """Wait until both sides of every connection are closed."""
        for ended in self._ended:
            await ended.wait()

    async def is_accepted(self) -> bool:
        """Whether a process of the proxy holds the first connection."""
        return self._owner() is not None

    async def is_alone(self) -> bool:
        """Whether that process accepts no other connections any more."""
        owner = self._owner()
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            return owner is not None and all(one.status != psutil.CONN_LISTEN for one in owner.net_connections())
        return False

    def _owner(self) -> psutil.Process | None:
        for one in psutil.net_connections("tcp"):
            if one.pid and (*one.laddr[1:], *one.raddr[1:]) == (int(self._port), self._local_port):
                with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                    return psutil.Process(one.pid)
        return None


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()
    with suppress(ConnectionError):
        await target.wait_closed()


async def answered_by(ports: Ports) -> dict[str, float]:
    """The number of infer requests that a server has answered, by protocol and outcome: ``http ok``."""
    async with httpx.AsyncClient(timeout=LONG_S) as client:
        answer = await client.get(f"http://127.0.0.1:{ports.metrics}/metrics")
    return Samples(answer.text).by_labels("ortserve_request_duration_seconds_count", "protocol", "outcome")


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    name: str = request.param
    try:
        find_proxy(name)
    except UnavailableError as error:
        pytest.skip(f"{name} cannot be had here: {error}")
    with ExitStack() as stack:
        yield Fleet(name, tmp_path, stack)


@pytest.mark.parametrize("file", ["haproxy.cfg", "nginx.conf", "envoy.yaml"])
def test_requests_that_are_repeated_are_those_of_inference(file: str) -> None:
    (pattern,) = re.findall(r"\^?/v2/models/\S+?/infer\$?", (CONFIGURATIONS / file).read_text())
    paths = [f"/v2/models/m{version}/infer" for version in ("", "/versions/12", "/versions/stable", "/versions/a.b-1")]
    paths += [
        "/v2/models/m/generate",
        "/v2/models/m/versions/1",
        "/v2/repository/models/infer/load",
        "/v2/models/a/b/infer",
    ]
    repeated = [path for path in paths if re.fullmatch(pattern, path)]
    assert repeated == [path for path in paths if match_infer_path(path.encode())]
    assert len(repeated) == 4


@pytest.mark.parametrize("fleet", PROXIES, indirect=True)
async def test_rolling_replacement_under_load_fails_no_request(fleet: Fleet) -> None:
    await fleet.start_both()
    async with loading(fleet.load, rest=fleet.proxy.rest, grpc=fleet.proxy.grpc):
        for name in ("a", "b"):  # otherwise the proxy may not know the second server when the first ends
            await fleet.wait_until_in(name)
        for name in ("a", "b"):
            await fleet.replace(name)
        await fleet.load.go_on()
    assert fleet.failures == []


@pytest.mark.parametrize("fleet", PROXIES, indirect=True)
async def test_killed_server_loses_no_retryable_request(fleet: Fleet) -> None:
    await fleet.start_both()
    async with loading(fleet.load, rest=fleet.proxy.rest, grpc=fleet.proxy.grpc):
        for name in ("a", "b"):
            await fleet.wait_until_in(name)
        fleet.servers["a"].send(signal.SIGKILL)
        await asyncio.to_thread(fleet.servers["a"].wait)
        await fleet.load.go_on(2 * CALLERS)  # every request in flight has been answered or has failed
        lost = list(fleet.load.failures)
        if fleet.proxy.repeats_calls:
            assert lost == []
        assert {failure.protocol for failure in lost} <= {"grpc"}
        assert len(lost) <= CALLERS

        await fleet.load.go_on(75)
        assert fleet.load.failures == lost
        if fleet.proxy.asks_readiness:  # other proxies would try it before it is ready
            fleet.start("a")
            await fleet.wait_until_loaded("a")
            await fleet.wait_until_in("a")
            await fleet.load.go_on()
            assert fleet.load.failures == lost


@pytest.mark.parametrize("fleet", PROXIES, indirect=True)
async def test_server_that_is_warming_gets_no_request_before_it_is_ready(fleet: Fleet) -> None:
    fleet.start("a")
    await fleet.wait_until_loaded("a")
    add_model(fleet.repository, "an_earlier_one", builders.slow)
    (fleet.repository / "an_earlier_one" / "model.yaml").write_text("warmup_s: 1\n")
    if not fleet.proxy.asks_readiness:
        await fleet.proxy.take_out("b")
    await fleet.wait_until_ready()
    async with loading(fleet.load, rest=fleet.proxy.rest, grpc=fleet.proxy.grpc):
        await fleet.load.go_on()
        b = fleet.start("b")
        await asyncio.to_thread(b.wait_for_line, "listening", "protocol=metrics ")
        looks = 0
        async with httpx.AsyncClient() as client:
            while True:
                answered = await answered_by(fleet.ports["b"])
                if (await client.get(f"http://{b.http}/v2/health/ready")).status_code == 200:
                    break
                assert answered == {}  # read while it was certainly not ready
                looks += 1
                await fleet.load.go_on(5)
        assert looks > 0, "the model is too fast for this test"
        if not fleet.proxy.asks_readiness:
            await fleet.proxy.put_in("b")
        await fleet.wait_until_in("b")
        await fleet.load.go_on()
    assert fleet.failures == []


@pytest.mark.parametrize("fleet", ASKING_PROXIES, indirect=True)
async def test_server_that_lacks_a_required_model_gets_no_request(fleet: Fleet) -> None:
    fleet.start("a")
    await fleet.wait_until_loaded("a")
    broken = add_model(fleet.repository, "required", builders.not_onnx)
    (broken / "model.yaml").write_text("required: true\n")
    fleet.start("b")
    await fleet.wait_until_loaded("b")
    await fleet.wait_until_ready()
    async with loading(fleet.load, rest=fleet.proxy.rest, grpc=fleet.proxy.grpc):
        await fleet.load.go_on(75)
    assert fleet.load.failures == []
    assert await answered_by(fleet.ports["b"]) == {}


@pytest.mark.parametrize("fleet", PROXIES, indirect=True)
async def test_stream_continues_past_the_size_of_one_body(fleet: Fleet) -> None:
    """A proxy counts a stream as one body, however many messages it has; the server bounds each message."""
    add_model(fleet.repository, "wide", builders.identity, shape=("batch", "width"))
    await fleet.start_both()
    rows = np.zeros((1, 4_000_000), np.float32)  # one row runs at once, a million of them in many batches
    most = ServerOptions().max_body_bytes
    assert rows.nbytes < most < 5 * rows.nbytes
    given = triton_grpc.InferInput("x", rows.shape, "FP32")
    given.set_data_from_numpy(rows)
    answered = asyncio.Semaphore(0)

    async def requests() -> AsyncIterator[dict[str, object]]:
        for _ in range(5):
            yield {"model_name": "wide", "inputs": [given]}
            await answered.acquire()

    n_answered = 0
    async with asyncio.timeout(LONG_S), triton_grpc_aio.InferenceServerClient(fleet.proxy.grpc) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None, f"after {n_answered} requests: {error}"
            assert result.as_numpy("y").nbytes == rows.nbytes
            n_answered += 1
            answered.release()
    assert n_answered == 5


@pytest.mark.parametrize("fleet", PROXIES, indirect=True)
async def test_stream_of_a_server_that_drains_ends_with_unavailable(fleet: Fleet) -> None:
    await fleet.start_both()
    given = triton_grpc.InferInput("x", (1, 64), "FP32")
    given.set_data_from_numpy(fleet.load.rows[:1])

    async def requests() -> AsyncIterator[dict[str, object]]:
        yield {"model_name": "heavy", "inputs": [given]}
        await asyncio.Event().wait()

    async with asyncio.timeout(LONG_S), triton_grpc_aio.InferenceServerClient(fleet.proxy.grpc) as client:
        answers = client.stream_infer(requests())
        _, error = await anext(answers)
        assert error is None
        for server in fleet.servers.values():
            server.send(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(answers)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "the server is shutting down" in (caught.value.details() or "")


@pytest.mark.parametrize("fleet", ["nginx"], indirect=True)
async def test_connecting_client_leaves_a_removed_server(fleet: Fleet) -> None:
    """A worker of nginx's old configuration would forget this connection and send its calls to both servers."""
    await fleet.start_both()
    given = triton_grpc.InferInput("x", (1, 64), "FP32")
    given.set_data_from_numpy(fleet.load.rows[:1])
    relay = SlowRelay(fleet.proxy.grpc)
    async with (
        await asyncio.start_server(relay.serve, "127.0.0.1") as listener,
        triton_grpc_aio.InferenceServerClient(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}") as client,
    ):
        first = asyncio.create_task(client.infer("heavy", [given], client_timeout=LONG_S))
        await until(relay.is_accepted)
        taking_out = asyncio.create_task(fleet.proxy.take_out("a"))
        await until(relay.is_alone)
        relay.may_speak.set()
        await first

        async def is_left_alone() -> bool:
            before = await answered_by(fleet.ports["a"])
            for _ in range(20):
                await client.infer("heavy", [given], client_timeout=LONG_S)
            return await answered_by(fleet.ports["a"]) == before

        await until(is_left_alone)
        await taking_out
    async with asyncio.timeout(LONG_S):
        await relay.wait_until_ended()


async def _is_ready(client: triton_grpc_aio.InferenceServerClient) -> bool:
    try:
        ready: bool = await client.is_server_ready()
    except Exception:  # the proxy has no server yet
        return False
    return ready


def documented(language: str) -> str:
    """The lines that the page adds to the configuration of a proxy."""
    (lines,) = blocks(language, (DOCS / "operations" / "load-balancers.md").read_text())
    return lines


class LimitingHaProxy(HaProxy):
    """HAProxy with the documented limits for each caller on both ports, made smaller."""

    def command(self) -> Sequence[str | Path]:
        command = super().command()
        lines = documented("haproxy")
        for limit, smaller in LIMITS.items():
            assert limit in lines
            lines = lines.replace(limit, smaller)
        file = self._folder / "haproxy.cfg"
        file.write_text(re.sub(r"^( *bind .*\n)", lambda bind: bind[1] + lines, file.read_text(), flags=re.MULTILINE))
        return command


@contextmanager
def examples_behind(name: str, folder: Path, *flags: str, kind: type[Proxy] | None = None) -> Iterator[Proxy]:
    """The bundled models behind a proxy."""
    with serving("--example", *SHORT_WARMUP, *flags) as server, ExitStack() as stack:
        ports = Ports(*(int(address.rpartition(":")[2]) for address in (server.http, server.grpc)))
        try:
            proxy = stack.enter_context(proxying(name, folder / "proxy", ports, ports, kind))
        except UnavailableError as error:
            pytest.skip(str(error))
        asyncio.run(proxy.wait_until_listening())  # HAProxy may count its connections as requests
        yield proxy


def test_documented_limits_apply_to_each_caller(tmp_path: Path) -> None:
    with examples_behind("haproxy", tmp_path, kind=LimitingHaProxy) as proxy, ExitStack() as stack:
        answers = [httpx.get(f"http://{proxy.rest}/v2", timeout=LONG_S) for _ in range(6)]
        assert (answers[0].status_code, answers[-1].status_code) == (200, 429)
        assert answers[-1].headers["retry-after"] == "10"
        with triton_grpc.InferenceServerClient(proxy.grpc) as client:
            assert client.is_server_live()
            with pytest.raises(InferenceServerException) as refused:
                [client.is_server_live() for _ in range(5)]
            assert refused.value.status() == "StatusCode.UNAVAILABLE"
        with pytest.raises(ConnectionResetError):
            read_first_ended(proxy.rest, 4, stack)


def read_first_ended(address: str, connections: int, stack: ExitStack) -> None:
    """Open connections and read from the first that ends: any may, since HAProxy accepts them on several threads."""
    host, _, port = address.partition(":")
    opened = [stack.enter_context(socket.create_connection((host, int(port)), LONG_S)) for _ in range(connections)]
    ended, _, _ = select.select(opened, [], [], LONG_S)
    ended[0].recv(1)


@pytest.mark.parametrize("name", PROXIES)
def test_proxies_pass_on_what_the_server_allows_to_pages_of_other_origins(tmp_path: Path, name: str) -> None:
    page = {"origin": "https://app.example.com", "access-control-request-method": "POST"}
    calls = [("GET", "", 200), ("OPTIONS", "/infer", 200), ("POST", "/infer", 400)]
    with examples_behind(name, tmp_path, "--cors-origins", page["origin"]) as proxy:
        for method, path, status in calls:
            answer = httpx.request(method, f"http://{proxy.rest}/v2/models/simple{path}", headers=page, timeout=LONG_S)
            assert answer.status_code == status
            assert answer.headers.get_list("access-control-allow-origin") == [page["origin"]]
