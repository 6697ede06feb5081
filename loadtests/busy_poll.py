"""What does an event loop that polls for the next request save a lone client, and what does it cost at other loads?

Level: server. Expected for ``--busy-poll-us 200`` against 0:

- one client in a closed loop: at most 0.45 of the median time over REST JSON and gRPC
- idle: the same CPU
- 200 requests per second, evenly spaced or as a Poisson process: at most 1.1 times the CPU
- 32 clients: at least as many requests per second

    python loadtests/busy_poll.py [--rounds 3] [--seconds 2] [--base DIR --base-name NAME] [--results DIR]

All servers run throughout and receive load in turns. With ``--base`` the server of another source tree, with its
default options, takes turns too, and the goals are ratios to it. The single client never sleeps (``spinning_client``),
nor does the open-loop client while it waits for an answer: the wake-up time of clients is not part of the question. wrk
and h2load act as the 32 clients. A single wrk client, which sleeps, is measured for comparison. Every answer to the
single client is checked, and samples of the answers to 32 clients. CPU is the run time of the server's threads as the
scheduler counts it. Writes ``loadtests/results/busy_poll.md``.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import ortserve  # noqa: F401 - silences ONNX Runtime before it is imported

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402

from harness import checking, h2load, serving, spread, table, thread_cpu_ns, write_report, wrk  # noqa: E402
from infer_requests import grpc_request, json_request  # noqa: E402
from spinning_client import Caller, GrpcCaller, RestCaller  # noqa: E402
from tiny_mlp import NAME, TinyMlp, write_tiny_mlp  # noqa: E402

FLAGS = {"sleeping": ("--busy-poll-us=0",), "polling": ("--busy-poll-us=200",), "base": ()}
PORTS = {"sleeping": 18400, "polling": 18410, "base": 18420}
OPEN_RATE = 200
CALLERS: dict[str, Callable[[int, TinyMlp], Caller]] = {"REST": RestCaller, "gRPC": GrpcCaller}


@dataclass(frozen=True)
class Arm:
    """A server of the tiny MLP, and the request that clients send."""

    pid: int
    port: int
    model: TinyMlp
    folder: Path

    def caller(self, protocol: str) -> Caller:
        port = self.port + (protocol == "gRPC")
        return CALLERS[protocol](port, self.model)

    def check(self) -> None:
        for protocol in CALLERS:
            with closing(self.caller(protocol)):
                pass


def closed_loop(arm: Arm, protocol: str, seconds: float) -> dict[str, float]:
    """Measure one client: median and 99th percentile in µs, requests per second, CPU µs per request."""
    times_ns: list[int] = []
    with closing(arm.caller(protocol)) as caller:
        until_ns = time.perf_counter_ns() + int(0.2e9)  # warm-up, in which the server learns latencies
        while time.perf_counter_ns() < until_ns:
            caller.call()
        before_ns, began_ns = thread_cpu_ns(arm.pid), time.perf_counter_ns()
        now_ns, until_ns = began_ns, began_ns + int(seconds * 1e9)
        while now_ns < until_ns:
            caller.call()
            after_ns = time.perf_counter_ns()
            times_ns.append(after_ns - now_ns)
            now_ns = after_ns
        used_ns = thread_cpu_ns(arm.pid) - before_ns
    p50, p99 = np.percentile(times_ns, (50, 99)) / 1e3
    rate = len(times_ns) / (now_ns - began_ns) * 1e9
    return {"p50 µs": p50, "p99 µs": p99, "requests/s": rate, "CPU µs/request": used_ns / len(times_ns) / 1e3}


def open_loop(arm: Arm, gaps_s: Iterator[float], seconds: float) -> dict[str, float]:
    """Send a REST request at each due time. Returns milliseconds of CPU per second."""
    with closing(arm.caller("REST")) as caller:
        before_ns, began_s = thread_cpu_ns(arm.pid), time.perf_counter()
        due_s = began_s
        while (due_s := due_s + next(gaps_s)) < began_s + seconds:
            time.sleep(max(0.0, due_s - time.perf_counter()))
            caller.call()
        time.sleep(max(0.0, began_s + seconds - time.perf_counter()))
        return {"CPU ms/s": (thread_cpu_ns(arm.pid) - before_ns) / seconds / 1e6}


def even() -> Iterator[float]:
    while True:
        yield 1 / OPEN_RATE


def poisson(seed: int) -> Iterator[float]:
    """Gaps between arrivals in seconds; the seed makes them equal for both servers of a round."""
    draw = random.Random(seed)
    while True:
        yield draw.expovariate(OPEN_RATE)


def idle(arm: Arm, seconds: float) -> dict[str, float]:
    before_ns = thread_cpu_ns(arm.pid)
    time.sleep(seconds)
    return {"CPU ms/s": (thread_cpu_ns(arm.pid) - before_ns) / seconds / 1e6}


def by_wrk(arm: Arm, seconds: float, connections: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{arm.port}/v2/models/mlp/infer"
    body = json_request(arm.model.row)
    with checking(arm.check) if connections > 1 else nullcontext():  # the checker would be a second client
        found = wrk(url, body, arm.folder, pid=arm.pid, connections=connections, seconds=max(1, round(seconds)))
    arm.check()
    return {"requests/s": found.requests_per_s, "CPU µs/request": found.cpu_us, "p50 µs": found.p50_ms * 1e3}


def many_grpc(arm: Arm, seconds: float) -> dict[str, float]:
    message, whole_s = grpc_request(NAME, arm.model.row), max(1, round(seconds))
    before_ns = thread_cpu_ns(arm.pid)
    with checking(arm.check):
        calls = h2load(f"127.0.0.1:{arm.port + 1}", message, arm.folder, connections=32, streams=1, seconds=whole_s)
    used_ns = thread_cpu_ns(arm.pid) - before_ns
    return {"requests/s": calls / whole_s, "CPU µs/request": used_ns / calls / 1e3}


Measure = Callable[[Arm, int], dict[str, float]]


def measures(seconds: float) -> dict[str, Measure]:
    """The measurements of a round, by name; the number of the round seeds the arrival times."""
    return {
        "REST, one client": lambda arm, _: closed_loop(arm, "REST", seconds),
        "gRPC, one client": lambda arm, _: closed_loop(arm, "gRPC", seconds),
        "REST, one of wrk": lambda arm, _: by_wrk(arm, seconds, 1),
        "idle": lambda arm, _: idle(arm, seconds),
        f"{OPEN_RATE}/s, even": lambda arm, _: open_loop(arm, even(), seconds),
        f"{OPEN_RATE}/s, Poisson": lambda arm, number: open_loop(arm, poisson(number), seconds),
        "REST, 32 clients": lambda arm, _: by_wrk(arm, seconds, 32),
        "gRPC, 32 clients": lambda arm, _: many_grpc(arm, seconds),
    }


AIMS = {
    ("REST, one client", "p50 µs"): 0.45,
    ("gRPC, one client", "p50 µs"): 0.45,
    ("REST, one of wrk", "p50 µs"): 0.45,
    (f"{OPEN_RATE}/s, even", "CPU ms/s"): 1.1,
    (f"{OPEN_RATE}/s, Poisson", "CPU ms/s"): 1.1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    parser.add_argument("--base", type=Path, help="source folder (PYTHONPATH) of another server to compare with")
    parser.add_argument("--base-name", default="", help="what the results page calls it, such as its commit")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    environment: dict[str, dict[str, str]] = {name: {} for name in ("sleeping", "polling")}
    if options.base:
        environment["base"] = {"PYTHONPATH": str(options.base)}
    measured: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        folder = Path(temporary)
        model = write_tiny_mlp(folder / "models")
        arms = {
            name: Arm(
                servers.enter_context(serving(folder / "models", PORTS[name], *FLAGS[name], environment=variables)),
                PORTS[name],
                model,
                folder,
            )
            for name, variables in environment.items()
        }
        chosen = {name: measure for name, measure in measures(options.seconds).items() if options.only in name}
        for number in range(options.rounds):
            for what, measure in chosen.items():
                for name in arms if number % 2 else reversed(arms):
                    found = measure(arms[name], number)
                    for unit, value in found.items():
                        measured.setdefault((what, unit, name), []).append(value)
                    figures = ", ".join(f"{value:.1f} {unit}" for unit, value in found.items())
                    print(f"round {number + 1}  {what:18} {name:9} {figures}", flush=True)
    report(measured, options)


def report(measured: dict[tuple[str, str, str], list[float]], options: argparse.Namespace) -> None:
    others = ["sleeping", "base"] if options.base else ["sleeping"]

    def ratios(what: str, unit: str, other: str) -> list[float]:
        pairs = zip(measured[what, unit, "polling"], measured[what, unit, other], strict=True)
        return [polling / reference for polling, reference in pairs]

    rows = []
    for what, unit in dict.fromkeys((what, unit) for what, unit, _ in measured):
        aim = AIMS.get((what, unit))
        is_met = aim is not None and statistics.median(ratios(what, unit, others[-1])) <= aim
        rows.append(
            [
                what,
                unit,
                *(spread(measured[what, unit, name]) for name in (*others[::-1], "polling")),
                *(spread(ratios(what, unit, other)) for other in others),
                "" if aim is None else f"{aim} {'met' if is_met else 'MISSED'}",
            ]
        )
    setting = (
        f"Tiny MLP, one row a request. Medians (lowest to highest) of {options.rounds} rounds of {options.seconds:g} s "
        "in which the servers took turns. Sleeping is `--busy-poll-us 0`, polling "
        "`--busy-poll-us 200`. The client shares the processors."
    )
    if options.base:
        setting += f" Base is another version of the server, {options.base_name}, with its default options."
    header = ["load", "figure", *others[::-1], "polling", *(f"polling / {other}" for other in others)]
    header.append(f"of {others[-1]} at most, as asked")
    write_report(options.results / "busy_poll.md", "Polling for a lone client", setting, table(header, rows))


if __name__ == "__main__":
    main()
