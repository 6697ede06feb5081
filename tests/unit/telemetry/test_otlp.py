"""Sampling, spans and their export, with a real collector in this process."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector import Collector, Trace, collecting
from ortserve.clock import monotonic_ns
from ortserve.core.timing import PHASES, Timing
from ortserve.errors import ErrorKind
from ortserve.telemetry.otlp import OtlpTracing
from ortserve.telemetry.tracing import EndedRequest, http_operation
from scarcity import no_threads

OPERATION: Final = http_operation("/infer", "http", {None: 200, ErrorKind.DEADLINE: 504, ErrorKind.INTERNAL: 500})
TRACE_ID: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID: Final = "00f067aa0ba902b7"
ANSWERED: Final = Timing(1_000, 2_000, 4_000, 5_000, 9_000, 10_000, batch_rows=7)


def tracing_to(endpoint: str, *, sample_ratio: float = 1.0) -> OtlpTracing:
    return OtlpTracing(
        endpoint=endpoint,
        protocol="http/protobuf",
        sample_ratio=sample_ratio,
        service_name=None,
        default_service_name="ortserve",
        clock=monotonic_ns,
    )


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting("http/protobuf") as collector:
        yield collector


@pytest.fixture
def nowhere() -> str:
    """An endpoint without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def export(collector: Collector, path: bytes = b"", **ended: Any) -> Trace:
    """Export one request. Returns its trace as the collector receives it."""
    tracing = tracing_to(collector.endpoint)
    trace = tracing.begin(OPERATION, None, (), path)
    assert trace is not None
    trace.end(EndedRequest(**({"ended_ns": 10_000, "kind": None, "request_id": "it"} | ended)))
    tracing.close(60)
    return collector.wait_for("it")


def durations_ns(trace: Trace) -> dict[str, int]:
    return {name: span.end_time_unix_nano - span.start_time_unix_nano for name, span in trace.phases.items()}


def test_wall_clock_times_are_monotonic_times_with_one_offset(collector: Collector) -> None:
    now_ns = monotonic_ns()
    points = [now_ns + point for point in (0, 1_000, 3_000, 4_000, 8_000, 9_000)]
    trace = export(collector, timing=Timing(*points), ended_ns=points[-1])
    assert durations_ns(trace) == dict(zip(PHASES, (1_000, 2_000, 1_000, 4_000, 1_000), strict=True))
    moved_ns = trace.root.start_time_unix_nano - now_ns
    assert trace.root.end_time_unix_nano == points[-1] + moved_ns
    assert abs(moved_ns - (time.time_ns() - monotonic_ns())) < 1_000_000_000


@pytest.mark.parametrize(
    ("timing", "phases"),
    [
        (Timing(1_000), {"decode": 9_000}),
        (Timing(1_000, 4_000), {"decode": 3_000, "queue": 6_000}),
        (Timing(1_000, 4_000, 6_000), {"decode": 3_000, "queue": 2_000}),
    ],
)
def test_failed_request_shows_its_phases_up_to_the_failure(
    collector: Collector, timing: Timing, phases: dict[str, int]
) -> None:
    trace = export(collector, timing=timing, kind=ErrorKind.DEADLINE)
    assert durations_ns(trace) == phases
    assert trace.attributes["http.response.status_code"] == 504


def test_texts_of_callers_are_truncated_and_valid(collector: Collector) -> None:
    trace = export(collector, b"/" + b"p" * 5000, timing=ANSWERED, model="m" * 5000, version="\ud800")
    assert trace.attributes["url.path"] == "/" + "p" * 255
    assert trace.attributes["ortserve.model.name"] == "m" * 256
    assert trace.attributes["ortserve.model.version"] == "?"


@pytest.mark.parametrize(("ratio", "share"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
def test_requests_without_a_parent_are_sampled_by_the_ratio(nowhere: str, ratio: float, share: float) -> None:
    tracing = tracing_to(nowhere, sample_ratio=ratio)
    taken = sum(tracing.begin(OPERATION, None, ()) is not None for _ in range(4000))
    tracing.close(0)
    assert taken / 4000 == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_parent_decides_at_any_ratio(nowhere: str, ratio: float) -> None:
    tracing = tracing_to(nowhere, sample_ratio=ratio)
    sampled = tracing.begin(OPERATION, f"00-{TRACE_ID}-{PARENT_ID}-01", ["a=1", "b=2"])
    unsampled = tracing.begin(OPERATION, f"00-{TRACE_ID}-{PARENT_ID}-00", ())
    of_later_version = tracing.begin(OPERATION, f"cc-{TRACE_ID}-{PARENT_ID}-02-more", ())
    tracing.close(0)
    assert sampled is not None
    assert sampled.trace_id == TRACE_ID
    assert sampled.span_id not in (PARENT_ID, "0" * 16)
    assert unsampled is None
    assert of_later_version is None  # its flag is unset as well


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        f"00-{TRACE_ID}-{PARENT_ID}",
        f"00-{TRACE_ID}-{PARENT_ID}-00-more",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-00",
        f"00-{'0' * 32}-{PARENT_ID}-00",
        f"00-{TRACE_ID}-{'0' * 16}-00",
        f"ff-{TRACE_ID}-{PARENT_ID}-00",
        f"00-{TRACE_ID}-{PARENT_ID}-00" + "x" * 1000,
    ],
)
def test_malformed_parent_is_ignored(nowhere: str, traceparent: str) -> None:
    always, never = tracing_to(nowhere), tracing_to(nowhere, sample_ratio=0)
    began = always.begin(OPERATION, traceparent, ())
    assert began is not None
    assert began.trace_id != TRACE_ID
    assert never.begin(OPERATION, traceparent, ()) is None
    for tracing in (always, never):
        tracing.close(0)


def test_queued_spans_are_exported_on_close_and_counted(collector: Collector) -> None:
    tracing = tracing_to(collector.endpoint)
    for _ in range(600):
        trace = tracing.begin(OPERATION, None, ())
        assert trace is not None
        trace.end(EndedRequest(ANSWERED, 10_000, None))
    tracing.close(60)
    assert len(collector.spans) == 600 * 6
    assert sum(span.kind == Span.SPAN_KIND_SERVER for span in collector.spans) == 600
    assert (tracing.exported_spans, tracing.dropped_spans) == (3600, 0)


def test_spans_past_the_bound_are_dropped_without_a_collector(nowhere: str) -> None:
    tracing = tracing_to(nowhere)
    begin_s = time.monotonic()
    for _ in range(5000):
        trace = tracing.begin(OPERATION, None, ())
        assert trace is not None
        trace.end(EndedRequest(ANSWERED, 10_000, None))
    assert tracing.dropped_spans >= (5000 - 2048 - 256) * 6
    tracing.close(0.05)
    assert time.monotonic() - begin_s < 15  # 30 s if it waits for the collector
    assert tracing.exported_spans == 0


def test_rejected_exports_are_logged_once_until_one_is_accepted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "ortserve")
    statuses = [404, 404, 404, 200, 404, 404]

    class Rejecting(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(statuses.pop(0))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Rejecting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            tracing = tracing_to(f"http://127.0.0.1:{server.server_port}")
            for _ in range(6):
                before = tracing.exported_spans + tracing.dropped_spans
                trace = tracing.begin(OPERATION, None, ())
                assert trace is not None
                trace.end(EndedRequest(timing=ANSWERED, ended_ns=10_000, kind=None, request_id="it"))
                until_s = time.monotonic() + 60
                while tracing.exported_spans + tracing.dropped_spans == before:
                    assert time.monotonic() < until_s, "the span was neither exported nor dropped"
                    time.sleep(0.001)
            tracing.close(60)
        finally:
            server.shutdown()
    assert caplog.text.count("404") == 2
    assert caplog.text.count("the collector accepts traces again") == 1


class Collecting(BaseHTTPRequestHandler):
    """Accepts every export, and counts its connections."""

    protocol_version = "HTTP/1.1"
    connections = 0

    def setup(self) -> None:
        type(self).connections += 1
        super().setup()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.answer()

    def answer(self) -> None:
        self.send_header("content-length", "2000")
        self.end_headers()
        self.wfile.write(bytes(2000))

    def log_message(self, *_: object) -> None:
        pass


class Endless(Collecting):
    sent_bytes = 0

    def answer(self) -> None:
        self.close_connection = True
        self.end_headers()
        with contextlib.suppress(OSError):
            while self.sent_bytes < 2**30:
                type(self).sent_bytes += self.wfile.write(bytes(2**16))


class Incomplete(Collecting):
    connections = 0

    def answer(self) -> None:
        self.close_connection = True
        self.send_header("content-length", "2000")
        self.end_headers()
        self.wfile.write(bytes(10))


def export_to(handler: type[Collecting], exports: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export one request after the other to a collector. Fails unless all are accepted."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            tracing = tracing_to(f"http://127.0.0.1:{server.server_port}")
            for number in range(1, exports + 1):
                trace = tracing.begin(OPERATION, None, ())
                assert trace is not None
                trace.end(EndedRequest(timing=ANSWERED, ended_ns=10_000, kind=None))
                until_s = time.monotonic() + 60
                while tracing.exported_spans < number * 6:
                    assert time.monotonic() < until_s, "the spans were not exported"
                    time.sleep(0.001)
            tracing.close(60)
        finally:
            server.shutdown()


def test_endless_answer_of_a_collector_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    export_to(Endless, 1, monkeypatch)
    assert Endless.sent_bytes < 64 * 2**20, "the kernel buffers a few megabytes"


def test_exports_share_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    export_to(Collecting, 3, monkeypatch)
    assert Collecting.connections == 1


def test_export_whose_answer_is_incomplete_has_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    export_to(Incomplete, 2, monkeypatch)
    assert Incomplete.connections == 2, "an export was repeated"


def test_close_without_a_free_thread_stops_the_export_at_once(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    tracing = tracing_to(collector.endpoint)
    with no_threads():
        tracing.close(60)
    (record,) = caplog.records
    assert record.getMessage() == "the last traces are not sent"
