"""Connections of the HTTP server without a socket."""

import asyncio
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp
from uvicorn.server import ServerState

from fakes.service import FakeInferenceService
from fakes.socket import FakeSocket
from ortserve.clock import Clock, monotonic_ns
from ortserve.config.options import ServerOptions
from ortserve.frontends.http.asgi_exchange import AsgiEndpoint
from ortserve.frontends.http.context import ConnectionContext
from ortserve.frontends.http.infer_exchange import InferEndpoint
from ortserve.frontends.http.protocol import HttpProtocol
from ortserve.frontends.http.request_head import HeadCache
from ortserve.frontends.unsent_answers import UnsentBudget
from ortserve.service.access import Access, Group, Keyring, digest_of

TURNS = 12
"""Iterations of the event loop that suffice for a response."""

LIMITS = ServerOptions(
    http_header_timeout_s=2,
    http_body_timeout_s=4,
    http_min_body_bytes_per_s=100,
    http_send_timeout_s=6,
    idle_timeout_s=8,
)
"""Small limits, all different, for tests of single decisions."""


class SeenHeaders:
    """Replaces traces: records the headers that each begins with, except the length of the body."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes, list[tuple[bytes, bytes]]]] = []

    def begin(self, call: str, version: str, path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.seen.append((call, version, path, [header for header in headers if header[0] != b"content-length"]))


class Service(FakeInferenceService):
    """Records the number of held bytes at the beginning of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes: list[int] = []

    def start(self, *arguments: Any) -> None:
        self.held_bytes.append(self.gate.held_bytes)
        super().start(*arguments)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with its request."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    said = repr((scope["method"], scope["path"], scope["headers"], body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said})


class HttpSide:
    """A server that creates connections one after the other. With ``has_keys`` infer requires the key ``right``."""

    def __init__(
        self,
        app: ASGIApp = echo,
        heads: HeadCache | None = None,
        *,
        has_keys: bool = False,
        max_unsent_bytes: int = 2**30,
        clock: Clock = monotonic_ns,
    ) -> None:
        self.service = Service()
        service: Any = self.service
        keyring = Keyring({Group.INFER: [digest_of(b"right")]})
        guards = Access([Group.INFER], keyring, on_refusal=lambda *_: None).guards if has_keys else {}
        self.traces = SeenHeaders()
        traces: Any = self.traces
        self.endpoint = InferEndpoint(
            service,
            max_body_bytes=1000,
            compression_min_bytes=10**6,
            clock=lambda: 0,
            guard=guards.get(Group.INFER),
            traces=traces,
            load_reports=None,
        )
        if heads is not None:
            self.endpoint.heads = heads  # type: ignore[misc]  # Final outside of tests
        self.asgi = AsgiEndpoint(app, guards)
        self.rejected: list[object] = []
        self.budget = UnsentBudget("http_unsent_bytes", max_unsent_bytes, clock)
        self.cut_answers: list[str] = []
        self.context = ConnectionContext(
            ServerOptions(http_port=0, http_max_header_bytes=4096, max_body_bytes=1000),
            on_rejected=self.rejected.append,
            budget=self.budget,
            on_cut_answer=self.cut_answers.append,
            on_evicted=lambda: None,
        )
        self.state = ServerState()

    def connect(self, written: bytearray) -> tuple[HttpProtocol, FakeSocket]:
        """Create a connection with a transport that appends its writes to ``written``."""
        transport = FakeSocket(written.extend)
        protocol = HttpProtocol(self.context, self.endpoint, self.asgi, self.state)
        protocol.connection_made(transport)
        return protocol, transport

    async def answer(self, pieces: list[bytes]) -> tuple[bytes, bool]:
        """Send all pieces and wait for the answers. Returns the written bytes, and whether the connection is closed."""
        written = bytearray()
        protocol, transport = self.connect(written)
        for piece in pieces:
            if not transport.is_closed:
                protocol.data_received(piece)
                await turns()
        answered = bytes(written), transport.is_closed
        protocol.connection_lost(None)
        return answered


async def turns(count: int = TURNS) -> None:
    """Let the event loop run."""
    for _ in range(count):
        await asyncio.sleep(0)
