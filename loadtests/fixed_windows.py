"""Is a fixed queue delay better than dispatch as soon as an instance is idle?

Level: server. Expected: no. At low load a delay only adds latency. At high load a batch fills anyway while the previous
one runs. Median and 99th percentile without delay should be the best, or within the noise of the best, at every load.

    python loadtests/fixed_windows.py [--rounds 5] [--seconds 4]

Servers with ``--queue-delay-s`` 0, 0.001, 0.005 and 0.010 and the same dense model are loaded in turns by open-loop
Poisson arrivals, at shares of the capacity that 64 callers in a closed loop measure without delay. Another arm has no
delay and ``--no-closed-loop-wait``, and one repeats the first arm to show the noise. All servers are restarted for each
round, because no two processes are equally fast: at 0.8 of capacity a server that is 1 % slower has a 4 % longer median
(simulated). Samples of answers are compared with ONNX Runtime's.
Writes ``loadtests/results/fixed_windows.md`` and a plot.
"""

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import matplotlib as mpl  # noqa: E402
import numpy as np  # noqa: E402

from dense_model import CALLERS, MAX_ROWS, dense_model  # noqa: E402
from harness import serving, spread, table, write_report  # noqa: E402
from open_loop import Outcome, closed_loop, offer  # noqa: E402

mpl.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

PLAIN = "no delay"
ARMS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "no delay, again": (),
    "no delay, no closed-loop wait": ("--no-closed-loop-wait",),
    "delay 1 ms": ("--queue-delay-s=0.001",),
    "delay 5 ms": ("--queue-delay-s=0.005",),
    "delay 10 ms": ("--queue-delay-s=0.01",),
}
"""The flags of each arm's server."""
PORTS = {arm: 18200 + 10 * number for number, arm in enumerate(ARMS)}
LOADS = {"low": 0.1, "medium": 0.4, "high": 0.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    options = parser.parse_args()
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    capacities: list[float] = []
    with dense_model() as model:
        requests = model.requests()
        for number in range(options.rounds):
            # Rotate the arms, so that neither their ports nor the order of starts and loads favours one of them.
            arms = [list(ARMS)[(place + number) % len(ARMS)] for place in range(len(ARMS))]
            with ExitStack() as servers:
                for arm in arms:
                    servers.enter_context(serving(model.repository, PORTS[arm], *ARMS[arm]))
                for arm in arms:  # warm-up, not counted
                    closed_loop(PORTS[arm], requests, model.check, callers=CALLERS, seconds=1)
                full = closed_loop(PORTS[PLAIN], requests, model.check, callers=CALLERS, seconds=options.seconds)
                capacities.append(full.answers_per_s)
                print(f"round {number + 1} capacity {full.answers_per_s:.0f}/s", flush=True)
                for load, share in LOADS.items():
                    for arm in arms:
                        outcome = offer(
                            PORTS[arm],
                            requests,
                            model.check,
                            rate=share * full.answers_per_s,
                            seconds=options.seconds,
                            seed=number,
                        )
                        assert set(outcome.statuses) == {200}, outcome.statuses
                        outcomes.setdefault((load, arm), []).append(outcome)
                        print(
                            f"round {number + 1} {load:6} {arm}: p50 {outcome.quantile_ms(0.5):.2f} "
                            f"p99 {outcome.quantile_ms(0.99):.2f} ms, {outcome.answers_per_s:.0f}/s",
                            flush=True,
                        )
    lines = []
    for load, arm in sorted(outcomes, key=lambda key: (list(LOADS).index(key[0]), list(ARMS).index(key[1]))):
        same, without = outcomes[load, arm], outcomes[load, PLAIN]
        lines.append(
            [
                f"{load} ({LOADS[load]:.1f})",
                arm,
                spread([o.quantile_ms(0.5) for o in same]),
                spread([o.quantile_ms(0.5) / u.quantile_ms(0.5) for o, u in zip(same, without, strict=True)]),
                spread([o.quantile_ms(0.99) for o in same]),
                spread([o.quantile_ms(0.99) / u.quantile_ms(0.99) for o, u in zip(same, without, strict=True)]),
                spread([o.answers_per_s for o in same]),
            ]
        )
    header = ["load", "arm", "p50 ms", "÷ no delay", "p99 ms", "÷ no delay", "answers/s"]
    setting = (
        f"Batches of up to {MAX_ROWS} rows, one row a request; capacity {spread(capacities)} requests/s. Load "
        "generator and server share the machine. Ratios are of the same round and the same arrival times. How far the "
        "second arm is from the first is noise."
    )
    write_report(
        HERE / "results" / "fixed_windows.md",
        "Fixed delays against none",
        setting,
        table(header, lines),
        "![Median and 99th percentile by load and delay](fixed_windows.png)",
    )
    _plot(outcomes, HERE / "results" / "fixed_windows.png")


def _plot(outcomes: dict[tuple[str, str], list[Outcome]], path: Path) -> None:
    """Plot a group of bars per load with a bar per arm: medians of the rounds, with their range as a line."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    width = 0.8 / len(ARMS)
    for panel, (title, quantile) in zip(panels, (("p50", 0.5), ("p99", 0.99)), strict=True):
        for index, arm in enumerate(ARMS):
            values = [[o.quantile_ms(quantile) for o in outcomes[load, arm]] for load in LOADS]
            middles = [statistics.median(of_load) for of_load in values]
            lengths = [
                [middle - min(of_load) for middle, of_load in zip(middles, values, strict=True)],
                [max(of_load) - middle for middle, of_load in zip(middles, values, strict=True)],
            ]
            panel.bar(np.arange(len(LOADS)) + index * width, middles, width, yerr=lengths, capsize=2, label=arm)
        panel.set_xticks(np.arange(len(LOADS)) + width * (len(ARMS) - 1) / 2, [f"{load} load" for load in LOADS])
        panel.set_ylabel(f"{title}, ms")
        panel.grid(axis="y", alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
