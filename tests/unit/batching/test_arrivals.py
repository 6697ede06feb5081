"""The arrival rate in rows per second."""

import pytest

from ortserve.batching.batcher import ArrivalRate

MS = 1_000_000
S = 1000 * MS


def arrive(rate: ArrivalRate, rows: int, every_ns: int, begin_ns: int, end_ns: int) -> None:
    for now_ns in range(begin_ns, end_ns, every_ns):
        rate.count(rows, now_ns)


def test_rate_is_zero_at_first() -> None:
    assert ArrivalRate().per_s(S) == 0


def test_rate_of_steady_arrivals_is_measured() -> None:
    rate = ArrivalRate()
    arrive(rate, 3, 10 * MS, S, 61 * S)
    assert rate.per_s(61 * S) == pytest.approx(300, rel=0.02)


def test_rate_follows_a_change_and_falls_without_arrivals() -> None:
    rate = ArrivalRate()
    arrive(rate, 1, 10 * MS, S, 41 * S)
    arrive(rate, 1, MS, 41 * S, 81 * S)
    assert rate.per_s(81 * S) == pytest.approx(1000, rel=0.05)
    assert rate.per_s(82 * S) < 900
    assert rate.per_s(200 * S) < 10
