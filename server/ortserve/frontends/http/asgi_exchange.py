"""One request to the ASGI application, which answers all calls except ``infer``.

``protocol`` creates an ``AsgiExchange`` for each such request. The exchange is the ASGI server of the request: it
builds the scope, and provides ``receive`` and ``send`` (ASGI 3.0, HTTP protocol 2.3).
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.access import http_group, is_unambiguous
from ortserve.frontends.http.connection import Connection, Exchange
from ortserve.frontends.http.cross_origin import permission
from ortserve.frontends.http.request_head import Header, credentials, match_infer_path
from ortserve.frontends.http.responses import STATUS_LINES, HttpResponse, failure, unknown_path, wrong_method
from ortserve.service.access import Group, Guard
from ortserve.telemetry.logs import log_fault

logger: Final = logging.getLogger(__name__)

_EXCHANGE: Final = "ortserve.exchange"
"""Key of the exchange in an ASGI scope."""

_PAUSE_BYTES: Final = 64 * 1024
"""The connection pauses reading while more bytes of a body wait for the application."""

_MAX_QUERY_BYTES: Final = 2 * 1024
"""Maximum size of a query; a longer one is ignored. FastAPI parses the query of each request, 30 KB in 16 ms. Only the
stream of the console uses a query."""

_NEEDS_KEY: Final = "a page of another origin changes the server only with a key"

_INVALID_NAME: Final = re.compile(b'[\x00-\x1f\x7f()<>@,;:\\[\\]={} \t\\\\"]')
_INVALID_VALUE: Final = re.compile(b"[\x00-\x08\x0a-\x1f\x7f]")


def _foreign_change(headers: list[Header]) -> ServeError | None:
    """Return the error for a call without a key that a page of another origin sends to change the server.

    Any page that an operator opens could send one to a port that only the operator's machine reaches. Browsers send
    ``Sec-Fetch-Site`` to loopback addresses and over TLS, and no page can set it. ``Origin`` is not compared with
    ``Host``, because proxies may replace ``Host``.
    """
    for name, value in headers:
        if name == b"sec-fetch-site" and value not in (b"same-origin", b"none"):
            return ServeError(
                ErrorKind.FORBIDDEN,
                f"{_NEEDS_KEY}: expected 'Sec-Fetch-Site: same-origin' or 'none', got '{value.decode('latin-1')}'",
            )
    return None


class AsgiEndpoint:
    """The application, and the guards of the groups of calls. All exchanges of a server share it."""

    def __init__(self, app: ASGIApp, guards: Mapping[Group, Guard]) -> None:
        self.app: Final = app
        self._guards: Final = guards

    def check(self, method: str, path: str, headers: list[Header], *, is_infer: bool) -> ServeError | None:
        """Check the key of a request by the decoded path that routes it.

        If the call needs no key but changes the server, check that no page of another origin sent it.

        Returns:
            The error if the request is rejected; None if it is admitted.
        """
        if not (is_infer or is_unambiguous(path)):
            return unknown_path(path)
        group = Group.INFER if is_infer else http_group(method, path)
        guard = None if group is None else self._guards.get(group)
        if guard is not None:
            return guard.refusal(credentials(headers))
        return _foreign_change(headers) if group is Group.CONTROL and method not in ("GET", "HEAD") else None

    def check_preflight(self, method: str, path: str, *, is_infer: bool) -> ServeError | None:
        """Check whether a page of another origin may send a request that ``check`` decides on.

        Browsers send ``Sec-Fetch-Site`` only to some addresses. So a change without a key is refused here, too.
        """
        is_change = not is_infer and http_group(method, path) is Group.CONTROL and method not in ("GET", "HEAD")
        if is_change and Group.CONTROL not in self._guards:
            return ServeError(ErrorKind.FORBIDDEN, f"{_NEEDS_KEY}: expected control_keys_file to be set, got none")
        return None


class AsgiExchange(Exchange):
    """One request to the application."""

    def __init__(
        self,
        connection: Connection,
        endpoint: AsgiEndpoint,
        *,
        method: str,
        raw_path: bytes,
        query: bytes,
        version: str,
        headers: list[Header],
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        super().__init__(connection, headers, keep_alive=keep_alive, more_body=True)
        self._cancels_with_caller = False
        self._endpoint: Final = endpoint
        self._method: Final = method
        self._raw_path: Final = raw_path
        self._query: Final = query
        self._version: Final = version
        self._has_content: Final = any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)
        self._awaits_continue = expects_continue and self._has_content
        """Whether the caller may still wait for ``100 Continue`` with its body."""
        self._body = bytearray()
        self._is_disconnected = False
        self._is_rejected = False
        self._is_chunked = False
        self._missing_bytes: int | None = 0
        """Bytes of the response that are to be sent; None if the end of the connection ends it."""
        self._arrival: Final = asyncio.Event()
        self._writable: Final = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.has_response_body = method != "HEAD"

    def start(self) -> None:
        connection = self.connection
        if connection.is_lost or self._is_disconnected:
            return
        path = self._raw_path.decode("ascii")
        if "%" in path:
            path = unquote(path)
        is_infer = match_infer_path(self._raw_path) is not None
        if not is_infer and len(path) > 1:
            path = path.rstrip("/")
        cross_origin = connection.context.cross_origin
        if cross_origin is not None and self._method == "OPTIONS":
            requested = cross_origin.requested_method(self.headers)
            if requested is not None:
                refusal = cross_origin.refusal(self.headers)
                refusal = refusal or self._endpoint.check_preflight(requested, path, is_infer=is_infer)
                self.respond(failure(refusal) if refusal else permission(requested))
                return
        error = self._endpoint.check(self._method, path, self.headers, is_infer=is_infer)
        if error is not None:
            if self._has_content:
                self._is_rejected = True
                self.write_rejection(error, path)
            else:
                self.respond(failure(error, path))
        elif is_infer:
            self.respond(wrong_method(self._method, "POST"))
        else:
            self._task = connection.loop.create_task(self._run(self._scope(path)))
            connection.server_state.tasks.add(self._task)
            self._task.add_done_callback(connection.server_state.tasks.discard)
            self._task.add_done_callback(connection.context.on_ended)

    def on_body(self, data: bytes) -> None:
        if self.response_started and (self.response_complete or self._is_rejected):
            return
        self._body += data
        self._awaits_continue = False
        if len(self._body) > _PAUSE_BYTES:
            self.connection.pause_reading()
        self._arrival.set()

    def on_end(self) -> None:
        self.more_body = self._awaits_continue = False
        self._arrival.set()
        if self._is_rejected and not self.response_complete:
            self.connection.complete(self)
        elif self.connection.is_closing:
            self.connection.close()  # the last response was written while its request arrived

    def write(self, response: HttpResponse) -> None:
        self._end_without_body()
        super().write(response)

    def on_writable(self) -> None:
        self._writable.set()
        super().on_writable()

    def unwritten_bytes(self) -> int:
        return self._missing_bytes or 0

    def reject_body(self, error: ServeError) -> None:
        self.connection.reject_in_turn(error, self._raw_path.decode("ascii"), self.headers, in_body=True)

    def abandon(self) -> None:
        self._is_disconnected = True
        self._arrival.set()
        self._writable.set()
        if self._cancels_with_caller:
            self._cancel_if_left()

    def cancel_with_caller(self) -> None:
        """Cancel the application's task when the caller leaves; at once if it has already left."""
        self._cancels_with_caller = True
        self._cancel_if_left()

    async def receive(self) -> Message:
        """Return the next part of the body, as ASGI defines ``receive``."""
        connection = self.connection
        if self._awaits_continue and not connection.transport.is_closing():
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._awaits_continue = False
        if not self._is_disconnected and not self.response_complete:
            if connection.newest is self:
                connection.resume_reading()
            await self._arrival.wait()
            self._arrival.clear()
        if self._is_disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Write the head or the next part of the response, as ASGI defines ``send``."""
        while self.connection.is_write_paused and not self._is_disconnected:
            self._writable.clear()
            await self._writable.wait()
        if self._is_disconnected:
            return
        expected = "http.response.body" if self.response_started else "http.response.start"
        if message["type"] != expected or self.response_complete:
            raise RuntimeError(f"expected the ASGI message '{expected}', got '{message['type']}'")
        if self.response_started:
            self._write_body(message.get("body", b""), more_body=message.get("more_body", False))
        else:
            self._write_head(message["status"], message.get("headers", ()))

    async def _run(self, scope: Scope) -> None:
        try:
            await self._endpoint.app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self.connection.is_lost:  # a lost connection is the expected cause
                raise
        except Exception as fault:  # noqa: BLE001 - the application has answered with an error
            log_fault(logger, "a call failed unexpectedly", fault)
        if self.response_complete or self._is_disconnected:
            return
        if self.response_started:
            self.connection.transport.close()
        else:
            self.keep_alive = False
            self.respond(failure(ServeError(ErrorKind.INTERNAL, "internal error"), scope["path"]))

    def _end_without_body(self) -> None:
        """Close the connection with this response if the caller waits with its body: it may never send it, and the
        next request would be taken for it.
        """
        if self._awaits_continue:
            self._awaits_continue = self.keep_alive = False

    def _cancel_if_left(self) -> None:
        if self._task is not None and self.connection.is_lost:
            self._task.cancel()

    def _scope(self, path: str) -> Scope:
        info = self.connection.transport.get_extra_info
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._version,
            "server": _address(info("sockname")),
            "client": _address(info("peername")),
            "scheme": "https" if info("sslcontext") else "http",
            # The application has no HEAD routes. HEAD runs as GET, and the body of the response is dropped.
            "method": "GET" if self._method == "HEAD" else self._method,
            "root_path": "",
            "path": path,
            "raw_path": self._raw_path,
            "query_string": self._query if len(self._query) <= _MAX_QUERY_BYTES else b"",
            "headers": self.headers,
            _EXCHANGE: self,
        }

    def _write_head(self, status: int, headers: list[Header]) -> None:
        connection = self.connection
        lines = connection.context.default_lines(connection.server_state.default_headers, self.headers)
        parts = [STATUS_LINES[status], lines]
        has_length = has_close = False
        for name, value in headers:
            if _INVALID_NAME.search(name) or _INVALID_VALUE.search(value):
                raise RuntimeError("invalid HTTP header of a response")
            name = name.lower()
            if name == b"content-length":
                has_length = True
                self._missing_bytes = int(value)
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self._is_chunked = True
            elif name == b"connection" and b"close" in [token.lower().strip() for token in value.split(b",")]:
                has_close = True
            parts += (name, b": ", value, b"\r\n")
        self.response_started = True
        self._end_without_body()
        if has_close or connection.ends():
            self.keep_alive = False
        if not self.keep_alive and not has_close:
            parts.append(b"connection: close\r\n")
        if not (has_length or self._is_chunked) and self.has_response_body and status not in (204, 304):
            if self._version == "1.0":  # knows no chunks (RFC 9112, section 6.1)
                self._missing_bytes = None
            else:
                self._is_chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
        parts.append(b"\r\n")
        connection.transport.write(b"".join(parts))

    def _write_body(self, body: bytes | memoryview, *, more_body: bool) -> None:
        transport = self.connection.transport
        if not self.has_response_body:
            self._missing_bytes = 0
        elif self._is_chunked:
            self._missing_bytes = 0
            parts: list[bytes | memoryview] = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            if not more_body:
                parts.append(b"0\r\n\r\n")
            transport.write(b"".join(parts))
        elif self._missing_bytes is None:
            transport.write(body)
        else:
            if len(body) > self._missing_bytes:
                raise RuntimeError("the body of a response is longer than its Content-Length")
            self._missing_bytes -= len(body)
            transport.write(body)
        if not more_body:
            if self._missing_bytes:
                raise RuntimeError("the body of a response is shorter than its Content-Length")
            self._arrival.set()
            self.connection.complete(self)


def exchange_of(scope: Scope) -> AsgiExchange:
    """Return the exchange of a request by its scope."""
    exchange: AsgiExchange = scope[_EXCHANGE]
    return exchange


def _address(info: object) -> tuple[str, int] | None:
    """Return host and port of a socket address of IPv4 or IPv6; None if the transport does not know the address."""
    return (str(info[0]), int(info[1])) if isinstance(info, tuple) else None
