"""A running server, asked over one kept-alive connection with bounded times, by calls that change nothing."""

import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
from cryptography import x509

from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.tools.doctor.options import reach_of
from ortserve.tools.doctor.result import ServerFacts

_MOST_BYTES: Final = 64 * 1024 * 1024
_METRICS_PORT: Final = 8002
METRICS: Final[Mapping[str, str]] = {
    "open_files": "process_open_fds",
    "most_open_files": "process_max_fds",
    "saturation": r"ortserve_saturation\{.*\}",
    "requests": r"ortserve_request_duration_seconds_count\{.*\}",
    "rejected_requests": r"ortserve_rejected_requests_total\{.*\}",
    "event_loop_stalls": "ortserve_event_loop_stalls_total",
    "run_timeouts": r'ortserve_batching_decisions_total\{.*decision="run_timeouts".*\}',
    "abandoned_runs": r'ortserve_batching_decisions_total\{.*decision="abandoned".*\}',
    "out_of_memory": r'ortserve_batching_decisions_total\{.*decision="out_of_memory".*\}',
    "rows_depend": r'ortserve_checked_requests_total\{.*outcome="differed".*\}',
}
"""Names in the result, and what the lines of Prometheus' text format begin with."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. ``headers`` have names in small letters."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def text(self) -> str:
        """The beginning of the body, for messages."""
        return self.body[:300].decode(errors="replace")

    def json(self) -> Any:
        """The body as JSON; None if it is none, or the status is an error."""
        try:
            return json.loads(self.body) if self.status == 200 else None
        except ValueError:
            return None


class Client:
    """A connection. Each wait ends after ``timeout_s``."""

    def __init__(self, url: str, key: str = "", timeout_s: float = 5.0, *, verify: bool = True) -> None:
        """Raises ServeError, invalid_input, unless ``url`` begins with ``http://`` or ``https://``."""
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError:
            port = host = None
        if not host or parts.scheme not in ("http", "https"):
            raise invalid_input(f"'{url}': expected the URL of an HTTP port, such as http://127.0.0.1:8000")
        self.url: Final = url
        self._prefix = parts.path.rstrip("/").removesuffix("/v2")
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\n{authorization}"
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            if not verify:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)

    def connect(self) -> socket.socket:
        """Connect, unless it is connected.

        Raises:
            ssl.SSLCertVerificationError: The certificate is not trusted here.
            ServeError: No server answers.
        """
        try:
            if self._connection.sock is None:
                self._connection.connect()
        except ssl.SSLCertVerificationError:
            raise
        except OSError as error:
            raise self._failed(error) from None
        return self._connection.sock

    def prepare(self, path: str, body: bytes | None = None, headers: str = "") -> bytes:
        """The bytes of a GET, or of a POST with a body."""
        method = "GET" if body is None else "POST"
        length = f"Content-Length: {len(body or b'')}\r\n"
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{headers}{length}\r\n".encode() + (body or b"")

    def ask(self, path: str, body: bytes | None = None) -> Answer:
        """GET, or POST with a body. Raises as ``exchange``."""
        return self.exchange(self.prepare(path, body))

    def exchange(self, request: bytes) -> Answer:
        """Send prepared bytes and read the answer, which takes little time here.

        Raises:
            ServeError: The server does not answer, or not in HTTP.
        """
        headers: dict[bytes, bytes] = {}
        body = bytearray()
        kept: list[bool] = []  # whether the connection stays open, once the answer is whole
        parser: httptools.HttpResponseParser
        events = SimpleNamespace(
            on_header=lambda name, value: headers.update({name.lower(): value}),
            on_body=body.extend,
            on_message_complete=lambda: kept.append(parser.should_keep_alive()),
        )
        parser = httptools.HttpResponseParser(events)
        try:
            sock = self.connect()
            sock.sendall(request)
            while not kept and len(body) < _MOST_BYTES:
                part = sock.recv(256 * 1024)
                if not part and not parser.get_status_code():
                    raise ConnectionResetError("the connection was closed")
                if not part:
                    break  # as servers of HTTP/1.0 end their answers
                parser.feed_data(part)
            if kept != [True]:
                self.close()
        except (OSError, httptools.HttpParserError) as error:
            self.close()
            raise self._failed(error) from None
        return Answer(parser.get_status_code(), headers, bytes(body))

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._connection.close()

    def _failed(self, error: Exception) -> ServeError:
        reason = "no answer in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", None)
        return ServeError(ErrorKind.NOT_READY, f"{self.url}: expected a server, got: {reason or repr(error)}")


def look_at(client: Client, metrics_url: str | None, certificate_problem: str) -> ServerFacts:
    """Ask the server. ``metrics_url`` is None for the usual port of the same host.

    Raises:
        ServeError: No server of the protocol answers, or not at ``metrics_url``.
    """
    sock = client.connect()
    address = str(sock.getpeername()[0])
    certificate = sock.getpeercert(binary_form=True) if isinstance(sock, ssl.SSLSocket) else None
    expires = x509.load_der_x509_certificate(certificate).not_valid_after_utc.timestamp() if certificate else None
    metadata = client.ask("/v2")
    known = metadata.json()
    if metadata.status not in (200, 401, 403) or (metadata.status == 200 and not isinstance(known, dict)):
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            f"{client.url}: expected a server of the Open Inference Protocol v2, got status {metadata.status} for /v2",
        )
    index = client.ask("/v2/repository/index", b"{}").json()
    control = client.ask("/v2/trace/setting").status
    return ServerFacts(
        name=str((known or {}).get("name", "unknown")),
        version=str((known or {}).get("version", "unknown")),
        live=client.ask("/v2/health/live").status == 200,
        ready=client.ask("/v2/health/ready").status == 200,
        reach=reach_of(address),
        tls=isinstance(sock, ssl.SSLSocket),
        certificate_expires_s=None if expires is None else expires - time.time(),
        certificate_problem=certificate_problem,
        control_is_open=control == 200 if control in (200, 401, 403) else None,
        models=dict(_state(each) for each in index if isinstance(each, dict)) if isinstance(index, list) else None,
        metrics=_read_metrics(metrics_url, address),
    )


def _state(entry: Mapping[str, Any]) -> tuple[str, str]:
    label = "/".join(str(entry[key]) for key in ("name", "version") if entry.get(key))
    return label, ": ".join(str(entry[key]) for key in ("state", "reason") if entry.get(key))


def _read_metrics(url: str | None, address: str) -> Mapping[str, float] | None:
    usual = f"http://[{address}]:{_METRICS_PORT}" if ":" in address else f"http://{address}:{_METRICS_PORT}"
    client = Client((url or usual).removesuffix("/metrics"), timeout_s=3.0, verify=False)
    try:
        text = client.ask("/metrics").body.decode(errors="replace")
    except ServeError:
        if url:
            raise
        return None
    finally:
        client.close()
    return sum_metrics(text) if "ortserve_build_info" in text else None


def sum_metrics(text: str) -> dict[str, float]:
    """The metrics that findings need, added up over models; of the saturation the largest. Pure."""
    found: dict[str, float] = {}
    for name, start in METRICS.items():
        values = re.findall(rf"^{start} (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$", text, re.MULTILINE | re.ASCII)
        if values:
            found[name] = max(map(float, values)) if name == "saturation" else sum(map(float, values))
    return found
