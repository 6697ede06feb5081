"""Blocking HTTP calls over a persistent connection. Waits are bounded, and errors name the server."""

import socket
import ssl
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import quote

import httptools
import orjson

from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.address import Address

_MAX_BYTES: Final = 2**30
_RESET: Final = struct.pack("ii", 1, 0)
"""The value of ``SO_LINGER`` with which closing a socket resets its connection."""
_MAX_TEXT: Final = 1000
"""Characters of an error of a server that messages quote."""
_KINDS: Final = {
    401: ErrorKind.UNAUTHENTICATED,
    403: ErrorKind.FORBIDDEN,
    404: ErrorKind.NOT_FOUND,
    409: ErrorKind.CONFLICT,
    429: ErrorKind.OVERLOADED,
}

_UNKNOWN_ISSUER: Final = (18, 19, 20, 21)
"""OpenSSL's codes for certificates whose issuer is not trusted, ``X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT`` and the
following ones."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. The names in ``headers`` are in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    def json(self) -> Any:
        """The body as JSON; None if it is not JSON, or the status is an error."""
        try:
            return orjson.loads(self.body) if self.status == 200 else None
        except orjson.JSONDecodeError:
            return None

    @property
    def json_size(self) -> int | None:
        """The size of the JSON if binary tensors follow it, otherwise None."""
        size = self.headers.get(b"inference-header-content-length", b"")
        return int(size) if size.isdigit() else None


class Client:
    """A connection, which the first call opens, also after ``close``.

    ``timeout_s`` limits each wait, and an answer that comes in many parts. All calls raise ServeError: not_ready, if no
    server answers, and unsupported, if the answer is not HTTP.
    """

    def __init__(self, address: Address, timeout_s: float = 5.0) -> None:
        assert not address.is_grpc
        self.address: Final = address
        self._timeout_s = timeout_s
        headers = {"host": address.authority, **address.headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._socket: socket.socket | None = None

    def connect(self) -> socket.socket:
        """The socket, connected if necessary. Also raises ssl.SSLCertVerificationError."""
        if self._socket is None:
            self._socket = connect(self.address, self._timeout_s)
        return self._socket

    def prepare(
        self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, *, method: str = ""
    ) -> bytes:
        """The bytes of a request: GET, or POST with a body, unless ``method`` names another one."""
        method = method or ("GET" if body is None else "POST")
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        length = f"content-length: {len(body or b'')}\r\n"
        head = f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self._head}{more}{length}\r\n"
        return head.encode() + (body or b"")

    def exchange(self, request: bytes) -> Answer:
        """Send prepared bytes and read the answer, of any status."""
        headers: dict[bytes, bytes] = {}
        body = bytearray()
        kept: list[bool] = []  # filled when the answer is complete: whether the connection stays open
        parser: httptools.HttpResponseParser
        events = SimpleNamespace(
            on_header=lambda name, value: headers.update({name.lower(): value}),
            on_body=body.extend,
            on_message_complete=lambda: kept.append(parser.should_keep_alive()),
        )
        parser = httptools.HttpResponseParser(events)
        latest = time.monotonic() + self._timeout_s
        is_first = self._socket is None
        try:
            connected = self.connect()
            connected.sendall(request)
            while not kept:
                part = connected.recv(256 * 1024)
                if not part and not parser.get_status_code() and is_first:
                    raise another_kind(self.address, "got a closed connection instead of an answer")
                if not part and not parser.get_status_code():
                    raise unreachable(self.address, "it has closed the connection")
                if not part:
                    break  # the end of the connection ends an answer of HTTP/1.0
                parser.feed_data(part)
                if not kept and time.monotonic() > latest:
                    raise TimeoutError
                if len(body) > _MAX_BYTES:
                    raise another_kind(self.address, f"got an answer of more than {_MAX_BYTES:,} bytes")
        except httptools.HttpParserError:
            raise another_kind(self.address, "got an answer that is not HTTP; is this a gRPC port?") from None
        except OSError as error:
            raise failed(self.address, error, self._timeout_s) from None
        finally:
            if not kept and self._socket is not None:
                # A server answers a call although its client has closed the connection, unless it was reset.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            if kept != [True]:
                self.close()
        return Answer(parser.get_status_code(), headers, bytes(body))

    def ask(self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Answer:
        """GET, or POST with a body. Returns an answer of any status."""
        return self.exchange(self.prepare(path, body, headers))

    def expect_http(self) -> None:
        """Get any answer before a call that takes long.

        If the connection closes during the first call, ``exchange`` blames the kind of the server. During a long call
        the server may have ended.
        """
        self.ask("/v2")

    def call(self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Answer:
        """As ``ask``, followed by ``checked``."""
        return self.checked(self.ask(path, body, headers))

    def checked(self, answer: Answer) -> Answer:
        """The answer, if its status is 200. Raises ServeError with the message of the server for other statuses."""
        status = answer.status
        if status == 200:
            return answer
        if 300 <= status < 400:
            location = answer.headers.get(b"location", b"nowhere").decode("latin-1")
            raise another_kind(self.address, f"got status {status}, a redirect to {location}")
        text = answer.body[:_MAX_TEXT].decode(errors="replace")
        is_lost = status == 501 or (400 <= status < 500 and status not in (401, 403, 429))
        # Errors of the protocol are JSON. Its calls have the right methods, so 405 comes from another kind of server,
        # such as the port of the metrics.
        if status == 405 or (is_lost and not text.startswith("{")):
            raise another_kind(self.address, f"got status {status}: {text[:60]!r}")
        with suppress(ValueError, LookupError, TypeError):
            text = str(orjson.loads(answer.body)["error"])[:_MAX_TEXT]
        hint = " (send a key with --key-file)" if status in (401, 403) else ""
        kind = _KINDS.get(status, ErrorKind.REJECTED_BY_MODEL if 400 <= status < 500 else ErrorKind.INTERNAL)
        raise ServeError(kind, f"{self.address.url}: status {status}: {text}{hint}")

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def connect(address: Address, timeout_s: float) -> socket.socket:
    """A connection to a server, with TLS if its address says so. ``timeout_s`` limits each wait, also later ones.

    Raises:
        ServeError: No server listens, or its port has no TLS.
        ssl.SSLCertVerificationError: The certificate is not trusted.
    """
    context, made = address.tls(), None
    try:
        made = socket.create_connection((address.host, address.port), timeout_s)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return context.wrap_socket(made, server_hostname=address.host) if context else made
    except OSError as error:
        if made is not None:
            made.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise
        raise failed(address, error, timeout_s) from None


def failed(address: Address, error: OSError, timeout_s: float) -> ServeError:
    """The error for a connection that failed, or on which nothing came within ``timeout_s``."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return untrusted(address, error)
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if reason == "WRONG_VERSION_NUMBER":
        usual = "grpc" if address.is_grpc else "http"
        return another_kind(address, f"got an answer without TLS; is this a port for {usual}://?")
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        hint = "it requires a client certificate that it trusts (--cert names a file with one and its key)"
        return unreachable(address, f"{hint}: {reason.lower().replace('_', ' ')}")
    waited = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else None
    return unreachable(address, waited or error.strerror or str(error))


def untrusted(address: Address, error: ssl.SSLCertVerificationError) -> ServeError:
    """The error for a server whose certificate is not trusted, is for another name, or has expired."""
    hint = " (--ca names a file with certificates to trust)" if error.verify_code in _UNKNOWN_ISSUER else ""
    problem = f"the server's certificate is not trusted: {error.verify_message}{hint}"
    return ServeError(ErrorKind.NOT_READY, f"{address.url}: {problem}")


def path_of(model: str, version: str = "") -> str:
    """The path of a model over REST."""
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


def read_timing(header: str) -> Iterator[tuple[str, float]]:
    """The phases of ``Server-Timing`` and their times in ms. Malformed entries are left out."""
    for entry in header.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for key, _, text in (parameter.partition("=") for parameter in parameters):
            if key == "dur" and text.replace(".", "", 1).isdecimal():
                yield name, float(text)


def another_kind(address: Address, seen: str) -> ServeError:
    """The error for a server that does not speak the protocol."""
    expected = f"{address.url}: expected a server of the Open Inference Protocol v2"
    return ServeError(ErrorKind.UNSUPPORTED, f"{expected}, {seen}")


def unreachable(address: Address, reason: str) -> ServeError:
    """The error for a server that does not answer."""
    return ServeError(ErrorKind.NOT_READY, f"{address.url}: cannot reach the server: {reason}")
