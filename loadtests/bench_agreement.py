"""Does ``ortserve bench`` measure what established load generators measure?

Level: server. In each round ``ortserve bench``, wrk, h2load and perf_analyzer apply the same load to the same server,
one after the other:

- an open loop at a moderate rate, and a closed loop on a model that computes for some milliseconds, so that the
  generator does a small part of the work. Expected: the same figures within the spread of the rounds. In the open loop
  h2load follows a script of send times and is up to a millisecond late, so bench also replays h2load's actual times.
- a closed loop on a small model, where generator and server compete for processors. Expected: bench measures less
  throughput than generators in C. The difference is about the share of processor time that bench reports for itself.

wrk supports closed loops only. The script also measures the CPU of a request in bench's own HTTP client and, if it is
installed, in aiohttp's.

    python loadtests/bench_agreement.py [--rounds 4] [--seconds 3] [--concurrency 4] [--rate 400]

Answers are checked by ``bench``. Writes ``loadtests/results/bench_agreement.md``, within six minutes.
"""

import argparse
import asyncio
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402

from apart import UnavailableError  # noqa: E402
from harness import serving, spread, table, write_report, wrk  # noqa: E402
from infer_requests import INFER, framed  # noqa: E402
from models.builders import heavy  # noqa: E402
from ortserve.core.dtypes import DataType  # noqa: E402
from ortserve.core.tensor import Tensor  # noqa: E402
from ortserve.example import repository_path  # noqa: E402
from ortserve.tools.encoding import encode_grpc, encode_rest  # noqa: E402
from perf_analyzer import PerfAnalyzer, find_perf_analyzer  # noqa: E402

PORT = 18500
BENCH = "ortserve bench"
REPLAY = "ortserve bench, at the moments of h2load"
WARM_UP_S = 0.5
HEAVY_STEPS = 60
"""Loop steps of the model that computes: about 5 ms a row on one thread."""


@dataclass(frozen=True)
class Load:
    """A load on one of the models: a closed loop of ``callers``, or an open loop if ``rate`` is set."""

    title: str
    model: str
    shape: tuple[int, ...]
    seconds: float
    callers: int = 1
    rate: int = 0

    @property
    def tensor(self) -> Tensor:
        """The model's only input, with one row."""
        name = "image" if self.model == "digits" else "x"
        return Tensor(name, DataType.FP32, np.ones(self.shape, np.float32) / 8)


@dataclass(frozen=True)
class Seen:
    """The figures that a generator reports; ``own`` holds bench's figures about itself."""

    per_s: float
    p50_ms: float
    p99_ms: float
    own: Mapping[str, Any] | None = None


def by_bench(url: str, load: Load, protocol: str, arrivals: Path | None = None) -> Seen:
    """Measure with bench. The file ``arrivals``, if given, lists the send times in seconds."""
    command = [sys.executable, "-m", "ortserve", "bench", url, "--model", load.model, "--json", f"--warmup={WARM_UP_S}"]
    how, seconds = f"--concurrency={load.callers}", load.seconds
    if arrivals is not None:
        how, seconds = f"--arrivals={arrivals}", float(np.loadtxt(arrivals)[-1]) - WARM_UP_S
    elif load.rate:
        how = f"--rate={load.rate}"
    options = [how, f"--seconds={seconds}", f"--protocol={protocol}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=120)
    (point,) = json.loads(done.stdout)["points"]
    if point["failures"] or not point["outputs"]["checked"]:
        raise RuntimeError(done.stdout)
    found = {one["percent"]: one["ms"] for one in point["percentiles"]}
    own, usage = point["generator"], point["usage"]
    part = own["cpu_share"] / (own["cpu_share"] + usage["processors"])
    return Seen(point["throughput"]["value"], found[50.0], found[99.0], own | {"part": part})


def by_wrk(url: str, load: Load, folder: Path, pid: int) -> Seen:
    body = encode_rest([load.tensor], is_binary=False).body
    path = f"{url}/v2/models/{load.model}/infer"
    seen = wrk(path, body, folder, pid=pid, connections=load.callers, seconds=round(load.seconds))
    return Seen(seen.requests_per_s, seen.p50_ms, seen.p99_ms)


def by_h2load(url: str, load: Load, folder: Path, *, is_grpc: bool) -> Seen:
    """Measure with h2load.

    An open loop uses one connection, because all clients of h2load would send at the same times. It follows a script,
    because with ``--rps`` h2load sends the requests of each 10 ms in one burst. The actual send times are written to
    the file ``moments`` of the protocol.
    """
    log = folder / "log"
    log.unlink(missing_ok=True)
    message = encode_grpc(load.model, "", [load.tensor]).body
    body = framed(message) if is_grpc else encode_rest([load.tensor], is_binary=False).body
    (folder / "request").write_bytes(body)
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"] if is_grpc else ["--h1"]
    path = INFER if is_grpc else f"/v2/models/{load.model}/infer"
    command = ["h2load", *headers, "-d", str(folder / "request"), f"--log-file={log}"]
    if load.rate:
        count, script = round(load.rate * load.seconds), folder / "script"
        script.write_text("".join(f"{number * 1000 / load.rate:.3f}\t{path}\n" for number in range(count)))
        command += ["-c1", f"-m{8 if is_grpc else 1}", f"-n{count}", f"--timing-script-file={script}", f"-B{url}"]
    else:
        command += [f"-c{load.callers}", "-m1", f"-D{round(load.seconds)}", f"{url}{path}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=load.seconds + 60).stdout
    found = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", output)
    if found is None or int(found[2]) or int(found[3]):
        raise RuntimeError(output)
    began_us, _, took_us = np.loadtxt(log, np.int64, delimiter="\t", unpack=True)
    sent_s = np.sort(began_us - began_us.min()) / 1e6
    np.savetxt(moments(folder, is_grpc=is_grpc), sent_s, "%.6f")
    p50, p99 = (float(value) / 1e3 for value in np.percentile(took_us, [50, 99]))
    return Seen(int(found[1]) / (sent_s[-1] if load.rate else round(load.seconds)), p50, p99)


def moments(folder: Path, *, is_grpc: bool) -> Path:
    return folder / ("grpc" if is_grpc else "rest")


def by_perf_analyzer(program: PerfAnalyzer, address: str, load: Load) -> Seen:
    # Three windows; -s 999 accepts them as stable whatever their difference.
    window = str(round(load.seconds * 1000 / 3))
    how = ("--request-rate-range", str(load.rate)) if load.rate else ("--concurrency-range", str(load.callers))
    shape = f"{load.tensor.name}:{','.join(map(str, load.shape[1:]))}"
    output = program.run(
        *("-i", "grpc", "-u", address, "-m", load.model, *how, "--shape", shape, "-p", window, "-r", "3", "-s", "999")
    )
    throughput = re.search(r"Throughput: ([\d.]+) infer/sec", output)
    p50, p99 = (re.search(rf"p{percent} latency: (\d+) usec", output) for percent in (50, 99))
    if throughput is None or p50 is None or p99 is None:
        raise RuntimeError(output)
    return Seen(float(throughput[1]), int(p50[1]) / 1e3, int(p99[1]) / 1e3)


def cpu_of_clients(address: str, tensor: Tensor) -> str:
    """CPU time per request in this process with bench's client and with aiohttp, in a closed loop of 4 callers."""
    import uvloop

    from ortserve.clock import monotonic_ns
    from ortserve.tools.address import parse_address
    from ortserve.tools.bench.connections import Connections, HttpConnection
    from ortserve.tools.bench.outcomes import Ticket
    from ortserve.tools.bench.target import ServerPlan

    body = encode_rest([tensor], is_binary=False).body
    head = f"POST /v2/models/digits/infer HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n\r\n"
    count, callers = 6000, 4

    class Callers:
        def __init__(self, target: Connections) -> None:
            self.left, self.target = count, target
            self.done = asyncio.get_running_loop().create_future()

        def answered(self, *_: object) -> None:
            self.left -= 1
            if self.left > 0:
                self.target.send(Ticket(0, 0, monotonic_ns()))
            elif self.left == 1 - callers:  # the last of all callers
                self.done.set_result(None)

        def failed(self, _: Ticket, __: int, kind: str, example: str) -> None:
            raise RuntimeError(f"{kind} {example}")

    async def ours() -> float:
        plan = ServerPlan(parse_address(f"http://{address}"), (head.encode() + body,), False, callers)
        target = Connections(plan, HttpConnection)
        await target.open(callers)
        run: Any = Callers(target)
        target.sink = run
        began_s = time.process_time()
        for _ in range(callers):
            target.send(Ticket(0, 0, monotonic_ns()))
        await run.done
        used_s = time.process_time() - began_s
        await target.close()
        return used_s / count * 1e6

    async def theirs() -> float:
        import aiohttp

        url = f"http://{address}/v2/models/digits/infer"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=callers)) as session:

            async def call() -> None:
                for _ in range(count // callers):
                    async with session.post(url, data=body) as answer:
                        assert answer.status == 200
                        await answer.read()

            began_s = time.process_time()
            await asyncio.gather(*(call() for _ in range(callers)))
            return (time.process_time() - began_s) / count * 1e6

    def run(main: Callable[[], Any]) -> list[float]:
        values = []
        for _ in range(3):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                values.append(runner.run(main()))
        return values

    text = f"CPU of the generator for a REST request: {spread(run(ours))} µs"
    if find_spec("aiohttp") is not None:
        text += f"; with aiohttp {spread(run(theirs))} µs"
    return text + "."


def measure(loads: Sequence[Load], rounds: int, program: PerfAnalyzer | None) -> tuple[list[list[str]], str]:
    """Returns a table row for each generator, and the CPU time of bench's client. The arms of a load alternate."""
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, repository = Path(temporary), Path(temporary) / "models"
        shutil.copytree(repository_path() / "digits", repository / "digits")
        (repository / "heavy" / "1").mkdir(parents=True)
        heavy(repository / "heavy" / "1" / "model.onnx", steps=HEAVY_STEPS)
        with serving(repository, PORT) as pid:
            for load in loads:
                rows += measure_load(load, rounds, program, folder, pid)
            return rows, cpu_of_clients(f"127.0.0.1:{PORT}", loads[-1].tensor)


def measure_load(load: Load, rounds: int, program: PerfAnalyzer | None, folder: Path, pid: int) -> list[list[str]]:
    rest, grpc = f"http://127.0.0.1:{PORT}", f"127.0.0.1:{PORT + 1}"
    arms: dict[tuple[str, str], Callable[[], Seen]] = {
        ("REST", BENCH): lambda: by_bench(rest, load, "rest"),
        ("REST", "h2load"): lambda: by_h2load(rest, load, folder, is_grpc=False),
        ("gRPC", BENCH): lambda: by_bench(f"grpc://{grpc}", load, "grpc"),
        ("gRPC", "h2load"): lambda: by_h2load(f"http://{grpc}", load, folder, is_grpc=True),
    }
    if load.rate:
        arms["REST", REPLAY] = lambda: by_bench(rest, load, "rest", moments(folder, is_grpc=False))
        arms["gRPC", REPLAY] = lambda: by_bench(f"grpc://{grpc}", load, "grpc", moments(folder, is_grpc=True))
    else:
        arms["REST", "wrk"] = lambda: by_wrk(rest, load, folder, pid)
    if program is not None:
        found = program
        arms["gRPC", "perf_analyzer"] = lambda: by_perf_analyzer(found, grpc, load)
    for protocol in ("REST", "gRPC"):
        arms[protocol, "h2load"]()  # warm-up; also records the send times for the first replay
    results: dict[tuple[str, str], list[Seen]] = {key: [] for key in arms}
    for number in range(rounds):
        for key in arms if number % 2 == 0 else reversed(arms):
            results[key].append(arms[key]())
            print(load.title, number + 1, *key, results[key][-1], flush=True)
    rows = []
    for (protocol, name), seen in sorted(results.items()):
        values = [[one.per_s for one in seen], [one.p50_ms for one in seen], [one.p99_ms for one in seen]]
        own = results[protocol, REPLAY if load.rate and name == "h2load" else BENCH]
        ratios = [
            [mine.per_s / one.per_s for mine, one in zip(own, seen, strict=True)],
            [mine.p50_ms / one.p50_ms for mine, one in zip(own, seen, strict=True)],
            [mine.p99_ms / one.p99_ms for mine, one in zip(own, seen, strict=True)],
        ]
        said = ""
        if name in (BENCH, REPLAY):
            accounts = [one.own for one in seen if one.own]
            part, waited = ([account[key] for account in accounts] for key in ("part", "waited_us"))
            refused = sum(bool(account["too_slow_because"]) for account in accounts)
            said = f"{statistics.median(part):.0%} of its and the server's CPU, answers waited "
            said += f"{statistics.median(waited):.0f} µs, {refused} of {rounds} runs without a verdict"
        cells = ["", "", ""] if name in (BENCH, REPLAY) else map(spread, ratios)
        rows.append([load.title, protocol, name, *map(spread, values), *cells, said])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rate", type=int, default=400)
    options = parser.parse_args()
    if options.seconds < 2 * WARM_UP_S:
        parser.error(f"--seconds: expected at least {2 * WARM_UP_S:g}, of which bench leaves out {WARM_UP_S:g}")
    seconds, callers, rate = options.seconds, options.concurrency, options.rate
    try:
        program: PerfAnalyzer | None = find_perf_analyzer()
    except UnavailableError as error:
        print(f"without perf_analyzer: {error}")
        program = None
    loads = [
        Load(f"open, {rate}/s, digits", "digits", (1, 1, 8, 8), seconds, rate=rate),
        Load(f"closed, {callers} callers, 5 ms of computing", "heavy", (1, 64), seconds, callers),
        Load(f"closed, {callers} callers, digits", "digits", (1, 1, 8, 8), seconds, callers),
    ]
    rows, clients = measure(loads, options.rounds, program)
    setting = (
        f"One row a request, {options.rounds} interleaved rounds of {seconds:g} s for each load; medians and ranges "
        "over the rounds. Ratios are bench / the other generator, round by round. The open loop of h2load is late by "
        "up to a millisecond; bench sends at the same times. Generators and server share the processors: in the last "
        "load, the client of bench needs more CPU than the clients in C, and takes it from the server. The last "
        "column shows the state of bench's generator."
    )
    columns = ["load", "protocol", "generator", "answers/s", "p50 ms", "p99 ms"]
    columns += ["ratio of answers/s", "ratio of p50", "ratio of p99", "generator of bench"]
    write_report(
        HERE / "results" / "bench_agreement.md",
        "bench beside other load generators",
        setting,
        table(columns, rows),
        clients,
    )


if __name__ == "__main__":
    main()
