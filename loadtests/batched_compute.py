"""How much of the throughput of a bare ``session.run`` loop remains when the same model is served and batched?

Level: server. Expected: at least 0.9 of the rows per second of a bare loop at the mean batch size served, for a model
whose run of 32 rows takes 20 ms or more with one intra-op thread, under a saturating closed loop.

    python loadtests/batched_compute.py [--rounds 5] [--seconds 8] [--connections 64]

Three arms take turns: the bare loop with the server idle; the bare loop while a program spins on the other processor;
and the load (wrk, one row per request) on the server, during which a checker compares answers with ONNX Runtime's. The
bare loop runs at the batch size that the server's metrics show for the previous round. Load generator and event loop
share the second processor. The second arm shows how much a busy second processor slows computation on the first, which
happens if both are threads of one core. The depth of the model is chosen so that a run of 32 rows takes 20 ms on this
machine. Writes ``loadtests/results/batched_compute.md``.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from harness import Load, checking, post, serving, spread, table, write_report, wrk  # noqa: E402
from infer_requests import json_request, numbers_of_json  # noqa: E402
from models.builders import heavy  # noqa: E402

PORT = 18000
DEFAULT_STEPS = 60
MIN_MS = 20.5


def make_model(file: Path) -> ort.InferenceSession:
    """Write the model and open it with one thread."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    session = ort.InferenceSession(str(heavy(file)), settings, providers=["CPUExecutionProvider"])
    short_ms = run_ms(session)
    if short_ms < MIN_MS:
        deeper = heavy(file, steps=math.ceil(DEFAULT_STEPS * MIN_MS / short_ms))
        session = ort.InferenceSession(str(deeper), settings, providers=["CPUExecutionProvider"])
    return session


def run_ms(session: ort.InferenceSession) -> float:
    """Median time of a run of 32 rows, in ms."""
    array = np.random.default_rng(32).standard_normal((32, 64)).astype(np.float32)
    runs = []
    for _ in range(20):
        began = time.perf_counter()
        session.run(None, {"x": array})
        runs.append((time.perf_counter() - began) * 1e3)
    return statistics.median(runs)


def bare_rows_per_s(session: ort.InferenceSession, rows: int, seconds: int) -> float:
    array = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)
    session.run(None, {"x": array})
    began, runs = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        session.run(None, {"x": array})
        runs += 1
    return runs * rows / (time.perf_counter() - began)


def batches_and_rows() -> tuple[float, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT + 2}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if family.name == "ortserve_batch_rows" and sample.labels["model"] == "heavy"
    }
    return samples["ortserve_batch_rows_count"], samples["ortserve_batch_rows_sum"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--connections", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "heavy" / "1").mkdir(parents=True)
        session = make_model(folder / "heavy" / "1" / "model.onnx")
        array = np.random.default_rng(0).uniform(-1, 1, (1, 64)).round(6).astype(np.float32)
        expected = session.run(None, {"x": array})[0].ravel()
        body = json_request(array, decimals=6)
        url = f"http://127.0.0.1:{PORT}/v2/models/heavy/infer"

        def check() -> None:
            np.testing.assert_allclose(numbers_of_json(post(url, body)), expected, rtol=1e-3, atol=1e-5)

        with serving(folder, PORT, "--intra-op-threads=1") as pid:
            wrk(url, body, folder, pid=pid, connections=options.connections, seconds=2)  # warm-up, not counted
            batches, rows = batches_and_rows()
            mean_rows = round(rows / batches)
            ratios: list[float] = []
            beside_busy: list[float] = []
            lines: list[list[str]] = []
            for number in range(options.rounds):
                bare = bare_rows_per_s(session, mean_rows, options.seconds)
                with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
                    bare_beside = bare_rows_per_s(session, mean_rows, options.seconds)
                    neighbour.kill()
                batches, rows = batches_and_rows()
                with checking(check):
                    load: Load = wrk(
                        url, body, folder, pid=pid, connections=options.connections, seconds=options.seconds
                    )
                more_batches, more_rows = batches_and_rows()
                served_rows = (more_rows - rows) / (more_batches - batches)
                ratios.append(load.requests_per_s / bare)
                beside_busy.append(load.requests_per_s / bare_beside)
                lines.append(
                    [
                        str(number + 1),
                        f"{bare:,.0f} at {mean_rows}",
                        f"{bare_beside:,.0f}",
                        f"{load.requests_per_s:,.0f} at {served_rows:.1f}",
                        f"{ratios[-1]:.3f}",
                        f"{beside_busy[-1]:.3f}",
                        f"{load.p50_ms:.0f}",
                        f"{load.p99_ms:.0f}",
                        f"{load.cpu_us:,.0f}",
                    ]
                )
                mean_rows = round(served_rows)
                print(lines[-1], flush=True)
            latency_ms = run_ms(session)
    header = ["round", "bare rows/s", "beside a busy processor", "served rows/s", "served ÷ bare"]
    header += ["served ÷ beside", "p50 ms", "p99 ms", "CPU µs a request"]
    write_report(
        HERE / "results" / "batched_compute.md",
        "Batched compute: served rows against a bare loop",
        f"{options.connections} connections, closed loop, one row a request; L(32) = {latency_ms:.0f} ms.",
        f"**Served ÷ bare: {spread(ratios)}**",
        f"Served ÷ bare beside a busy processor: {spread(beside_busy)}",
        table(header, lines),
    )


if __name__ == "__main__":
    main()
