"""What does counting one answered request cost the event loop, and what does a scrape of a thousand models take?

Counting: prometheus_client's Histogram, or plain lists?

A request is six observations (its duration and five phases), labels bound beforehand in both arms. Expected: a lock and
a linear search each make the library several times dearer. Both arms run interleaved; the figures are the medians of
the rounds and their spread. Process level, one thread, nothing else running. Before printing, the arms' buckets are
compared.

Scraping: prometheus_client's text writer, or ``telemetry.text_format``? A thousand models that have all been used, and
of which one in ten is used between scrapes. Expected: the library makes each sample anew, ours only what changed, so
several times less. Both arms run interleaved, on the same numbers, and the processor's time is measured.

    PYTHONPATH=server python loadtests/metrics_cost.py
"""

import platform
import statistics
import time
import timeit
from collections.abc import Callable
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from ortserve.core.timing import PHASES, Timing
from ortserve.telemetry.declarations import PHASE_DURATION, REQUEST_DURATION
from ortserve.telemetry.metrics import BatchingNumbers, Metrics
from ortserve.telemetry.text_format import TextFormat
from ortserve.telemetry.triton_metrics import TritonMetrics

ROUNDS = 11
REQUESTS = 20_000
# Durations of a small model on a CPU: 40 µs, 30 µs, 10 µs, 250 µs, 60 µs.
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


MODELS = 1000


def compare_scrapes() -> None:
    """Print how long each writer takes for a thousand models, and how much it writes."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    TritonMetrics(registry, metrics)
    numbers = BatchingNumbers(1, {f"decision_{n}": n for n in range(11)}, {2**n: 0.001 for n in range(7)}, 0.001, 1)
    models = [metrics.model(f"model-{number}", "1") for number in range(MODELS)]
    for model in models:
        model.set_state("ready")
        model.set_batching_source(lambda: numbers)
        model.set_saturation_source(lambda: 0.5)
        model.observe_success("rest", TIMING, 1)
    writers: dict[str, Callable[[], bytes]] = {
        "prometheus_client": lambda: generate_latest(registry),
        "telemetry.text_format": TextFormat(registry).write,
    }
    taken: dict[str, list[float]] = {name: [] for name in writers}
    for write in writers.values():
        write()
    size = 0
    for _ in range(ROUNDS):
        for name, write in writers.items():
            for model in models[::10]:
                model.observe_success("rest", TIMING, 1)
            begin_s = time.thread_time()
            size = len(write())
            taken[name].append((time.thread_time() - begin_s) * 1e3)
    print(f"a scrape of {MODELS} models, {size / 1e6:.1f} MB")
    for name, samples in taken.items():
        print(f"{name:30}{statistics.median(samples):8.0f} ms/scrape  ({min(samples):.0f} to {max(samples):.0f})")


def main() -> None:
    arms = {"prometheus_client.Histogram": library_arm(), "telemetry.metrics": collector_arm()}
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, (_, observe) in arms.items():
            taken[name].append(timeit.timeit(observe, number=REQUESTS) / REQUESTS * 1e9)
    outputs = [buckets_of(registry) for registry, _ in arms.values()]
    if not outputs[0] or outputs[0] != outputs[1]:
        raise SystemExit("the two arms counted differently; the figures mean nothing")

    print(f"Python {platform.python_version()}, prometheus_client {version('prometheus_client')}, {platform.machine()}")
    for name, samples in taken.items():
        print(f"{name:30}{statistics.median(samples):8.0f} ns/request  ({min(samples):.0f} to {max(samples):.0f})")
    library, collector = (statistics.median(samples) for samples in taken.values())
    print(f"ratio {library / collector:.1f}")
    compare_scrapes()


if __name__ == "__main__":
    main()
