"""Readers that make no progress for too long."""

from ortserve.frontends.grpc.native.timeouts import SendProgress

S = 10**9


def test_reader_without_progress_is_late_after_the_timeout() -> None:
    progress = SendProgress(10)
    assert progress.stalled(0, {1: 5}) == []
    assert progress.stalled(9 * S, {1: 5}) == []
    assert progress.stalled(10 * S, {1: 5}) == [1]


def test_reader_with_progress_in_each_period_is_never_late() -> None:
    progress = SendProgress(10)
    assert not any(progress.stalled(9 * S * turn, {1: turn}) for turn in range(10))


def test_empty_output_restarts_the_timeout() -> None:
    progress = SendProgress(10)
    assert progress.stalled(0, {1: 5}) == []
    assert progress.stalled(9 * S, {}) == []
    assert progress.stalled(18 * S, {1: 5}) == []
    assert progress.stalled(28 * S, {1: 5}) == [1]


def test_decreased_count_is_not_progress() -> None:
    progress = SendProgress(10)
    assert progress.stalled(0, {1: 500}) == []
    assert progress.stalled(9 * S, {1: 5}) == []
    assert progress.stalled(10 * S, {1: 5}) == [1]
    assert progress.stalled(11 * S, {1: 6}) == []


def test_timeouts_are_independent() -> None:
    progress = SendProgress(10)
    assert progress.stalled(0, {0: 1, 1: 1, 2: 1}) == []
    assert progress.stalled(10 * S, {0: 2, 1: 1, 2: 1, 3: 0}) == [1, 2]
