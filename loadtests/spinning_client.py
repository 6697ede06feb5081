"""One client of the tiny MLP over REST or gRPC that never sleeps: it polls its socket until the answer arrives.

Waking a sleeping client takes as long as waking a sleeping server, and would add to every figure. The first answer of
each connection is checked against expected outputs, all others against the bytes of the first.
"""

import socket
from typing import Protocol

import hpack

import http2_frames as http2
from infer_requests import INFER, framed, grpc_request, json_request, numbers_of_grpc, numbers_of_json
from tiny_mlp import NAME, TinyMlp


class Caller(Protocol):
    """A connection to a server."""

    def call(self) -> None:
        """Send the request and receive the answer. Raises AssertionError if it is wrong."""
        ...

    def close(self) -> None: ...


class RestCaller:
    """Infers over REST with JSON."""

    def __init__(self, port: int, model: TinyMlp) -> None:
        body = json_request(model.row)
        head = f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        self._request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._socket = _connect(port)
        self._answer = b""
        first = self._exchange()
        model.check(numbers_of_json(first))
        self._answer = first

    def call(self) -> None:
        assert self._exchange() == self._answer

    def close(self) -> None:
        self._socket.close()

    def _exchange(self) -> bytes:
        self._socket.sendall(self._request)
        received = b""
        while True:
            received += _spin(self._socket)
            head, end, body = received.partition(b"\r\n\r\n")
            if end:
                assert head.startswith(b"HTTP/1.1 200 "), received
                size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                if len(body) >= size:
                    assert len(body) == size
                    return body


class GrpcCaller:
    """Infers over gRPC with raw contents, using HTTP/2 frames that are built in advance."""

    def __init__(self, port: int, model: TinyMlp) -> None:
        headers = {":method": "POST", ":scheme": "http", ":path": INFER}
        headers |= {":authority": f"127.0.0.1:{port}", "te": "trailers", "content-type": "application/grpc"}
        encoder = hpack.Encoder()
        # Never-indexed headers leave the dynamic table unchanged, so every stream can send the same block.
        self._block = encoder.encode([hpack.NeverIndexedHeaderTuple(*header) for header in headers.items()])
        self._data = framed(grpc_request(NAME, model.row))
        self._socket = _connect(port)
        self._socket.sendall(http2.opening())
        self._stream = -1
        self._received = b""
        self._answer = b""
        first = self._exchange()
        model.check(numbers_of_grpc(first[5:]))
        self._answer = first

    def call(self) -> None:
        assert self._exchange() == self._answer

    def close(self) -> None:
        self._socket.close()

    def _exchange(self) -> bytes:
        self._stream += 2
        self._socket.sendall(
            http2.frame(http2.HEADERS, http2.END_HEADERS, self._stream, self._block)
            + http2.frame(http2.DATA, http2.END_STREAM, self._stream, self._data)
        )
        answer = b""
        while True:
            while (first := http2.first_frame(self._received)) is not None:
                kind, flags, stream, payload, self._received = first
                if kind == http2.DATA:
                    answer += payload
                elif kind == http2.HEADERS and flags & http2.END_STREAM:
                    assert stream == self._stream
                    return answer
                elif kind in (http2.SETTINGS, http2.PING) and not flags & http2.ACK:
                    self._socket.sendall(http2.frame(kind, http2.ACK, 0, payload if kind == http2.PING else b""))
                else:
                    assert kind in (http2.HEADERS, http2.SETTINGS, http2.PING, http2.WINDOW_UPDATE), kind
            self._received += _spin(self._socket)


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection


def _spin(connection: socket.socket) -> bytes:
    while True:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            continue
        assert data, "the server closed the connection"
        return data
