"""The search for failing requests without a runner: the test knows them and counts the runs of the search."""

from collections import deque
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.inflight import inflight
from ortserve.batching.groups import RequestGroup, divide
from ortserve.batching.queue import RequestQueue
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, RunTimeoutError, ServeError

REJECTED = ServeError(ErrorKind.INTERNAL, "the run failed")


def search(size: int, offenders: set[int], error: Exception = REJECTED) -> tuple[int, set[int], set[int]]:
    """Returns the number of runs after the first, the number of answered requests, and the failed requests."""
    requests = [inflight((), index + 1, Timing(0)) for index in range(size)]
    answered: set[int] = set()
    failed: set[int] = set()
    shape_class = RequestQueue().shape_class(None)
    waiting = deque([RequestGroup(shape_class, requests, sum(request.rows for request in requests))])
    runs = 0
    while waiting:
        group = waiting.popleft()
        runs += 1
        members = {requests.index(request) for request in group.requests}
        assert group.rows == sum(index + 1 for index in members)
        if not members & offenders:
            answered |= members
            continue
        groups = divide(group, error)
        if groups:
            waiting.extend(groups)
        else:
            failed |= members
    assert answered.isdisjoint(failed)
    assert answered | failed == set(range(size))
    return runs - 1, answered, failed


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 9, 16, 31, 64])
def test_single_failing_request_is_found_after_twice_the_logarithm_of_runs(size: int) -> None:
    for offender in range(size):
        runs, _, failed = search(size, {offender})
        assert failed == {offender}
        assert runs <= 2 * ceil(log2(size))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 64])
def test_batch_of_failing_requests_costs_a_run_for_each_beside_the_halves(size: int) -> None:
    runs, answered, failed = search(size, set(range(size)))
    assert not answered
    assert len(failed) == size
    assert runs <= 4 * ceil(log2(size)) + size


@given(st.integers(2, 64).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))))
def test_no_request_fails_because_of_others(case: tuple[int, set[int]]) -> None:
    size, offenders = case
    _, _, failed = search(size, offenders)
    assert failed == offenders


def test_two_failing_requests_far_apart_are_both_found() -> None:
    runs, _, failed = search(64, {0, 63})
    assert failed == {0, 63}
    assert runs <= 4 * 6


def test_runs_over_the_time_limit_end_after_four_times_the_logarithm_of_runs() -> None:
    runs, _, failed = search(64, set(range(64)), RunTimeoutError("a run took over 1 s"))
    assert len(failed) == 64
    assert runs <= 4 * 6
