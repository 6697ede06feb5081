"""The decision to poll and its duration, with generated times."""

from hypothesis import given
from hypothesis import strategies as st

from ortserve.service.busy_polling import PollPolicy

MAX_NS = 200_000
S = 1_000_000_000


def policy_after(*gaps_ns: int) -> PollPolicy:
    policy = PollPolicy(MAX_NS)
    for gap_ns in gaps_ns:
        policy.observe_gap(gap_ns)
    return policy


def test_loop_does_not_poll_before_gaps_are_known() -> None:
    assert PollPolicy(MAX_NS).budget_ns(S) == 0
    assert policy_after(*[50_000] * 5).budget_ns(S) == 0


def test_loop_polls_for_twice_the_usual_gap() -> None:
    assert policy_after(*[50_000] * 8).budget_ns(S) == 100_000


def test_budget_stays_within_the_longest() -> None:
    assert policy_after(*[190_000] * 8).budget_ns(S) == MAX_NS


def test_three_long_gaps_of_eight_end_it_and_short_ones_begin_it_again() -> None:
    policy = policy_after(*[50_000] * 8, *[5_000_000] * 2)
    assert policy.budget_ns(S) > 0
    policy.observe_gap(5_000_000)
    assert policy.budget_ns(2 * S) == 0
    for _ in range(6):
        policy.observe_gap(50_000)
    assert policy.budget_ns(3 * S) == 100_000


def test_long_gaps_do_not_change_the_mean_of_the_short_ones() -> None:
    assert policy_after(*[50_000] * 8, S).budget_ns(S) == 100_000


def test_longest_of_zero_never_polls() -> None:
    policy = PollPolicy(0)
    for _ in range(8):
        policy.observe_gap(1_000)
    assert policy.budget_ns(S) == 0


def test_wasted_polling_is_recovered_over_time() -> None:
    policy = policy_after(*[50_000] * 8)
    now_ns = S
    misses = 0
    while budget_ns := policy.budget_ns(now_ns):
        policy.observe_waste(budget_ns)
        misses += 1
    assert misses == 20  # 2 ms at once
    assert policy.budget_ns(now_ns + 1_900_000) == 0
    assert policy.budget_ns(now_ns + 2_100_000) == 100_000  # 5 % of 2 ms


@given(st.lists(st.tuples(st.integers(1, 400_000), st.integers(0, 5_000_000)), max_size=300))
def test_waste_stays_below_a_twentieth_of_the_time(steps: list[tuple[int, int]]) -> None:
    """This holds for all gaps, if the loop polls for the whole budget each time."""
    policy = PollPolicy(MAX_NS)
    began_ns = now_ns = S
    wasted_ns = 0
    for gap_ns, work_ns in steps:
        budget_ns = policy.budget_ns(now_ns)
        assert 0 <= budget_ns <= MAX_NS
        if budget_ns and gap_ns > budget_ns:
            policy.observe_waste(budget_ns)
            wasted_ns += budget_ns
        policy.observe_gap(gap_ns)
        now_ns += gap_ns + work_ns
    assert wasted_ns <= 2_000_000 + 0.05 * (now_ns - began_ns)
