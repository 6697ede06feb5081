"""How many REST JSON requests does one ortserve process answer, compared with a minimal FastAPI server?

Level: server. Expected: at 32 connections at least 6 times the naive server's requests per second for the tiny MLP, at
about a tenth of its CPU time per request.

    python loadtests/rest_throughput.py [--rounds 5] [--seconds 5] [--connections 32]

All servers run throughout and are loaded in turns, one at a time. A checker compares answers with ONNX Runtime's during
the load. The naive server is measured as a user would write it, and again with its session limited to one thread. The
load generator (wrk) shares the machine's processors with the server. Writes
``loadtests/results/rest_throughput.md``.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402

from harness import Load, checking, post, running, serving, spread, table, write_report, wrk  # noqa: E402
from infer_requests import json_request, numbers_of_json  # noqa: E402
from models.builders import mlp  # noqa: E402
from ortserve.example import repository_path  # noqa: E402

PORT = 18000
NAIVE = {"naive": (18010, []), "naive, one thread": (18011, ["--one-thread"])}


@dataclass(frozen=True)
class Case:
    """A model on both servers: its file, input name, the index of the compared output, an input and its answer."""

    model: str
    file: Path
    input: str
    output: int
    array: np.ndarray
    expected: np.ndarray


@dataclass(frozen=True)
class Arm:
    server: str
    case: Case
    pid: int
    url: str
    body: bytes

    def check(self) -> None:
        answer = numbers_of_json(post(self.url, self.body), self.case.output)
        np.testing.assert_allclose(answer, self.case.expected, rtol=1e-4, atol=1e-6)


def make_case(model: str, file: Path, name: str, array: np.ndarray, output: int = 0) -> Case:
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return Case(model, file, name, output, array, session.run(None, {name: array})[output].ravel())


def make_arm(server: str, case: Case, pid: int, port: int) -> Arm:
    url = f"http://127.0.0.1:{port}/v2/models/{case.model}/infer"
    return Arm(server, case, pid, url, json_request(case.array, case.input, decimals=6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=32)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        folder = Path(temporary)
        (folder / "mlp" / "1").mkdir(parents=True)
        mlp_file = mlp(folder / "mlp" / "1" / "model.onnx")
        digits_file = repository_path() / "digits" / "1" / "model.onnx"
        cases = (
            make_case("mlp", mlp_file, "x", generator.uniform(-1, 1, (1, 64)).round(6).astype(np.float32)),
            make_case("digits", digits_file, "image", generator.integers(0, 17, (1, 1, 8, 8)).astype(np.float32)),
        )
        ours = servers.enter_context(serving(folder, PORT, "--example"))
        arms = [make_arm("ortserve", case, ours, PORT) for case in cases]
        files = [f"{case.model}={case.file}" for case in cases]
        for server, (port, flags) in NAIVE.items():
            naive = [sys.executable, str(HERE / "naive_server.py"), str(port), *files, *flags]
            pid = servers.enter_context(running(naive, f"http://127.0.0.1:{port}/health"))
            arms += [make_arm(server, case, pid, port) for case in cases]
        arms.sort(key=lambda arm: arm.case.model)
        results: dict[tuple[str, str], list[Load]] = {}
        for arm in arms:  # warm-up, not counted
            wrk(arm.url, arm.body, folder, pid=arm.pid, connections=options.connections, seconds=1)
        for number in range(options.rounds):
            for arm in arms if number % 2 == 0 else reversed(arms):
                with checking(arm.check):
                    load = wrk(
                        arm.url,
                        arm.body,
                        folder,
                        pid=arm.pid,
                        connections=options.connections,
                        seconds=options.seconds,
                    )
                results.setdefault((arm.case.model, arm.server), []).append(load)
                print(f"round {number + 1} {arm.case.model:7} {arm.server:17} {load}", flush=True)
    report(results, options.connections)


_CAVEATS = (
    "{connections} connections, closed loop, medians of {rounds} interleaved rounds; the load generator runs on the "
    "same processors. All requests succeeded, and samples of the answers were compared with ONNX Runtime's own."
)


def report(results: dict[tuple[str, str], list[Load]], connections: int) -> None:
    rows = []
    ratios = []
    for (model, server), loads in results.items():

        def median(field: str, loads: list[Load] = loads) -> float:
            return float(statistics.median(getattr(load, field) for load in loads))

        rows.append(
            [
                model,
                server,
                f"{median('requests_per_s'):,.0f}",
                f"{median('p50_ms'):.2f}",
                f"{median('p99_ms'):.2f}",
                spread([load.cpu_us for load in loads]),
            ]
        )
        if server != "ortserve":
            pairs = list(zip(results[model, "ortserve"], loads, strict=True))
            more = [ours.requests_per_s / theirs.requests_per_s for ours, theirs in pairs]
            less = [theirs.cpu_us / ours.cpu_us for ours, theirs in pairs]
            ratios.append([model, server, spread(more), spread(less)])
    write_report(
        HERE / "results" / "rest_throughput.md",
        "REST JSON throughput: ortserve and the naive server",
        _CAVEATS.format(connections=connections, rounds=len(loads)),
        table(["model", "server", "requests/s", "p50 ms", "p99 ms", "CPU µs a request"], rows),
        table(["model", "against", "requests/s, times as many", "CPU a request, times less"], ratios),
    )


if __name__ == "__main__":
    main()
