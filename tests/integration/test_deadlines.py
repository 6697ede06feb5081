"""Requests with a deadline, a queue timeout or a priority, behind queued requests."""

import math
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from encodings_of_requests import json_array, rest_json
from models import builders
from servers import (
    LONG_S,
    ServerProcess,
    add_model,
    decisions,
    json_input,
    read_metrics,
    rest_url,
    serving,
    wait_for_queue,
    wait_for_sample,
)

ROW: Final = np.arange(4, dtype=np.float32).reshape(1, 4)
SEEN_BATCHES: Final = 10
"""Batches before a test; the server then trusts its latency estimate of the model."""
AT_LEISURE: Final = {"X-Request-Timeout-Ms": str(round(LONG_S * 1000))}
"""A long deadline that replaces the latency target of a model, which a run on a busy machine may miss."""
WAITING: Final = 24
ONE_AT_A_TIME: Final = "max_rows: 1\nintra_op_threads: 1\n"


def add_slow(repository: Path, name: str, options: str = "") -> None:
    """Add a model that runs one row at a time in about 100 ms; fourteen runs take longer than ``MIN_DUE_NS``."""
    (add_model(repository, name, builders.slow) / "model.yaml").write_text(ONE_AT_A_TIME + options)


@contextmanager
def serving_slow(repository: Path, **models: str) -> Iterator[ServerProcess]:
    """Serve models of ``add_slow``, by name with their options, and let the server learn their latency."""
    for model, options in models.items():
        add_slow(repository, model, options)
    with serving(repository, "--warmup-s", "0") as server:
        for model in models:
            for _ in range(SEEN_BATCHES):
                post(server, model, AT_LEISURE).raise_for_status()
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for tests of REST alone."""
    models = {"slow": "", "promised": "slo_s: 1.0\n", "levelled": "priority_levels: 2\n"}
    with serving_slow(tmp_path_factory.mktemp("deadlines"), **models) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> np.ndarray:
    """The answer to ``ROW``, from any of the models."""
    return rest_json(server, "slow", {"x": ROW})["y"]


def post(server: ServerProcess, model: str, headers: dict[str, str] | None = None, **parameters: int) -> httpx.Response:
    document: dict[str, Any] = {"inputs": [json_input("x", ROW)], "parameters": parameters}
    return httpx.post(rest_url(server, model), json=document, headers=headers, timeout=LONG_S)


@pytest.fixture
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    """A channel that is connected before a backlog builds up, so that later calls take no longer than a call."""
    with grpc.insecure_channel(server.grpc) as channel:
        grpc.channel_ready_future(channel).result(LONG_S)
        yield channel


def call(
    channel: grpc.Channel, model: str, *, timeout_s: float = LONG_S, queue_timeout_us: int = 0
) -> grpc.Call | None:
    """Call over gRPC. Returns the failure, or None on success."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=ROW.shape)
    request.raw_input_contents.append(ROW.tobytes())
    request.parameters["timeout"].int64_param = queue_timeout_us
    send: grpc.UnaryUnaryMultiCallable[bytes, bytes]
    send = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    try:
        send(request.SerializeToString(), timeout=timeout_s)
    except grpc.RpcError as error:
        return cast("grpc.Call", error)
    return None


def learned_ms(server: ServerProcess, model: str = "slow") -> float:
    """The server's estimate of one run; it is longer on a busy machine."""
    answer = httpx.get(f"http://{server.http}/v2/models/{model}/batching", timeout=LONG_S).raise_for_status()
    return float(answer.json()["classes"][0]["latency_ms"]["1"])


def within(server: ServerProcess, runs: float) -> dict[str, str]:
    """The header of a request whose timeout is this many runs."""
    return {"X-Request-Timeout-Ms": str(round(runs * learned_ms(server)))}


@contextmanager
def backlog(
    server: ServerProcess, model: str, callers: int = WAITING, headers: dict[str, str] | None = None, **parameters: int
) -> Iterator[list["Future[httpx.Response]"]]:
    """Queue requests for a model, with a deadline only if a header sets it. At the end all must have been answered."""
    with ThreadPoolExecutor(callers) as pool:
        calls = [pool.submit(post, server, model, headers, **parameters) for _ in range(callers)]
        wait_for_queue(server, model, callers - 3)
        yield calls
    assert [call.result().status_code for call in calls] == [200] * callers


def excess_ms(text: str) -> float:
    """The predicted lateness of an answer that a rejection states."""
    found = re.search(r"([\d.]+) ms are left, and the answer is expected in ([\d.]+) ms", text)
    assert found is not None, text
    return float(found[2]) - float(found[1])


BEHIND_THE_BACKLOG: Final = 14
"""Runs: more than the 10 after which requests without a deadline count as due, fewer than those queued."""


def test_request_late_behind_the_backlog_is_rejected_with_the_time_to_wait(
    server: ServerProcess, channel: grpc.Channel
) -> None:
    before = decisions(server, "slow")["refused_late"]
    with backlog(server, "slow") as waiting:
        (timeout_ms,) = within(server, BEHIND_THE_BACKLOG).values()
        headers = ("X-Request-Timeout-Ms", "x-envoy-expected-rq-timeout-ms")
        answers = [post(server, "slow", {header: timeout_ms}) for header in headers]
        failure = call(channel, "slow", timeout_s=float(timeout_ms) / 1000)
        assert not waiting[-1].done(), "the refusals waited for the backlog"
    for answer in answers:
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) == math.ceil(excess_ms(answer.json()["error"]) / 1000)
    assert failure is not None
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    pushback_ms = int(dict(failure.trailing_metadata() or ())["grpc-retry-pushback-ms"])
    assert pushback_ms == pytest.approx(excess_ms(failure.details() or ""), abs=1.2)
    assert decisions(server, "slow")["refused_late"] == before + 3


def test_earliest_deadline_runs_first(server: ServerProcess, expected: np.ndarray) -> None:
    # The other deadlines are beyond ten batches, where the order of arrival applies.
    with backlog(server, "slow", 16, within(server, 300)) as waiting:
        answer = post(server, "slow", within(server, 6))
        assert sum(not call.done() for call in waiting) > 4
    assert answer.status_code == 200, answer.text
    np.testing.assert_array_equal(json_array(answer.json()["outputs"][0]), expected)


def test_deadline_below_the_model_latency_gets_no_retry_after(server: ServerProcess, channel: grpc.Channel) -> None:
    with backlog(server, "slow", 8):
        answer = post(server, "slow", within(server, 0.3))
        failure = call(channel, "slow", timeout_s=0.7 * learned_ms(server) / 1000)
    assert answer.status_code == 504
    assert "retry-after" not in answer.headers
    assert "the request alone takes" in answer.json()["error"]
    assert failure is not None
    assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "grpc-retry-pushback-ms" not in dict(failure.trailing_metadata() or ())


def test_idle_server_runs_a_request_predicted_to_be_late(server: ServerProcess, expected: np.ndarray) -> None:
    # Otherwise a wrong prediction would never be corrected. The answer is late, but the client may still read it.
    answer = post(server, "slow", within(server, 0.5))
    assert answer.status_code == 200, answer.text
    np.testing.assert_array_equal(json_array(answer.json()["outputs"][0]), expected)


def test_deadline_that_passes_during_the_run_is_counted(server: ServerProcess, channel: grpc.Channel) -> None:
    count = "ortserve_request_duration_seconds_count"
    labels = {"model": "slow", "version": "1", "protocol": "grpc"}

    def counted(outcome: str) -> float:
        expected = {**labels, "outcome": outcome}
        return read_metrics(server).by_labels(count, *expected).get(" ".join(expected.values()), 0.0)

    late, left = counted("deadline"), counted("cancelled")
    failure = call(channel, "slow", timeout_s=0.4 * learned_ms(server) / 1000)
    assert failure is not None
    assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert wait_for_sample(server, count, lambda value: value > late, **labels, outcome="deadline") == late + 1
    assert counted("cancelled") == left
    assert post(server, "slow").status_code == 200  # waits for the run that continued, which would delay the next test


def test_passed_deadline_is_rejected_by_an_idle_server(server: ServerProcess) -> None:
    answer = post(server, "slow", {"x-request-timeout-ms": "0"})
    assert answer.status_code == 504
    assert "retry-after" not in answer.headers


def test_shorter_of_two_timeouts_applies(server: ServerProcess) -> None:
    answer = post(server, "slow", {"x-request-timeout-ms": "60000", "x-envoy-expected-rq-timeout-ms": "0"})
    assert answer.status_code == 504


@pytest.mark.parametrize("value", ["soon", "-1", "1.5", "", "9" * 30])
def test_timeout_that_is_not_milliseconds_is_400(server: ServerProcess, value: str) -> None:
    answer = post(server, "slow", {"x-request-timeout-ms": value})
    assert answer.status_code == 400
    assert "x-request-timeout-ms: expected a whole number of milliseconds" in answer.json()["error"]


def test_latency_target_applies_to_requests_without_a_deadline(server: ServerProcess, expected: np.ndarray) -> None:
    callers = 80
    with ThreadPoolExecutor(callers) as pool:
        calls = [pool.submit(post, server, "promised") for _ in range(callers)]
    answers = [call.result() for call in calls]
    statuses = [answer.status_code for answer in answers]
    # A second of runs of about 50 ms. Some admitted requests may turn out to be late; they are dropped and not run.
    assert set(statuses) <= {200, 429, 504}
    assert statuses.count(200) >= 1
    assert statuses.count(429) >= 10
    for answer in answers:
        if answer.status_code == 200:
            np.testing.assert_array_equal(json_array(answer.json()["outputs"][0]), expected)
        elif answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1


def test_timeout_parameter_bounds_the_wait_and_not_the_run(server: ServerProcess, channel: grpc.Channel) -> None:
    # It started at once, and ran longer than the timeout.
    assert post(server, "slow", timeout=10_000).status_code == 200
    before = decisions(server, "slow")["dropped_late"]
    with backlog(server, "slow", 8), ThreadPoolExecutor(2) as pool:
        by_rest = pool.submit(post, server, "slow", timeout=10_000)
        by_grpc = pool.submit(call, channel, "slow", queue_timeout_us=10_000)
    answer, failure = by_rest.result(), by_grpc.result()
    assert answer.status_code == 504
    assert "timeout passed in the queue" in answer.json()["error"]
    assert failure is not None
    assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "timeout passed in the queue" in (failure.details() or "")
    assert decisions(server, "slow")["dropped_late"] == before + 2


@pytest.mark.parametrize("name", ["timeout", "priority"])
def test_parameter_that_is_not_an_unsigned_integer_is_400(server: ServerProcess, name: str) -> None:
    answer = post(server, "slow", None, **{name: -1})
    assert answer.status_code == 400
    assert f"parameter '{name}': expected an unsigned integer, got -1" in answer.json()["error"]


def test_urgent_requests_overtake_queued_ones(server: ServerProcess) -> None:
    with backlog(server, "levelled", 14, priority=2) as waiting, ThreadPoolExecutor(4) as pool:
        urgent = [pool.submit(post, server, "levelled", priority=1) for _ in range(2)]
        urgent += [pool.submit(post, server, "levelled") for _ in range(2)]  # the default level is the first
        order = [call in urgent for call in as_completed([*waiting, *urgent])]
    # The last batches contain no urgent request: at least half of the backlog had not run when they arrived.
    assert True not in order[-7:]


def test_priority_is_ignored_for_a_model_without_levels(server: ServerProcess) -> None:
    with backlog(server, "slow", 8) as waiting, ThreadPoolExecutor(1) as pool:
        late = pool.submit(post, server, "slow", priority=1)
        order = [call is late for call in as_completed([*waiting, late])]
    assert True in order[-2:]
