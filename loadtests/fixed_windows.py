"""Would a fixed delay, in which batches wait for more rows, do better than leaving as soon as an instance is free?

Level: server. Expected: no. At low load a delay only adds to the latency, at high load batches fill by themselves while
the one before them runs; median and 99th percentile without delay should be the best, or within the noise, everywhere.

    python loadtests/fixed_windows.py [--rounds 3] [--seconds 4]

Four servers with ``--queue-delay-s`` 0, 0.001, 0.005 and 0.010 and the same dense model are loaded in turns by
open-loop Poisson arrivals, at shares of the capacity that 64 callers in a closed loop found without delay. Samples of
answers are compared with what ONNX Runtime gives by itself. Writes ``loadtests/results/fixed_windows.md`` and a plot.
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
import matplotlib as mpl  # noqa: E402
import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402

from harness import circumstances, running, spread, table  # noqa: E402
from models.builders import heavy  # noqa: E402
from open_loop import Outcome, closed_loop, offer  # noqa: E402
from overload import CALLERS, MAX_ROWS, STEPS, VARIETY, http_request  # noqa: E402

mpl.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

DELAYS_S = (0.0, 0.001, 0.005, 0.01)
PORTS = {delay_s: 18200 + 10 * number for number, delay_s in enumerate(DELAYS_S)}
LOADS = {"low": 0.1, "medium": 0.4, "high": 0.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4)
    options = parser.parse_args()
    rows = np.random.default_rng(0).standard_normal((VARIETY, 64)).astype(np.float32).round(4)
    outcomes: dict[tuple[str, float], list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        folder = Path(temporary)
        (folder / "heavy" / "1").mkdir(parents=True)
        file = heavy(folder / "heavy" / "1" / "model.onnx", steps=STEPS)
        (folder / "heavy" / "model.yaml").write_text(f"max_rows: {MAX_ROWS}\nintra_op_threads: 1\n")
        expected = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": rows})[0]

        def check(number: int, body: bytes) -> None:
            answer = json.loads(body)["outputs"][0]["data"]
            np.testing.assert_allclose(answer, expected[number % VARIETY], rtol=1e-3, atol=1e-4)

        requests = [http_request(row) for row in rows]
        for delay_s, port in PORTS.items():
            flags = [f"--http-port={port}", f"--grpc-port={port + 1}", f"--metrics-port={port + 2}"]
            command = [sys.executable, "-m", "ortserve", "serve", str(folder), "--log-level=warning", *flags]
            command.append(f"--queue-delay-s={delay_s}")
            servers.enter_context(running(command, f"http://127.0.0.1:{port}/v2/health/ready"))
        for port in PORTS.values():  # warm-up, not counted
            closed_loop(port, requests, check, callers=CALLERS, seconds=1)
        capacity = closed_loop(PORTS[0.0], requests, check, callers=CALLERS, seconds=3).answers_per_s
        print(f"capacity {capacity:.0f}/s", flush=True)
        for number in range(options.rounds):
            for load, share in LOADS.items():
                for delay_s in DELAYS_S if number % 2 == 0 else reversed(DELAYS_S):
                    outcome = offer(
                        PORTS[delay_s],
                        requests,
                        check,
                        rate=share * capacity,
                        seconds=options.seconds,
                        seed=number,
                    )
                    assert set(outcome.statuses) == {200}, outcome.statuses
                    outcomes.setdefault((load, delay_s), []).append(outcome)
                    print(
                        f"round {number + 1} {load:6} delay {1e3 * delay_s:2.0f} ms: "
                        f"p50 {outcome.quantile_ms(0.5):.2f} p99 {outcome.quantile_ms(0.99):.2f} ms, "
                        f"{outcome.answers_per_s:.0f}/s",
                        flush=True,
                    )
    lines = []
    for (load, delay_s), same in outcomes.items():
        without = outcomes[load, 0.0]
        lines.append(
            [
                f"{load} ({LOADS[load]:.1f})",
                f"{1e3 * delay_s:.0f}",
                spread([o.quantile_ms(0.5) for o in same]),
                spread([o.quantile_ms(0.5) / u.quantile_ms(0.5) for o, u in zip(same, without, strict=True)]),
                spread([o.quantile_ms(0.99) for o in same]),
                spread([o.quantile_ms(0.99) / u.quantile_ms(0.99) for o, u in zip(same, without, strict=True)]),
                spread([o.answers_per_s for o in same]),
            ]
        )
    header = ["load", "delay ms", "p50 ms", "÷ no delay", "p99 ms", "÷ no delay", "answers/s"]
    setting = (
        f"Batches of up to {MAX_ROWS} rows, one row a request; capacity {capacity:.0f} requests/s. Load generator and "
        "server share the machine. Ratios are of the same round and the same arrival times."
    )
    text = "\n\n".join(
        (
            "# Fixed delays against none",
            circumstances(),
            setting,
            table(header, lines),
            "![Median and 99th percentile by load and delay](fixed_windows.png)",
        )
    )
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "fixed_windows.md").write_text(text + "\n")
    _plot(outcomes, HERE / "results" / "fixed_windows.png")
    print(text)


def _plot(outcomes: dict[tuple[str, float], list[Outcome]], path: Path) -> None:
    """One group of bars a load, one bar a delay: medians of the rounds, their range as a line."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    width = 0.8 / len(DELAYS_S)
    for panel, (title, quantile) in zip(panels, (("p50", 0.5), ("p99", 0.99)), strict=True):
        for index, delay_s in enumerate(DELAYS_S):
            values = [[o.quantile_ms(quantile) for o in outcomes[load, delay_s]] for load in LOADS]
            middles = [statistics.median(of_load) for of_load in values]
            lengths = [
                [middle - min(of_load) for middle, of_load in zip(middles, values, strict=True)],
                [max(of_load) - middle for middle, of_load in zip(middles, values, strict=True)],
            ]
            label = f"delay {1e3 * delay_s:.0f} ms" if delay_s else "no delay"
            panel.bar(np.arange(len(LOADS)) + index * width, middles, width, yerr=lengths, capsize=2, label=label)
        panel.set_xticks(np.arange(len(LOADS)) + width * (len(DELAYS_S) - 1) / 2, [f"{load} load" for load in LOADS])
        panel.set_ylabel(f"{title}, ms")
        panel.grid(axis="y", alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
