"""What does the console cost a server without viewers and with ten viewers? How much memory does its history take?

Level: server; passes and memory: function. Expected: without viewers one pass over the versions every 5 s, at most 0.1
% of a processor with 10 models; with ten viewers, half of them on the page of one model, at most 1 % more; 11 KB for
each active version.

Idle servers with and without the console run side by side, so that other work on the machine affects both. Their
processor times are read at the same moments. The passes over a thousand active versions and the memory of their rings
are measured in one process. Writes ``loadtests/results/console_cost.md``.

    python loadtests/console_cost.py [--rounds 5] [--seconds 20]
"""

import argparse
import asyncio
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx

from harness import cpu_s, serving, spread, table, write_report
from ortserve.clock import monotonic_ns
from ortserve.core.timing import Timing
from ortserve.example import repository_path
from ortserve.frontends.http.console_routes import encode_event
from ortserve.registry.catalog import VersionRecord
from ortserve.service.observation import Observation

MODELS = 10
VIEWERS = 10
VERSIONS = 1000
RESULTS = Path(__file__).parent / "results" / "console_cost.md"


@contextmanager
def viewing(port: int) -> Iterator[None]:
    """Connect ten viewers, half of them to one model's page. Fails if a stream stays empty."""
    ends, events = Event(), [0] * VIEWERS

    def view(number: int) -> None:
        query = "?model=m0&version=1" if number % 2 else ""
        with httpx.stream("GET", f"http://127.0.0.1:{port}/v2/console/stream{query}", timeout=30) as answer:
            for line in answer.iter_lines():
                events[number] += line.startswith("event: ")
                if ends.is_set():
                    return

    threads = [Thread(target=view, args=(number,)) for number in range(VIEWERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    if min(events) < 3:
        raise SystemExit(f"a stream brought too few events: {events}; the figures mean nothing")


def shares(ports: dict[str, int], pids: dict[str, int], seconds: float) -> dict[str, float]:
    """CPU use of each server, in percent of one processor."""
    with viewing(ports["ten viewers"]):
        time.sleep(2)
        before, began = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - began
        return {name: 100 * (cpu_s(pid) - before[name]) / passed for name, pid in pids.items()}


class Active:
    """A registry of a thousand versions that all answer requests."""

    def __init__(self) -> None:
        self.known = [VersionRecord(f"m{number}", 1, lambda: None) for number in range(VERSIONS)]

    def records(self) -> list[VersionRecord]:
        return self.known

    def labels(self, model: str) -> dict[str, int]:
        return {"stable": 1}

    def successor(self, record: VersionRecord) -> None:
        return None

    def answer(self) -> None:
        for record in self.known:
            record.metrics.observe_success("http", Timing(0, 1, 2, 3, 4, 5), 1)


async def passes(rounds: int) -> tuple[list[float], list[float], float]:
    """Measure passes. Returns the ms of a pass for the history and of one for a viewer, and the bytes of a ring."""
    registry: Any = Active()
    observation = Observation(registry, dict, dict, monotonic_ns, encode=encode_event)
    await observation._read_versions(is_sample=True)
    tracemalloc.start()
    registry.answer()
    before, _ = tracemalloc.get_traced_memory()
    observation._sample += 1
    await observation._read_versions(is_sample=True)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for is_sample in (True, False):
            viewer = None if is_sample else await observation.view(None)
            registry.answer()
            observation._sample += is_sample
            began = time.process_time()
            await observation._read_versions(is_sample=is_sample)
            taken[is_sample].append(1000 * (time.process_time() - began))
            if viewer is not None:
                observation.leave(viewer)
    return taken[True], taken[False], (after - before) / VERSIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    chosen = parser.parse_args()
    flags = {"without the console": ("--no-console",), "no viewers": (), "ten viewers": ()}
    ports = {name: 18500 + 10 * number for number, name in enumerate(flags)}
    taken: dict[str, list[float]] = {name: [] for name in flags}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for number in range(MODELS):
            shutil.copytree(repository_path() / "simple", Path(folder) / f"m{number}")
        pids = {
            name: stack.enter_context(serving(Path(folder), ports[name], "--warmup-s=0.1", *more))
            for name, more in flags.items()
        }
        for _ in range(chosen.rounds):
            for name, share in shares(ports, pids, chosen.seconds).items():
                taken[name].append(share)
    sampled, shown, ring_bytes = asyncio.run(passes(max(11, chosen.rounds)))
    rows = [[name, spread(values)] for name, values in taken.items()]
    write_report(
        RESULTS,
        "Cost of the console",
        f"## {MODELS} idle models, percent of one processor",
        f"Medians of {chosen.rounds} stretches of {chosen.seconds:g} s, all servers side by side, and their range.",
        table(["server", "% of a processor"], rows),
        f"## {VERSIONS} versions that all answer requests",
        table(
            ["what", "figure"],
            [
                ["pass for the history, every 5 s", f"{spread(sampled)} ms"],
                ["pass for viewers, each second, in turns of 50 versions", f"{spread(shown)} ms"],
                ["memory of a version's history", f"{ring_bytes / 1024:.1f} KiB"],
            ],
        ),
    )


if __name__ == "__main__":
    main()
