"""The protocol's statistics, from what the metrics counted."""

import pytest
from prometheus_client import CollectorRegistry

from ortserve.core.batch import BatchResult
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind
from ortserve.telemetry.metrics import Metrics, ModelMetrics
from ortserve.telemetry.statistics import (
    FAILURE_REASONS,
    REASONS,
    BatchSizeStatistics,
    Duration,
    InferStatistics,
    read_statistics,
)

# Phases of 1, 2, 3, 4 and 5 ns.
TIMING = Timing(1_000, 1_001, 1_003, 1_006, 1_010, 1_015)


@pytest.fixture
def model() -> ModelMetrics:
    return Metrics(CollectorRegistry()).model("m", "3")


def test_nothing_happened_yet(model: ModelMetrics) -> None:
    nothing = Duration(0, 0)
    numbers = read_statistics(model)
    assert (numbers.name, numbers.version, numbers.last_done_ns) == ("m", "3", 0)
    assert (numbers.inference_count, numbers.execution_count, numbers.batches) == (0, 0, ())
    assert numbers.inference == InferStatistics(nothing, nothing, nothing, nothing, nothing, nothing)
    assert numbers.failures == dict.fromkeys(REASONS, 0)


def test_requests_count_their_rows_and_parts_and_a_batch_counts_once(model: ModelMetrics) -> None:
    model.observe_success("http", TIMING, 2)
    model.observe_success("grpc", TIMING, 3)
    model.observe_batch(5, 1_003, BatchResult((), 1_006, 1_010, 4), 1_012)
    model.observe_batch(1, 2_000, BatchResult((), 2_001, 2_003, 2), 2_006)
    model.observe_batch(5, 3_000, BatchResult((), 3_001, 3_003, 2), 3_006)

    numbers = read_statistics(model)

    assert (numbers.last_done_ns, numbers.inference_count, numbers.execution_count) == (1_015, 5, 3)
    assert numbers.inference == InferStatistics(
        success=Duration(2, 30),
        fail=Duration(0, 0),
        queue=Duration(2, 4),
        compute_input=Duration(2, 6),
        compute_infer=Duration(2, 8),
        compute_output=Duration(2, 10),
    )
    assert numbers.batches == (
        BatchSizeStatistics(1, Duration(1, 1), Duration(1, 2), Duration(1, 3)),
        BatchSizeStatistics(5, Duration(2, 4), Duration(2, 6), Duration(2, 5)),
    )


def test_every_failure_counts_but_the_callers_own_mistakes(model: ModelMetrics) -> None:
    for kind in ErrorKind:
        for protocol in ("http", "grpc"):
            model.observe_failure(protocol, kind, 10)

    numbers = read_statistics(model)

    assert set(ErrorKind) - FAILURE_REASONS.keys() == {
        ErrorKind.INVALID_INPUT,
        ErrorKind.UNAUTHENTICATED,
        ErrorKind.FORBIDDEN,
        ErrorKind.ALREADY_EXISTS,
        ErrorKind.NOT_FOUND,
        ErrorKind.TOO_LARGE,
        ErrorKind.UNSUPPORTED,
        ErrorKind.HEADERS_TOO_LARGE,
        ErrorKind.TOO_SLOW,
    }
    assert numbers.failures == {"REJECTED": 6, "CANCELED": 2, "BACKEND": 4, "OTHER": 2}
    assert numbers.inference.fail == Duration(14, 140)
