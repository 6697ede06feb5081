"""The rate at which callers read answers, by literals."""

import pytest

from ortserve.frontends.read_rate import ReadRate

S = 10**9
ANSWER = object()


def note(rate: ReadRate, second: int, unsent: int, subject: object = ANSWER) -> bool:
    rate.note(second * S, subject, -unsent, has_unsent=unsent > 0)
    return rate.is_slow(second * S)


@pytest.mark.parametrize("per_second", [0, 99, 100, 1000])
def test_caller_below_the_rate_is_slow_from_a_sixth_of_the_timeout_on(per_second: int) -> None:
    rate = ReadRate(100, 6)
    slow = [note(rate, second, 100_000 - second * per_second) for second in range(20)]
    assert slow == [False] + [per_second < 100] * 19


def test_fast_start_of_an_answer_gives_no_later_credit() -> None:
    rate = ReadRate(100, 6)
    slow = [note(rate, second, unsent) for second, unsent in enumerate([10**6, *[1000] * 12])]
    assert slow == [False] * 7 + [True] * 6


def test_next_answer_restarts_the_rate() -> None:
    rate = ReadRate(100, 6)
    slow = [note(rate, second, 1000, subject) for second, subject in enumerate([ANSWER, ANSWER, object()])]
    assert slow == [False, True, False]
    assert not note(rate, 3, 0)
    assert not rate.is_slow(9 * S)


def test_slow_caller_need_not_make_up_for_all_of_the_past() -> None:
    rate = ReadRate(100, 6)
    assert all([note(rate, second, 100_000) for second in range(1000)][1:])
    assert not note(rate, 1000, 99_000)
