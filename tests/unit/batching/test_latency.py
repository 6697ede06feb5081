"""The learned latency of batches."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortserve.batching.latency import LatencyModel, Line

US = 1_000
NO_TIMES = [0, 0.5, -1, -math.inf, math.inf, math.nan, 2.0**63]
TIMES = st.one_of(st.integers(1, 2**63 - 1), st.floats(allow_nan=True, allow_infinity=True))


def teach(latency: LatencyModel, rows: int, ns: float, times: int) -> None:
    for _ in range(times):
        latency.observe(rows, ns)


def test_nothing_is_known_at_first() -> None:
    latency = LatencyModel()
    assert latency.predict_ns(1) is None
    assert latency.line(8) is None
    assert latency.knots() == {}
    assert (latency.observations, latency.residual_ns) == (0, 0)


def test_prediction_is_linear_between_knots_and_goes_on_beyond_the_last() -> None:
    latency = LatencyModel([(1, 100), (4, 160), (8, 400)])
    predicted = {rows: latency.predict_ns(rows) for rows in (1, 2, 3, 4, 5, 6, 8, 9, 16)}
    assert predicted == {1: 100, 2: 120, 3: 140, 4: 160, 5: 220, 6: 280, 8: 400, 9: 460, 16: 880}


def test_order_in_which_knots_become_known_does_not_count() -> None:
    latency = LatencyModel([(8, 400), (1, 100), (4, 160)])
    assert list(latency.knots().items()) == [(1, 100), (4, 160), (8, 400)]


def test_falling_latency_is_not_continued_below_the_last_knot() -> None:
    assert LatencyModel([(1, 200), (2, 100)]).predict_ns(64) == 100


def test_single_knot_is_the_careful_guess_for_other_sizes() -> None:
    latency = LatencyModel([(4, 1000)])
    assert [latency.predict_ns(rows) for rows in (1, 3, 4, 8, 16)] == [1000, 1000, 1000, 2000, 4000]


def test_first_observation_is_taken_as_it_is() -> None:
    latency = LatencyModel()
    latency.observe(4, 1000)
    assert latency.predict_ns(4) == 1000
    assert latency.observations == 1
    latency.observe(1, 300)
    assert latency.knots() == {1: 300, 4: 1000}


@pytest.mark.parametrize("slow", [3, 10, 100])
def test_slow_first_run_is_forgotten_at_the_second(slow: float) -> None:
    latency = LatencyModel([(1, 100)])
    for ns in (slow * 1000, 1000):
        latency.observe(8, ns)
    assert latency.knots() == {1: 100, 8: pytest.approx(1000)}


@pytest.mark.parametrize("slow", [3, 10, 100])
def test_slow_first_run_of_a_size_in_part_filled_is_nearly_forgotten_at_the_second(slow: float) -> None:
    latency = LatencyModel([(1, 100), (4, 400)])
    for ns in (slow * 600, 600):
        latency.observe(6, ns)
    assert latency.predict_ns(6) == pytest.approx(600, rel=0.35)


def test_second_run_of_a_size_between_known_ones_does_not_scale_the_knot_above_again() -> None:
    latency = LatencyModel([(8, 70), (12, 100)])
    latency.observe(12, 40)
    above = latency.predict_ns(16)
    latency.observe(12, 40)
    assert latency.knots() == {8: 70, 12: 95, 16: above}


def test_first_run_that_took_less_than_twice_as_long_as_the_second_counts() -> None:
    latency = LatencyModel()
    latency.observe(8, 1900)
    latency.observe(8, 1000)
    assert latency.predict_ns(8) == pytest.approx(1900 - 90)


def test_first_observation_of_a_size_in_part_filled_is_scaled_to_the_whole() -> None:
    latency = LatencyModel([(1, 100), (4, 400)])
    latency.observe(6, 600)  # on the line, so the knot at 8 stays on it too
    assert latency.predict_ns(6) == pytest.approx(600)
    assert latency.predict_ns(8) == pytest.approx(800)
    assert latency.knots().keys() == {1, 4, 8}


def test_observation_moves_the_prediction_a_tenth_of_the_way() -> None:
    latency = LatencyModel([(1, 1000), (8, 2000)])
    latency.observe(1, 1500)
    assert latency.knots() == {1: pytest.approx(1050), 8: 2000}
    latency.observe(8, 1000)
    assert latency.knots() == {1: pytest.approx(1050), 8: pytest.approx(1900)}


@pytest.mark.parametrize(("seen_ns", "predicted_ns"), [(1e12, 1100), (2000, 1100), (1, 950), (500, 950)])
def test_outlier_moves_the_prediction_no_more_than_twice_or_half_would(seen_ns: float, predicted_ns: float) -> None:
    latency = LatencyModel([(1, 1000)])
    latency.observe(1, seen_ns)
    assert latency.predict_ns(1) == pytest.approx(predicted_ns)


def test_size_between_knots_teaches_each_of_them_by_its_share() -> None:
    latency = LatencyModel([(4, 1000), (8, 1000)])
    latency.observe(7, 2000)
    assert latency.knots() == {4: pytest.approx(1025), 8: pytest.approx(1075)}


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("factor", [10, 0.1, 100, 0.01])
def test_prediction_converges_after_a_lasting_change(rows: int, factor: float) -> None:
    latency = LatencyModel([(1, 1000), (2, 1200), (4, 1600), (8, 2400)])
    wanted = factor * (latency.predict_ns(rows) or 0)
    teach(latency, rows, wanted, 300)
    assert latency.predict_ns(rows) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_prediction_is_near_the_mean_of_noisy_batches(seed: int) -> None:
    draw = random.Random(seed)
    latency = LatencyModel([(1, 300 * US), (16, 300 * US)])
    for _ in range(2000):
        rows = draw.choice([1, 2, 4, 8, 16])
        latency.observe(rows, (100 * US + rows * 10 * US) * draw.uniform(0.9, 1.1))
    for rows in (1, 2, 4, 8, 16):
        assert latency.predict_ns(rows) == pytest.approx(100 * US + rows * 10 * US, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_one_batch_in_twenty_takes_longer_than_predicted_and_the_residual(seed: int, spread: float) -> None:
    draw = random.Random(seed)
    latency = LatencyModel([(8, 1000)])
    late = 0
    batches = 20_000
    for number in range(batches + 500):
        ns = 1000 * draw.lognormvariate(0, spread)
        limit_ns = (latency.predict_ns(8) or 0) + latency.residual_ns
        late += number >= 500 and ns > limit_ns
        latency.observe(8, ns)
    # Four standard errors of a share of 0.05 are 0.006.
    assert late / batches == pytest.approx(0.05, abs=0.006)


@pytest.mark.parametrize("seed", range(5))
def test_residual_returns_soon_after_other_work_slowed_down_all_batches(seed: int) -> None:
    draw = random.Random(seed)
    latency = LatencyModel([(8, 100 * US)])
    for slowdown, batches in ((1, 300), (5, 30), (1, 200)):
        for _ in range(batches):
            latency.observe(8, slowdown * 100 * US * draw.lognormvariate(0, 0.1))
    assert latency.residual_ns < 80 * US


def test_residual_is_never_negative_and_falls_when_batches_take_as_long_as_predicted() -> None:
    latency = LatencyModel([(1, 1000)])
    latency.observe(1, 3000)
    raised_ns = latency.residual_ns
    assert 0 < raised_ns < 200
    for _ in range(300):
        latency.observe(1, latency.predict_ns(1) or 0)
        assert latency.residual_ns >= 0
    assert latency.residual_ns == 0


@pytest.mark.parametrize("ns", NO_TIMES)
def test_invalid_durations_are_ignored(ns: float) -> None:
    latency = LatencyModel([(1, 1000)])
    latency.observe(1, ns)
    latency.observe(64, ns)
    assert latency.knots() == {1: 1000}
    assert (latency.observations, latency.residual_ns) == (0, 0)


@pytest.mark.parametrize("ns", NO_TIMES)
def test_invalid_durations_of_warm_up_are_ignored(ns: float) -> None:
    latency = LatencyModel([(1, ns), (2, 2000), (4, ns)])
    assert latency.knots() == {2: 2000}


def test_knots_at_odd_sizes_are_used_and_taught() -> None:
    latency = LatencyModel([(1, 100), (2, 200), (3, 300), (48, 4800)])
    assert latency.predict_ns(3) == 300
    assert latency.predict_ns(24) == pytest.approx(2400)
    teach(latency, 3, 600, 200)
    assert latency.predict_ns(3) == pytest.approx(600, rel=0.01)
    teach(latency, 48, 2400, 200)
    assert latency.predict_ns(48) == pytest.approx(2400, rel=0.01)


def test_line_goes_through_one_row_and_the_most() -> None:
    assert LatencyModel([(1, 110), (2, 500), (11, 210)]).line(11) == Line(10, 100)
    assert LatencyModel([(1, 100)]).line(1) == Line(0, 100)
    assert LatencyModel([(1, 200), (8, 100)]).line(8) == Line(0, 200)  # no negative cost of a row
    assert LatencyModel([(1, 10), (2, 100)]).line(2) == Line(90, 0)  # nor of a batch


@given(
    known=st.lists(st.tuples(st.integers(1, 4096), TIMES), max_size=5),
    seen=st.lists(st.tuples(st.integers(1, 4096), TIMES), max_size=30),
    max_ratio=st.sampled_from([2.0, 1000.0]),
    rows=st.integers(1, 10**6),
)
def test_prediction_is_positive_and_finite(
    known: list[tuple[int, float]], seen: list[tuple[int, float]], max_ratio: float, rows: int
) -> None:
    latency = LatencyModel(known, max_ratio=max_ratio)
    for size, ns in seen:
        latency.observe(size, ns)
    predicted_ns = latency.predict_ns(rows)
    assert predicted_ns is None or 0 < predicted_ns < math.inf
    assert 0 <= latency.residual_ns < math.inf


def test_time_of_fewer_rows_is_known_again_soon_after_its_neighbour_was_far_off() -> None:
    latency = LatencyModel([(64, 100 * US), (128, 1e9)])
    teach(latency, 65, 100 * US, 10_000)
    assert latency.predict_ns(65) == pytest.approx(100 * US, rel=0.01)
    teach(latency, 64, 100 * US, 300)
    assert latency.predict_ns(64) == pytest.approx(100 * US, rel=0.01)
