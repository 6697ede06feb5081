"""Planned batches, as tables of cases."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from fakes.inflight import inflight
from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel
from ortserve.batching.planner import BatchPolicy, RunNow, WaitUntil, lower_cap, plan_batch
from ortserve.core.timing import Timing

NOW = 1000
UNKNOWN = LatencyModel()
LINEAR = LatencyModel([(1, 110), (2, 120), (4, 140), (8, 180), (16, 260)])  # 100 + 10 a row


@dataclass(frozen=True)
class Waiting:
    rows: int
    queued_ns: int
    finish_by_ns: int | None = None
    start_by_ns: int | None = None
    level: int = 1


def plan(
    waiting: Sequence[Waiting],
    policy: BatchPolicy,
    latency: LatencyModel = UNKNOWN,
) -> RunNow | WaitUntil:
    requests = [
        inflight(
            (),
            one.rows,
            Timing(0, one.queued_ns),
            level=one.level,
            finish_by_ns=one.finish_by_ns,
            start_by_ns=one.start_by_ns,
        )
        for one in waiting
    ]
    return plan_batch(requests, policy, latency, NOW)


@pytest.mark.parametrize(
    ("waiting", "policy", "planned"),
    [
        # (rows, queued at) in queue order; without a delay all queued requests start at once
        ([(1, 900)], BatchPolicy(8), RunNow(1, 1)),
        ([(1, 900), (1, 950), (1, 1000)], BatchPolicy(8), RunNow(3, 3)),
        ([(8, 900)], BatchPolicy(8), RunNow(1, 8)),
        ([(3, 1), (3, 2), (3, 3)], BatchPolicy(8), RunNow(2, 6)),
        ([(5, 1), (4, 2), (1, 3)], BatchPolicy(8), RunNow(1, 5)),  # the third would fit, but the second is before it
        ([(1, 1)] * 20, BatchPolicy(1), RunNow(1, 1)),
        # with a delay, which starts when the oldest request was queued, at any position
        ([(1, 900)], BatchPolicy(8, 500), WaitUntil(1400)),
        ([(1, 900), (1, 990)], BatchPolicy(8, 500), WaitUntil(1400)),
        ([(1, 990), (1, 900)], BatchPolicy(8, 500), WaitUntil(1400)),
        ([(1, 501)], BatchPolicy(8, 500), WaitUntil(1001)),
        ([(1, 500)], BatchPolicy(8, 500), RunNow(1, 1)),
        ([(1, 100), (1, 999)], BatchPolicy(8, 500), RunNow(2, 2)),
        # a full batch, or one that the next request does not fit into, does not wait
        ([(8, 999)], BatchPolicy(8, 500), RunNow(1, 8)),
        ([(4, 999), (4, 1000)], BatchPolicy(8, 500), RunNow(2, 8)),
        ([(5, 999), (4, 1000)], BatchPolicy(8, 500), RunNow(1, 5)),
        # a preferred size starts without the delay: the largest that whole requests reach
        ([(1, 999)] * 2, BatchPolicy(8, 500, preferred_rows=(2, 4)), RunNow(2, 2)),
        ([(1, 999)] * 3, BatchPolicy(8, 500, preferred_rows=(2, 4)), RunNow(2, 2)),
        ([(1, 999)] * 5, BatchPolicy(8, 500, preferred_rows=(2, 4)), RunNow(4, 4)),
        ([(1, 999)], BatchPolicy(8, 500, preferred_rows=(2, 4)), WaitUntil(1499)),
        ([(3, 999)], BatchPolicy(8, 500, preferred_rows=(2, 4)), WaitUntil(1499)),
        ([(3, 100)], BatchPolicy(8, 500, preferred_rows=(2, 4)), RunNow(1, 3)),
        ([(1, 999)] * 9, BatchPolicy(8, 500, preferred_rows=(2, 4)), RunNow(8, 8)),  # full is better than preferred
        ([(1, 999)] * 3, BatchPolicy(8, preferred_rows=(2,)), RunNow(3, 3)),  # no delay to save
    ],
)
@pytest.mark.parametrize("latency", [UNKNOWN, LINEAR], ids=["unknown", "known"])
def test_requests_without_deadlines(
    waiting: list[tuple[int, int]],
    policy: BatchPolicy,
    planned: RunNow | WaitUntil,
    latency: LatencyModel,
) -> None:
    assert plan([Waiting(*one) for one in waiting], policy, latency) == planned


@pytest.mark.parametrize(
    ("waiting", "planned"),
    [
        # (rows, deadline) of requests queued at 900; a batch of n rows takes 100 + 10 n
        ([(1, 1139), (1, None), (1, None), (1, None)], RunNow(3, 3)),
        ([(1, 1140), (1, None), (1, None), (1, None)], RunNow(4, 4)),
        ([(1, 1110), (1, None), (1, None)], RunNow(1, 1)),
        ([(2, 1160), (3, None), (2, None)], RunNow(2, 5)),
        ([(1, 9999)] * 8, RunNow(8, 8)),
        # of several deadlines the earliest applies, at any position
        ([(1, 1180), (1, 1125), (1, None)], RunNow(2, 2)),
        # if no size meets it, a small batch helps no request
        ([(1, 1109), (1, None), (1, None)], RunNow(3, 3)),
        ([(1, 1000), (1, 1000), (1, 1000)], RunNow(3, 3)),
        # a late request does not delay the requests before it
        ([(1, None), (1, None), (1, 1050), (1, None)], RunNow(2, 2)),
    ],
)
def test_batch_is_as_large_as_its_deadlines_allow(waiting: list[tuple[int, int | None]], planned: RunNow) -> None:
    assert plan([Waiting(rows, 900, by_ns) for rows, by_ns in waiting], BatchPolicy(8), LINEAR) == planned


def test_without_a_prediction_deadlines_make_no_batch_smaller() -> None:
    waiting = [Waiting(1, 900, 1001)] * 8
    assert plan(waiting, BatchPolicy(8, buckets=(2, 4, 8)), UNKNOWN) == RunNow(8, 8)


def test_deadline_is_compared_with_the_time_of_the_padded_bucket() -> None:
    waiting = [Waiting(1, 900, 1150), *[Waiting(1, 900)] * 4]
    assert plan(waiting, BatchPolicy(8), LINEAR) == RunNow(5, 5)
    assert plan(waiting, BatchPolicy(8, buckets=(4, 8)), LINEAR) == RunNow(4, 4)


def test_batch_cut_short_by_a_deadline_does_not_wait_for_the_delay() -> None:
    waiting = [Waiting(1, 999, 1125), Waiting(1, 999), Waiting(1, 999)]
    assert plan(waiting, BatchPolicy(8, 500), LINEAR) == RunNow(2, 2)


@pytest.mark.parametrize(
    ("one", "planned"),
    [
        (Waiting(1, 900, finish_by_ns=1400 + 111), WaitUntil(1400)),
        (Waiting(1, 900, finish_by_ns=1400 + 110), RunNow(1, 1)),
        (Waiting(1, 900, start_by_ns=1401), WaitUntil(1400)),
        (Waiting(1, 900, start_by_ns=1400), RunNow(1, 1)),
    ],
)
def test_delay_makes_no_request_late(one: Waiting, planned: RunNow | WaitUntil) -> None:
    assert plan([one], BatchPolicy(8, 500), LINEAR) == planned


@pytest.mark.parametrize(
    ("rows", "known", "planned"),
    [
        # steep: two batches of 4 cost no more than one of 8, so of 5 rows 4 run now
        ([1] * 5, [(4, 100), (8, 200)], RunNow(4, 4)),
        ([1] * 7, [(4, 100), (8, 200)], RunNow(4, 4)),  # 100/4 < 200/7
        ([1] * 8, [(4, 100), (8, 200)], RunNow(8, 8)),
        # flat: padding costs almost nothing
        ([1] * 5, [(4, 100), (8, 110)], RunNow(5, 5)),
        ([1] * 5, [(4, 100), (8, 125)], RunNow(5, 5)),  # equal: fewer runs
        ([1] * 5, [(4, 100), (8, 126)], RunNow(4, 4)),
        # whole requests: the smaller batch may be padded too
        ([3, 3], [(4, 100), (8, 200)], RunNow(2, 6)),  # 100/3 = 200/6
        ([3, 2], [(4, 100), (8, 200)], RunNow(1, 3)),  # 100/3 < 200/5
        ([5], [(4, 100), (8, 1000)], RunNow(1, 5)),  # it cannot be split
        ([5, 1], [(4, 100), (8, 1000)], RunNow(2, 6)),
        # no bucket is below the smallest
        ([1], [(4, 100), (8, 1000)], RunNow(1, 1)),
        ([1] * 3, [(4, 100), (8, 1000)], RunNow(3, 3)),
        # without a prediction: all queued requests
        ([1] * 5, [], RunNow(5, 5)),
    ],
)
def test_batch_is_padded_up_or_split_down_by_what_a_row_costs(
    rows: list[int], known: list[tuple[int, float]], planned: RunNow
) -> None:
    policy = BatchPolicy(8, buckets=(4, 8))
    assert plan([Waiting(one, 900) for one in rows], policy, LatencyModel(known)) == planned


def test_bucket_is_the_smallest_that_holds_the_rows() -> None:
    policy = BatchPolicy(8, buckets=(2, 5, 16))
    assert [policy.bucket_for(rows) for rows in (1, 2, 3, 5, 6, 8)] == [2, 2, 5, 5, 16, 16]
    assert [BatchPolicy(8).bucket_for(rows) for rows in (1, 8)] == [1, 8]


def practised() -> LatencyModel:
    latency = LatencyModel(LINEAR.knots().items())
    latency.observations = MIN_OBSERVATIONS
    return latency


TIGHT_NS = NOW + 120
"""Enough time for a batch of 2."""


@pytest.mark.parametrize(
    ("waiting", "taken"),
    [
        # full batches after a small one would be late, so the small one's request is evicted
        ([Waiting(1, 0, TIGHT_NS), *[Waiting(1, 0, NOW + 299)] * 9], RunNow(8, 8, evicted=1)),
        ([*[Waiting(1, 0, TIGHT_NS)] * 2, *[Waiting(1, 0, NOW + 290)] * 9], RunNow(8, 8, evicted=2)),
        # the small batch makes no request late: all are answered
        ([Waiting(1, 0, TIGHT_NS), *[Waiting(1, 0, NOW + 300)] * 9], RunNow(2, 2)),
        ([Waiting(1, 0, TIGHT_NS), *[Waiting(1, 0)] * 9], RunNow(2, 2)),
        # an eviction would save too few requests
        ([*[Waiting(1, 0, TIGHT_NS)] * 2, Waiting(1, 0, NOW + 125)], RunNow(2, 2)),
        # it has not waited, so it may run at once
        ([Waiting(1, NOW, TIGHT_NS), *[Waiting(1, NOW, NOW + 299)] * 9], RunNow(2, 2)),
    ],
)
def test_request_that_would_make_others_late_is_evicted(waiting: Sequence[Waiting], taken: RunNow) -> None:
    assert plan(waiting, BatchPolicy(8), practised()) == taken


def test_no_request_is_evicted_for_lower_levels_or_by_an_unsure_prediction() -> None:
    waiting = [Waiting(1, 0, TIGHT_NS), *[Waiting(1, 0, NOW + 299)] * 9]
    assert plan(waiting, BatchPolicy(8), LINEAR) == RunNow(2, 2)
    lower = [waiting[0], *[replace(one, level=2) for one in waiting[1:]]]
    assert plan(lower, BatchPolicy(8), practised()) == RunNow(2, 2)


@pytest.mark.parametrize(
    ("max_rows", "buckets", "failed", "expected"),
    [
        (64, (), 64, (32, ())),
        (64, (), 10, (5, ())),
        (4, (), 64, (4, ())),
        (1, (), 1, (1, ())),
        (8, (1, 2, 4, 8), 8, (4, (1, 2, 4))),
        (4, (1, 2, 4), 8, (4, (1, 2, 4))),
        (8, (1, 8), 8, (1, (1,))),
        (8, (4, 8), 4, (2, (4,))),
    ],
)
def test_a_batch_that_found_no_memory_halves_the_most_rows(
    max_rows: int, buckets: tuple[int, ...], failed: int, expected: tuple[int, tuple[int, ...]]
) -> None:
    lowered = lower_cap(BatchPolicy(max_rows, buckets=buckets), failed)
    assert (lowered.max_rows, lowered.buckets) == expected
    assert lower_cap(lowered, failed) == lowered, "a second batch of that size was on its way already"
