"""Who has taken nothing for too long."""

from ortserve.frontends.grpc.native.send_waits import SendWaits

S = 10**9


def test_who_takes_nothing_is_late_after_the_time_and_not_before() -> None:
    waits = SendWaits(10)
    assert waits.late(0, {1: 5}) == []
    assert waits.late(9 * S, {1: 5}) == []
    assert waits.late(10 * S, {1: 5}) == [1]


def test_who_takes_something_in_each_time_is_never_late() -> None:
    waits = SendWaits(10)
    assert not any(waits.late(9 * S * turn, {1: turn}) for turn in range(10))


def test_who_has_nothing_to_take_begins_anew() -> None:
    waits = SendWaits(10)
    assert waits.late(0, {1: 5}) == []
    assert waits.late(9 * S, {}) == []
    assert waits.late(18 * S, {1: 5}) == []
    assert waits.late(28 * S, {1: 5}) == [1]


def test_number_that_became_smaller_counts_from_there_and_is_nothing_taken() -> None:
    waits = SendWaits(10)
    assert waits.late(0, {1: 500}) == []
    assert waits.late(9 * S, {1: 5}) == []
    assert waits.late(10 * S, {1: 5}) == [1]
    assert waits.late(11 * S, {1: 6}) == []


def test_each_is_waited_for_on_its_own() -> None:
    waits = SendWaits(10)
    assert waits.late(0, {0: 1, 1: 1, 2: 1}) == []
    assert waits.late(10 * S, {0: 2, 1: 1, 2: 1, 3: 0}) == [1, 2]
