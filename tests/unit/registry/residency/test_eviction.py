"""The models that are evicted to make room for a load."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortserve.registry.residency.eviction import HOST, EvictionPlan, Resident, in_start_order, plan_evictions

NOW_NS = 1_000


def resident(name: str, nbytes: int, used_ns: int = 0, **traits: object) -> Resident:
    return Resident(name, {HOST: nbytes}, used_ns, **traits)  # type: ignore[arg-type]


OLD, NEW = resident("old", 40, 1), resident("new", 40, 2)


@pytest.mark.parametrize(
    ("need", "used", "residents", "plan"),
    [
        (20, 80, [OLD, NEW], EvictionPlan()),
        (21, 80, [OLD, NEW], EvictionPlan(evict=("old",))),
        (21, 80, [NEW, resident("old", 40, 1, is_busy=True)], EvictionPlan(evict=("new",))),
        (61, 80, [NEW, OLD], EvictionPlan(evict=("old", "new"))),
        (61, 80, [NEW, resident("old", 40, 1, is_kept=True)], EvictionPlan(missing={HOST: 1})),
        (101, 80, [OLD, NEW], EvictionPlan(missing={HOST: 1})),
        # A recently loaded model stays, so that the load waits if there is no other.
        (21, 80, [NEW, resident("old", 40, 1, stays_until_ns=NOW_NS + 5)], EvictionPlan(evict=("new",))),
        (61, 80, [NEW, resident("old", 40, 1, stays_until_ns=NOW_NS + 5)], EvictionPlan(wait_until_ns=NOW_NS + 5)),
        # An ensemble is evicted with a member, and before it; its last use is that of its members.
        (21, 80, [OLD, NEW, resident("sum", 0, 1, members=("old",))], EvictionPlan(evict=("sum", "old"))),
        (21, 80, [OLD, NEW, resident("sum", 0, 3, members=("old",))], EvictionPlan(evict=("new",))),
        (
            21,
            40,
            [resident("m", 100), resident("in", 0, members=("m",)), resident("out", 0, members=("in",))],
            EvictionPlan(),
        ),
        (
            61,
            40,
            [resident("m", 100), resident("in", 0, members=("m",)), resident("out", 0, members=("in",))],
            EvictionPlan(evict=("out", "in", "m")),
        ),
        (21, 80, [OLD, NEW, resident("sum", 0, 1, members=("old",), is_kept=True)], EvictionPlan(evict=("new",))),
    ],
)
def test_least_recently_used_models_leave(need: int, used: int, residents: list[Resident], plan: EvictionPlan) -> None:
    assert plan_evictions({HOST: used + need - 100}, residents, NOW_NS) == plan


def test_no_model_leaves_whose_memory_is_not_needed_beside_the_others() -> None:
    host, both = Resident("host", {HOST: 30}, 1), Resident("both", {HOST: 30, "gpu:0": 9}, 2)
    assert plan_evictions({HOST: 30, "gpu:0": 9}, [host, both], NOW_NS) == EvictionPlan(evict=("both",))
    assert plan_evictions({HOST: 31, "gpu:0": 9}, [host, both], NOW_NS) == EvictionPlan(evict=("host", "both"))
    assert plan_evictions({HOST: 30, "gpu:0": 0}, [host, both], NOW_NS) == EvictionPlan(evict=("host",))
    assert plan_evictions({HOST: 30, "gpu:0": 10}, [host, both], NOW_NS) == EvictionPlan(missing={"gpu:0": 1})
    assert plan_evictions({HOST: 50}, [OLD, resident("new", 50, 2)], NOW_NS) == EvictionPlan(evict=("new",))


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9), st.integers(0, 2 * NOW_NS), st.booleans()), max_size=8),
)
def test_plan_makes_enough_room_or_says_why_not(need: int, models: list[tuple[int, int, int, bool]]) -> None:
    residents = [
        resident(str(number), nbytes, used_ns, stays_until_ns=stays_ns, is_kept=is_kept)
        for number, (nbytes, used_ns, stays_ns, is_kept) in enumerate(models)
    ]
    used = sum(one.held[HOST] for one in residents)
    plan = plan_evictions({HOST: used + need - 100}, residents, NOW_NS)
    evicted = [one for one in residents if one.name in plan.evict]
    assert not any(one.is_kept or one.stays_until_ns > NOW_NS for one in evicted)
    free = 100 - used + sum(one.held[HOST] for one in evicted)
    kept = sum(one.held[HOST] for one in residents if one.is_kept)
    assert plan.missing.get(HOST, 0) == max(0, need + kept - 100) or need <= 100 - used
    if not plan.missing and not plan.wait_until_ns:
        assert free >= need
        assert all(free - one.held[HOST] < need for one in evicted)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_start_leaves_in_memory_what_a_start_with_all_files_would(sizes: list[int], random: Random) -> None:
    order = {str(place): place for place in range(len(sizes))}
    held: dict[str, Resident] = {}

    def load(name: str) -> None:
        need, used = sizes[order[name]], sum(one.held[HOST] for one in held.values())
        plan = plan_evictions({HOST: used + need - 100}, in_start_order(list(held.values()), order, name), NOW_NS)
        if not plan.missing:
            assert plan.wait_until_ns == 0
            for evicted in plan.evict:
                del held[evicted]
            held[name] = resident(name, need, stays_until_ns=2 * NOW_NS, is_pinned=True, is_busy=True)

    for name in random.sample(list(order), len(order)):
        load(name)
    for name in order:
        if name not in held:
            load(name)
    expected: set[str] = set()
    for name, place in order.items():
        if sum(sizes[order[other]] for other in expected) + sizes[place] <= 100:
            expected.add(name)
    assert held.keys() == expected


def test_ensemble_leaves_at_the_start_with_the_member_that_comes_last() -> None:
    order = {"loading": 0, "sum": 1, "old": 2, "new": 3}
    residents = [NEW, OLD, resident("sum", 0, members=("new",)), resident("sent", 20)]
    plan = plan_evictions({HOST: 10}, in_start_order(residents, order, "loading"), NOW_NS)
    assert plan == EvictionPlan(evict=("sum", "new"))
    assert plan_evictions({HOST: 10}, in_start_order(residents, order, "other"), NOW_NS).missing == {HOST: 10}
