"""The search for the capacity, with targets of known capacity."""

import pytest

from ortserve.tools.bench.measure import bracket, first_rate, next_rate


def search(capacity: float, start: float) -> dict[float, bool]:
    tries: dict[float, bool] = {}
    rate: float | None = start
    while rate is not None:
        tries[rate] = rate <= capacity
        rate = next_rate(tries)
    return tries


@pytest.mark.parametrize("capacity", [3.0, 480.0, 12_345.0])
@pytest.mark.parametrize("factor", [0.01, 0.3, 1.5, 20.0])
def test_search_finds_the_capacity(capacity: float, factor: float) -> None:
    tries = search(capacity, first_rate(capacity * factor / 0.3))

    low, high = bracket(tries)
    assert low is not None
    assert high is not None
    assert low <= capacity < high <= low * 1.13
    assert len(tries) <= 14


def test_target_that_sustains_nothing_has_no_capacity() -> None:
    tries = search(0.0, 100.0)

    assert bracket(tries) == (None, list(tries)[-1])
    assert len(tries) < 10


def test_target_without_a_limit_ends_the_search() -> None:
    assert bracket(search(1e12, 1.0))[1] is None


def test_noise_below_the_bracket_is_not_believed() -> None:
    """A rate that was sustained once counts only below the lowest rate that was not sustained."""
    assert bracket({100: True, 200: False, 150: False, 170: True}) == (100, 150)
