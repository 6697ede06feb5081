"""Which instances are free, and how long the others are thought to be busy."""

import math

import pytest

from ortserve.batching.instances import Instances
from ortserve.core.batch import Batch, BatchDone, BatchResult

NOW = 1000


class Idler:
    """Never asked to run anything here."""

    def run(self, batch: Batch) -> BatchResult:
        raise AssertionError

    def start(self, batch: Batch, done: BatchDone) -> None:
        raise AssertionError


def test_instance_is_lent_to_one_run_at_a_time() -> None:
    runners = [Idler(), Idler()]
    instances = Instances(runners)
    assert not instances.are_busy
    lent = [instances.lend(10, NOW), instances.lend(10, NOW)]
    assert {*lent} == {*runners}
    assert (instances.free, instances.are_busy) == ([], True)
    instances.give_back(lent[0])
    assert (instances.free, instances.are_busy) == ([lent[0]], True)
    assert instances.lend(10, NOW) is lent[0]


def test_nobody_waits_where_one_is_free_and_else_for_the_first_that_ends() -> None:
    instances = Instances([Idler(), Idler()])
    assert instances.busy_ns(NOW) == 0
    instances.lend(500, NOW)
    assert instances.busy_ns(NOW) == 0
    later = instances.lend(900, NOW)
    assert instances.busy_ns(NOW + 100) == 400
    instances.give_back(later)
    assert instances.busy_ns(NOW + 100) == 0


@pytest.mark.parametrize("predicted_ns", [None, 0, 500, math.nan, math.inf])
@pytest.mark.parametrize("after_ns", [500, 501, 10**9])
def test_overdue_run_is_not_taken_for_an_idle_instance(predicted_ns: float | None, after_ns: int) -> None:
    instances = Instances([Idler()])
    instances.lend(predicted_ns, NOW)
    assert instances.busy_ns(NOW + after_ns) == 1
