"""What does a trace cost a request: on the event loop, and on the thread that exports it?

Level: function, nothing else running.

On the loop: reading the trace context from the headers of a request, and passing its record to the exporter at the end,
by the sampling decision that the headers ask for. Expected: about a microsecond for an unsampled request and about ten
for a sampled one, mostly for OpenTelemetry's parsing of the headers. The exporter's queue is full, so that it drops
each record: no other thread takes part and no spans are created.

On the exporting thread: creating and encoding six spans, without sending them, in that thread's own time. Expected:
about ten times the time on the loop. The thread competes with the loop for the interpreter lock, so a saturated loop
loses that time for requests.

The cases run interleaved; figures are medians of the rounds and their spread. The encoded spans are counted before
anything is written. Writes ``loadtests/results/tracing_cost.md``.

    python loadtests/tracing_cost.py [--rounds 11]
"""

import argparse
import logging
import os
import time
import timeit
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanContext, TraceFlags

from harness import spread, table, write_report
from ortserve.clock import monotonic_ns
from ortserve.core.timing import PHASES, Timing
from ortserve.frontends.trace_headers import HttpTraces
from ortserve.telemetry.otlp import OtlpTrace, OtlpTracing
from ortserve.telemetry.tracing import EndedRequest, http_operation

TIMING: Final = Timing(1_000_000, 1_040_000, 1_070_000, 1_080_000, 1_330_000, 1_390_000, batch_rows=4)
ENDED: Final = EndedRequest(TIMING, TIMING.done_ns, None, "model", "1", "a-request-id", 1)
BATCH: Final = 256

PATH: Final = b"/v2/models/model/infer"
HEADERS: Final = [
    (b"host", b"127.0.0.1:8000"),
    (b"accept", b"*/*"),
    (b"user-agent", b"client/1.0"),
    (b"content-type", b"application/json"),
    (b"content-length", b"600"),
]
INFER: Final = http_operation("/v2/models/{model}/infer", "http", {None: 200})
PARENT: Final = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0"


def tracing(sample_ratio: float) -> OtlpTracing:
    """Tracing that exports to an address without a listener."""
    return OtlpTracing(
        endpoint="http://127.0.0.1:9",
        protocol="http/protobuf",
        sample_ratio=sample_ratio,
        service_name=None,
        default_service_name="ortserve",
        clock=monotonic_ns,
    )


def cases_of(never: OtlpTracing, always: OtlpTracing) -> dict[str, Callable[[], bool]]:
    """The tracing work of a request on the loop, by case. Each function returns whether the request was sampled."""

    def request(tracing: OtlpTracing, headers: list[tuple[bytes, bytes]]) -> Callable[[], bool]:
        traces = HttpTraces(tracing, "http")

        def run() -> bool:
            trace = traces.begin("infer", "", PATH, headers)
            if trace is None:
                return False
            trace.end(EndedRequest(TIMING, TIMING.done_ns, None, "model", "1", "a-request-id", 1))
            return True

        return run

    return {
        "left out by the ratio": request(never, HEADERS),
        "its caller wants none": request(always, [*HEADERS, (b"traceparent", PARENT + b"0")]),
        "begins a trace": request(always, HEADERS),
        "in its caller's trace": request(always, [*HEADERS, (b"traceparent", PARENT + b"1")]),
    }


def export_us() -> float:
    """Time of this thread, in µs per request, to create and encode spans."""
    context = SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    ended: list[OtlpTrace] = []
    for _ in range(BATCH):
        OtlpTrace(ended.append, INFER, PATH, context, None).end(ENDED)
    resource = Resource({"service.name": "ortserve"})
    begin_s = time.thread_time()
    encoded = encode_spans([span for one in ended for span in one.make(resource, 0)])
    encoded.SerializeToString()
    taken_s = time.thread_time() - begin_s
    spans = encoded.resource_spans[0].scope_spans[0].spans
    if len(spans) != BATCH * (1 + len(PHASES)):
        raise SystemExit(f"{len(spans)} spans of {BATCH} requests; the figures mean nothing")
    return taken_s / BATCH * 1e6


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--requests", type=int, default=20_000, help="of each case in a round")
    parser.add_argument("--report", type=Path, default=Path(__file__).parent / "results" / "tracing_cost.md")
    options = parser.parse_args(arguments)

    load = os.getloadavg()[0]
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # the missing listener is intended
    never, always = tracing(0), tracing(1)
    for _ in range(2500):  # fills the exporter's queue
        trace = always.begin(INFER, None, ())
        assert trace is not None
        trace.end(ENDED)
    cases = cases_of(never, always)
    if [run() for run in cases.values()] != [False, False, True, True]:
        raise SystemExit("other requests were sampled than should have been; the figures mean nothing")
    taken_us: dict[str, list[float]] = {name: [] for name in cases}
    exporting_us: list[float] = []
    for _ in range(options.rounds):
        for name, run in cases.items():
            taken_us[name].append(timeit.timeit(run, number=options.requests) / options.requests * 1e6)
        exporting_us.append(export_us())
    for one in (never, always):
        one.close(0)
    library = f"opentelemetry-sdk {version('opentelemetry-sdk')}"
    write_report(
        options.report,
        "Cost of a trace",
        f"{library}. Load average at the beginning: {load:.1f} (0 means an idle machine).",
        f"Medians of {options.rounds} rounds in which all cases took turns, and their range.",
        "## On the event loop",
        table(("request", "µs a request"), [(name, spread(samples)) for name, samples in taken_us.items()]),
        "## On the exporting thread",
        table(("", "µs a request"), [("spans made and encoded", spread(exporting_us))]),
    )


if __name__ == "__main__":
    main()
