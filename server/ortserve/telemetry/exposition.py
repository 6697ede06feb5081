"""The metrics port: answers Prometheus on threads of its own, so that a busy event loop can still be looked at."""

import contextlib
import gzip
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry

from ortserve.listening import open_listener
from ortserve.telemetry.text_format import CONTENT_TYPE, TextFormat

Refusal: TypeAlias = tuple[int, bytes | memoryview, Sequence[tuple[bytes, bytes]]]
"""Status, body and headers of an answer without metrics."""

_MAX_S: Final = 30.0
"""How long a caller may keep a thread, from its connection to the end of its answer."""

_MAX_CONNECTIONS: Final = 32
"""At one time; each has a thread. Some scrapers ask, each now and then."""

_FAREWELL_S: Final = 1.0
"""For a caller's end of a TLS session; it has its answer."""

_JSON: Final = ((b"content-type", b"application/json"),)
_TAKES_GZIP: Final = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)


class MetricsServer:
    """Serves the metrics at ``/metrics``, and what health probes are told, from construction until ``close``.

    Args:
        registry: What is exposed.
        host: Address to listen on.
        port: 0 takes any free one; ``port`` says which.
        health: Gives status and JSON for the paths of health, None for others; asked on the port's threads.
        refuse: Asked there, too, with the values of a caller's Authorization header; None lets it pass. Health is open.
        tls: Gives the context of the next connection; None for plain text.
        handshake_timeout_s: For a connection's TLS handshake.
        max_s: For which a caller may keep its connection.
        max_connections: At one time; further ones are closed as they come.

    Raises:
        ServeError: ``CONFLICT``, when the address cannot be listened on, naming the option.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        *,
        health: Callable[[str], tuple[int, bytes] | None] = lambda _: None,
        refuse: Callable[[Sequence[str]], Refusal | None] = lambda _: None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        handshake_timeout_s: float = _MAX_S,
        max_s: float = _MAX_S,
        max_connections: int = _MAX_CONNECTIONS,
    ) -> None:
        text_format = TextFormat(registry)

        class Handler(_Handler):
            def read(self) -> bytes:
                return text_format.write()

            def read_health(self) -> tuple[int, bytes] | None:
                return health(self.path)

            def refusal(self) -> Refusal | None:
                return refuse(self.headers.get_all("Authorization", ()))

        self._server = _Server(
            open_listener("metrics_port", host, port),
            Handler,
            tls=tls,
            handshake_timeout_s=handshake_timeout_s,
            max_s=max_s,
            max_connections=max_connections,
        )
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end the thread. Returns within half a second, scrapes under way are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """Bounds its threads, and how long each may be kept."""

    daemon_threads = True

    def __init__(
        self,
        listener: socket.socket,
        handler: type[BaseHTTPRequestHandler],
        *,
        tls: Callable[[], ssl.SSLContext] | None,
        handshake_timeout_s: float,
        max_s: float,
        max_connections: int,
    ) -> None:
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._max_s = max_s
        self._max_connections = max_connections
        self._ends_s: dict[Any, float] = {}
        """When each connection that is open has had its time, by its socket."""
        # With a socket of ours, in the place of one that would know one family, and ask a name server for our name.
        self.address_family = listener.family
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_port = listener.getsockname()[1]
        self.server_activate()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._ends_s) < self._max_connections

    def process_request(self, request: Any, client_address: Any) -> None:
        self._ends_s[request] = time.monotonic() + self._max_s
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """On the connection's own thread, which alone waits for its handshake."""
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(self._handshake_timeout_s)
        # Who does not finish the handshake, or leaves, is no news.
        with contextlib.suppress(OSError), self._tls().wrap_socket(request, server_side=True) as session:
            # In the place of the socket that it was made of, which is none any more.
            self._ends_s[session] = self._ends_s.pop(request)
            try:
                super().finish_request(session, client_address)
                session.settimeout(_FAREWELL_S)
                session.unwrap()
            finally:
                del self._ends_s[session]

    def shutdown_request(self, request: Any) -> None:
        self._ends_s.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller who left, or was cut off, is no fault that a traceback would explain."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def service_actions(self) -> None:
        """Called some times a second; who sends or takes a byte now and then is cut off, too."""
        now_s = time.monotonic()
        for request, end_s in list(self._ends_s.items()):
            if now_s >= end_s:
                with contextlib.suppress(OSError):  # its thread may have closed it meanwhile
                    request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    def read(self) -> bytes:
        raise NotImplementedError

    def read_health(self) -> tuple[int, bytes] | None:
        raise NotImplementedError

    def refusal(self) -> Refusal | None:
        raise NotImplementedError

    def do_GET(self) -> None:
        health = self.read_health()
        if health is not None:
            self._answer(*health, _JSON)
            return
        refusal = self.refusal()
        if refusal is not None:
            self._answer(*refusal)
            return
        if self.path.partition("?")[0] != "/metrics":
            self._answer(404, b'{"error":"Not Found: expected /metrics or a path of health"}', _JSON)
            return
        body = self.read()
        headers = [(b"content-type", CONTENT_TYPE.encode())]
        if _TAKES_GZIP.search(self.headers.get("Accept-Encoding", "")):
            # The fastest level is enough for names that come again and again, and no other thread waits meanwhile.
            body = gzip.compress(body, compresslevel=1)
            headers.append((b"content-encoding", b"gzip"))
        self._answer(200, body, headers)

    do_HEAD = do_GET  # noqa: N815 - as its base looks for it

    def _answer(self, status: int, body: bytes | memoryview, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name.decode(), value.decode())
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """One line a scrape would say nothing."""
