"""A tiny server of the REST protocol in a thread, with exactly known delays and failures."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Behave = Callable[[int], str]
"""Treatment of an infer request, by its number: ``ok``, a status such as ``503``, ``close``, ``hang``, ``garbage`` (not
HTTP), ``nonsense`` (status 200 without outputs) or ``wrong`` (another value)."""


@dataclass
class SmallServer:
    """One worker that takes ``service_s`` per request, and stalls for ``stall_s`` at every multiple of ``every_s``.

    The model ``m`` answers with its input. ``spans_s`` are the actual times of requests, from arrival to answer.
    ``index`` replaces the index of the repository.
    """

    behave: Behave = lambda number: "ok"
    service_s: float = 0.0
    stall_s: float = 0.0
    every_s: float = 1.0
    is_protocol: bool = True
    version: str = "1"
    index: Any = None
    port: int = 0
    requests: int = 0
    spans_s: list[tuple[float, float]] = field(default_factory=list)
    _worker: asyncio.Lock = field(default_factory=asyncio.Lock)
    _began_s: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, ready: Callable[[], object], stop: asyncio.Event) -> None:
        """Listen until ``stop`` is set."""
        server = await asyncio.start_server(self._converse, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._began_s = time.monotonic()
        ready()
        await stop.wait()
        server.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                body = await reader.readexactly(length)
                answer = await self._answer(head.split()[1].decode(), body)
                if not answer:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes) -> bytes:
        if not self.is_protocol:
            return _http(200, b"<html>hello</html>")
        if path == "/v2":
            return _http(200, {"name": "small", "version": "1", "extensions": []})
        if path == "/v2/repository/index":
            return _http(200, self.index or [{"name": "m", "version": self.version, "state": "READY"}])
        if path == "/v2/models/m":
            tensors = [{"name": name, "datatype": "FP32", "shape": [-1, 2]} for name in ("x", "y")]
            return _http(200, {"name": "m", "inputs": tensors[:1], "outputs": tensors[1:]})
        if path != "/v2/models/m/infer":
            return _http(404, {"error": f"nothing at {path}"})
        return await self._infer(body)

    async def _infer(self, body: bytes) -> bytes:
        number, self.requests = self.requests, self.requests + 1
        way = self.behave(number)
        arrived_s = time.monotonic()
        if self.service_s:
            async with self._worker:  # first come, first served
                now_s = (time.monotonic() - self._began_s) % self.every_s
                if now_s < self.stall_s:
                    await asyncio.sleep(self.stall_s - now_s)
                await asyncio.sleep(self.service_s)
        self.spans_s.append((arrived_s, time.monotonic()))
        if way == "hang":
            await asyncio.sleep(3600)
        if way in ("close", "garbage"):
            return b"" if way == "close" else b"this is no HTTP\r\n\r\n"
        if way.isdigit():
            return _http(int(way), {"error": f"the server says {way}"})
        request = json.loads(body)["inputs"][0]
        data = [value + (way == "wrong") for value in request["data"]]
        outputs = [{"name": "y", "datatype": "FP32", "shape": request["shape"], "data": data}]
        return _http(200, {"model_name": "m", "outputs": outputs if way != "nonsense" else 7})


def _http(status: int, content: Any) -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def small_server(**traits: Any) -> Iterator[SmallServer]:
    """Serve while the block runs."""
    server = SmallServer(**traits)
    ready = threading.Event()
    ends: list[Callable[[], object]] = []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        await server.serve(ready.set, stop)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(30)
        yield server
    finally:
        ends[0]()
        thread.join(30)
