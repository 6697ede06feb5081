"""What does compiling the path of requests save?

Level: server. Expected: a REST JSON request takes at most 0.8 of the interpreted server's CPU at 32 connections, and
less than its median time at one; so does a gRPC call.

    make test-compiled PYTEST_ARGS=tests/unit/core    # which leaves the compiled package in .venv/compiled
    python loadtests/compiled_cost.py [--package .venv/compiled] [--rounds 7] [--seconds 3]

Both servers run all the time, one is asked at a time by wrk and one grpcio client, as in ``grpc_latency``.
Answers are compared with ONNX Runtime's own. Writes ``loadtests/results/compiled_cost.md``.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402

from grpc_latency import Way, calls_us  # noqa: E402
from harness import checking, circumstances, serving, spread, table, wrk  # noqa: E402
from models.builders import mlp  # noqa: E402

PORTS: Final = {"interpreted": 18300, "compiled": 18310}
REST_32: Final = "REST, 32 connections, CPU"
REST_32_RATE: Final = "REST, 32 connections, requests/s"
REST_1: Final = "REST, one, p50"
GRPC_1: Final = "gRPC, one, p50"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=HERE.parent / ".venv" / "compiled")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    environments = {"interpreted": {}, "compiled": {"PYTHONPATH": str(options.package.resolve())}}
    for name, environment in environments.items():
        check_that_it_is(name, environment)
    measured: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        folder = Path(temporary)
        (folder / "models" / "mlp" / "1").mkdir(parents=True)
        file = mlp(folder / "models" / "mlp" / "1" / "model.onnx")
        row = np.random.default_rng(0).uniform(-1, 1, (1, 64)).astype(np.float32)
        session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        expected = session.run(None, {"x": row})[0].ravel()
        ways = {}
        for name, environment in environments.items():
            server = serving(folder / "models", PORTS[name], environment=environment)
            ways[name] = Way(servers.enter_context(server), PORTS[name], row, expected)
        for number in range(options.rounds + 1):  # the first is not counted
            for name, way in ways.items() if number % 2 else reversed(list(ways.items())):
                took = one_round(way, folder, options.seconds)
                print(f"round {number} {name:12} {took}", flush=True)
                for what, value in took.items() if number else ():
                    measured.setdefault((what, name), []).append(value)
    report(measured, options)


def check_that_it_is(name: str, environment: Mapping[str, str]) -> None:
    """Raises RuntimeError: The package on the path is not the one to measure."""
    command = [sys.executable, "-m", "ortserve", "version"]
    output = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout
    if f"request path {name}\n" not in output:
        raise RuntimeError(f"expected an {name} package, got one that prints: {output}")


def one_round(way: Way, folder: Path, seconds: int) -> dict[str, float]:
    with checking(way.check):
        many = wrk(way.url, way.body, folder, pid=way.pid, connections=32, seconds=seconds)
        one = wrk(way.url, way.body, folder, pid=way.pid, connections=1, seconds=seconds)
    return {
        REST_32: many.cpu_us,
        REST_32_RATE: many.requests_per_s,
        REST_1: one.p50_ms * 1e3,
        GRPC_1: calls_us(way, "mlp", way.row, way.expected, 2000),
    }


def report(measured: dict[tuple[str, str], list[float]], options: argparse.Namespace) -> None:
    rows = []
    for what in (REST_32, REST_32_RATE, REST_1, GRPC_1):
        plain, fast = measured[what, "interpreted"], measured[what, "compiled"]
        ratio = [one / other for one, other in zip(fast, plain, strict=True)]
        rows.append([what, spread(plain), spread(fast), spread(ratio)])
    setting = (
        f"Tiny MLP, medians (lowest to highest) of {options.rounds} rounds in which the servers took turns; µs of CPU "
        "of the server a request, or of median time. Samples and last answers were compared with ONNX Runtime's own."
    )
    header = ["what", "interpreted", "compiled", "compiled / interpreted"]
    text = "\n\n".join(["# The path of requests, compiled", circumstances(), setting, table(header, rows)])
    options.results.mkdir(exist_ok=True)
    (options.results / "compiled_cost.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
