"""Free instances, and the predicted time until the others are free."""

import pytest

from fakes.runner import Idler
from ortserve.batching.instances import Instances
from ortserve.core.batch import Runner

NOW = 1000


def lend(instances: Instances, predicted_ns: float) -> Runner:
    runner = instances.free[-1]
    assert instances.lend_next(predicted_ns, NOW) == NOW
    return runner


def test_instance_has_one_run_at_a_time() -> None:
    runners = [Idler(), Idler()]
    instances = Instances(runners)
    assert not instances.are_busy
    lent = [lend(instances, 10), lend(instances, 10)]
    assert {*lent} == {*runners}
    assert (instances.free, instances.are_busy) == ([], True)
    instances.give_back(lent[0], NOW, NOW)
    assert (instances.free, instances.are_busy) == ([lent[0]], True)
    assert lend(instances, 10) is lent[0]


def test_wait_is_zero_with_a_free_instance_and_else_until_the_first_run_ends() -> None:
    instances = Instances([Idler(), Idler()])
    assert instances.busy_ns(NOW) == 0
    instances.lend_next(500, NOW)
    assert instances.busy_ns(NOW) == 0
    later = lend(instances, 900)
    assert instances.busy_ns(NOW + 100) == 400
    instances.give_back(later, NOW, NOW)
    assert instances.busy_ns(NOW + 100) == 0


@pytest.mark.parametrize("predicted_ns", [0, 500])
@pytest.mark.parametrize("after_ns", [500, 501, 10**9])
def test_overdue_run_is_not_taken_for_an_idle_instance(predicted_ns: float, after_ns: int) -> None:
    instances = Instances([Idler()])
    instances.lend_next(predicted_ns, NOW)
    assert instances.busy_ns(NOW + after_ns) == 1


def test_a_second_batch_is_due_when_its_rows_will_just_be_staged_by_the_end_of_the_first() -> None:
    (runner,) = runners = [Idler()]
    instances = Instances(runners, depth=2)
    assert instances.ahead_due_ns(NOW) is None
    instances.lend_next(10_000_000, NOW)
    assert not instances.free
    assert instances.ahead_due_ns(NOW) == NOW + 10_000_000 - 100_000
    for _ in range(100):
        instances.observe_staging(2_000_000)
    assert instances.ahead_due_ns(NOW) == pytest.approx(NOW + 10_000_000 - 3_100_000, abs=1000)
    instances.free_ahead(NOW)
    assert instances.free == [runner]
    assert instances.busy_ns(NOW) == 10_000_000, "it is free for a second batch, and not idle"
    instances.lend_next(10_000_000, NOW)
    assert instances.ahead_due_ns(NOW) is None, "it takes no third"


def test_a_second_batch_is_measured_from_the_end_of_the_first() -> None:
    (runner,) = runners = [Idler()]
    instances = Instances(runners, depth=2)
    instances.lend_next(500, NOW)
    instances.free_ahead(NOW)
    assert instances.lend_next(500, NOW + 100) == NOW + 500
    assert instances.give_back(runner, NOW, NOW + 550) == NOW
    assert (instances.free, instances.are_busy) == ([], True), "it is not the next one's turn yet"
    assert instances.ahead_due_ns(NOW) == NOW + 550 + 500 - 100_000
    assert instances.give_back(runner, NOW + 100, NOW + 900) == NOW + 550
    assert (instances.free, instances.are_busy) == ([runner], False)
    assert instances.busy_ns(NOW) == 0


def test_lost_instance_gets_no_more_runs() -> None:
    kept, lost = runners = [Idler(), Idler()]
    instances = Instances(runners, depth=2)
    assert lend(instances, 10) is lost
    instances.retire(lost)
    instances.retire(lost)
    instances.give_back(lost, NOW, NOW + 10)
    assert (instances.count, instances.free) == (1, [kept])
    assert instances.ahead_due_ns(NOW) is None
