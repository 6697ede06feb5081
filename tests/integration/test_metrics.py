"""The values on the metrics port after traffic of known requests."""

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from encodings_of_requests import grpc_raw, rest_json, triton_inputs
from models import builders
from servers import (
    LONG_S,
    Samples,
    ServerProcess,
    add_model,
    json_input,
    read_metrics,
    rest_url,
    serving,
    triton_clients,
)

UNKNOWN = "made-up-name"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Samples]:
    """The content of the metrics port after the traffic of ``_send_traffic`` alone."""
    repository = tmp_path_factory.mktemp("metrics")
    add_model(repository, "identity", builders.identity)
    add_model(repository, "poison", builders.poison)
    add_model(repository, "broken", builders.not_onnx)
    with serving(repository, "--max-rows", "8", "--warmup-s", "1") as server:
        _send_traffic(server)
        yield read_metrics(server)


def _send_traffic(server: ServerProcess) -> None:
    """Send one request after the other, so that each is a separate batch."""

    def rows(count: int) -> dict[str, np.ndarray]:
        return {"x": np.ones((count, 4), np.float32)}

    def refused(model: str, array: np.ndarray, status: int, version: str = "") -> None:
        document = {"inputs": [json_input("x", array)]}
        answer = httpx.post(rest_url(server, model, version), json=document, timeout=LONG_S)
        assert answer.status_code == status

    for count in (1, 2, 5):
        rest_json(server, "identity", rows(count))
    for count in (1, 8):
        grpc_raw(server, "identity", rows(count))
    refused("identity", np.ones((1, 5), np.float32), 400)
    refused("identity", np.ones((9, 4), np.float32), 400)  # more rows than the option permits
    refused("identity", np.ones((1, 4), np.float32), 404, version="7")
    refused("broken", np.ones((1, 4), np.float32), 503)
    refused(UNKNOWN, np.ones((1, 4), np.float32), 404)
    refused("poison", np.full((1, 4), builders.POISON), 400)
    assert httpx.post(rest_url(server, "identity"), content=b"{", timeout=LONG_S).status_code == 400
    assert httpx.post(rest_url(server, "identity"), headers={"Content-Encoding": "br"}).status_code == 501
    with triton_clients(server) as (_, grpc):
        for model in (UNKNOWN, UNKNOWN + "2"):
            with pytest.raises(InferenceServerException):
                grpc.infer(model, triton_inputs(triton_grpc, rows(1)))


def test_requests_are_counted_by_model_version_protocol_and_outcome(samples: Samples) -> None:
    assert samples.by_labels("ortserve_request_duration_seconds_count", "model", "version", "protocol", "outcome") == {
        "identity 1 http ok": 3,
        "identity 1 grpc ok": 2,
        "identity 1 http invalid_input": 2,
        "poison 1 http rejected_by_model": 1,
        "  http not_found": 2,
        "  http not_ready": 1,
        "  http invalid_input": 1,
        "  http unsupported": 1,
        "  grpc not_found": 2,
    }


def test_phases_of_answered_requests_sum_to_their_whole_durations(samples: Samples) -> None:
    assert samples.by_labels("ortserve_request_phase_duration_seconds_count", "model", "version", "phase") == {
        f"identity 1 {phase}": 5 for phase in ("decode", "queue", "stage", "compute", "encode")
    }
    durations = samples.by_labels("ortserve_request_duration_seconds_sum", "model", "version", "protocol", "outcome")
    total = sum(seconds for labels, seconds in durations.items() if labels.endswith(" ok"))
    phases = samples.by_labels("ortserve_request_phase_duration_seconds_sum", "model", "version", "phase")
    assert set(phases) == {f"identity 1 {phase}" for phase in ("decode", "queue", "stage", "compute", "encode")}
    assert sum(phases.values()) == pytest.approx(total, abs=1e-9)


def test_rows_of_batches_are_counted(samples: Samples) -> None:
    assert samples.by_labels("ortserve_batch_rows_count", "model", "version") == {"identity 1": 5}
    assert samples.by_labels("ortserve_batch_rows_sum", "model", "version") == {"identity 1": 1 + 2 + 5 + 1 + 8}
    buckets = samples.by_labels("ortserve_batch_rows_bucket", "le")
    assert [buckets[bound] for bound in ("1.0", "2.0", "4.0", "8.0", "+Inf")] == [2, 3, 3, 5, 5]


def test_rejections_are_counted_by_model_and_reason_without_failed_runs(samples: Samples) -> None:
    refusals = samples.by_labels("ortserve_rejected_requests_total", "model", "reason")
    of_broken = refusals.pop("broken not_ready", 0) + refusals.pop(" not_ready", 0)
    assert of_broken == 1
    # A missing version counts for its model; a missing model counts for none.
    assert refusals == {
        "identity invalid_input": 3,
        "identity not_found": 1,
        " not_found": 3,
        " unsupported": 1,
    }


def test_states_of_all_versions_are_shown(samples: Samples) -> None:
    assert samples.by_labels("ortserve_model_state", "model", "version", "state") == {
        "identity 1 ready": 1,
        "poison 1 ready": 1,
        "broken 1 failed": 1,
    }


def test_queue_is_empty_after_all_answers(samples: Samples) -> None:
    assert samples.by_labels("ortserve_queue_rows", "model", "version") == {}
    assert samples.value("ortserve_queue_rows", model="identity", version="1") == 0


def test_unknown_names_become_no_label_values(samples: Samples) -> None:
    assert UNKNOWN not in samples.text


def test_build_and_process_metrics_exist(samples: Samples) -> None:
    assert list(samples.by_labels("ortserve_build_info", "version").values()) == [1]
    assert samples.value("process_resident_memory_bytes") > 0


def test_machine_metrics_exist_under_triton_names(samples: Samples) -> None:
    assert 0 <= samples.value("nv_cpu_utilization") <= 1
    assert 0 < samples.value("nv_cpu_memory_used_bytes") < samples.value("nv_cpu_memory_total_bytes")
