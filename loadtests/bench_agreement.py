"""Does ``ortserve bench`` measure what established load generators measure?

Level: server. The same closed loop on the same server by ``ortserve bench``, wrk, h2load and perf_analyzer, one after
the other in each round. Expected: medians within the spread of the rounds; over gRPC, lower throughput than h2load's,
whose C takes less of the processors that the server shares with it. Also: the CPU of a request in bench's own HTTP
client against aiohttp's, if that is installed.

    python loadtests/bench_agreement.py [--rounds 5] [--seconds 4] [--concurrency 4]

Answers are checked by ``bench``. Writes ``loadtests/results/bench_agreement.md``.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
import numpy as np  # noqa: E402

from apart import UnavailableError  # noqa: E402
from harness import circumstances, serving, spread, table, wrk  # noqa: E402
from ortserve.core.dtypes import DataType  # noqa: E402
from ortserve.core.tensor import Tensor  # noqa: E402
from ortserve.tools.bench.encoding import encode_grpc, encode_rest  # noqa: E402
from perf_analyzer import PerfAnalyzer, find_perf_analyzer  # noqa: E402

PORT = 18500
EXAMPLE = HERE.parent / "server" / "ortserve" / "example" / "repository"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
INPUT = Tensor("image", DataType.FP32, np.random.default_rng(0).normal(size=(1, 1, 8, 8)).astype(np.float32))


@dataclass(frozen=True)
class Seen:
    """What a generator reports."""

    per_s: float
    p50_ms: float
    p99_ms: float


def by_bench(url: str, seconds: float, concurrency: int, protocol: str) -> Seen:
    command = [sys.executable, "-m", "ortserve", "bench", url, "--model", "digits", "--json", "--warmup", "0.5"]
    options = [f"--concurrency={concurrency}", f"--seconds={seconds}", f"--protocol={protocol}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=120)
    (point,) = json.loads(done.stdout)["points"]
    if point["failures"] or not point["outputs"]["checked"]:
        raise RuntimeError(done.stdout)
    print(f"  generator: {point['generator']}", flush=True)
    found = {one["percent"]: one["ms"] for one in point["percentiles"]}
    return Seen(point["throughput"]["value"], found[50.0], found[99.0])


def by_wrk(url: str, seconds: float, concurrency: int, folder: Path, pid: int) -> Seen:
    body = encode_rest([INPUT], is_binary=False).body
    load = wrk(f"{url}/v2/models/digits/infer", body, folder, pid=pid, connections=concurrency, seconds=round(seconds))
    return Seen(load.requests_per_s, load.p50_ms, load.p99_ms)


def by_h2load(url: str, seconds: float, concurrency: int, folder: Path, *, is_grpc: bool) -> Seen:
    log = folder / "log"
    log.unlink(missing_ok=True)
    message = encode_grpc("digits", "", [INPUT]).body
    prefix = b"\0" + len(message).to_bytes(4, "big")
    (folder / "request").write_bytes(prefix + message if is_grpc else encode_rest([INPUT], is_binary=False).body)
    command = ["h2load", f"-c{concurrency}", "-m1", f"-D{round(seconds)}", "-d", str(folder / "request")]
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"] if is_grpc else ["--h1"]
    path = METHOD if is_grpc else "/v2/models/digits/infer"
    command += [*headers, f"--log-file={log}", f"{url}{path}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60).stdout
    found = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", output)
    if found is None or int(found[2]) or int(found[3]):
        raise RuntimeError(output)
    took_us = [int(line.split("\t")[2]) for line in log.read_text().splitlines()]
    p50, p99 = (float(value) / 1e3 for value in np.percentile(took_us, [50, 99]))
    return Seen(int(found[1]) / round(seconds), p50, p99)


def by_perf_analyzer(program: PerfAnalyzer, address: str, seconds: float, concurrency: int, protocol: str) -> Seen:
    # Three windows, called stable however they differ.
    window = str(round(seconds * 1000 / 3))
    output = program.run(
        *("-i", protocol, "-u", address, "-m", "digits", "--concurrency-range", str(concurrency), "--shape"),
        *("image:1,8,8", "-p", window, "-r", "3", "-s", "999"),
    )
    throughput = re.search(r"Throughput: ([\d.]+) infer/sec", output)
    p50, p99 = (re.search(rf"p{percent} latency: (\d+) usec", output) for percent in (50, 99))
    if throughput is None or p50 is None or p99 is None:
        raise RuntimeError(output)
    return Seen(float(throughput[1]), int(p50[1]) / 1e3, int(p99[1]) / 1e3)


def cpu_of_clients(address: str) -> str:
    """CPU of one request in this process, by the client of bench and by aiohttp, in a loop of 4 callers."""
    import uvloop

    from ortserve.clock import monotonic_ns
    from ortserve.tools.address import parse_address
    from ortserve.tools.bench.connections import Connections
    from ortserve.tools.bench.http_client import HttpConnection
    from ortserve.tools.bench.samples import Ticket
    from ortserve.tools.bench.target import ServerPlan

    body = encode_rest([INPUT], is_binary=False).body
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
        target.sink = run = Callers(target)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--concurrency", type=int, default=4)
    options = parser.parse_args()
    seconds, callers = options.seconds, options.concurrency
    try:
        program: PerfAnalyzer | None = find_perf_analyzer()
    except UnavailableError as error:
        print(f"without perf_analyzer: {error}")
        program = None
    results: dict[tuple[str, str], list[Seen]] = {}
    with tempfile.TemporaryDirectory() as temporary, serving(EXAMPLE, PORT) as pid:
        folder = Path(temporary)
        rest, grpc = f"http://127.0.0.1:{PORT}", f"127.0.0.1:{PORT + 1}"
        arms: dict[tuple[str, str], Callable[[], Seen]] = {
            ("REST", "ortserve bench"): lambda: by_bench(rest, seconds, callers, "rest"),
            ("REST binary", "ortserve bench"): lambda: by_bench(rest, seconds, callers, "rest-binary"),
            ("REST", "wrk"): lambda: by_wrk(rest, seconds, callers, folder, pid),
            ("REST", "h2load"): lambda: by_h2load(rest, seconds, callers, folder, is_grpc=False),
            ("gRPC", "ortserve bench"): lambda: by_bench(f"grpc://{grpc}", seconds, callers, "grpc"),
            ("gRPC", "h2load"): lambda: by_h2load(f"http://{grpc}", seconds, callers, folder, is_grpc=True),
        }
        if program is not None:
            found = program
            arms["REST binary", "perf_analyzer"] = lambda: by_perf_analyzer(found, rest[7:], seconds, callers, "http")
            arms["gRPC", "perf_analyzer"] = lambda: by_perf_analyzer(found, grpc, seconds, callers, "grpc")
        by_wrk(rest, 1, callers, folder, pid)  # warm-up
        for number in range(options.rounds):
            for key in arms if number % 2 == 0 else reversed(arms):
                seen = arms[key]()
                results.setdefault(key, []).append(seen)
                print(number + 1, *key, seen, flush=True)
        clients = cpu_of_clients(f"127.0.0.1:{PORT}")
    rows = []
    for key, rounds in sorted(results.items()):
        values = [[one.per_s for one in rounds], [one.p50_ms for one in rounds], [one.p99_ms for one in rounds]]
        rows.append([*key, *map(spread, values)])
    ratios = []
    for protocol in ("REST", "REST binary", "gRPC"):
        own = results[protocol, "ortserve bench"]
        for (other, name), others in results.items():
            if other == protocol and name != "ortserve bench":
                of = [mine.p50_ms / one.p50_ms for mine, one in zip(own, others, strict=True)]
                ratios.append(f"{protocol}: median by bench / by {name}, round by round: {statistics.median(of):.2f}.")
    setting = (
        f"The digits model, one row a request, closed loop of {callers} callers, {options.rounds} interleaved rounds "
        f"of {seconds:g} s; medians and ranges. Generators and server share the processors."
    )
    text = "\n\n".join(
        (
            "# bench beside other load generators",
            circumstances(),
            setting,
            table(["protocol", "generator", "answers/s", "p50 ms", "p99 ms"], rows),
            " ".join(ratios),
            clients,
        )
    )
    (HERE / "results" / "bench_agreement.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
