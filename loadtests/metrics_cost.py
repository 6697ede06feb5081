"""What does counting one answered request cost the event loop, and how long does a scrape of a thousand models take?

Level: function, one thread, nothing else running. Both arms run interleaved; figures are medians of the rounds and
their spread.

Counting: prometheus_client's Histogram against plain lists. A request is six observations (its duration and five
phases); labels are bound in advance in both arms. Expected: the library takes several times as long, because each
observation acquires a lock and searches linearly. The buckets of the arms are compared before anything is written.

Scraping: prometheus_client's text writer against ``telemetry.families``. All of a thousand models have been used, and
one in ten is used between scrapes. Expected: several times less, because the library writes every sample again and
``families`` only those that changed. Both arms write the same numbers; processor time is measured. Writes
``loadtests/results/metrics_cost.md``.

    python loadtests/metrics_cost.py [--rounds 11]
"""

import argparse
import os
import time
import timeit
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from harness import spread, table, write_report
from ortserve.core.timing import PHASES, Timing
from ortserve.telemetry.declarations import PHASE_DURATION, REQUEST_DURATION
from ortserve.telemetry.families import TextFormat
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import BatchingNumbers
from ortserve.telemetry.statistics import TritonMetrics

# Phases of a request to a small model on a CPU: 40 µs, 30 µs, 10 µs, 250 µs, 60 µs.
TIMING = Timing(1_000_000, 1_040_000, 1_070_000, 1_080_000, 1_330_000, 1_390_000)


def library_arm() -> tuple[CollectorRegistry, Callable[[], None]]:
    registry = CollectorRegistry()
    duration = Histogram(
        REQUEST_DURATION.name, "-", REQUEST_DURATION.labels, buckets=REQUEST_DURATION.buckets, registry=registry
    ).labels("m", "1", "rest", "ok")
    phase = Histogram(
        PHASE_DURATION.name, "-", PHASE_DURATION.labels, buckets=PHASE_DURATION.buckets, registry=registry
    )
    phases = [phase.labels("m", "1", name) for name in PHASES]

    def observe() -> None:
        duration.observe((TIMING.done_ns - TIMING.received_ns) / 1e9)
        for series, phase_ns in zip(phases, TIMING.phases_ns(), strict=True):
            series.observe(phase_ns / 1e9)

    return registry, observe


def collector_arm() -> tuple[CollectorRegistry, Callable[[], None]]:
    registry = CollectorRegistry()
    model = Metrics(registry).model("m", "1")
    return registry, lambda: model.observe_success("rest", TIMING, 1)


def buckets_of(registry: CollectorRegistry) -> list[str]:
    names = (REQUEST_DURATION.name, PHASE_DURATION.name)
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if line.startswith(names) and ("_bucket{" in line or "_count{" in line))


def compare_counting(rounds: int, requests: int) -> str:
    """Measure the cost of counting a request. Returns Markdown."""
    arms = {"prometheus_client.Histogram": library_arm(), "telemetry.metrics": collector_arm()}
    taken_us: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (_, observe) in arms.items():
            taken_us[name].append(timeit.timeit(observe, number=requests) / requests * 1e6)
    outputs = [buckets_of(registry) for registry, _ in arms.values()]
    if not outputs[0] or outputs[0] != outputs[1]:
        raise SystemExit("the two arms counted differently; the figures mean nothing")
    return _compared(taken_us, "µs a request")


def compare_scrapes(rounds: int, models: int) -> tuple[str, float]:
    """Measure scrapes. Returns a table as Markdown, and the size of a scrape in MB."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    TritonMetrics(registry, metrics)
    numbers = BatchingNumbers(1, {f"decision_{n}": n for n in range(11)}, {2**n: 0.001 for n in range(7)}, 0.001, 1)
    versions = [metrics.model(f"model-{number}", "1") for number in range(models)]
    for model in versions:
        model.set_state("ready")
        model.batching.connect(lambda: numbers)
        model.saturation = lambda: 0.5
        model.observe_success("rest", TIMING, 1)
    writers: dict[str, Callable[[], bytes]] = {
        "prometheus_client": lambda: generate_latest(registry),
        "telemetry.families": TextFormat(registry).write,
    }
    taken_ms: dict[str, list[float]] = {name: [] for name in writers}
    for write in writers.values():
        write()
    size = 0
    for _ in range(rounds):
        for name, write in writers.items():
            for model in versions[::10]:
                model.observe_success("rest", TIMING, 1)
            begin_s = time.thread_time()
            size = len(write())
            taken_ms[name].append((time.thread_time() - begin_s) * 1e3)
    return _compared(taken_ms, "ms a scrape"), size / 1e6


def _compared(taken: dict[str, list[float]], unit: str) -> str:
    library, ours = taken.values()
    ratios = [one / other for one, other in zip(library, ours, strict=True)]
    rows = [(name, spread(samples)) for name, samples in taken.items()]
    return f"{table(('arm', unit), rows)}\n\nThe library takes {spread(ratios)} times as much."


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--requests", type=int, default=20_000, help="of each arm in a round")
    parser.add_argument("--models", type=int, default=1000, help="that are scraped")
    parser.add_argument("--report", type=Path, default=Path(__file__).parent / "results" / "metrics_cost.md")
    options = parser.parse_args(arguments)

    load = os.getloadavg()[0]
    counting = compare_counting(options.rounds, options.requests)
    scraping, size_mb = compare_scrapes(options.rounds, options.models)
    library = f"prometheus_client {version('prometheus_client')}"
    write_report(
        options.report,
        "Cost of counting a request, and of a scrape",
        f"{library}. Load average at the beginning: {load:.1f} (0 means an idle machine).",
        f"Medians of {options.rounds} rounds in which both arms took turns, and their range.",
        "## Counting an answered request",
        counting,
        f"## A scrape of {options.models} models, a tenth of them used since the last one: {size_mb:.1f} MB",
        scraping,
    )


if __name__ == "__main__":
    main()
