"""Who has taken nothing for too long."""

from ortserve.frontends.grpc.native.timeouts import SendProgress

S = 10**9


def test_who_takes_nothing_is_late_after_the_time_and_not_before() -> None:
    progress = SendProgress(10)
    assert progress.stalled(0, {1: 5}) == []
    assert progress.stalled(9 * S, {1: 5}) == []
    assert progress.stalled(10 * S, {1: 5}) == [1]


def test_who_takes_something_in_each_time_is_never_late() -> None:
    progress = SendProgress(10)
    assert not any(progress.stalled(9 * S * turn, {1: turn}) for turn in range(10))


def test_who_has_nothing_to_take_begins_anew() -> None:
    progress = SendProgress(10)
    assert progress.stalled(0, {1: 5}) == []
    assert progress.stalled(9 * S, {}) == []
    assert progress.stalled(18 * S, {1: 5}) == []
    assert progress.stalled(28 * S, {1: 5}) == [1]


def test_number_that_became_smaller_counts_from_there_and_is_nothing_taken() -> None:
    progress = SendProgress(10)
    assert progress.stalled(0, {1: 500}) == []
    assert progress.stalled(9 * S, {1: 5}) == []
    assert progress.stalled(10 * S, {1: 5}) == [1]
    assert progress.stalled(11 * S, {1: 6}) == []


def test_each_is_waited_for_on_its_own() -> None:
    progress = SendProgress(10)
    assert progress.stalled(0, {0: 1, 1: 1, 2: 1}) == []
    assert progress.stalled(10 * S, {0: 2, 1: 1, 2: 1, 3: 0}) == [1, 2]
