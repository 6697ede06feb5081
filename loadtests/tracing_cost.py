"""What does a trace cost a request: on the event loop, and on the thread that exports it?

On the loop: looking for a trace in the headers of a request, and handing its record over at the end, by what its caller
wants. Expected: about a microsecond where nothing is sampled, some ten where it is, most of that for reading the
caller's headers by OpenTelemetry's library. The record is handed to a processor that is full, so that no other thread
takes part; what it drops is not made into spans.

On the exporting thread: making six spans and encoding them, but not sending them, by that thread's own time. Expected:
some ten times what the loop spends. It takes turns with the loop for the interpreter, so of a loop that is always busy
it takes that share of requests.

The cases run interleaved; the figures are the medians of the rounds and their spread. Process level, nothing else
running. Before printing, the encoded spans are read back and counted.

    PYTHONPATH=server python loadtests/tracing_cost.py
"""

import logging
import platform
import statistics
import time
import timeit
from collections.abc import Callable
from importlib.metadata import version
from typing import Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanContext, TraceFlags

from ortserve.clock import monotonic_ns
from ortserve.core.timing import PHASES, Timing
from ortserve.frontends.trace_headers import HttpTraces
from ortserve.telemetry.otlp import OtlpTracing
from ortserve.telemetry.spans import RequestSpans
from ortserve.telemetry.tracing import EndedRequest, http_operation

ROUNDS: Final = 11
REQUESTS: Final = 20_000
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
PARENT: Final = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0"


def tracing(sample_ratio: float) -> OtlpTracing:
    """Exports to where nobody listens."""
    return OtlpTracing(
        endpoint="http://127.0.0.1:9",
        protocol="http/protobuf",
        sample_ratio=sample_ratio,
        service_name=None,
        default_service_name="ortserve",
        clock=monotonic_ns,
    )


def main() -> None:
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # that nobody listens is meant to be so
    never, always = tracing(0), tracing(1)
    infer = http_operation("/v2/models/{model}/infer", "http", {None: 200})
    for _ in range(2500):  # more than may wait
        trace = always.begin(infer, None, ())
        assert trace is not None
        trace.end(ENDED)

    def request(tracing: OtlpTracing, headers: list[tuple[bytes, bytes]]) -> Callable[[], bool]:
        traces = HttpTraces(tracing, "http")

        def run() -> bool:
            trace = traces.begin("infer", "", PATH, headers)
            if trace is None:
                return False
            trace.end(EndedRequest(TIMING, TIMING.done_ns, None, "model", "1", "a-request-id", 1))
            return True

        return run

    cases = {
        "left out by the ratio": (request(never, HEADERS), False),
        "its caller wants none": (request(always, [*HEADERS, (b"traceparent", PARENT + b"0")]), False),
        "begins a trace": (request(always, HEADERS), True),
        "in its caller's trace": (request(always, [*HEADERS, (b"traceparent", PARENT + b"1")]), True),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    exporting: list[float] = []
    context = SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    requests = [RequestSpans(infer, PATH, context, None, ENDED) for _ in range(BATCH)]
    resource = Resource({"service.name": "ortserve"})
    for name, (run, is_sampled) in cases.items():
        if run() is not is_sampled:
            raise SystemExit(f"{name}: sampled {not is_sampled}; the figures mean nothing")
    for _ in range(ROUNDS):
        for name, (run, _) in cases.items():
            taken[name].append(timeit.timeit(run, number=REQUESTS) / REQUESTS * 1e6)
        begin_s = time.thread_time()
        encoded = encode_spans([span for one in requests for span in one.make(resource, 0)])
        encoded.SerializeToString()
        exporting.append((time.thread_time() - begin_s) / BATCH * 1e6)
        spans = encoded.resource_spans[0].scope_spans[0].spans
        if len(spans) != BATCH * (1 + len(PHASES)):
            raise SystemExit(f"{len(spans)} spans of {BATCH} requests; the figures mean nothing")
    for one in (never, always):
        one.close(0)

    print(f"Python {platform.python_version()}, opentelemetry-sdk {version('opentelemetry-sdk')}, {platform.machine()}")
    for name, samples in (*taken.items(), ("spans made and encoded", exporting)):
        print(f"{name:26}{statistics.median(samples):8.2f} µs/request  ({min(samples):.2f} to {max(samples):.2f})")


if __name__ == "__main__":
    main()
