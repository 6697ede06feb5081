"""What do a thousand small models cost, and what does a server with room for fifty of them answer?

Level: server. Expected:

- Concurrent loading takes less time than sequential loading.
- The median of one model with a thousand loaded is at most 1.1 times its median alone.
- With a memory budget for fifty models and a Zipf load every answer is correct.
- Loading raises the p99 of serving models to at most 1.5 times.

    python loadtests/many_models.py [--models 1000] [--room 50] [--seconds 20]

- Start: the time until all models are ready, and the growth of private memory, threads and descriptors per model. The
  arm "one at a time" is the same server with a memory budget that is never reached; a budget makes loads sequential.
- Median, p99 and CPU time per request: one connection sends requests to one model, in turns on a server with all models
  and on one with that model alone.
- Zipf: four connections choose models by a Zipf distribution of exponent 1.1, on a server whose budget holds only some.
- Loads: one connection sends requests to one model. In turns, another client loads and unloads other models
  continuously or pauses.

The script is one process beside the server; it compares answers with numpy. The requesting thread has a higher priority
than the loading threads, where the system permits it, because a client on another machine would not wait for them
either. Writes ``loadtests/results/many_models.md``.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from harness import cpu_s, spread, table, write_report
from infer_requests import json_request, numbers_of_json
from ortserve.engine.thread_priority import put_loop_first

HERE = Path(__file__).parent
WIDTH, HIDDEN, OUT = 64, 64, 10
ROW = np.linspace(-1, 1, WIDTH, dtype=np.float32)[None]
BODY = json_request(ROW)
ROUNDS = 5
TURNS = 40


def make_model(path: Path, seed: int, width: int = WIDTH, hidden: int = HIDDEN) -> np.ndarray:
    """Write a model with two layers. Returns its answer to ``ROW``."""
    rng = np.random.default_rng(seed)
    first, second = (rng.standard_normal(shape, np.float32) / 8 for shape in ((width, hidden), (hidden, OUT)))
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", OUT])],
        [numpy_helper.from_array(first, "a"), numpy_helper.from_array(second, "b")],
    )
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return np.maximum(ROW @ first, 0) @ second if width == WIDTH else np.empty(0)


@dataclass
class Server:
    """A server under test, with the time and memory of its start."""

    pid: int
    http: int
    metrics: int
    started_s: float

    def status(self) -> dict[str, float]:
        """Private memory in MB, and the numbers of threads and descriptors."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        numbers = {name: int(re.search(rf"{name}:\s+(\d+)", text)[1]) for name in ("RssAnon", "Threads")}  # type: ignore[index]
        files = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        return {"MB": numbers["RssAnon"] * 1024 / 1e6, "threads": numbers["Threads"], "descriptors": files}

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.http, timeout=60)

    def sample(self, name: str) -> dict[str, float]:
        """The values of a metric, by labels."""
        connection = HTTPConnection("127.0.0.1", self.metrics, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith(name)}


@contextmanager
def serving(repository: Path, *flags: str) -> Iterator[Server]:
    """Start the server on free ports, and wait until initial loading has ended."""
    ports = [part for name in ("http", "grpc", "metrics") for part in (f"--{name}-port", "0")]
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "ortserve", "serve", str(repository), *ports, *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    found: dict[str, int] = {}
    try:
        for line in process.stderr:
            if "listening" in line:
                fields = dict(re.findall(r"(\w+)=(\S+)", line))
                found[fields["protocol"]] = int(fields["port"])
            if "initial loading has ended" in line:
                break
        started_s = time.monotonic() - began
        reader = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
        reader.start()
        yield Server(process.pid, found["http"], found["metrics"], started_s)
    finally:
        process.terminate()
        process.wait(120)


def ask(connection: HTTPConnection, model: str) -> tuple[int, np.ndarray, float]:
    """Send one request. Returns its status, answer and duration in seconds."""
    began = time.perf_counter()
    connection.request("POST", f"/v2/models/{model}/infer", BODY)
    response = connection.getresponse()
    content = response.read()
    took_s = time.perf_counter() - began
    if response.status != 200:
        return response.status, np.empty(0), took_s
    return 200, numbers_of_json(content), took_s


def times(server: Server, model: str, seconds: float) -> list[float]:
    """Durations in ms of consecutive requests on one connection."""
    connection, found = server.connect(), []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        status, _, took_s = ask(connection, model)
        assert status == 200
        found.append(took_s * 1e3)
    return found


def p(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def compare_alone(many: Path, one: Path, seconds: float) -> list[list[str]]:
    """Measure one model beside all others and alone, in short rounds with alternating order."""
    found: dict[str, list[float]] = {"beside": [], "alone": []}
    spent_s = dict.fromkeys(found, 0.0)
    with serving(many) as crowded, serving(one) as alone:
        servers = {"beside": crowded, "alone": alone}
        for server in servers.values():
            times(server, "m0000", 1)
        for turn in range(TURNS):
            for name in list(servers)[:: 1 if turn % 2 else -1]:
                before_s = cpu_s(servers[name].pid)
                found[name] += times(servers[name], "m0000", seconds / TURNS)
                spent_s[name] += cpu_s(servers[name].pid) - before_s
    rows = [("p50", [p(found[name], 50) for name in found]), ("p99", [p(found[name], 99) for name in found])]
    rows.append(("CPU per request", [1e3 * spent_s[name] / len(found[name]) for name in found]))
    return [
        [title, f"{beside:.3f} ms", f"{without:.3f} ms", f"{beside / without:.2f}"] for title, (beside, without) in rows
    ]


def zipf(server: Server, expected: Mapping[str, np.ndarray], seconds: float) -> dict[str, float]:
    """Send requests to models by a Zipf distribution on four connections; compare every answer."""
    names = sorted(expected)
    weights = 1 / np.arange(1, len(names) + 1) ** 1.1
    weights /= weights.sum()
    counts: dict[str, float] = {"requests": 0, "right": 0, "not ready": 0, "wrong": 0}
    took: list[float] = []
    lock = threading.Lock()
    ends = time.monotonic() + seconds

    def client(seed: int) -> None:
        rng, connection = np.random.default_rng(seed), server.connect()
        while time.monotonic() < ends:
            name = names[rng.choice(len(names), p=weights)]
            status, answer, took_s = ask(connection, name)
            is_right = status == 200 and np.allclose(answer, expected[name][0], rtol=1e-3, atol=1e-4)
            with lock:
                took.append(took_s * 1e3)
                counts["requests"] += 1
                counts["right" if is_right else "not ready" if status == 503 else "wrong"] += 1

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(client, seed) for seed in range(4)]:
            done.result()
    assert not counts["wrong"], f"{counts['wrong']:.0f} of {counts['requests']:.0f} answers were wrong"
    waited = sum(server.sample("ortserve_on_demand_requests_total").values())
    counts["hit rate"] = 1 - waited / counts["requests"]
    wait_s = sum(server.sample("ortserve_on_demand_wait_seconds_total").values())
    counts["mean wait ms"] = 1e3 * wait_s / max(1, waited)
    counts["p50 ms"], counts["p99 ms"] = p(took, 50), p(took, 99)
    counts["evictions"] = sum(server.sample("ortserve_model_evictions_total").values())
    counts["ledger MB"] = (
        sum(value for labels, value in server.sample("ortserve_model_memory_bytes").items() if "mapped" not in labels)
        / 1e6
    )
    return counts


def loads_beside(folder: Path, seconds: float) -> list[list[str]]:
    """p50 and p99 of one model, in turns while no model loads and while other models load and unload continuously."""
    make_model(folder / "m0000" / "1" / "model.onnx", 0)
    for number, (width, hidden) in enumerate(((256, 256), (1024, 2048), (2048, 4096))):
        make_model(folder / f"load{number}" / "1" / "model.onnx", number, width, hidden)
    rows = []
    with serving(folder, "--model-control-mode", "explicit", "--load-model", "m0000") as server:
        for number in range(3):
            rest: list[float] = []
            busy: list[float] = []
            ratios = {50: [], 99: []}  # type: dict[int, list[float]]
            for _ in range(ROUNDS):
                still = times(server, "m0000", seconds / 5)
                is_over = threading.Event()
                with ThreadPoolExecutor(1) as pool:
                    loading = pool.submit(keep_loading, server, f"load{number}", is_over)
                    try:
                        loaded = times(server, "m0000", seconds / 5)
                    finally:
                        is_over.set()
                loading.result()
                for percent in ratios:
                    ratios[percent].append(p(loaded, percent) / p(still, percent))
                rest += still
                busy += loaded
            size = ("0.3 MB", "8 MB", "34 MB")[number]
            rows += [
                [f"{size}, p{percent}", f"{p(busy, percent):.3f} ms", f"{p(rest, percent):.3f} ms", spread(values)]
                for percent, values in ratios.items()
            ]
    return rows


def keep_loading(server: Server, model: str, is_over: threading.Event) -> None:
    connection = server.connect()
    while not is_over.is_set():
        for action in ("load", "unload"):
            connection.request("POST", f"/v2/repository/models/{model}/{action}", b"{}")
            response = connection.getresponse()
            text = response.read().decode()
            assert response.status == 200, f"the {action} of {model} failed: {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--room", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20)
    given = parser.parse_args()
    put_loop_first()
    parts: list[str] = []

    def add(title: str, make: Callable[[], str]) -> None:
        parts.append(f"## {title}\n\n{make()}")
        print(parts[-1], flush=True)

    with tempfile.TemporaryDirectory() as folder:
        many, one = Path(folder) / "many", Path(folder) / "one"
        expected = {
            f"m{number:04d}": make_model(many / f"m{number:04d}" / "1" / "model.onnx", number)
            for number in range(given.models)
        }
        make_model(one / "m0000" / "1" / "model.onnx", 0)
        grown = 0.0

        def start() -> str:
            nonlocal grown
            rows = []
            with serving(one) as server:
                base, base_s = server.status(), server.started_s
            for title, flags in (("side by side", ()), ("one at a time", ("--memory-budget-bytes", str(2**40)))):
                with serving(many, *flags) as server:
                    status = server.status()
                    growth = {key: (status[key] - base[key]) / (given.models - 1) for key in base}
                    grown = grown or growth["MB"]
                    rows.append(
                        [
                            title,
                            f"{server.started_s:.1f} s",
                            f"{1000.0 * (server.started_s - base_s) / given.models:.1f} ms",
                            f"{growth['MB'] * 1000.0:.0f} KB",
                            f"{growth['threads']:.2f}",
                            f"{growth['descriptors']:.2f}",
                        ]
                    )
            header = ["loads", "start", "per model", "memory per model", "threads", "descriptors"]
            return table(header, rows) + f"\n\nStart of a server with one model: {base_s:.1f} s."

        def room() -> str:
            budget = round(grown * 1e6 * given.room)
            flags = ("--load-policy", "on_demand", "--memory-budget-bytes", str(budget))
            with serving(many, *flags) as server:
                counts = zipf(server, expected, given.seconds)
            shown = {key: f"{value:.3f}" if key == "hit rate" else f"{value:.1f}" for key, value in counts.items()}
            return f"Budget {budget / 1e6:.1f} MB.\n\n" + table(list(shown), [list(shown.values())])

        add(f"Start with {given.models} models", start)
        add(
            "One model beside the others and alone",
            lambda: table(["", "beside", "alone", "ratio"], compare_alone(many, one, given.seconds)),
        )
        add(f"Room for {given.room} models, Zipf load", room)
        add(
            "A model that serves while others load",
            lambda: table(
                ["size of the loads", "during loads", "at rest", "ratio"],
                loads_beside(Path(folder) / "loads", given.seconds),
            ),
        )
    write_report(HERE / "results" / "many_models.md", "Many models", *parts)


if __name__ == "__main__":
    main()
