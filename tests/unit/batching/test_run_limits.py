"""Time limits of runs; the tests of the batcher show runs over them."""

import math

import pytest

from fakes.inflight import inflight
from ortserve.batching.groups import RequestGroup
from ortserve.batching.queue import RequestQueue
from ortserve.batching.run_limits import MIN_LIMIT_NS, UNKNOWN_LIMIT_NS, RunLimits, latest_deadline_ns
from ortserve.core.timing import Timing

S = 1_000_000_000


@pytest.mark.parametrize(
    ("predicted_ns", "limit_ns"),
    [
        (0, UNKNOWN_LIMIT_NS),
        (1000.0, MIN_LIMIT_NS),
        (3.0 * S, MIN_LIMIT_NS),
        (30.0 * S, 600 * S),
    ],
)
def test_an_open_limit_follows_the_predicted_time(predicted_ns: float, limit_ns: float) -> None:
    assert RunLimits().limit_ns(predicted_ns) == limit_ns


@pytest.mark.parametrize("predicted_ns", [0, 1000.0, 30.0 * S])
def test_configured_limit_ignores_the_prediction(predicted_ns: float) -> None:
    assert RunLimits(2 * S).limit_ns(predicted_ns) == 2 * S


def test_group_is_late_once_all_of_its_requests_are() -> None:
    def late_ns(*deadlines: int | None) -> float:
        requests = [inflight((), 1, Timing(0), finish_by_ns=deadline) for deadline in deadlines]
        return latest_deadline_ns(RequestGroup(RequestQueue().shape_class(None), requests, len(requests)))

    assert late_ns(5, 9, 7) == 9
    assert late_ns(5, None) == math.inf
