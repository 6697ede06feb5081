"""Does an overloaded server maintain its full throughput of timely answers?

Level: server. Expected: at 1.2 and 2 times the capacity, with a deadline of five full batches on each request, answers
within the deadline reach at least 0.90 of the capacity. Without deadlines hardly any answer is in time, because each
request has waited in a queue that only grows.

There are two models. Full batches of the first take about 20 ms, so that the load generator uses a small part of the
machine. Those of the second take 5 ms; generating, reading and rejecting twice the load then takes processor time that
was available when the capacity was measured. In the arm "less 5 ms" callers reserve 5 ms of the deadline for
transmission, which the server cannot see. This arm was added after the whole deadline had missed the goal with the
second model.

    python loadtests/overload.py [--rounds 3] [--seconds 6]

Dense models run on one thread; one process beside the server sends an open-loop Poisson load. Each round measures the
capacity with 64 callers in a closed loop and then applies both loads in three arms: with the deadline less 5 ms in the
header ``x-request-timeout-ms``, with the whole deadline, and without the header. Each arm counts answers within the
same deadline. Samples of answers are compared with ONNX Runtime's. Writes ``loadtests/results/overload.md``.
"""

import argparse
import json
import math
import sys
import urllib.request
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
from dense_model import CALLERS, MAX_ROWS, STEPS, dense_model  # noqa: E402
from harness import serving, spread, table, write_report  # noqa: E402
from open_loop import Outcome, closed_loop, offer  # noqa: E402

PORT = 18100
DEPTHS = (4 * STEPS, STEPS)
"""Layers of the models; full batches take about 20 and 5 ms."""
LOADS = (1.2, 2.0)
BATCHES = 5
"""Length of the deadline, in full batches."""
WAY_MS = 5
ARMS = ("less 5 ms", "whole", "none")
"""The deadline that callers send to the server."""


def learned(path: str) -> tuple[float, dict[str, int]]:
    """The server's estimate of a full batch in ms, and its decisions so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}/batching", timeout=30) as answer:
        document = json.load(answer)
    return document["classes"][0]["latency_ms"][str(MAX_ROWS)], document["decisions"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6)
    options = parser.parse_args()
    sections = [section for steps in DEPTHS for section in overload(steps, options.rounds, options.seconds)]
    write_report(HERE / "results" / "overload.md", "Overload: what is answered in time", *sections)


def overload(steps: int, rounds: int, seconds: float) -> tuple[str, str]:
    """Overload a model with ``steps`` layers. Returns a description of the setting, and the table."""
    ratios: dict[tuple[float, str], list[float]] = {}
    outcomes: dict[tuple[float, str], list[Outcome]] = {}
    capacities: list[float] = []
    with dense_model(steps) as model, serving(model.repository, PORT):
        plain = model.requests()
        closed_loop(PORT, plain, model.check, callers=CALLERS, seconds=2)  # warm-up, not counted
        full_ms, _ = learned(model.path)
        deadline_ms = math.ceil(BATCHES * full_ms)
        requests = {
            "less 5 ms": model.requests({"X-Request-Timeout-Ms": str(deadline_ms - WAY_MS)}),
            "whole": model.requests({"X-Request-Timeout-Ms": str(deadline_ms)}),
            "none": plain,
        }
        for number in range(rounds):
            capacity = closed_loop(PORT, plain, model.check, callers=CALLERS, seconds=seconds).answers_per_s
            capacities.append(capacity)
            print(f"{full_ms:.1f} ms, round {number + 1}: capacity {capacity:.0f}/s", flush=True)
            for load in LOADS:
                for arm in ARMS:
                    outcome = offer(
                        PORT, requests[arm], model.check, rate=load * capacity, seconds=seconds, seed=number
                    )
                    outcomes.setdefault((load, arm), []).append(outcome)
                    ratio = outcome.in_time_per_s(deadline_ms / 1e3) / capacity
                    ratios.setdefault((load, arm), []).append(ratio)
                    print(
                        f"  {load} times, deadline sent: {arm}: {ratio:.3f} in time, "
                        f"{dict(outcome.statuses)}, p99 {outcome.quantile_ms(0.99):.0f} ms",
                        flush=True,
                    )
        _, decided = learned(model.path)
    lines = [
        [
            f"{load}",
            arm,
            spread(ratios[load, arm]),
            spread([sum(o.statuses.values()) / o.seconds for o in same]),
            _share(same, 200),
            _share(same, 429),
            _share(same, 504),
            spread([o.quantile_ms(0.5) for o in same]),
            spread([o.quantile_ms(0.99) for o in same]),
        ]
        for (load, arm), same in outcomes.items()
    ]
    header = ["load ÷ capacity", "deadline sent", "answered in time ÷ capacity", "offered/s", "200", "429", "504"]
    setting = (
        f"One row a request, batches of up to {MAX_ROWS} rows that take {full_ms:.1f} ms on one thread; capacity "
        f"{spread(capacities)} requests/s by {CALLERS} callers in a closed loop; deadline {deadline_ms} ms. Load "
        f"generator and server share the machine. Latencies are of answers with status 200, from when the request "
        f"was due to be sent. Rows computed without a recipient: {decided['wasted_rows']}."
    )
    return setting, table([*header, "p50 ms", "p99 ms"], lines)


def _share(outcomes: list[Outcome], status: int) -> str:
    return f"{100 * sum(o.statuses[status] for o in outcomes) / sum(o.offered for o in outcomes):.1f} %"


if __name__ == "__main__":
    main()
