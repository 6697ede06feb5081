"""Ramps find the capacity of simulated servers."""

import numpy as np
import pytest

from ortserve.tools.tune.loads import Offer, ramp, read, steady, sustained_rate


def queue(due_s: np.ndarray, service_s: float, stall: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
    """Latencies at one worker that takes ``service_s`` per request, and stalls once."""
    free, ages = 0.0, []
    for due in due_s:
        begin = max(due, free)
        if stall[0] <= begin < sum(stall):
            begin = sum(stall)
        free = begin + service_s
        ages.append(free - due)
    return np.array(ages)


def found(capacity: float, expected: float, slo_s: float, seed: int, stall: tuple[float, float] = (0.0, 0.0)) -> float:
    offer = ramp(expected, slo_s)
    due = offer.times_s(seed)
    return sustained_rate(offer, due, queue(due, 1 / capacity, stall) <= slo_s)


@pytest.mark.parametrize(("capacity", "slo_s"), [(40.0, 0.5), (400.0, 0.05), (4000.0, 0.02), (4000.0, 0.2)])
def test_a_ramp_finds_the_capacity_wherever_it_is_in_it(capacity: float, slo_s: float) -> None:
    for factor in (0.7, 1.0, 1.4):
        rates = [found(capacity, capacity * factor, slo_s, seed) for seed in range(5)]
        assert 0.85 * capacity < np.median(rates) < 1.8 * capacity  # queues reach the bound some time after saturation


def test_ratios_of_ramps_are_those_of_capacities() -> None:
    ratios = [found(300.0, 300.0, 0.02, seed) / found(250.0, 250.0, 0.02, seed) for seed in range(10)]
    assert np.exp(np.mean(np.log(ratios))) == pytest.approx(1.2, rel=0.08)


def test_a_stall_in_the_middle_does_not_end_a_ramp() -> None:
    calm, stalled = (found(1000.0, 1000.0, 0.02, 0, stall) for stall in ((0.0, 0.0), (0.2, 0.01)))
    assert stalled == pytest.approx(calm, rel=0.1)


def test_results_outside_lie_at_the_ends() -> None:
    offer = ramp(1000.0, 0.02)
    due = offer.times_s(0)
    assert sustained_rate(offer, due, np.zeros(len(due), bool)) == offer.low
    assert sustained_rate(offer, due, np.ones(len(due), bool)) > 0.98 * offer.high
    assert sustained_rate(offer, due[:0], np.zeros(0, bool)) == offer.low


def test_the_same_seed_makes_the_same_pattern_at_other_rates() -> None:
    one, other = Offer(100.0, 100.0, 4.0).times_s(3), Offer(200.0, 200.0, 2.0).times_s(3)
    assert np.allclose(one, other * 2)
    assert len(ramp(100.0, 0.01).times_s(1)) > 150
    assert steady(2.0).seconds == 5.0


def test_a_reading_without_answers_has_figures() -> None:
    due, ages = np.array([0.1, 0.2]), np.array([1.0, 1.0])
    offer = Offer(2.0, 2.0, 1.0)
    reading = read(offer, due, ages, np.zeros(2, bool), slo_s=0.1, percentile=99.0, cpu_s=0.5, memory_nbytes=1)
    assert (reading.late_share, reading.p50_ms, reading.cpu_ms) == (1.0, 1000.0, 500.0)
