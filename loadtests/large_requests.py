"""What do requests with large tensors cost the server, and how much of that is receiving the bytes?

Level: server. Expected: a REST request of 16 MB takes at most three times the CPU of a process that only receives as
many bytes into memory. A gRPC call of 16 MB takes at most 0.8 of the CPU of a call on grpcio's transport, a call of
64 KB at most as much.

    python loadtests/large_requests.py [--rounds 7] [--results DIR]

One server for each way runs throughout. One caller sends requests to them in turns and waits for each answer. The model
returns the largest number of an FP32 tensor, so that answers are small. Answers are compared. Writes
``loadtests/results/large_requests.md``.
"""

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final, cast

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import grpc  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import tritonclient.http as triton_http  # noqa: E402
import uvloop  # noqa: E402

from harness import serving, spread, table, thread_cpu_ns, write_report  # noqa: E402
from infer_requests import INFER, grpc_request, numbers_of_grpc  # noqa: E402

SIZES: Final = {"64 KB": (65_536, 400), "600 KB": (600_000, 200), "16 MB": (16_000_000, 20)}
"""Bytes of a tensor and requests per round, by name of the size."""
WAYS: Final = {
    "REST": ("--grpc-transport=native", 18300),
    "gRPC, native": ("--grpc-transport=native", 18320),
    "gRPC, grpcio": ("--grpc-transport=grpcio", 18330),
}
FLOOR: Final = "receiving alone"
FLOOR_PORT: Final = 18340
ASKED: Final = (
    ("16 MB", "REST", FLOOR, 3.0),
    ("16 MB", "gRPC, native", "gRPC, grpcio", 0.8),
    ("64 KB", "gRPC, native", "gRPC, grpcio", 1.0),
)
"""Goals: size, way, the way to compare its CPU with, and the maximum ratio."""

Ask = Callable[[], float]
"""Sends one request and returns its answer."""


@dataclass(frozen=True)
class Measured:
    """CPU time of the server per request, and median time of a request, in µs."""

    cpu_us: float
    p50_us: float


class Sink(asyncio.BufferedProtocol):
    """Receives a length of eight bytes and then that many bytes; answers with the last four of them."""

    def __init__(self) -> None:
        self._place = memoryview(bytearray(8))
        self._came = 0
        self._is_length = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._place[self._came :]

    def buffer_updated(self, nbytes: int) -> None:
        self._came += nbytes
        if self._came < len(self._place):
            return
        if self._is_length:
            size = int.from_bytes(self._place, "big")
            self._place, self._came, self._is_length = np.empty(size, np.uint8).data, 0, False
        else:
            self._transport.write(bytes(self._place[-4:]))
            self._place, self._came, self._is_length = memoryview(bytearray(8)), 0, True


def sink(is_ready: Event) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", FLOOR_PORT)
        is_ready.set()
        await server.serve_forever()

    uvloop.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    measured: dict[tuple[str, str], list[Measured]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / "largest" / "1" / "model.onnx"
        model.parent.mkdir(parents=True)
        write_model(model)
        pids = {way: stack.enter_context(serving(Path(folder), port, flag)) for way, (flag, port) in WAYS.items()}
        is_ready = multiprocessing.Event()
        receiver = multiprocessing.Process(target=sink, args=(is_ready,), daemon=True)
        receiver.start()
        stack.callback(receiver.kill)
        assert is_ready.wait(30)
        pids[FLOOR] = receiver.pid or 0
        for size, (nbytes, requests) in SIZES.items():
            array = np.random.default_rng(0).random((1, nbytes // 4), np.float32)
            with ExitStack() as callers:
                asks = {way: caller(way, array, callers) for way in pids}
                for number in range(options.rounds + 1):
                    for way, ask in asks.items() if number % 2 else reversed(asks.items()):
                        found = measure(pids[way], ask, requests)
                        if number:  # the first round is warm-up
                            measured.setdefault((size, way), []).append(found)
                            print(f"round {number} {size:7} {way:18} {found.cpu_us:.0f} {found.p50_us:.0f}", flush=True)
    report(measured, options)


def write_model(path: Path) -> None:
    """Write a model that returns the largest number of each row."""
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("ReduceMax", ["x"], ["y"], axes=[1])],
        "largest",
        [tensor("x", onnx.TensorProto.FLOAT, ["batch", "width"])],
        [tensor("y", onnx.TensorProto.FLOAT, ["batch", 1])],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8), path)


def caller(way: str, array: np.ndarray, stack: ExitStack) -> Ask:
    """Returns a function that sends one request on a persistent connection and checks the answer."""
    ask: Ask
    if way.startswith("gRPC"):
        ask = grpc_caller(WAYS[way][1] + 1, array, stack)
        expected = array.max()
    else:
        port = FLOOR_PORT if way == FLOOR else WAYS[way][1]
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ask = sink_caller(connection, array) if way == FLOOR else rest_caller(connection, array)
        expected = array[0, -1] if way == FLOOR else array.max()

    def checked() -> float:
        answer = ask()
        assert answer == expected, (way, answer, expected)
        return answer

    return checked


def rest_caller(connection: socket.socket, array: np.ndarray) -> Ask:
    given = triton_http.InferInput("x", list(array.shape), "FP32").set_data_from_numpy(array)
    body, size = triton_http.InferenceServerClient.generate_request_body([given])
    lines = ("POST /v2/models/largest/infer HTTP/1.1", "Host: x", f"Content-Length: {len(body)}")
    request = "\r\n".join((*lines, f"Inference-Header-Content-Length: {size}", "\r\n")).encode()

    def ask() -> float:
        connection.sendall(request)
        connection.sendall(body)
        came = b""
        while b"\r\n\r\n" not in came:
            came += connection.recv(65536)
        head, _, rest = came.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
        while len(rest) < length:
            rest += connection.recv(65536)
        assert head.startswith(b"HTTP/1.1 200"), rest
        return float(np.frombuffer(rest[-4:], np.float32)[0])

    return ask


def sink_caller(connection: socket.socket, array: np.ndarray) -> Ask:
    content = array.tobytes()

    def ask() -> float:
        connection.sendall(len(content).to_bytes(8, "big"))
        connection.sendall(content)
        return float(np.frombuffer(connection.recv(4), np.float32)[0])

    return ask


def grpc_caller(port: int, array: np.ndarray, stack: ExitStack) -> Ask:
    message = grpc_request("largest", array)
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)))
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(INFER)

    def ask() -> float:
        return float(numbers_of_grpc(call(message, timeout=60))[0])

    return ask


def measure(pid: int, ask: Ask, requests: int) -> Measured:
    taken = []
    before = thread_cpu_ns(pid)
    for _ in range(requests):
        began = time.perf_counter()
        ask()
        taken.append((time.perf_counter() - began) * 1e6)
    return Measured((thread_cpu_ns(pid) - before) / requests / 1e3, statistics.median(taken))


_CAVEATS = (
    "Medians (lowest to highest) of {rounds} rounds in which the ways took turns: µs of the server's CPU a request, "
    "and median time in µs, which includes the caller's own. Each answer was compared. *Receiving alone* is a process "
    "that receives the bytes into memory and answers with the last number; the servers also read them once more, to "
    "find the largest. A process's CPU includes the kernel's copy out of the socket."
)


def report(measured: dict[tuple[str, str], list[Measured]], options: argparse.Namespace) -> None:
    rows = [
        [size, way, spread([one.cpu_us for one in found]), spread([one.p50_us for one in found])]
        for (size, way), found in measured.items()
    ]
    ratios = []
    for size, way, other, asked in ASKED:
        pairs = zip(measured[size, way], measured[size, other], strict=True)
        ratios.append(
            [f"{size}: {way} / {other}", spread([one.cpu_us / two.cpu_us for one, two in pairs]), f"{asked:g}"]
        )
    write_report(
        options.results / "large_requests.md",
        "Requests with large tensors",
        _CAVEATS.format(rounds=options.rounds),
        table(["tensor", "way", "CPU, µs", "median time, µs"], rows),
        table(["CPU of", "ratio", "at most, as asked"], ratios),
    )


if __name__ == "__main__":
    main()
