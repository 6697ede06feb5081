"""Answers carry their phase timings on both protocols, consistent with the server's metrics."""

import re
import statistics
from typing import Final

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from models import builders
from ortserve.core.timing import PHASES
from servers import LONG_S, add_model, json_input, read_metrics, rest_url, serving

ROW: Final = np.ones((1, 4), np.float32)
REQUESTS: Final = 5


@pytest.fixture(scope="module")
def sent_and_counted(
    tmp_path_factory: pytest.TempPathFactory, ways: tuple[str, ...]
) -> dict[str, tuple[list[str], float]]:
    """The timing header of each answer and the sum of durations in the server's metrics, by protocol."""
    repository = tmp_path_factory.mktemp("timing")
    add_model(repository, "slow", builders.slow, steps=15_000)
    with serving(repository, "--warmup-s", "0", *ways) as server:
        document = {"inputs": [json_input("x", ROW)]}
        by_rest = [httpx.post(rest_url(server, "slow"), json=document, timeout=LONG_S) for _ in range(REQUESTS)]
        request = service_pb2.ModelInferRequest(model_name="slow")
        request.inputs.add(name="x", datatype="FP32", shape=ROW.shape)
        request.raw_input_contents.append(ROW.tobytes())
        trailers = []
        with grpc.insecure_channel(server.grpc) as channel:
            send: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            send = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for _ in range(REQUESTS):
                _, made = send.with_call(request.SerializeToString(), timeout=LONG_S)
                trailers.append(dict(made.trailing_metadata() or ()))
        samples = read_metrics(server)

    def counted_s(protocol: str) -> float:
        labels = {"model": "slow", "version": "1", "protocol": protocol, "outcome": "ok"}
        return samples.value("ortserve_request_duration_seconds_sum", **labels)

    return {
        "http": ([answer.headers["server-timing"] for answer in by_rest], counted_s("http")),
        "grpc": ([str(trailer["server-timing"]) for trailer in trailers], counted_s("grpc")),
    }


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_server_timing_phases_sum_to_the_counted_duration(
    sent_and_counted: dict[str, tuple[list[str], float]], protocol: str
) -> None:
    headers, counted_s = sent_and_counted[protocol]
    total_ms = 0.0
    longest = []
    for text in headers:
        phases = [re.fullmatch(r"(\w+);dur=(\d+\.\d{3})", phase) for phase in text.split(", ")]
        durations_ms = {phase[1]: float(phase[2]) for phase in phases if phase is not None}
        assert tuple(durations_ms) == PHASES
        longest.append(max(durations_ms, key=lambda name: durations_ms[name]))
        total_ms += sum(durations_ms.values())
    assert total_ms == pytest.approx(counted_s * 1000, abs=0.01 * REQUESTS)
    assert statistics.mode(longest) == "compute"  # the mode, because on a busy machine the event loop is sometimes late
