"""Rates of a version from two readings, and the ring of the last 15 minutes."""

import pytest

from ortserve.core.batch import BatchResult
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind
from ortserve.telemetry.history import COLUMNS, IDLE, RING_SAMPLES, Rates, Ring, quantile, rates, read_counts
from ortserve.telemetry.series import ModelMetrics

SECOND_NS = 1_000_000_000
MS_NS = 1_000_000


def answer(metrics: ModelMetrics, protocol: str = "http", *, rows: int = 2) -> None:
    """A request of 6 ms: 1 decode, 2 queue, 0 stage, 3 compute, 0 encode."""
    timing = Timing(0, 1 * MS_NS, 3 * MS_NS, 3 * MS_NS, 6 * MS_NS, 6 * MS_NS)
    metrics.observe_success(protocol, timing, rows)


def test_rates_are_of_the_time_between_two_readings_and_of_all_protocols() -> None:
    metrics = ModelMetrics("m", "1")
    answer(metrics)
    before = read_counts(metrics, 0)
    for protocol in ("http", "grpc"):
        for _ in range(5):
            answer(metrics, protocol)
    for kind in (ErrorKind.OVERLOADED, ErrorKind.DEADLINE, ErrorKind.INVALID_INPUT, ErrorKind.CANCELLED):
        metrics.observe_failure("http", kind, 1)
    for size in (8, 12):
        metrics.observe_batch(size, 1, BatchResult((), 2, 3, 1), 4)
    now = rates(before, read_counts(metrics, 2 * SECOND_NS), queue_rows=3, saturation=None)
    assert (now.requests_per_s, now.rows_per_s, now.refused_per_s, now.failed_per_s) == (5, 10, 1, 0.5)
    assert (now.batch_rows, now.queue_rows, now.saturation) == (10, 3, 0)
    assert (now.decode_ms, now.queue_ms, now.stage_ms, now.compute_ms, now.encode_ms) == (1, 2, 0, 3, 0)
    assert 5 <= now.p50_ms <= now.p90_ms <= now.p99_ms <= 10


def test_rates_of_a_version_without_requests_are_idle() -> None:
    metrics = ModelMetrics("m", "1")
    before, after = read_counts(metrics, 0), read_counts(metrics, SECOND_NS)
    assert after == before
    assert rates(before, after, queue_rows=0, saturation=None) == IDLE


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([0, 0, 0, 0], 0.5, 0.0),
        ([4, 0, 0, 0], 0.5, 0.5),
        ([0, 4, 0, 0], 0.5, 1.5),
        ([1, 0, 1, 0], 0.99, 2.0 + 2.0 * 0.98),
        ([0, 0, 0, 9], 0.5, 4.0),
        ([0, 0, 2, 0], 1.0, 4.0),
    ],
)
def test_quantile_is_interpolated_inside_its_bucket(buckets: list[int], share: float, expected: float) -> None:
    assert quantile(buckets, (1.0, 2.0, 4.0), share) == pytest.approx(expected)


def test_ring_keeps_the_last_samples_in_order_and_zeros_for_missed_ones() -> None:
    ring = Ring(10, {})
    ring.add(10, Rates(requests_per_s=1), {})
    ring.add(13, Rates(requests_per_s=4), {})
    assert [row[0] for row in ring.rows()] == [1, 0, 0, 4]
    assert all(len(row) == len(COLUMNS) for row in ring.rows())
    for sample in range(14, 14 + RING_SAMPLES):
        ring.add(sample, Rates(requests_per_s=sample), {})
    assert [row[0] for row in ring.rows()] == list(range(14, 14 + RING_SAMPLES))
    ring.add(2000, Rates(requests_per_s=7), {})
    assert [row[0] for row in ring.rows()] == [0] * (RING_SAMPLES - 1) + [7]


def test_ring_is_forgotten_after_15_idle_minutes() -> None:
    ring = Ring(0, {})
    ring.add(0, Rates(failed_per_s=1), {})
    ring.add(RING_SAMPLES - 1, IDLE, {})
    assert not ring.is_forgotten(RING_SAMPLES - 1)
    assert ring.is_forgotten(RING_SAMPLES)


def test_recent_errors_are_those_of_the_last_15_minutes() -> None:
    ring = Ring(0, {"deadline": 5})
    assert ring.recent_errors({"deadline": 7, "internal": 1}) == {"deadline": 2, "internal": 1}
    for sample in range(2 * RING_SAMPLES):
        ring.add(sample, Rates(failed_per_s=1), {"deadline": 5 + sample // 12})
    assert ring.recent_errors({"deadline": 5 + 2 * RING_SAMPLES // 12}) == {"deadline": RING_SAMPLES // 12}


def test_recent_errors_end_after_15_minutes_if_samples_are_missed() -> None:
    """On a busy machine a sample comes late, and then has a later number. Here each first one of a minute is missed."""
    ring = Ring(1, {})
    for sample in range(1, 2 * RING_SAMPLES):
        if sample % 12:
            ring.add(sample, Rates(failed_per_s=1), {"deadline": sample // 12})
    assert ring.recent_errors({"deadline": 29}) == {"deadline": 15 - 1}
    ring.add(3 * RING_SAMPLES, IDLE, {"deadline": 30})
    assert ring.recent_errors({"deadline": 31}) == {"deadline": 2}


def test_recent_errors_include_those_before_and_after_a_reload() -> None:
    ring = Ring(0, {"deadline": 5})
    ring.add(0, Rates(failed_per_s=1), {"deadline": 9, "internal": 1})
    ring.restart_errors({"deadline": 9, "internal": 1})
    assert ring.recent_errors({}) == {"deadline": 4, "internal": 1}
    assert ring.recent_errors({"deadline": 2}) == {"deadline": 6, "internal": 1}
    ring.restart_errors({"deadline": 2})
    assert ring.recent_errors({"internal": 1}) == {"deadline": 6, "internal": 2}
    for sample in range(1, RING_SAMPLES + 12):
        ring.add(sample, IDLE, {"deadline": 2})
    assert ring.recent_errors({"deadline": 3}) == {"deadline": 1}
