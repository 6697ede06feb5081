"""What do sequences cost: memory and p99 with 10,000 live sequences, CPU of a request? What does batching them gain?

Level: server for the CPU of a request, batching in process for the rest. Expected: memory of the states plus about
2 KiB per sequence; at most 1.3 times the CPU of a request without a sequence; a GRU over 64 sequences at least 8 times
faster than one sequence at a time.

    python loadtests/sequences.py [--rounds 5] [--seconds 3]

The run checks sums, and compares each hidden state with a run of that sequence alone. Writes
``loadtests/results/sequences.md``.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime as ort  # noqa: E402
import psutil  # noqa: E402
import uvloop  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from prometheus_client import CollectorRegistry  # noqa: E402

from harness import cpu_s, serving, spread, table, write_report  # noqa: E402
from ortserve.clock import monotonic_ns  # noqa: E402
from ortserve.config.options import ServerOptions  # noqa: E402
from ortserve.core.inflight import NO_TERMS, InflightRequest  # noqa: E402
from ortserve.core.sequence import SequencePart  # noqa: E402
from ortserve.core.timing import Timing  # noqa: E402
from ortserve.registry.registry import Registry  # noqa: E402
from ortserve.registry.served_version import ServedVersion  # noqa: E402
from ortserve.telemetry.metrics import Metrics  # noqa: E402

PORT = 18400
CONNECTIONS = 32
LIVE = 10_000
RATE = 2_000
BATCH = 64
STEPS = 30
SUMS = "sequences: {max_idle_s: 600, states: [{input: STATE, output: NEXT}]}\nbatched: true\nmax_rows: 64\n"


def running_sum(path: Path, *, is_plain: bool) -> None:
    """Write a model that computes y = x + state over 16 numbers, or, if plain, y = x + x."""
    other = "x" if is_plain else "STATE"
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 16]) for name in dict.fromkeys(("x", other))
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 16])
        for name in ("y", *(() if is_plain else ("NEXT",)))
    ]
    nodes = [helper.make_node("Add", ["x", other], ["y"])]
    if not is_plain:
        nodes.append(helper.make_node("Add", ["x", other], ["NEXT"]))
    _write(path, nodes, inputs, outputs, [])


def recurrent(path: Path, kind: str, width: int, hidden: int) -> None:
    """Write one step of a GRU, or of a model like voice activity detection: dense layer, LSTM of one step, sigmoid."""
    rng = np.random.default_rng(0)
    operator, gates = ("GRU", 3) if kind == "gru" else ("LSTM", 4)
    features = width if kind == "gru" else 128
    states = ["h"] if kind == "gru" else ["h", "c"]

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((rng.standard_normal(shape) * 0.05).astype(np.float32), name)

    weights = [
        weight("w", 1, gates * hidden, features),
        weight("r", 1, gates * hidden, hidden),
        numpy_helper.from_array(np.array([0], np.int64), "first"),
    ]
    nodes = []
    if kind == "vad":
        weights += [weight("front", width, features), weight("last", hidden, 1)]
        nodes += [helper.make_node("MatMul", ["x", "front"], ["m"]), helper.make_node("Relu", ["m"], ["f"])]
    nodes += [helper.make_node("Unsqueeze", ["f" if kind == "vad" else "x", "first"], ["steps"])]
    nodes += [helper.make_node("Unsqueeze", [state, "first"], [f"{state}0"]) for state in states]
    ends = [f"{state}1" for state in states]
    nodes += [
        helper.make_node(
            operator, ["steps", "w", "r", "", "", *[f"{state}0" for state in states]], ["", *ends], hidden_size=hidden
        ),
        *[helper.make_node("Squeeze", [end, "first"], [f"{end}_next"]) for end in ends],
    ]
    if kind == "vad":
        nodes += [helper.make_node("MatMul", ["h1_next", "last"], ["l"]), helper.make_node("Sigmoid", ["l"], ["y"])]
    else:
        nodes += [helper.make_node("Identity", ["h1_next"], ["y"])]
    tensor = helper.make_tensor_value_info
    inputs = [tensor("x", TensorProto.FLOAT, ["batch", width])]
    inputs += [tensor(state, TensorProto.FLOAT, ["batch", hidden]) for state in states]
    outputs = [tensor("y", TensorProto.FLOAT, ["batch", 1 if kind == "vad" else hidden])]
    outputs += [tensor(f"{end}_next", TensorProto.FLOAT, ["batch", hidden]) for end in ends]
    _write(path, nodes, inputs, outputs, weights)


def _write(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any]) -> None:
    graph = helper.make_graph(nodes, "model", inputs, outputs, weights)
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def make_repository(folder: Path) -> None:
    running_sum(folder / "plain" / "1" / "model.onnx", is_plain=True)
    (folder / "plain" / "model.yaml").write_text("batched: true\nmax_rows: 64\n")
    running_sum(folder / "sums" / "1" / "model.onnx", is_plain=False)
    (folder / "sums" / "model.yaml").write_text(SUMS)


def wrk_cpu_us(folder: Path, pid: int, model: str, seconds: int) -> float:
    """CPU of the server per request. Requests cycle through many sequences that stay alive."""
    body = {
        "inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [0.5] * 16}],
        "parameters": {"sequence_id": 7, "sequence_start": True},
    }
    before, after = json.dumps(body).split('7, "sequence_start": true')
    script = folder / "sequences.lua"
    # wrk builds one request that it does not send, so each sequence starts twice. Both arms send the same bytes; the
    # plain model ignores the parameters.
    script.write_text(
        "local number = 0\nrequest = function()\n number = number + 1\n"
        f" local id = number % {8 * CONNECTIONS} + 1\n"
        f" local flag = number <= {16 * CONNECTIONS} and 'true' or 'false'\n"
        f" local body = {before!r} .. id .. ', \"sequence_start\": ' .. flag .. {after!r}\n"
        " return wrk.format('POST', nil, {['Content-Type'] = 'application/json'}, body)\nend\n"
    )
    url = f"http://127.0.0.1:{PORT}/v2/models/{model}/infer"
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), url]
    began_s = cpu_s(pid)
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 30).stdout
    used_s = cpu_s(pid) - began_s
    if "Non-2xx" in printed or "Socket errors" in printed:
        raise RuntimeError(printed)
    found = re.search(r"(\d+) requests in", printed)
    assert found is not None
    return used_s / int(found.group(1)) * 1e6


def send(served: ServedVersion, name: int, row: np.ndarray, *, start: bool) -> InflightRequest:
    request = InflightRequest(Timing(monotonic_ns()), (row,), 1)
    served.submit_part(request, NO_TERMS, SequencePart(name, start, False))
    return request


async def open_models(folder: Path) -> Registry:
    registry = Registry(
        [folder], ServerOptions(warmup_s=1.0, max_queue_rows=100_000), Metrics(CollectorRegistry()), monotonic_ns
    )
    await registry.load_all()
    return registry


async def many_live(folder: Path, hidden: int = 256) -> dict[str, float]:
    """Memory of ``LIVE`` sequences, and the latency of requests at ``RATE`` per second over all of them."""
    recurrent(folder / "gru" / "1" / "model.onnx", "gru", 32, hidden)
    (folder / "gru" / "model.yaml").write_text(
        f"batched: true\nmax_rows: {BATCH}\nrow_checks: false\n"
        f"sequences: {{max_idle_s: 600, max_candidates: {LIVE}, states: [{{input: h, output: h1_next}}]}}\n"
    )
    registry = await open_models(folder)
    served = registry.find("gru", "")
    row = np.ones((1, 32), np.float32)
    process = psutil.Process()
    for number in range(200):  # the first requests allocate memory that is never freed
        await send(served, 10**6 + number, row, start=True)
    before = process.memory_info().rss
    for first in range(0, LIVE - 200, 100):
        for request in [send(served, 1 + first + number, row, start=True) for number in range(100)]:
            await request
    grown = process.memory_info().rss - before
    latencies: list[float] = []
    tasks: set[asyncio.Task[None]] = set()

    async def ask(name: int) -> None:
        began_ns = monotonic_ns()
        await send(served, name, row, start=False)
        latencies.append((monotonic_ns() - began_ns) / 1e6)

    began_s = time.perf_counter()
    for number in range(5 * RATE):
        await asyncio.sleep(max(0.0, began_s + number / RATE - time.perf_counter()))
        task = asyncio.create_task(ask(random.randint(1, LIVE - 200)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    assert served.sequences is not None
    reading = served.sequences.reading()
    await registry.close()
    return {
        "live": reading.active,
        "state_mib": reading.state_bytes / 2**20,
        "grown_mib": grown / 2**20,
        "other_bytes": (grown - (LIVE - 200) * hidden * 4) / (LIVE - 200),
        "p50_ms": float(np.percentile(latencies, 50)),
        "p99_ms": float(np.percentile(latencies, 99)),
    }


async def gains(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Speed-up of running 64 sequences together over one at a time, by model."""
    shapes = {"gru": (128, 1024), "vad": (512, 512)}
    for kind, (width, hidden) in shapes.items():
        recurrent(folder / kind / "1" / "model.onnx", kind, width, hidden)
        states = "h", "c"
        kept = ", ".join(f"{{input: {state}, output: {state}1_next}}" for state in states[: 1 if kind == "gru" else 2])
        (folder / kind / "model.yaml").write_text(
            f"batched: true\nmax_rows: {BATCH}\nrow_checks: false\nsequences: {{max_idle_s: 600, states: [{kept}]}}\n"
        )
    registry = await open_models(folder)
    found: dict[str, list[float]] = {kind: [] for kind in shapes}
    number = 0
    rng = np.random.default_rng(1)
    for _ in range(rounds):
        for kind, (width, _) in shapes.items():
            served = registry.find(kind, "")
            rows = [rng.standard_normal((1, width)).astype(np.float32) for _ in range(BATCH)]
            number += BATCH
            began_s = time.perf_counter()
            for step in range(STEPS):
                together = [send(served, number + index, row, start=step == 0) for index, row in enumerate(rows)]
                outputs = [(await request)[0] for request in together]
            together_s = (time.perf_counter() - began_s) / (STEPS * BATCH)
            number += BATCH
            began_s = time.perf_counter()
            for step in range(STEPS):
                alone = await send(served, number + 7, rows[7], start=step == 0)
            alone_s = (time.perf_counter() - began_s) / STEPS
            np.testing.assert_allclose(outputs[7], alone[0], rtol=1e-3, atol=1e-5)
            found[kind].append(alone_s / together_s)
    await registry.close()
    return found


def model_gains(folder: Path) -> dict[str, float]:
    """Speed-up of the bare models on 64 rows together over one at a time, on one thread."""
    found = {}
    for kind in ("gru", "vad"):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(folder / kind / "1" / "model.onnx", options)
        shortest_s = {}
        for rows in (1, BATCH):
            feeds = {spec.name: np.ones((rows, spec.shape[1]), np.float32) for spec in session.get_inputs()}
            session.run(None, feeds)
            shortest_s[rows] = min(timeit.repeat(lambda: session.run(None, feeds), number=1, repeat=50))  # noqa: B023
        found[kind] = BATCH * shortest_s[1] / shortest_s[BATCH]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args()
    cpu: dict[str, list[float]] = {"plain": [], "sums": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_repository(folder / "models")
        flags = ("--warmup-s=1", "--drain-timeout-s=1")
        with serving(folder / "models", PORT, *flags) as pid:
            wrk_cpu_us(folder, pid, "plain", 1)
        # A new server for each round, so that every round starts with new sequences.
        for _ in range(options.rounds):
            with serving(folder / "models", PORT, *flags) as pid:
                for model, values in cpu.items():
                    values.append(wrk_cpu_us(folder, pid, model, options.seconds))
            print(cpu, flush=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            live = runner.run(many_live(folder / "live"))
            print(live, flush=True)
            gain = runner.run(gains(folder / "gains", options.rounds))
            print(gain, flush=True)
        bare = model_gains(folder / "gains")
    ratios = [own / plain for own, plain in zip(cpu["sums"], cpu["plain"], strict=True)]
    write_report(
        HERE / "results" / "sequences.md",
        "Sequences",
        f"CPU of a REST JSON request, {CONNECTIONS} connections, µs. The plain model ignores the parameters.",
        table(
            ["plain", "of a sequence", "ratio (aim: at most 1.3)"],
            [[spread(cpu["plain"]), spread(cpu["sums"]), spread(ratios)]],
        ),
        f"{live['live']:.0f} live sequences of a GRU with a state of 1 KiB, {RATE} requests/s over all of them:",
        table(
            [
                "states, MiB",
                "resident memory grew by, MiB",
                "bytes a sequence beside its state",
                "p50, ms",
                "p99, ms",
            ],
            [[f"{live[key]:.2f}" for key in ("state_mib", "grown_mib", "other_bytes", "p50_ms", "p99_ms")]],
        ),
        f"Requests per second of {BATCH} sequences together against one at a time (aim: 8), and of a bare session:",
        table(
            ["", "GRU, 1024 wide", "voice-activity-like, LSTM 512 wide"],
            [
                ["sequences", spread(gain["gru"]), spread(gain["vad"])],
                ["a bare session", f"{bare['gru']:.2f}", f"{bare['vad']:.2f}"],
            ],
        ),
    )


if __name__ == "__main__":
    main()
