"""The times at which rules end a rollout, and the percentiles that they evaluate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortserve.config.rollout import RolloutRules
from ortserve.service.rollout.decision import Figures, Latencies, decide

RULES = RolloutRules(
    min_requests=100, max_error_rate=0.02, max_disagreement=0.05, max_p99_ratio=1.5, promote_after=1000
)


def timed(stable: int, candidate: int, p99_s: float, **counts: int) -> Figures:
    return Figures(
        **counts, stable_requests=stable, candidate_requests=candidate, stable_p99_s=0.01, candidate_p99_s=p99_s
    )


GOOD = timed(1000, 1000, 0.012, requests=1000, compared=1000)


@pytest.mark.parametrize(
    ("figures", "result", "reason"),
    [
        (Figures(), None, ""),
        (GOOD, "promoted", "1000 requests kept the rules: 0 failed, 0 of 1000 disagreed, p99 12 ms, stable 10 ms"),
        (Figures(requests=999, compared=999), None, ""),
        # Two failures are 2 % of the first 100 requests, so the third one decides before these have arrived.
        (Figures(requests=2, failed=2), None, ""),
        (Figures(requests=3, failed=3), "rolled_back", "max_error_rate: expected at most 0.02, got 3 of 3 requests"),
        (Figures(requests=1000, failed=20), None, ""),
        (Figures(requests=1000, failed=21), "rolled_back", "got 21 of 1000 requests"),
        (Figures(requests=90, compared=90, disagreed=5), None, ""),
        (
            Figures(requests=90, compared=90, disagreed=6),
            "rolled_back",
            "max_disagreement: expected at most 0.05, got 6",
        ),
        # Times count from 100 requests on both sides; answers from the response cache have no times.
        (timed(500, 99, 1.0, requests=99), None, ""),
        (timed(500, 99, 1.0, requests=500), None, ""),
        (timed(99, 500, 1.0, requests=500), None, ""),
        (timed(100, 100, 0.016, requests=100), "rolled_back", "got 1.6"),
        # No decision without times if a rule bounds them, nor without comparisons.
        (Figures(requests=1000, compared=1000), None, ""),
        (timed(1000, 1000, 0.01, requests=1000, compared=99), None, ""),
    ],
)
def test_decision_follows_from_the_figures(figures: Figures, result: str | None, reason: str) -> None:
    decision = decide(RULES, figures)
    assert (None if decision is None else decision.result) == result
    assert decision is None or reason in decision.reason


def test_share_that_equals_its_bound_is_kept() -> None:
    """As a product, 0.29 of 100 is 28.999999999999996."""
    for percent in range(100):
        rules = RolloutRules(max_error_rate=percent / 100, max_disagreement=percent / 100)
        assert decide(rules, Figures(requests=100, failed=percent, compared=100, disagreed=percent)) is None
        assert decide(rules, Figures(requests=1000, failed=10 * percent + 1)) is not None


@given(st.builds(Figures, *[st.integers(0, 10**6)] * 7, st.floats(0, 100), st.floats(0, 100)))
def test_rules_that_are_not_set_decide_nothing(figures: Figures) -> None:
    assert decide(RolloutRules(), figures) is None


@given(st.lists(st.integers(1, 2**34), min_size=1, max_size=300))
def test_percentile_is_at_most_nine_percent_too_long_and_never_too_short(times_ns: list[int]) -> None:
    latencies = Latencies()
    for ns in times_ns:
        latencies.add(ns)
    exact = sorted(times_ns)[-(-len(times_ns) * 99 // 100) - 1] / 1e9
    found = latencies.p99_s()
    assert found is not None
    assert exact * (1 - 1e-9) <= found <= exact * 2 ** (1 / 8) * (1 + 1e-9)


def test_times_without_end_count_as_the_longest() -> None:
    latencies = Latencies()
    assert latencies.p99_s() is None
    latencies.add(2**60)
    latencies.add(0)
    assert latencies.p99_s() == 2**35 / 1e9
