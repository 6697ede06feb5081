"""The neighbours of ``noisy_neighbour.py``: the requests of each, and the process that sends them.

Bodies are built before the measurement, and the same bytes are sent each time. The process has the lowest priority,
because it shares the processors with the server.
"""

import http.client
import io
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final

import grpc
import h2.config
import h2.connection
import numpy as np
import orjson
from h2.settings import SettingCodes, Settings

import crafted_messages as crafted
from infer_requests import INFER, framed
from models import builders, costly
from ortserve.core.dtypes import DataType
from raw_grpc import end_of_call

SLOWEST_S: Final = 60.0
"""Timeout of an answer."""
MIB: Final = 2**20

_UNREAD: Final = 16
"""Number of connections whose callers read no answers."""
_PIECE_BYTES: Final = 65_536
_LOOP_STEPS: Final = 500_000
_HEADERS: Final[Mapping[str, str]] = {"Content-Type": "application/json"}

Ask = Callable[[], Sequence[str]]
"""Sends once and returns the outcome of each request: an HTTP status or the name of a gRPC status."""


@dataclass(frozen=True)
class Ports:
    """The ports of the server on 127.0.0.1."""

    http: int
    grpc: int


@dataclass(frozen=True)
class Neighbour:
    """A client that may disturb others.

    Attributes:
        name: Name for the option ``--only`` and the table.
        sends: Description of its requests.
        every_s: Interval between requests; longer if the answer takes longer.
        prepare: Builds the requests.
        extra_bytes: Memory that the server may use in addition to its request limit, for a model it loads.
    """

    name: str
    sends: str
    every_s: float
    prepare: Callable[[Ports, ExitStack], Sequence[Ask]]
    extra_bytes: int = 0


def write_models(repository: Path) -> tuple[str, ...]:
    """Write all models that neighbours request. Returns the names of the models to load at start."""
    made: dict[str, Callable[[Path], Path]] = {
        "counted": costly.counted_loop,
        "widened": costly.widened,
        "largest": costly.largest,
        "largest_int32": lambda path: costly.largest(path, DataType.INT32),
        "largest_int64": lambda path: costly.largest(path, DataType.INT64),
        "first_text": costly.first_text,
        "poison": builders.poison,
        "weighty": costly.weighty,
    }
    for name, build in made.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        build(folder / "model.onnx")
    return *(name for name in made if name != "weighty"), "text_stats"


def neighbour(pipe: Pipe, name: str, ports: Ports) -> None:
    """Run the neighbour's process.

    It reports that it is prepared. Then it starts sending on each first message, stops on the next, and returns counts.
    """
    os.nice(19)
    chosen = next(one for one in NEIGHBOURS if one.name == name)
    with ExitStack() as stack:
        asks = cycle(chosen.prepare(ports, stack))
        pipe.send("prepared")
        while pipe.recv() is not None:
            pipe.send(_send_until_stopped(pipe, asks, chosen.every_s))


def _send_until_stopped(pipe: Pipe, asks: Iterator[Ask], every_s: float) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    due = time.monotonic()
    while not pipe.poll(max(0.0, due - time.monotonic())):
        due = max(due + every_s, time.monotonic())
        try:
            outcomes.update(next(asks)())
        except OSError as error:
            outcomes[type(error).__name__] += 1
    pipe.recv()
    return outcomes


def _posting(ports: Ports, path: str, body: bytes, headers: Mapping[str, str] = _HEADERS) -> Ask:
    sized = {**headers, "Content-Length": str(len(body))}

    def ask() -> Sequence[str]:
        # A kernel without preemption runs a whole system call at once, so the body is sent in pieces.
        connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=SLOWEST_S, blocksize=_PIECE_BYTES)
        with closing(connection):
            connection.request("POST", path, io.BytesIO(body), sized)
            answer = connection.getresponse()
            while answer.read(1 << 20):
                pass
            return (str(answer.status),)

    return ask


def _inferring(ports: Ports, model: str, body: bytes, headers: Mapping[str, str] = _HEADERS) -> Ask:
    return _posting(ports, f"/v2/models/{model}/infer", body, headers)


def _calling(ports: Ports, stack: ExitStack, message: bytes) -> Ask:
    """Returns a call by grpcio's client that sends the message's bytes unchanged."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{ports.grpc}", options))
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(INFER)

    def ask() -> Sequence[str]:
        try:
            call(message, timeout=SLOWEST_S)
        except grpc.RpcError as error:
            return (error.code().name,)
        return ("OK",)

    return ask


def _calling_compressed(ports: Ports, message: bytes) -> Ask:
    """Returns a call whose message is compressed in advance and fits the initial window of HTTP/2."""
    packed = crafted.gzipped(message)
    body = b"\1" + len(packed).to_bytes(4) + packed
    assert len(body) < 65_536

    def ask() -> Sequence[str]:
        try:
            trailers = end_of_call(f"127.0.0.1:{ports.grpc}", INFER, body, {"grpc-encoding": "gzip"})
        except AssertionError as error:
            return (f"closed: {error}"[:60],)
        return (_GRPC_NAMES[int(trailers["grpc-status"])],)

    return ask


_GRPC_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


def _json_1mb(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    return (_inferring(ports, "largest", crafted.numbers_json(100_000, "0.12345678")),)


def _json_16mb(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    return (_inferring(ports, "largest", crafted.numbers_json(1_500_000, "0.12345678")),)


def _rest_bombs(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    bodies = (crafted.empty_inputs_json(20_000_000), crafted.empty_parameters_json(20_000_000))
    return [_inferring(ports, "largest", crafted.gzipped(body), crafted.GZIP) for body in bodies]


def _rest_numbers(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    return (_inferring(ports, "largest", crafted.gzipped(crafted.numbers_json(30_000_000)), crafted.GZIP),)


def _grpc_bombs(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    tags = (crafted.RAW_CONTENTS_TAG, crafted.INPUTS_TAG, crafted.OUTPUTS_TAG, crafted.PARAMETERS_TAG)
    messages = (crafted.infer_message("largest", crafted.empty_fields(tag, 28_000_000)) for tag in tags)
    return [_calling_compressed(ports, message) for message in messages]


def _grpc_empty_fields(ports: Ports, stack: ExitStack) -> Sequence[Ask]:
    tags = (crafted.RAW_CONTENTS_TAG, crafted.INPUTS_TAG, crafted.OUTPUTS_TAG, crafted.PARAMETERS_TAG)
    messages = (crafted.infer_message("largest", crafted.empty_fields(tag, 2_000_000)) for tag in tags)
    return [_calling(ports, stack, message) for message in messages]


def _texts(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    return (_inferring(ports, "text_stats", *crafted.text_stats_request(b"eleven byte", 2_000_000)),)


def _empty_texts(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    count = 16_000_000
    request = crafted.binary_request({"x": ("BYTES", [1, count], crafted.texts(b"", count))})
    return (_inferring(ports, "first_text", *request),)


def _typed_integers(ports: Ports, stack: ExitStack) -> Sequence[Ask]:
    count, small = 15_000_000, b"\xd0\x86\x03\x05"  # 50,000 and 5 as varints of three bytes and one byte
    narrow = crafted.typed_message("largest_int32", "INT32", 2, small * count, 2 * count)
    wide_value = crafted.varint(2**40)
    wide_count = 60_000_000 // len(wide_value)
    wide = crafted.typed_message("largest_int64", "INT64", 3, wide_value * wide_count, wide_count)
    return (_calling(ports, stack, narrow), _calling(ports, stack, wide))


def _typed_texts(ports: Ports, stack: ExitStack) -> Sequence[Ask]:
    count = 2_000_000
    contents = crafted.field(5, crafted.field(8, b"eleven byte") * count)
    message = crafted.infer_message("first_text", crafted.tensor_message("x", "BYTES", [1, count], contents))
    return (_calling(ports, stack, message),)


def _loop_model(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    """Fifty short runs, from which the server may learn that runs are short, then a long one."""

    def body(steps: int) -> bytes:
        return orjson.dumps({"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [steps]}]})

    quick, long = (_inferring(ports, "counted", body(steps)) for steps in (1, _LOOP_STEPS))
    return [quick] * 50 + [long]


def _endless_loop(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    """A run that would take 60,000 years, for a client that waits half a second."""
    tensor = {"name": "n", "datatype": "INT64", "shape": [1], "data": [2**62]}
    body = orjson.dumps({"inputs": [tensor]})
    return (_inferring(ports, "counted", body, {**_HEADERS, "X-Request-Timeout-Ms": "500"}),)


def _load(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    return [_posting(ports, f"/v2/repository/models/weighty/{what}", b"{}") for what in ("load", "unload")]


def _failing(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    """Thirty-two requests at once; every fourth makes the run of its batch fail."""

    def request(value: int) -> bytes:
        tensor = {"name": "x", "datatype": "INT64", "shape": [1, 4], "data": [value] * 4}
        return crafted.http_request("poison", orjson.dumps({"inputs": [tensor]}), {"Connection": "close"})

    values = [builders.POISON if number % 4 == 0 else 1 for number in range(32)]
    requests = [request(value) for value in values]

    def ask() -> Sequence[str]:
        with ExitStack() as stack:
            connections = [stack.enter_context(_connection(ports.http)) for _ in requests]
            for connection, content in zip(connections, requests, strict=True):
                connection.sendall(content)
            statuses = [_status(connection) for connection in connections]
        return [
            f"{status} to a good one" if status != "200" and value != builders.POISON else status
            for status, value in zip(statuses, values, strict=True)
        ]

    return (ask,)


def _slow_readers(ports: Ports, stack: ExitStack) -> Sequence[Ask]:
    """Callers on both protocols that each request 4 MB, read nothing, and disconnect after others have connected."""
    tensor = {"name": "n", "datatype": "INT64", "shape": [1], "data": [1_000_000]}
    wanted = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    rest = crafted.http_request("widened", orjson.dumps(wanted))
    raw = crafted.field(7, np.array([1_000_000]).tobytes())
    message = crafted.infer_message("widened", crafted.tensor_message("n", "INT64", [1]), raw)
    call = _unread_call(framed(message))
    waiting: deque[socket.socket] = deque()

    def ask() -> Sequence[str]:
        for port, request in ((ports.http, rest), (ports.grpc, call)):
            connection = stack.enter_context(_connection(port, receive_buffer=4096))
            waiting.append(connection)
            connection.sendall(request)
        while len(waiting) > _UNREAD:
            waiting.popleft().close()
        return ["not read"] * 2

    return (ask,)


def _json_answers(ports: Ports, _: ExitStack) -> Sequence[Ask]:
    def body(count: int) -> bytes:
        return orjson.dumps({"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [count]}]})

    return [_inferring(ports, "widened", body(count)) for count in (1_000_000, 4_000_000)]


NEIGHBOURS: Final = (
    Neighbour("json_1mb", "1 MB of JSON, 20 times a second", 1 / 20, _json_1mb),
    Neighbour("json_16mb", "16 MB of JSON, once a second", 1.0, _json_16mb),
    Neighbour("rest_bombs", "gzip of 20 M empty lists, and of 20 M empty objects in a parameter", 0.2, _rest_bombs),
    Neighbour("rest_numbers", "30 M numbers, valid, in 60 KB of gzip", 0.5, _rest_numbers),
    Neighbour("grpc_bombs", "gzip of 28 M empty raw contents, inputs, outputs, parameters", 0.2, _grpc_bombs),
    Neighbour("grpc_empty_fields", "4 MB of empty raw contents, inputs, outputs, parameters", 0.2, _grpc_empty_fields),
    Neighbour("texts", "2 M texts of 11 bytes, REST binary", 1.0, _texts),
    Neighbour("empty_texts", "16 M empty texts in 64 MB, REST binary", 1.0, _empty_texts),
    Neighbour("typed_texts", "2 M texts of 11 bytes, gRPC bytes_contents", 1.0, _typed_texts),
    Neighbour("typed_integers", "60 MB of gRPC int_contents and int64_contents", 0.5, _typed_integers),
    Neighbour("loop_model", f"runs of 1 and of {_LOOP_STEPS:,} steps of a Loop", 0.0, _loop_model),
    Neighbour("endless_loop", "2⁶² steps of a Loop, with a deadline of 0.5 s", 1.0, _endless_loop),
    Neighbour("load", "loading and unloading a model of 200 MB", 0.2, _load, extra_bytes=800 * MIB),
    Neighbour("failing", "32 requests at once, every fourth of which fails its batch", 0.1, _failing),
    Neighbour("slow_readers", f"{_UNREAD} answers of 4 MB that are not read, 16 a second", 0.125, _slow_readers),
    Neighbour("json_answers", "answers of 1 M and 4 M numbers as JSON", 0.5, _json_answers),
)


def _connection(port: int, *, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(SLOWEST_S)
    connection.connect(("127.0.0.1", port))
    return connection


def _status(connection: socket.socket) -> str:
    came = b""
    while data := connection.recv(65_536):
        came += data
    return came[9:12].decode() or "closed"


def _unread_call(body: bytes) -> bytes:
    """The HTTP/2 bytes that a client sends for one gRPC call, with windows for a large answer."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    connection.local_settings = Settings(initial_values={SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
    connection.initiate_connection()
    connection.increment_flow_control_window(2**30)
    head = {":method": "POST", ":scheme": "http", ":path": INFER, ":authority": "x", "te": "trailers"}
    connection.send_headers(1, [*head.items(), ("content-type", "application/grpc")])
    connection.send_data(1, body, end_stream=True)
    return connection.data_to_send()
