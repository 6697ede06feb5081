"""Small requests at a fixed rate on both protocols from a separate process: a measure of interference by other clients.

Latency counts from the due time of a request, so that a stall of the server shows in every request that was due
meanwhile. Each answer is compared with ONNX Runtime's.
"""

import gc
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final, Protocol

import hpack
import numpy as np

import http2_frames as http2
from crafted_messages import http_request
from harness import process, receive
from infer_requests import INFER, framed, grpc_request, json_request, numbers_of_grpc, numbers_of_json
from tiny_mlp import NAME, write_tiny_mlp

RATE: Final = 200.0
"""Requests per second on each protocol, evenly spaced; requests of the two protocols alternate."""
CONNECTIONS: Final = 8
"""Connections per protocol. A request waits while all are busy; its latency includes this wait."""
PATIENCE_S: Final = 60.0
"""Timeout of answers after the last due time. Requests without an answer by then count as lost."""
PROTOCOLS: Final = ("REST", "gRPC")


@dataclass(frozen=True)
class Stretch:
    """The results of one protocol's requests: latencies of correct answers in seconds, and counts of other results."""

    latencies_s: np.ndarray
    wrong: tuple[str, ...]
    lost: int

    def quantile_ms(self, share: float) -> float:
        """A quantile of latency in ms. Lost requests count as the slowest; without any answer it is infinite."""
        count = len(self.latencies_s) + self.lost + len(self.wrong)
        place = int(np.ceil(share * count)) - 1
        return float(np.sort(self.latencies_s)[place]) * 1e3 if 0 <= place < len(self.latencies_s) else float("inf")


@dataclass(frozen=True)
class Row:
    """The request that is repeated, and its correct answer."""

    model: str
    values: np.ndarray
    expected: np.ndarray


class _Caller(Protocol):
    """A connection with at most one request in flight."""

    socket: socket.socket

    def send(self) -> None:
        """Send the request."""

    def receive(self) -> bytes | None:
        """Read available bytes. Returns the answer once it is complete. Raises OSError if the connection failed."""


class RestCaller:
    """Sends REST JSON requests on a persistent connection."""

    def __init__(self, port: int, row: Row) -> None:
        self.socket = _connect(port)
        self._request = http_request(row.model, json_request(row.values[None]))
        self._came = b""

    def send(self) -> None:
        self.socket.sendall(self._request)

    def receive(self) -> bytes | None:
        self._came += _read(self.socket)
        head, separator, body = self._came.partition(b"\r\n\r\n")
        if not separator or len(body) < int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return None
        self._came = b""
        return head[9:12] + body

    @staticmethod
    def outputs(answer: bytes) -> np.ndarray:
        """Raises ValueError where the answer is an error."""
        if answer[:3] != b"200":
            raise ValueError(answer[:200].decode())
        return numbers_of_json(answer[3:])


class GrpcCaller:
    """Sends gRPC calls on a persistent HTTP/2 connection."""

    def __init__(self, port: int, row: Row) -> None:
        self.socket = _connect(port)
        self.socket.sendall(http2.opening())
        self._data = framed(grpc_request(row.model, row.values[None]))
        self._head = [(":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "x")]
        self._head += [("te", "trailers"), ("content-type", "application/grpc")]
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._stream = -1
        self._window = http2.FIRST_WINDOW
        self._came = b""
        self._message = b""

    def send(self) -> None:
        # The server returns window once it has read the bytes, and every earlier call has been answered.
        assert self._window >= len(self._data), "the server gave no window back"
        self._stream += 2
        self._window -= len(self._data)
        self._message = b""
        head = http2.frame(http2.HEADERS, http2.END_HEADERS, self._stream, self._encoder.encode(self._head))
        self.socket.sendall(head + http2.frame(http2.DATA, http2.END_STREAM, self._stream, self._data))

    def receive(self) -> bytes | None:
        self._came += _read(self.socket)
        answer = None
        while (first := http2.first_frame(self._came)) is not None:
            kind, flags, stream, content, self._came = first
            answer = self._on_frame(kind, flags, stream, content) or answer
        return answer

    def _on_frame(self, kind: int, flags: int, stream: int, content: bytes) -> bytes | None:
        if kind == http2.DATA:
            self._message += content
        elif kind == http2.HEADERS:
            headers = {str(name): str(value) for name, value in self._decoder.decode(content)}
            if flags & http2.END_STREAM:
                is_answered = headers.get("grpc-status") == "0"
                return self._message if is_answered else f"status of {headers}".encode()
        elif kind == http2.WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(content)
        elif kind in (http2.SETTINGS, http2.PING) and not flags & http2.ACK:
            self.socket.sendall(http2.frame(kind, http2.ACK, 0, content if kind == http2.PING else b""))
        elif kind in (http2.RESET, http2.GOAWAY):
            raise ConnectionResetError(f"frame {kind}: {content!r}")
        return None

    @staticmethod
    def outputs(answer: bytes) -> np.ndarray:
        """Raises ValueError where the answer is an error."""
        if answer.startswith(b"status"):
            raise ValueError(answer[:200].decode())
        return numbers_of_grpc(answer[5:])


class _Arm:
    """Connections, due requests and results of one protocol."""

    def __init__(self, open_caller: Callable[[], _Caller], outputs: Callable[[bytes], np.ndarray], row: Row) -> None:
        self._open = open_caller
        self._outputs = outputs
        self._row = row
        self.idle = [open_caller() for _ in range(CONNECTIONS)]
        self.busy: dict[socket.socket, tuple[_Caller, float]] = {}
        self._due: deque[float] = deque()
        self._answers: list[tuple[float, bytes]] = []
        self._lost = 0

    @property
    def is_done(self) -> bool:
        return not self.busy and not self._due

    def add(self, due: float) -> None:
        self._due.append(due)
        self._send()

    def receive(self, ready: socket.socket) -> None:
        caller, due = self.busy[ready]
        try:
            answer = caller.receive()
        except OSError:
            self._lose(ready)
            return
        if answer is not None:
            self._answers.append((time.perf_counter() - due, answer))
            del self.busy[ready]
            self.idle.append(caller)
            self._send()

    def finish(self) -> Stretch:
        """Count requests without an answer as lost, and compare all answers."""
        for ready in list(self.busy):
            self._lose(ready)
        lost, self._lost = self._lost + len(self._due), 0
        self._due.clear()
        wrong: list[str] = []
        latencies: list[float] = []
        for latency_s, answer in self._answers:
            try:
                np.testing.assert_allclose(self._outputs(answer).ravel(), self._row.expected, rtol=1e-3, atol=1e-5)
                latencies.append(latency_s)
            except (ValueError, AssertionError) as error:
                wrong.append(str(error))
        self._answers.clear()
        return Stretch(np.array(latencies), tuple(wrong), lost)

    def _send(self) -> None:
        while self._due and self.idle:
            caller = self.idle.pop(0)  # in rotation, so that the server closes no connection as idle
            due = self._due.popleft()
            self.busy[caller.socket] = caller, due
            try:
                caller.send()
            except OSError:
                self._lose(caller.socket)

    def _lose(self, gone: socket.socket) -> None:
        del self.busy[gone]
        gone.close()
        self._lost += 1
        with suppress(OSError):  # the server has ended: due requests count as lost at the end of the stretch
            self.idle.append(self._open())


@contextmanager
def small_requests(port: int, row: Row) -> Iterator[Callable[[float], dict[str, Stretch]]]:
    """Run the process beside a server with gRPC on the next port, after a warm-up.

    Yields a function that sends requests for a duration in seconds, and returns a ``Stretch`` per protocol.
    """
    with process(_probe, {"REST": port, "gRPC": port + 1}, row) as pipe:

        def stretch(seconds: float) -> dict[str, Stretch]:
            pipe.send(seconds)
            stretches: dict[str, Stretch] = receive(pipe, seconds + 2 * PATIENCE_S)
            return stretches

        stretch(1.0)
        yield stretch


def _probe(pipe: Pipe, ports: dict[str, int], row: Row) -> None:
    """Run the process: for each received duration in seconds, send requests and return a ``Stretch`` per protocol."""
    arms = (
        _Arm(lambda: RestCaller(ports["REST"], row), RestCaller.outputs, row),
        _Arm(lambda: GrpcCaller(ports["gRPC"], row), GrpcCaller.outputs, row),
    )
    gc.disable()
    # Real-time priority: a client on another machine would not wait for the server's processors.
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while (seconds := pipe.recv()) is not None:
        pipe.send(dict(zip(PROTOCOLS, _stretch(arms, seconds), strict=True)))
        gc.collect()


def _stretch(arms: tuple[_Arm, ...], seconds: float) -> list[Stretch]:
    due = [(number / RATE / len(arms), arms[number % len(arms)]) for number in range(int(seconds * RATE) * len(arms))]
    began = time.perf_counter()
    sent = 0
    while (now_s := time.perf_counter() - began) < seconds + PATIENCE_S:
        while sent < len(due) and due[sent][0] <= now_s:
            due[sent][1].add(began + due[sent][0])
            sent += 1
        if sent == len(due) and all(arm.is_done or not (arm.busy or arm.idle) for arm in arms):
            break
        wait_s = due[sent][0] - now_s if sent < len(due) else 0.1
        # The timeout of select has a resolution of microseconds, that of epoll of milliseconds.
        for ready in select.select([one for arm in arms for one in arm.busy], [], [], max(0.0, wait_s))[0]:
            next(arm for arm in arms if ready in arm.busy).receive(ready)
    return [arm.finish() for arm in arms]


def small_row(folder: Path) -> Row:
    """Write the model for small requests. Returns one request and its answer."""
    model = write_tiny_mlp(folder, decimals=4)
    return Row(NAME, model.row[0], model.expected)


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _read(connection: socket.socket) -> bytes:
    data = connection.recv(65_536)
    if not data:
        raise ConnectionResetError("the server closed the connection")
    return data
