"""What does a gRPC call cost on the server's own transport, compared with grpcio's?

Level: server. Expected: for the tiny MLP the native transport answers at least four times as many calls as grpcio's,
and uses at most a quarter of grpcio's CPU time per call.

    python loadtests/grpc_transport.py [--rounds 5] [--seconds 5] [--connections 4] [--streams 8]

Both servers run throughout and are loaded in turns by two kinds of callers: h2load, whose header blocks never change,
and grpcio clients in separate processes, as users run them. A checker compares answers with ONNX Runtime's during the
load. CPU is that of the server's process tree; the load generator shares its processors. Writes
``loadtests/results/grpc_transport.md``.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import grpc  # noqa: E402

from harness import checking, cpu_s, h2load, serving, spread, table, write_report  # noqa: E402
from infer_requests import INFER, grpc_request, numbers_of_grpc  # noqa: E402
from tiny_mlp import NAME, TinyMlp, write_tiny_mlp  # noqa: E402

PORTS = {"grpcio": 18100, "native": 18110}


@dataclass(frozen=True)
class Result:
    calls_per_s: float
    cpu_us: float


@dataclass(frozen=True)
class Arm:
    transport: str
    pid: int
    address: str
    request: bytes
    model: TinyMlp

    def check(self) -> None:
        with grpc.insecure_channel(self.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(INFER)
            self.check_answer(call(self.request, timeout=60))

    def check_answer(self, answer: bytes) -> None:
        self.model.check(numbers_of_grpc(answer))


def by_grpcio(arm: Arm, pool: Executor, *, connections: int, streams: int, seconds: float) -> int:
    """Run a closed loop with grpcio's synchronous clients: a process per connection, a thread per stream.

    Returns:
        The number of calls.
    """
    offer = partial(call_in_threads, arm, threads=streams, seconds=seconds)
    return sum(future.result(seconds + 60) for future in [pool.submit(offer) for _ in range(connections)])


def call_in_threads(arm: Arm, *, threads: int, seconds: float) -> int:
    """Call from several threads on one connection. Returns the number of calls."""
    until = time.monotonic() + seconds
    with grpc.insecure_channel(arm.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(INFER)

        def offer(_: int) -> int:
            count = 0
            while time.monotonic() < until:
                answer = call(arm.request, timeout=60)
                count += 1
            arm.check_answer(answer)
            return count

        with ThreadPoolExecutor(threads) as callers:
            return sum(callers.map(offer, range(threads)))


def measure(arm: Arm, offer: Callable[[Arm, int], int], seconds: int) -> Result:
    before_s, began = cpu_s(arm.pid), time.monotonic()
    calls = offer(arm, seconds)
    return Result(calls / (time.monotonic() - began), (cpu_s(arm.pid) - before_s) / calls * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--streams", type=int, default=8, help="calls of one connection at one time")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    results: dict[tuple[str, str], list[Result]] = {}
    load = {"connections": options.connections, "streams": options.streams}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        folder = Path(temporary)
        pool = servers.enter_context(ProcessPoolExecutor(options.connections, get_context("spawn")))
        offers: dict[str, Callable[[Arm, int], int]] = {
            "h2load": lambda arm, seconds: h2load(arm.address, arm.request, folder, **load, seconds=seconds),
            "grpcio clients": lambda arm, seconds: by_grpcio(arm, pool, **load, seconds=seconds),
        }
        model = write_tiny_mlp(folder / "models")
        arms = []
        for transport, port in PORTS.items():
            pid = servers.enter_context(serving(folder / "models", port, f"--grpc-transport={transport}"))
            arms.append(Arm(transport, pid, f"127.0.0.1:{port + 1}", grpc_request(NAME, model.row), model))
        for offer in offers.values():  # warm-up, not counted
            for arm in arms:
                measure(arm, offer, seconds=1)
        for number in range(options.rounds):
            for callers, offer in offers.items():
                for arm in arms if number % 2 == 0 else reversed(arms):
                    with checking(arm.check):
                        result = measure(arm, offer, options.seconds)
                    results.setdefault((callers, arm.transport), []).append(result)
                    print(f"round {number + 1} {callers:15} {arm.transport:7} {result}", flush=True)
    report(results, options)


_CAVEATS = (
    "Tiny MLP, 64 numbers a request; {connections} connections with {streams} concurrent calls, closed loop, medians "
    "(lowest to highest) of {rounds} interleaved rounds of {seconds} s; the load generator runs on the same "
    "processors. grpcio clients are synchronous: one process per connection with one thread per call, each call with a "
    "timeout, because threads of one process delay each other. Every call was answered OK; samples were compared with "
    "ONNX Runtime's own."
)


def report(results: dict[tuple[str, str], list[Result]], options: argparse.Namespace) -> None:
    rows = [
        [
            callers,
            transport,
            f"{statistics.median(result.calls_per_s for result in each):,.0f}",
            spread([result.cpu_us for result in each]),
        ]
        for (callers, transport), each in results.items()
    ]
    ratios = []
    for callers in dict.fromkeys(callers for callers, _ in results):
        pairs = list(zip(results[callers, "grpcio"], results[callers, "native"], strict=True))
        more = spread([native.calls_per_s / grpcio.calls_per_s for grpcio, native in pairs])
        ratios.append([callers, more, spread([native.cpu_us / grpcio.cpu_us for grpcio, native in pairs])])
    write_report(
        options.results / "grpc_transport.md",
        "gRPC: grpcio's transport and the native one",
        _CAVEATS.format(**vars(options)),
        table(["callers", "transport", "calls/s", "CPU µs a call"], rows),
        table(["callers", "calls/s, native / grpcio (4 or more asked)", "CPU a call (0.25 or less asked)"], ratios),
    )


if __name__ == "__main__":
    main()
