"""How long does a gRPC call take on the native transport, compared with grpcio's?

Level: server. Expected with one call in flight: a call on the native transport takes at most 0.65 of the median time on
grpcio's; a call of 600 KB or 16 MB takes at most as long.

    python loadtests/grpc_latency.py [--rounds 5]

One server for each transport runs throughout. One grpcio client calls them in turns; times include the client's share.
Answers are compared with ONNX Runtime's. The client shares the servers' processors.
Writes ``loadtests/results/grpc_latency.md``.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import grpc  # noqa: E402
import numpy as np  # noqa: E402

from harness import post, serving, spread, table, write_report  # noqa: E402
from infer_requests import INFER, grpc_request, json_request, numbers_of_grpc, numbers_of_json  # noqa: E402
from models.builders import identity  # noqa: E402
from tiny_mlp import NAME, TinyMlp, write_tiny_mlp  # noqa: E402

TRANSPORTS = {"grpcio": "--grpc-transport=grpcio", "native": "--grpc-transport=native"}
PORTS = {"grpcio": 18220, "native": 18230}
LARGE = {"600 KB": (150_000, 40), "16 MB": (4_000_000, 8)}
"""Numbers (FP32) of a request and calls per round, by name of the size."""


@dataclass(frozen=True)
class Way:
    """A server of the tiny MLP, and a request on both protocols."""

    pid: int
    port: int
    model: TinyMlp

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v2/models/{NAME}/infer"

    @property
    def grpc(self) -> str:
        """The address of the gRPC port."""
        return f"127.0.0.1:{self.port + 1}"

    @property
    def body(self) -> bytes:
        return json_request(self.model.row)

    @property
    def message(self) -> bytes:
        return grpc_request(NAME, self.model.row)

    def check(self) -> None:
        self.model.check(numbers_of_json(post(self.url, self.body)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    measured: dict[tuple[str, str], list[float]] = {}

    def take(what: str, ways: dict[str, Way], measure: Callable[[Way], float], number: int) -> None:
        for name, way in ways.items() if number % 2 else reversed(list(ways.items())):
            measured.setdefault((what, name), []).append(measure(way))
            print(f"round {number} {what:24} {name:7} {measured[what, name][-1]:.1f}", flush=True)

    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        folder = Path(temporary)
        model = write_tiny_mlp(folder / "models")
        (folder / "models" / "wide" / "1").mkdir(parents=True)
        identity(folder / "models" / "wide" / "1" / "model.onnx", shape=("batch", "width"))
        ways = {
            name: Way(servers.enter_context(serving(folder / "models", PORTS[name], flag)), PORTS[name], model)
            for name, flag in TRANSPORTS.items()
        }

        def call_small(way: Way, calls: int = 2000) -> float:
            return calls_us(way.grpc, way.message, model.expected, calls)

        for way in ways.values():  # warm-up, not counted
            call_small(way, 200)
        for number in range(1, options.rounds + 1):
            take("one call", ways, call_small, number)
            for size, (numbers, calls) in LARGE.items():
                array = np.arange(numbers, dtype=np.float32).reshape(1, -1)

                def call_large(way: Way, array: np.ndarray = array, calls: int = calls) -> float:
                    return calls_us(way.grpc, grpc_request("wide", array), array.ravel(), calls)

                take(size, ways, call_large, number)
    report(measured, options)


def calls_us(address: str, message: bytes, expected: np.ndarray, calls: int) -> float:
    """Median time of sequential calls by a grpcio client that sends a ``grpc-timeout`` with each call."""
    taken = []
    sizes = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    with grpc.insecure_channel(address, sizes) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(INFER)
        for _ in range(calls + calls // 4):
            began = time.perf_counter()
            answer = call(message, timeout=60)
            taken.append((time.perf_counter() - began) * 1e6)
    np.testing.assert_allclose(numbers_of_grpc(answer), expected, rtol=1e-4, atol=1e-6)
    return statistics.median(taken[calls // 4 :])


_EXPECTED = {"one call": 0.65, "600 KB": 1.0, "16 MB": 1.0}


_CAVEATS = (
    "Medians (lowest to highest) of {rounds} rounds in which the transports took turns; µs of median time of a call. "
    "Both servers have the same codecs and batcher. The last answers were compared with ONNX Runtime's own."
)


def report(measured: dict[tuple[str, str], list[float]], options: argparse.Namespace) -> None:
    rows = []
    for what, expected in _EXPECTED.items():
        grpcio, native = (measured[what, name] for name in TRANSPORTS)
        ratio = [one / other for one, other in zip(native, grpcio, strict=True)]
        rows.append([what, spread(grpcio), spread(native), spread(ratio), f"{expected:g}"])
    write_report(
        options.results / "grpc_latency.md",
        "gRPC calls on the native transport and on grpcio's",
        _CAVEATS.format(rounds=options.rounds),
        table(["call", "grpcio", "native", "native / grpcio", "expected at most"], rows),
    )


if __name__ == "__main__":
    main()
