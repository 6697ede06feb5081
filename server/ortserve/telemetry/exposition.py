"""The metrics port: answers Prometheus on threads of its own, so that a busy event loop can still be looked at."""

import gzip
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from socketserver import TCPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry

from ortserve.errors import ErrorKind, ServeError
from ortserve.telemetry.text_format import CONTENT_TYPE, TextFormat

_IDLE_S: Final = 30.0
"""How long a caller may keep a thread without asking."""

_FAREWELL_S: Final = 1.0
"""For a caller's end of a TLS session; it has its answer."""


class MetricsServer:
    """Serves the metrics at any path but those of health, ``/metrics`` by custom, from construction until ``close``.

    Args:
        registry: What is exposed.
        host: Address to listen on.
        port: 0 takes any free one; ``port`` says which.
        health: Gives status and JSON for the paths of health, None for others; asked on the port's threads.
        tls: Gives the context of the next connection; None for plain text.
        handshake_timeout_s: For a connection's TLS handshake.

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
        tls: Callable[[], ssl.SSLContext] | None = None,
        handshake_timeout_s: float = _IDLE_S,
    ) -> None:
        text_format = TextFormat(registry)

        class Handler(_Handler):
            def read(self) -> bytes:
                return text_format.write()

            def read_health(self) -> tuple[int, bytes] | None:
                return health(self.path)

        try:
            self._server = _Server((host, port), Handler, tls, handshake_timeout_s)
        except OSError as error:
            message = f"metrics_port: cannot listen on {host}:{port}: {error.strerror}"
            raise ServeError(ErrorKind.CONFLICT, message) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end the thread. Returns within half a second, scrapes under way are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: type["_Handler"],
        tls: Callable[[], ssl.SSLContext] | None,
        handshake_timeout_s: float,
    ) -> None:
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        super().__init__(address, handler)

    def finish_request(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """On the connection's own thread, which alone waits for its handshake."""
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        assert isinstance(request, socket)
        request.settimeout(self._handshake_timeout_s)
        # Who does not finish the handshake, or leaves, is no news.
        with suppress(OSError), self._tls().wrap_socket(request, server_side=True) as session:
            super().finish_request(session, client_address)
            session.settimeout(_FAREWELL_S)
            session.unwrap()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's would ask a name server for our name
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_S

    def read(self) -> bytes:
        raise NotImplementedError

    def read_health(self) -> tuple[int, bytes] | None:
        raise NotImplementedError

    def do_GET(self) -> None:
        health = self.read_health()
        if health is not None:
            status, body = health
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        body = self.read()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            # The fastest level: a tenth of the size is left, and no other thread waits meanwhile.
            body = gzip.compress(body, compresslevel=1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """One line a scrape would say nothing."""
