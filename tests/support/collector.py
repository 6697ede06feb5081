"""An OpenTelemetry collector in the test's own process: it receives spans over HTTP and gRPC, and stores them."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

LONG_S: Final = 60.0
"""Upper bound of waits; only failing tests reach it."""


@dataclass(frozen=True)
class Trace:
    """The span of a request, and the spans within it by name."""

    root: Span
    phases: dict[str, Span]

    @property
    def attributes(self) -> dict[str, str | int]:
        return attributes_of(self.root.attributes)


@dataclass
class Collector:
    """Stores received spans; ``endpoint`` is the address for a server's option."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, str | int]] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes) -> bytes:
        """Store the spans of a request, and return the answer."""
        request = ExportTraceServiceRequest.FromString(body)
        with self.news:
            for group in request.resource_spans:
                self.resources.append(attributes_of(group.resource.attributes))
                for scope in group.scope_spans:
                    assert scope.scope.name == "ortserve"
                    self.spans.extend(scope.spans)
            self.news.notify_all()
        return ExportTraceServiceResponse().SerializeToString()

    def wait_for(self, request_id: str) -> Trace:
        """Wait for the trace of a request."""

        def found() -> Span | None:
            return next(
                (
                    span
                    for span in self.spans
                    if attributes_of(span.attributes).get("ortserve.request.id") == request_id
                ),
                None,
            )

        with self.news:
            self.news.wait_for(lambda: found() is not None, LONG_S)
            root = found()
            assert root is not None, f"no span of {request_id!r} came"
            # The spans of a request are exported together.
            return Trace(root, {span.name: span for span in self.spans if span.parent_span_id == root.span_id})

    def wait_for_span(self, is_wanted: Callable[[Span], bool]) -> Span:
        """Wait for the first span that is wanted."""
        with self.news:
            self.news.wait_for(lambda: any(map(is_wanted, self.spans)), LONG_S)
            return next(span for span in self.spans if is_wanted(span))


def attributes_of(pairs: Iterable[KeyValue]) -> dict[str, str | int]:
    """Attributes with text or integer values, as a dictionary."""
    return {
        pair.key: pair.value.int_value if pair.value.HasField("int_value") else pair.value.string_value
        for pair in pairs
    }


@contextmanager
def collecting(protocol: str) -> Iterator[Collector]:
    """Listen on a free port; ``protocol`` is a value of ``--otlp-protocol``."""
    with _over_grpc() if protocol == "grpc" else _over_http() as collector:
        yield collector


@contextmanager
def _over_http() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            answer = collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join(LONG_S)


@contextmanager
def _over_grpc() -> Iterator[Collector]:
    collector = Collector()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Export": grpc.unary_unary_rpc_method_handler(lambda body, _: collector.take(body))
    }
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(1), handlers=[grpc.method_handlers_generic_handler(service, handlers)])
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait(LONG_S)
