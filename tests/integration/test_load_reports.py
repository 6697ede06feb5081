"""Answers carry the server's load in ORCA's formats, on request or always."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from models import builders
from ortserve._pb.orca_load_report_v3_pb2 import OrcaLoadReport
from raw_grpc import Trailers, trailers_of_call
from servers import LONG_S, ServerProcess, add_model, json_input, read_metrics, rest_url, serving
from transports import ON_BOTH_TRANSPORTS

ROW: Final = np.ones((1, 4), np.float32)
DOCUMENT: Final = {"inputs": [json_input("x", ROW)]}
ASKING: Final = "endpoint-load-metrics-format"
REPORT_HEADERS: Final = ("endpoint-load-metrics", "endpoint-load-metrics-bin")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    add_model(folder, "slow", builders.slow, steps=600)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, ways: tuple[str, ...]) -> Iterator[ServerProcess]:
    """A server that sends reports on request."""
    with serving(repository, "--warmup-s", "0.2", *ways) as server:
        yield server


def rest(server: ServerProcess, asked: str = "", route: str = "") -> Mapping[str, str]:
    """The load report in an answer's headers."""
    headers = {ASKING: asked} if asked else {}
    url = f"http://{server.http}/v2/models/slow/{route}" if route else rest_url(server, "slow")
    document = {"x": [1.0, 2.0, 3.0, 4.0]} if route else DOCUMENT
    answer = httpx.post(url, json=document, headers=headers, timeout=LONG_S)
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.headers.items() if name in REPORT_HEADERS}


def unary(server: ServerProcess, asked: str = "", accepted: str = "identity") -> Trailers:
    """The load report in the trailing metadata of a call."""
    return _of_call(server, "ModelInfer", [message()], asked, accepted)


def streamed(server: ServerProcess, asked: str = "", accepted: str = "identity") -> Trailers:
    """The load report in the trailing metadata of a stream."""
    return _of_call(server, "ModelStreamInfer", [message()] * 3, asked, accepted)


def _of_call(server: ServerProcess, method: str, messages: Sequence[bytes], asked: str, accepted: str) -> Trailers:
    metadata = {"grpc-accept-encoding": accepted} | ({ASKING: asked} if asked else {})
    trailers = trailers_of_call(server.grpc, f"/inference.GRPCInferenceService/{method}", messages, metadata)
    return {name: value for name, value in trailers.items() if name in REPORT_HEADERS}


def message(model: str = "slow") -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=ROW.shape)
    request.raw_input_contents.append(ROW.tobytes())
    return bytes(request.SerializeToString())


def numbers(text: str) -> dict[str, float]:
    """A report in the text format, parsed as load balancers do."""
    assert text.startswith("TEXT ")
    return {name: float(value) for name, _, value in (part.partition("=") for part in text[5:].split(", "))}


def is_plausible(report: OrcaLoadReport) -> bool:
    return report.rps_fractional > 0 and report.application_utilization > 0 and 0 < report.cpu_utilization < 1.5


def test_rest_request_gets_a_report_in_the_requested_format(server: ServerProcess) -> None:
    (text,) = rest(server, "text").values()
    assert {"application_utilization", "cpu_utilization", "rps_fractional", "eps"} < numbers(text).keys()
    assert rest(server, "json")["endpoint-load-metrics"].startswith('JSON {"application_utilization":')
    (name, encoded), *others = rest(server, "bin").items()
    assert name == "endpoint-load-metrics-bin"
    assert not others
    assert is_plausible(OrcaLoadReport.FromString(base64.b64decode(encoded, validate=True)))


@ON_BOTH_TRANSPORTS
def test_grpc_call_gets_a_report_in_the_requested_format(server: ServerProcess) -> None:
    for send in (unary, streamed):
        (text,) = send(server, "text").values()
        assert numbers(str(text))["rps_fractional"] > 0
        (name, serialized), *others = send(server, "bin").items()
        assert (name, others) == ("endpoint-load-metrics-bin", [])
        assert isinstance(serialized, bytes)
        assert is_plausible(OrcaLoadReport.FromString(serialized))


def test_generate_answers_carry_a_report_on_request(server: ServerProcess) -> None:
    for route in ("generate", "generate_stream"):
        (text,) = rest(server, "TEXT", route).values()
        assert "named_metrics.saturation" in numbers(text)


def test_no_report_without_a_known_requested_format(server: ServerProcess) -> None:
    for send in (rest, unary, streamed):
        assert send(server) == {}
        assert send(server, "xml") == {}


def test_always_mode_sends_binary_reports_by_default(repository: Path, ways: tuple[str, ...]) -> None:
    flags = ("--load-reports=always", "--warmup-s=0", "--grpc-response-compression=gzip")
    with serving(repository, *flags, *ways) as server:
        assert rest(server).keys() == rest(server, route="generate").keys() == {"endpoint-load-metrics-bin"}
        for send in (unary, streamed):
            for accepted in ("identity", "gzip"):
                assert send(server, accepted=accepted).keys() == {"endpoint-load-metrics-bin"}
                assert send(server, "json", accepted=accepted).keys() == {"endpoint-load-metrics"}


def test_never_mode_sends_no_reports(repository: Path) -> None:
    with serving(repository, "--load-reports=never", "--warmup-s=0") as server:
        assert rest(server, "text") == rest(server, "text", "generate") == {}
        assert unary(server, "text") == streamed(server, "bin") == {}


def test_report_grows_with_the_load(server: ServerProcess) -> None:
    growing = ("rps_fractional", "named_metrics.saturation")
    with httpx.Client(timeout=LONG_S) as client:  # sequential requests, because earlier tests made only a few

        def report() -> dict[str, float]:
            answer = client.post(rest_url(server, "slow"), json=DOCUMENT, headers={ASKING: "text"})
            return numbers(answer.headers["endpoint-load-metrics"])

        calm = busy = report()
        for _ in range(5000):
            if all(busy[name] > 2 * calm[name] for name in growing):
                break
            busy = report()
        else:
            pytest.fail(f"after 5000 requests: {busy}, at first {calm}")
    assert busy["application_utilization"] >= busy["named_metrics.saturation"]
    assert busy["eps"] == 0


def test_grpc_client_prefers_the_less_utilised_server(tmp_path: Path) -> None:
    """The client is grpc's own; its weights depend only on the reports in the trailing metadata."""
    for name, steps in (("fast", 300), ("slow", 6000)):
        add_model(tmp_path / name, "m", builders.slow, steps=steps)
    flags = ("--load-reports=always", "--warmup-s=0.2", "--max-rows=1")
    with serving(tmp_path / "fast", *flags) as fast, serving(tmp_path / "slow", *flags) as slow:
        policy = {"weighted_round_robin": {"blackoutPeriod": "0.1s", "weightUpdatePeriod": "0.1s"}}
        options = [("grpc.service_config", json.dumps({"loadBalancingConfig": [policy]}))]
        with grpc.insecure_channel(f"ipv4:{fast.grpc},{slow.grpc}", options=options) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for _ in range(100):
                before = answered(fast), answered(slow)
                for _ in range(20):
                    call(message("m"), timeout=LONG_S)
                by_fast, by_slow = answered(fast) - before[0], answered(slow) - before[1]
                assert by_fast + by_slow == 20
                if by_fast >= 3 * by_slow > 0:
                    break
            else:
                pytest.fail(f"after 2000 calls the fast server gets {by_fast} of 20")


def answered(server: ServerProcess) -> float:
    """The number of calls that a server has answered."""
    counts = read_metrics(server).by_labels("ortserve_request_duration_seconds_count", "protocol", "outcome")
    return counts.get("grpc ok", 0.0)
