"""Does a request cost more with one build of the package than with another?

Level: server. Expected after a change that moves code: no more CPU per request, over REST and gRPC.

    ORTSERVE_COMPILE=1 python -m pip install --no-deps --no-build-isolation --target OLD .    # on the old commit
    ORTSERVE_COMPILE=1 python -m pip install --no-deps --no-build-isolation --target NEW .    # on the new commit
    python loadtests/package_cost.py OLD NEW [--rounds 9] [--seconds 2]

Both servers run all the time and are loaded in turns: by wrk over REST with 32 connections and with one, and by h2load
over gRPC with 8 connections of 8 streams. Answers are compared with ONNX Runtime's own. Writes
``loadtests/results/package_cost.md``.
"""

import argparse
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402
import psutil  # noqa: E402

from grpc_latency import METHOD, Way  # noqa: E402
from harness import checking, circumstances, serving, spread, table, wrk  # noqa: E402
from models.builders import mlp  # noqa: E402
from ortserve._pb import grpc_service_pb2 as pb  # noqa: E402

PORTS: Final = {"old": 18400, "new": 18410}
CALLS: Final = 30_000
REST_32: Final = "REST, 32 connections, CPU µs"
REST_RATE: Final = "REST, 32 connections, requests/s"
REST_1: Final = "REST, one connection, p50 µs"
GRPC_64: Final = "gRPC, 64 calls at a time, CPU µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder with the old package")
    parser.add_argument("new", type=Path, help="folder with the new package")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    measured: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        folder = Path(temporary)
        (folder / "models" / "mlp" / "1").mkdir(parents=True)
        file = mlp(folder / "models" / "mlp" / "1" / "model.onnx")
        row = np.random.default_rng(0).uniform(-1, 1, (1, 64)).astype(np.float32)
        session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        expected = session.run(None, {"x": row})[0].ravel()
        message = folder / "message"
        message.write_bytes(grpc_message(row))
        ways = {}
        for name, package in (("old", options.old), ("new", options.new)):
            server = serving(folder / "models", PORTS[name], environment={"PYTHONPATH": str(package.resolve())})
            ways[name] = Way(servers.enter_context(server), PORTS[name], row, expected)
        for number in range(options.rounds + 1):  # the first is not counted
            for name, way in ways.items() if number % 2 else reversed(list(ways.items())):
                took = one_round(way, folder, message, options.seconds)
                print(f"round {number} {name} {took}", flush=True)
                for what, value in took.items() if number else ():
                    measured.setdefault((what, name), []).append(value)
    rows = []
    for what in (REST_32, REST_RATE, REST_1, GRPC_64):
        old, new = measured[what, "old"], measured[what, "new"]
        rows.append(
            [what, spread(old), spread(new), spread([one / other for one, other in zip(new, old, strict=True)])]
        )
    text = "\n\n".join(
        (
            "# A request with two builds of the package",
            circumstances().replace(str(options.old), "OLD").replace(str(options.new), "NEW"),
            f"Tiny MLP, medians (lowest to highest) of {options.rounds} rounds in which the servers took turns.",
            table(["what", "old", "new", "new / old"], rows),
        )
    )
    options.results.mkdir(exist_ok=True)
    (options.results / "package_cost.md").write_text(text + "\n")
    print(text)


def grpc_message(row: np.ndarray) -> bytes:
    """A request for the model in the frame of a gRPC message."""
    request = pb.ModelInferRequest(model_name="mlp")
    request.inputs.add(name="x", datatype="FP32", shape=row.shape)
    request.raw_input_contents.append(row.tobytes())
    data = request.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def one_round(way: Way, folder: Path, message: Path, seconds: int) -> dict[str, float]:
    with checking(way.check):
        many = wrk(way.url, way.body, folder, pid=way.pid, connections=32, seconds=seconds)
        one = wrk(way.url, way.body, folder, pid=way.pid, connections=1, seconds=seconds)
    return {
        REST_32: many.cpu_us,
        REST_RATE: many.requests_per_s,
        REST_1: one.p50_ms * 1e3,
        GRPC_64: grpc_cpu_us(way, message),
    }


def grpc_cpu_us(way: Way, message: Path) -> float:
    """CPU time of the server per call."""
    server = psutil.Process(way.pid)
    headers = ("-H", "content-type: application/grpc", "-H", "te: trailers")
    url = f"http://127.0.0.1:{way.port + 1}{METHOD}"
    before = server.cpu_times()
    command = ["h2load", "-n", str(CALLS), "-c", "8", "-m", "8", "-d", str(message), *headers, url]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    after = server.cpu_times()
    if f"{CALLS} succeeded" not in printed:
        raise RuntimeError(f"expected {CALLS} answers, got: {printed}")
    return (after.user + after.system - before.user - before.system) / CALLS * 1e6


if __name__ == "__main__":
    main()
