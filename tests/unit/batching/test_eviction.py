"""Evictions from the queue, as tables of cases."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from fakes.inflight import inflight
from ortserve.batching.latency import MIN_OBSERVATIONS, LatencyModel
from ortserve.batching.planner import (
    DEADLINE_PASSED,
    OUT_OF_REACH,
    PASSED_IN_SEARCH,
    TIMEOUT_PASSED,
    BatchPolicy,
    find_expired,
    find_late_in_search,
    find_unfit,
)
from ortserve.core.inflight import InflightRequest
from ortserve.core.timing import Timing

NOW = 1000
POLICY = BatchPolicy(8)


@dataclass(frozen=True)
class Waiting:
    """A queued request, and the reason of its eviction."""

    why: str | None = None
    rows: int = 1
    queued_ns: int = 500
    finish_by_ns: int | None = None
    start_by_ns: int | None = None

    def request(self) -> InflightRequest:
        return inflight(
            (),
            self.rows,
            Timing(0, self.queued_ns),
            finish_by_ns=self.finish_by_ns,
            start_by_ns=self.start_by_ns,
        )


def stays(
    rows: int = 1, *, queued_ns: int = 500, finish_by_ns: int | None = None, start_by_ns: int | None = None
) -> Waiting:
    return Waiting(None, rows, queued_ns, finish_by_ns, start_by_ns)


def latency(observations: int = MIN_OBSERVATIONS, ns: float = 100) -> LatencyModel:
    """Every batch takes ``ns``."""
    model = LatencyModel([(1, ns), (8, ns)])
    model.observations = observations
    return model


def assert_evicted(
    waiting: Sequence[Waiting],
    model: LatencyModel,
    policy: BatchPolicy = POLICY,
) -> None:
    requests = [one.request() for one in waiting]
    evictions = find_unfit(requests, policy, model, NOW)
    wanted = [(request, one.why) for request, one in zip(requests, waiting, strict=True) if one.why]
    assert [(eviction.request, eviction.reason) for eviction in evictions] == wanted


def test_only_late_requests_are_evicted() -> None:
    assert_evicted(
        [
            stays(),
            stays(start_by_ns=1000),
            Waiting(TIMEOUT_PASSED, start_by_ns=999),
            stays(finish_by_ns=1100),
            Waiting(OUT_OF_REACH, finish_by_ns=1099),
            Waiting(DEADLINE_PASSED, finish_by_ns=999),
            Waiting(TIMEOUT_PASSED, start_by_ns=999, finish_by_ns=999),
            stays(start_by_ns=5000, finish_by_ns=5000),
        ],
        latency(),
    )


@pytest.mark.parametrize("model", [latency(MIN_OBSERVATIONS - 1), latency(ns=math.inf), LatencyModel()])
def test_unsure_prediction_evicts_no_request(model: LatencyModel) -> None:
    assert_evicted([stays(finish_by_ns=1001), Waiting(DEADLINE_PASSED, finish_by_ns=999)], model)


def test_prediction_evicts_only_requests_that_the_wait_made_late() -> None:
    waiting = [
        stays(finish_by_ns=1050, queued_ns=951),  # at its arrival only 99 were left
        Waiting(OUT_OF_REACH, finish_by_ns=1050, queued_ns=950),
    ]
    assert_evicted(waiting, latency())


def test_prediction_is_of_the_bucket_that_a_request_is_padded_to() -> None:
    steep = LatencyModel([(1, 10), (8, 100)])
    steep.observations = MIN_OBSERVATIONS
    waiting = stays(finish_by_ns=1050)
    assert_evicted([waiting], steep)
    assert_evicted([Waiting(OUT_OF_REACH, finish_by_ns=1050)], steep, BatchPolicy(8, buckets=(8,)))


def test_only_the_requests_of_a_full_batch_are_checked() -> None:
    late, behind = Waiting(TIMEOUT_PASSED, start_by_ns=1), stays(start_by_ns=1)
    assert_evicted([stays(4), stays(4), behind], latency())
    assert_evicted([stays(4), stays(3), late, stays(1), behind], latency())
    assert_evicted([stays(4), stays(3), late], latency())


def test_sweep_finds_all_late_requests_and_the_next_due_time() -> None:
    waiting = [
        stays(8),
        Waiting(DEADLINE_PASSED, finish_by_ns=999, start_by_ns=1500),
        stays(8, finish_by_ns=1300),
        Waiting(TIMEOUT_PASSED, start_by_ns=999, finish_by_ns=1500),
        stays(start_by_ns=1200, finish_by_ns=1400),
        stays(finish_by_ns=1250, start_by_ns=1260),
    ]
    requests = [one.request() for one in waiting]
    found = find_expired(requests, NOW)
    wanted = [(request, one.why) for request, one in zip(requests, waiting, strict=True) if one.why]
    assert [(eviction.request, eviction.reason) for eviction in found.evictions] == wanted
    assert found.next_ns == 1200


def test_sweep_of_requests_without_deadlines_finds_no_request() -> None:
    found = find_expired([stays().request()] * 3, NOW)
    assert (found.evictions, found.next_ns) == ([], math.inf)


def test_moment_itself_is_not_too_late() -> None:
    found = find_expired([stays(finish_by_ns=NOW).request(), stays(start_by_ns=NOW).request()], NOW)
    assert (found.evictions, found.next_ns) == ([], NOW)


def test_late_requests_of_a_failed_batch_do_not_run_again() -> None:
    waiting = [
        stays(start_by_ns=1),  # its run starts in time
        Waiting(PASSED_IN_SEARCH, finish_by_ns=999),
        stays(finish_by_ns=1000),
        stays(finish_by_ns=999),
        stays(),
    ]
    requests = [one.request() for one in waiting]
    requests[3].cancel()
    assert find_late_in_search(requests, NOW) == [requests[1]]
