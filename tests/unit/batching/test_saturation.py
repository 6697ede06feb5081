"""The saturation, which autoscaling uses."""

import pytest

from ortserve.batching.statistics import saturation


@pytest.mark.parametrize(
    ("offered_rows_per_s", "batch_rows", "batch_ns", "parallel_batches", "expected"),
    [
        (0.0, 8, 100e6, 1, 0.0),
        (40.0, 8, 100e6, 1, 0.5),
        (80.0, 8, 100e6, 1, 1.0),
        (240.0, 8, 100e6, 1, 3.0),
        (80.0, 8, 100e6, 2, 0.5),
        (80.0, 1, 100e6, 2, 4.0),
    ],
)
def test_saturation_is_the_offered_rate_divided_by_that_of_full_batches(
    offered_rows_per_s: float, batch_rows: int, batch_ns: float, parallel_batches: int, expected: float
) -> None:
    found = saturation(offered_rows_per_s, batch_rows=batch_rows, batch_ns=batch_ns, parallel_batches=parallel_batches)
    assert found == pytest.approx(expected)


def test_saturation_is_unknown_without_a_batch_latency() -> None:
    assert saturation(1.0, batch_rows=8, batch_ns=None, parallel_batches=1) is None
    assert saturation(0.0, batch_rows=8, batch_ns=None, parallel_batches=1) == 0


def test_saturation_is_unknown_without_an_instance() -> None:
    assert saturation(1.0, batch_rows=8, batch_ns=100e6, parallel_batches=0) is None
