"""Traces of a real server at a real collector: their parents and attributes; tracing fails no request."""

import json
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import numpy as np
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tritonclient.grpc import service_pb2

from collector import Collector, attributes_of, collecting
from http_wire import connect, is_read, post, reset, wait_until
from models import builders, members
from models.members import add_ensemble
from ortserve.core.timing import PHASES
from servers import (
    LONG_S,
    SHORT_WARMUP,
    ServerProcess,
    add_model,
    json_input,
    rest_url,
    serving,
    starting,
    wait_for_sample,
)
from transports import ON_BOTH_TRANSPORTS

ROW: Final = np.ones((1, 4), np.float32)
TRACE_ID: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID: Final = "00f067aa0ba902b7"
SAMPLED: Final = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=opaque"}
UNSAMPLED: Final = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
SERVICE: Final = "inference.GRPCInferenceService"
SECRET: Final = "vErYsEcReT"

Traced = tuple[ServerProcess, Collector]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    add_model(folder, "identity", builders.identity)
    add_model(folder, "poison", builders.poison)
    add_model(folder, "plus", members.affine, offset=1)
    add_model(folder, "picks", members.picks)
    add_ensemble(folder, "inner", ["x"], ["y"], [("plus", {"a": "x"}, {"b": "y"})])
    steps = [("inner", {"x": "x"}, {"y": "t"}), ("picks", {"a": "t"}, {"b": "y"})]
    add_ensemble(folder, "outer", ["x"], ["y"], steps)
    (add_model(folder, "slow", builders.slow) / "model.yaml").write_text("max_rows: 32\n")
    return folder


@pytest.fixture(scope="module")
def traced(repository: Path, ways: tuple[str, ...]) -> Iterator[Traced]:
    """A server whose spans come soon; each gRPC transport goes with a protocol of the exporter."""
    protocol = "grpc" if "--grpc-transport=native" in ways else "http/protobuf"
    with collecting(protocol) as collector:
        flags = (f"--otlp-endpoint={collector.endpoint}", f"--otlp-protocol={protocol}", "--max-body-bytes=100000")
        logs = ("--access-log", "--log-format=json")
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"}
        with serving(repository, *SHORT_WARMUP, *flags, *ways, *logs, env=environment) as server:
            yield server, collector


def _rest(
    server: ServerProcess, request_id: str, headers: Mapping[str, str] | None = None, *, array: np.ndarray = ROW
) -> httpx.Response:
    document = {"id": request_id, "inputs": [json_input("x", array)]}
    return httpx.post(rest_url(server, "identity"), json=document, headers=headers, timeout=LONG_S)


def _message(request_id: str, model: str = "identity", array: np.ndarray = ROW) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name="x", datatype="FP32", shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    return bytes(request.SerializeToString())


def _unary(server: ServerProcess, message: bytes, **metadata: str) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        call(message, timeout=LONG_S, metadata=tuple(metadata.items()))


def _stream(server: ServerProcess, messages: Sequence[bytes], **metadata: str) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        answers = list(call(iter(messages), timeout=LONG_S, metadata=tuple(metadata.items())))
    assert len(answers) == len(messages)


@ON_BOTH_TRANSPORTS
@pytest.mark.parametrize("protocol", ["http", "grpc", "stream"])
def test_request_span_joins_the_client_trace_and_its_phases_sum_up(traced: Traced, protocol: str) -> None:
    server, collector = traced
    request_id = f"{protocol}-child"
    before_ns = time.time_ns()
    if protocol == "http":
        assert _rest(server, request_id, SAMPLED).status_code == 200
    elif protocol == "grpc":
        _unary(server, _message(request_id), **SAMPLED)
    else:
        _stream(server, [_message(request_id)], **SAMPLED)
    after_ns = time.time_ns()

    trace = collector.wait_for(request_id)
    root = trace.root
    assert root.trace_id.hex() == TRACE_ID
    assert root.parent_span_id.hex() == PARENT_ID
    assert root.trace_state == "vendor=opaque"
    assert root.kind == Span.SPAN_KIND_SERVER
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert before_ns <= root.start_time_unix_nano < root.end_time_unix_nano <= after_ns

    assert tuple(trace.phases) == PHASES
    point = root.start_time_unix_nano
    for span in trace.phases.values():
        assert span.trace_id == root.trace_id
        assert span.start_time_unix_nano == point
        point = span.end_time_unix_nano
    assert point == root.end_time_unix_nano

    attributes = trace.attributes
    assert attributes["ortserve.outcome"] == "ok"
    assert (attributes["ortserve.model.name"], attributes["ortserve.model.version"]) == ("identity", "1")
    assert (attributes["ortserve.rows"], attributes["ortserve.batch.rows"]) == (1, 1)
    if protocol == "http":
        assert root.name == "POST /v2/models/{model}/infer"
        assert (attributes["http.request.method"], attributes["http.response.status_code"]) == ("POST", 200)
        assert attributes["http.route"] == "/v2/models/{model}/infer"
        assert (attributes["url.scheme"], attributes["url.path"]) == ("http", "/v2/models/identity/infer")
    else:
        method = f"{SERVICE}/{'ModelInfer' if protocol == 'grpc' else 'ModelStreamInfer'}"
        assert root.name == attributes["rpc.method"] == method
        assert (attributes["rpc.system.name"], attributes["rpc.response.status_code"]) == ("grpc", "OK")


def test_request_without_a_parent_starts_a_trace(traced: Traced) -> None:
    server, collector = traced
    _rest(server, "root-1")
    _rest(server, "root-2", {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01-more"})  # malformed
    _unary(server, _message("root-3"), traceparent="nonsense")
    _unary(server, _message("root-4"), traceparent=f"00-{'0' * 32}-{PARENT_ID}-01")
    roots = [collector.wait_for(f"root-{number}").root for number in range(1, 5)]
    assert all(root.parent_span_id == b"" for root in roots)
    assert len({root.trace_id for root in roots} | {bytes.fromhex(TRACE_ID)}) == 5


def test_unsampled_parent_yields_no_span(traced: Traced) -> None:
    server, collector = traced
    _rest(server, "unsampled-http", UNSAMPLED)
    _unary(server, _message("unsampled-grpc"), **UNSAMPLED)
    _stream(server, [_message("unsampled-stream")], **UNSAMPLED)
    _rest(server, "sampled-behind-them")
    collector.wait_for("sampled-behind-them")
    assert not [span for span in collector.spans if "unsampled" in str(span.attributes)]


def test_spans_of_one_batch_share_its_id(traced: Traced) -> None:
    server, collector = traced
    names = [f"mate-{number}" for number in range(16)]
    _stream(server, [_message(name, "slow", np.ones((2, 4), np.float32)) for name in names], **SAMPLED)
    spans = [collector.wait_for(name).attributes for name in names]
    batches: dict[Any, list[Any]] = {}
    for one in spans:
        assert one["ortserve.rows"] == 2
        batches.setdefault(one["ortserve.batch.id"], []).append(one["ortserve.batch.rows"])
    assert len(batches) < len(names)  # requests that arrived during the first run shared batches
    assert all(rows == [2 * len(rows)] * len(rows) for rows in batches.values())


def test_failures_are_spans_with_their_kind_and_status(traced: Traced) -> None:
    server, collector = traced
    assert _rest(server, "bad-shape", SAMPLED, array=np.ones((1, 5), np.float32)).status_code == 400
    poisoned = {"id": "bad-run", "inputs": [json_input("x", np.full((1, 4), builders.POISON))]}
    url = rest_url(server, "poison", "1")
    assert httpx.post(url, json=poisoned, headers=SAMPLED, timeout=LONG_S).status_code == 400
    with pytest.raises(grpc.RpcError):
        _unary(server, _message("bad-name", model="absent"), **SAMPLED)
    expected: dict[str, dict[str, Any]] = {
        "bad-shape": {"http.response.status_code": 400, "error.type": "invalid_input"},
        "bad-run": {"http.response.status_code": 400, "error.type": "rejected_by_model"},
        "bad-name": {"rpc.response.status_code": "NOT_FOUND", "error.type": "not_found"},
    }
    for request_id, attributes in expected.items():
        trace = collector.wait_for(request_id)
        assert trace.root.status.code == Status.STATUS_CODE_ERROR
        assert trace.attributes.items() >= attributes.items()
        assert trace.attributes["ortserve.outcome"] == attributes["error.type"]
    assert collector.wait_for("bad-run").root.name == "POST /v2/models/{model}/versions/{version}/infer"
    assert tuple(collector.wait_for("bad-run").phases) == PHASES[:2]  # where in the run it failed is not known


@pytest.mark.parametrize(("value", "outcome"), [(3, "ok"), (99, "rejected_by_model")])
def test_steps_of_an_ensemble_are_spans_below_that_of_the_request(traced: Traced, value: int, outcome: str) -> None:
    server, collector = traced
    request_id = f"ensemble-{outcome}"
    body = {"id": request_id, "inputs": [json_input("x", np.full((1, 2), value, np.float32))]}
    answer = httpx.post(rest_url(server, "outer"), json=body, headers=SAMPLED, timeout=LONG_S)
    assert answer.status_code == (200 if outcome == "ok" else 400)
    root = collector.wait_for(request_id).root

    def steps_below(parent: Span) -> dict[str | int, Span]:
        inside = [span for span in collector.spans if span.parent_span_id == parent.span_id and span.name == "step"]
        return {attributes_of(span.attributes)["ortserve.model.name"]: span for span in inside}

    steps = steps_below(root)
    assert list(steps) == ["inner", "picks"]
    plus = steps_below(steps["inner"])["plus"]
    assert {attributes_of(span.attributes)["ortserve.outcome"] for span in (steps["inner"], plus)} == {"ok"}
    assert attributes_of(steps["picks"].attributes)["ortserve.outcome"] == outcome
    assert (steps["picks"].status.code == Status.STATUS_CODE_ERROR) == (outcome != "ok")
    assert attributes_of(plus.attributes)["ortserve.batch.rows"] == 1
    for above, below in ((root, steps["inner"]), (steps["inner"], plus), (root, steps["picks"])):
        assert below.trace_id == root.trace_id
        assert above.start_time_unix_nano <= below.start_time_unix_nano
        assert below.end_time_unix_nano <= above.end_time_unix_nano
    phases = [span.name for span in collector.spans if span.parent_span_id == plus.span_id]
    assert tuple(phases) == PHASES


def test_rejected_bodies_are_spans_too(traced: Traced) -> None:
    server, collector = traced
    parent = "a" * 16
    header = {"traceparent": f"00-{TRACE_ID}-{parent}-01"}
    answer = httpx.post(rest_url(server, "identity"), content=b"x" * 100_001, headers=header, timeout=LONG_S)
    assert answer.status_code == 413
    span = collector.wait_for_span(lambda span: span.parent_span_id.hex() == parent)
    assert attributes_of(span.attributes)["error.type"] == "too_large"


def test_span_of_a_disconnected_request_ends_at_the_disconnect(traced: Traced) -> None:
    server, collector = traced
    document = json.dumps({"id": "left", "inputs": [json_input("x", ROW)]}).encode()
    with connect(server) as connection:
        connection.sendall(post("slow", document, *(f"{name}: {value}" for name, value in SAMPLED.items())))
        wait_until(lambda: is_read(connection))
        reset(connection)
    trace = collector.wait_for("left")
    assert trace.attributes["ortserve.outcome"] == "cancelled"
    assert trace.attributes["http.response.status_code"] == 499
    assert tuple(trace.phases) == PHASES[:2]
    assert trace.phases["queue"].end_time_unix_nano == trace.root.end_time_unix_nano


@pytest.mark.parametrize("call", ["generate", "generate_stream"])
def test_generate_span_names_its_route(traced: Traced, call: str) -> None:
    server, collector = traced
    document = {"id": f"by-{call}", "x": [1.0, 2.0, 3.0, 4.0]}
    url = f"http://{server.http}/v2/models/identity/versions/1/{call}"
    httpx.post(url, json=document, headers=SAMPLED, timeout=LONG_S).raise_for_status()
    trace = collector.wait_for(f"by-{call}")
    assert trace.root.trace_id.hex() == TRACE_ID
    assert trace.root.name == f"POST /v2/models/{{model}}/versions/{{version}}/{call}"
    assert trace.attributes["url.path"] == f"/v2/models/identity/versions/1/{call}"


@pytest.mark.parametrize("call", ["infer", "generate"])
def test_span_path_is_unnormalised_and_excludes_the_query(traced: Traced, call: str) -> None:
    server, collector = traced
    request_id = f"{call}-by-path"
    inputs: dict[str, Any] = {"inputs": [json_input("x", ROW)]} if call == "infer" else {"x": [1.0, 2.0, 3.0, 4.0]}
    path = f"/v2/models/%69dentity/{call}"
    url = f"http://{server.http}{path}?key={SECRET}"
    httpx.post(url, json={"id": request_id, **inputs}, timeout=LONG_S).raise_for_status()
    assert collector.wait_for(request_id).attributes["url.path"] == path
    assert SECRET not in str(collector.spans)


def test_log_lines_of_traced_requests_carry_the_ids_of_their_spans(traced: Traced) -> None:
    server, collector = traced
    _rest(server, "logged", SAMPLED)
    _rest(server, "logged-alone", UNSAMPLED)
    line = json.loads(server.wait_for_line('"request_id": "logged"'))
    assert (line["trace_id"], line["span_id"]) == (TRACE_ID, collector.wait_for("logged").root.span_id.hex())
    assert not {"trace_id", "span_id"} & json.loads(server.wait_for_line('"request_id": "logged-alone"')).keys()


def test_trace_names_the_service_and_contains_no_tensor_values(traced: Traced) -> None:
    server, collector = traced
    document = {"id": "secret", "inputs": [json_input("x", ROW) | {"data": [SECRET] * 4}]}
    assert httpx.post(rest_url(server, "identity"), json=document, timeout=LONG_S).status_code == 400
    span = collector.wait_for_span(lambda span: attributes_of(span.attributes).get("error.type") == "invalid_input")
    assert span
    assert SECRET not in str(collector.spans)
    for resource in collector.resources:
        assert resource["service.name"] == "ortserve"
        assert resource["deployment.environment.name"] == "test"
        assert resource["service.version"]
        assert resource["service.instance.id"]


def test_last_spans_are_sent_before_the_server_exits(repository: Path) -> None:
    # Sampling by ratio excludes requests without a parent, so the parent identifies the spans.
    with collecting("http/protobuf") as collector:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
        flags = ("--warmup-s=0", "--otlp-sample-ratio=0", "--otlp-service-name=named")
        with serving(repository, *flags, env=environment) as server:
            for number in range(5):
                assert _rest(server, f"last-{number}", SAMPLED).status_code == 200
                assert _rest(server, f"left-out-{number}").status_code == 200
            assert collector.spans == []
        roots = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
        assert len(roots) == 5
        assert len(collector.spans) == 5 * (1 + len(PHASES))
        assert collector.resources[0]["service.name"] == "named"


def test_absent_collector_delays_nothing_and_its_dropped_spans_are_counted(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.listen(0)  # the kernel accepts connections, but no answer is sent
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        flags = (f"--otlp-endpoint={endpoint}", "--otlp-flush-timeout-s=0.2", "--warmup-s=0")
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "10", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.1"}
        with serving(repository, *flags, env=environment) as server:
            for number in range(5):
                assert _rest(server, f"unsent-{number}").status_code == 200
            dropped = wait_for_sample(server, "ortserve_dropped_spans_total", lambda count: count > 0)
            assert dropped % (1 + len(PHASES)) == 0
            begin_s = time.monotonic()
            server.send(signal.SIGTERM)
            assert server.wait() == 0
            assert time.monotonic() - begin_s < 15


def test_trace_option_without_the_library_stops_the_start_with_a_hint() -> None:
    hidden = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "without_opentelemetry")}
    with starting("--example", "--otlp-endpoint=http://127.0.0.1:4318", env=hidden) as server:
        assert server.wait() == 1
        assert "otlp_endpoint: expected OpenTelemetry to be installed" in server.output
        assert "pip install 'ortserve[otel]'" in server.output
        assert "Traceback" not in server.output
