"""HTTP/1.1 on a plain socket: requests as bytes, and the answers of a connection one after the other."""

import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from certificates import HOST
from servers import LONG_S, LOOK_S, ServerProcess


def connect(server: ServerProcess) -> socket.socket:
    """Open a connection to the HTTP port, with TLS if the server uses it."""
    host, port = server.http.split(":")
    plain = socket.create_connection((host, int(port)), timeout=LONG_S)
    return server.client.wrap_socket(plain, server_hostname=HOST) if server.client else plain


def post(model: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    """An infer request."""
    lines = [f"POST /v2/models/{model}/infer HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "\r\n"]).encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def is_read(connection: socket.socket) -> bool:
    """Whether the server has read all sent bytes, so that the kernel buffers of both ends are empty."""
    ours, theirs = connection.getsockname()[1], connection.getpeername()[1]
    waiting = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, _, queues = line.split()[1:5]
        ends = [int(end.partition(":")[2], 16) for end in (local, remote)]
        to_send, to_read = (int(queue, 16) for queue in queues.split(":"))
        if ends == [ours, theirs]:
            waiting += to_send
        elif ends == [theirs, ours]:
            waiting += to_read
    return not waiting


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll until a condition without an event holds."""
    end_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(LOOK_S)


class Answers:
    """Reads the answers of a connection one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._came = bytearray()

    def next(self) -> tuple[int, Mapping[str, str], Any]:
        """Status, headers (names in lower case) and document of the next answer."""
        while b"\r\n\r\n" not in self._came:
            self.receive()
        head, _, self._came = self._came.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", "0"))
        while len(self._came) < length:
            self.receive()
        body, self._came = bytes(self._came[:length]), self._came[length:]
        is_json = headers.get("content-type") == "application/json" and "content-encoding" not in headers
        return int(first.split(" ")[1]), headers, json.loads(body) if is_json else body

    def is_at_end(self) -> bool:
        """Whether the server closed the connection and no bytes are left. Blocks until bytes or the end arrive."""
        return not self._came and self._connection.recv(1) == b""

    def receive(self) -> None:
        """Read available bytes, within the connection's timeout."""
        data = self._connection.recv(1 << 20)
        assert data, f"the server closed the connection after {bytes(self._came)!r}"
        self._came += data


def reset(connection: socket.socket) -> None:
    """Reset the connection. Over TLS, the end of the session is not announced either."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
