"""The metrics port. It answers scrapes and health probes on its own threads, so a busy event loop stays observable."""

import contextlib
import gzip
import json
import logging
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from ortserve.core.thread_pool import ThreadPool, start_thread
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.responses import JSON_TYPE, HttpResponse, failure, wrong_method
from ortserve.listening import open_listener
from ortserve.telemetry.families import CONTENT_TYPE
from ortserve.telemetry.logs import log_fault

logger: Final = logging.getLogger(__name__)

_MAX_S: Final = 30.0
"""Time limit of one connection, from its start to the end of the answer. Each connection has a thread."""

_MAX_CONNECTIONS: Final = 32
"""Maximum number of open connections. A few scrapers connect from time to time."""

_FAREWELL_S: Final = 1.0
"""Time limit of the TLS close handshake, after the answer was sent."""

_TAKES_GZIP: Final = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)


class MetricsServer(ThreadingHTTPServer):
    """Serves ``/metrics`` and health probes from construction until ``close``, each connection on a thread.

    Args:
        write: Returns all metrics in Prometheus' text format; called on the port's threads.
        host: Address to listen on.
        port: 0 selects a free port; the attribute ``port`` holds it.
        health: Returns the answer to a health path, None for other paths; called on the port's threads.
        refuse: Receives the values of the Authorization header and returns the error answer, or None to accept the
            caller; called on the port's threads. Health probes need no key.
        tls: Returns the context of the next connection; None for plain text.
        handshake_timeout_s: Time limit of a TLS handshake.
        max_s: Time limit of one connection.
        max_connections: Maximum number of open connections. A further one replaces the one that has sent no whole
            request for longest; if all have sent theirs, it is closed at once.

    Raises:
        ServeError: ``CONFLICT``, if the address cannot be listened on; the message names the option. ``OVERLOADED``, if
            the system permits no thread.
    """

    request_queue_size = 128  # of new connections; beyond the default of 5, the system delays them by a second

    def __init__(
        self,
        write: Callable[[], bytes],
        host: str,
        port: int,
        *,
        health: Callable[[str], HttpResponse | None] = lambda _: None,
        refuse: Callable[[Sequence[str]], HttpResponse | None] = lambda _: None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        handshake_timeout_s: float = _MAX_S,
        max_s: float = _MAX_S,
        max_connections: int = _MAX_CONNECTIONS,
    ) -> None:
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._max_s = max_s
        self._max_connections = max_connections
        self._ends_s: dict[Any, float] = {}
        """Monotonic time at which each open connection, by its socket, reaches its time limit."""
        self._unread: dict[Any, bool] = {}
        """The open connections whose request was not read yet, oldest first."""
        # Use our own socket: the base class supports one address family and looks up the host name.
        listener = open_listener("metrics_port", host, port)
        try:
            # Without a further thread, a probe of health waits for another connection instead of failing.
            self._threads_of_connections = ThreadPool(max_connections, "metrics-connection")
        except ServeError:
            listener.close()
            raise
        self.address_family = listener.family
        super().__init__(("", 0), partial(_Handler, write, health, refuse, self._unread), bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.port: int = listener.getsockname()[1]
        self.server_activate()
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        try:
            start_thread(self._thread)
        except ServeError:
            self.server_close()
            raise

    def close(self) -> None:
        """Stop listening and end the thread. Returns within half a second, without waiting for current scrapes.

        Their threads delay no exit of the server, which ends with ``os._exit``; a normal exit of Python joins them.
        """
        self.shutdown()
        self.server_close()
        self._thread.join()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room. Idle connections must not keep health probes away."""
        count = len(self._ends_s)
        if count < self._max_connections:
            return True
        oldest = next(iter(tuple(self._unread)), None)
        if oldest is None or count >= 2 * self._max_connections:  # the threads of those closed have not ended yet
            return False
        self._unread.pop(oldest, None)
        _disconnect(oldest)
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        self._ends_s[request] = time.monotonic() + self._max_s
        self._unread[request] = True
        self._threads_of_connections.submit(self.process_request_thread, request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Run the handshake and answer. Each connection has a thread, so only that thread waits for the handshake."""
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(self._handshake_timeout_s)
        # Failed handshakes and closed connections are not reported.
        with (
            contextlib.suppress(OSError),
            self._tls().wrap_socket(request, server_side=True, do_handshake_on_connect=False) as session,
        ):
            # The session replaces the plain socket, which is detached: only the session can be disconnected, also in
            # its handshake.
            self._ends_s[session] = self._ends_s.pop(request)
            self._unread[session] = True
            try:
                if not self._unread.pop(request, False):
                    return  # a new connection has replaced this one meanwhile
                session.do_handshake()
                super().finish_request(session, client_address)
                session.settimeout(_FAREWELL_S)
                session.unwrap()
            finally:
                self._unread.pop(session, None)
                del self._ends_s[session]

    def server_close(self) -> None:
        super().server_close()
        self._threads_of_connections.shutdown(wait=False)

    def shutdown_request(self, request: Any) -> None:
        self._unread.pop(request, None)
        self._ends_s.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors of the server only: a closed connection needs no traceback."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            log_fault(logger, "a call of the metrics port failed unexpectedly", error)

    def service_actions(self) -> None:
        """Close connections over their time limit, slow ones included. Called several times a second."""
        now_s = time.monotonic()
        for request, end_s in list(self._ends_s.items()):
            if now_s >= end_s:
                _disconnect(request)


def _disconnect(connection: Any) -> None:
    """Wake the thread of a connection, which then closes it. It may have closed it already.

    The method of ``SSLSocket`` also removes the session, which its thread still uses.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers the request of one connection. The base class does so in its constructor, on the connection's thread."""

    default_request_version = "HTTP/1.0"  # answers to malformed requests have a status, too

    def __init__(
        self,
        write: Callable[[], bytes],
        health: Callable[[str], HttpResponse | None],
        refuse: Callable[[Sequence[str]], HttpResponse | None],
        unread: dict[Any, bool],
        *connection: Any,
    ) -> None:
        """Answer, with the callbacks of ``MetricsServer``; ``connection`` are the arguments of the base class.

        The connection leaves ``unread`` when its request was read.
        """
        self._write = write
        self._health = health
        self._refuse = refuse
        self._unread = unread
        super().__init__(*connection)

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        self._unread.pop(self.connection, None)
        return is_valid

    def do_GET(self) -> None:
        health = self._health(self.path)
        if health is not None:
            self._answer(*health)
            return
        refusal = self._refuse(self.headers.get_all("Authorization", ()))
        if refusal is not None:
            self._answer(*refusal)
            return
        if self.path.partition("?")[0] != "/metrics":
            self._answer(*failure(ServeError(ErrorKind.NOT_FOUND, "Not Found: expected /metrics or a health path")))
            return
        body = self._write()
        headers = [(b"content-type", CONTENT_TYPE.encode())]
        if _TAKES_GZIP.search(self.headers.get("Accept-Encoding", "")):
            # The fastest level compresses repeated names well enough.
            body = gzip.compress(body, compresslevel=1)
            headers.append((b"content-encoding", b"gzip"))
        self._answer(200, body, headers)

    do_HEAD = do_GET  # noqa: N815 - the base class looks for this name

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a method without a handler, or a malformed request, with the same documents as the HTTP port."""
        self.close_connection = True
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._answer(*wrong_method(self.command, "GET, HEAD"))
        else:
            text = f"malformed HTTP request: {message or HTTPStatus(code).phrase}"
            self._answer(code, json.dumps({"error": text}).encode(), (JSON_TYPE,))

    def _answer(self, status: int, body: bytes | memoryview, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.send_response_only(status)  # without a header that names the version of Python
        self.send_header("Date", self.date_time_string())
        for name, value in headers:
            self.send_header(name.decode(), value.decode())
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""
