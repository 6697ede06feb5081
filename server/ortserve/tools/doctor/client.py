"""One kept-alive HTTP connection to a server of the protocol, with bounded times and short errors."""

import http.client
import json
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from ortserve.codecs.binary_tensor import encode_binary_tensor
from ortserve.core.signature import TensorSpec
from ortserve.errors import ErrorKind, ServeError, invalid_input

_MOST_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: ``timing`` is its header ``Server-Timing``."""

    status: int
    body: bytes
    timing: str = ""

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
        self.has_tls: Final = parts.scheme == "https"
        self.address = ""
        """Of the server, once connected."""
        self._prefix = parts.path.rstrip("/").removesuffix("/v2")
        self._headers = {"Host": parts.netloc.rpartition("@")[2]} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._connection = http.client.HTTPConnection(host, port or 80, timeout=timeout_s)
        if self.has_tls:
            context = ssl.create_default_context()
            if not verify:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._connection = http.client.HTTPSConnection(host, port or 443, timeout=timeout_s, context=context)

    def connect(self) -> bytes:
        """Connect. Returns the server's certificate in DER; empty without TLS.

        Raises:
            ssl.SSLCertVerificationError: The certificate is not trusted here.
            ServeError: No server answers.
        """
        try:
            self._connection.connect()
        except ssl.SSLCertVerificationError:
            raise
        except OSError as error:
            raise self._failed(error) from None
        sock = self._connection.sock
        self.address = str(sock.getpeername()[0])
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return (sock.getpeercert(binary_form=True) or b"") if isinstance(sock, ssl.SSLSocket) else b""

    def ask(self, path: str, body: bytes | None = None) -> Answer:
        """GET, or POST with a body of JSON.

        Raises:
            ServeError: The server does not answer, or not in HTTP.
        """
        try:
            self._connection.request("GET" if body is None else "POST", self._prefix + path, body, self._headers)
            answer = self._connection.getresponse()
            return Answer(answer.status, answer.read(_MOST_BYTES))
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise self._failed(error) from None

    def prepare(self, model: str, specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> bytes:
        """The bytes of a request to run a model, with binary inputs and outputs."""
        parts = [bytes(encode_binary_tensor(array, spec.datatype)) for spec, array in zip(specs, arrays, strict=True)]
        inputs = [
            {"name": spec.name, "shape": array.shape, "datatype": spec.datatype.value}
            | {"parameters": {"binary_data_size": len(part)}}
            for spec, array, part in zip(specs, arrays, parts, strict=True)
        ]
        document = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        headers = self._headers | {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(document)),
            "Content-Length": str(len(document) + sum(map(len, parts))),
        }
        lines = [f"POST {self._prefix}/v2/models/{model}/infer HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        return b"".join(["\r\n".join(lines).encode(), b"\r\n\r\n", document, *parts])

    def exchange(self, request: bytes) -> Answer:
        """Send prepared bytes and read the answer, in much less time than ``ask`` needs.

        Raises:
            ServeError: The server does not answer, or rejects the request.
        """
        try:
            if self._connection.sock is None:  # the server closed it after an answer
                self.connect()
            sock = self._connection.sock
            sock.sendall(request)
            content = b""
            while b"\r\n\r\n" not in content:
                content += _receive(sock)
            head, _, body = content.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            missing = min(_MOST_BYTES, int(headers["content-length"])) - len(body)
            while missing > 0:
                part = _receive(sock)
                body, missing = body + part, missing - len(part)
            answer = Answer(int(first.split()[1]), body, headers.get("server-timing", ""))
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise self._failed(error) from None
        if answer.status != 200:
            text = body[:500].decode(errors="replace")
            raise ServeError(ErrorKind.REJECTED_BY_MODEL, f"{self.url}: status {answer.status}: {text}")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _failed(self, error: Exception) -> ServeError:
        reason = "no answer in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", None)
        return ServeError(ErrorKind.NOT_READY, f"{self.url}: expected a server, got: {reason or repr(error)}")


def _receive(sock: socket.socket) -> bytes:
    part = sock.recv(256 * 1024)
    if not part:
        raise ConnectionResetError("the connection was closed")
    return part
