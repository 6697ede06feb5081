"""What is learned of how long answers take once their outputs are there."""

import random

from ortserve.batching.answering import AnswerTime

MS = 1_000_000


def taught(*times_ns: int) -> AnswerTime:
    answers = AnswerTime()
    for ns in times_ns:
        answers.observe(ns)
    return answers


def test_deadline_is_as_it_was_before_anything_is_known() -> None:
    assert taught().settle_by_ns(10 * MS, 0) == 10 * MS


def test_outputs_must_be_there_before_the_deadline_by_the_time_that_answers_take() -> None:
    assert taught(2 * MS).settle_by_ns(10 * MS, 0) == 8 * MS


def test_half_of_what_is_left_stays_for_the_run() -> None:
    assert taught(500 * MS).settle_by_ns(10 * MS, 4 * MS) == 7 * MS


def test_deadline_that_has_passed_is_left_as_it_is() -> None:
    assert taught(2 * MS).settle_by_ns(10 * MS, 11 * MS) == 10 * MS


def test_few_times_are_longer() -> None:
    seeded = random.Random(7)
    answers, longer = AnswerTime(), 0
    for number in range(20_000):
        ns = round(seeded.gammavariate(4, MS / 4))
        longer += number >= 1000 and ns > answers.high_ns
        answers.observe(ns)
    assert 0.03 < longer / 19_000 < 0.1


def test_one_long_pause_counts_as_ten_times_the_mean_and_is_soon_forgotten() -> None:
    answers = taught(*[MS] * 100, 1000 * MS)
    assert answers.high_ns < 7 * MS
    for _ in range(40):
        answers.observe(MS)
    assert answers.high_ns < 1.1 * MS


def test_pause_at_the_first_batch_is_soon_forgotten() -> None:
    assert taught(1000 * MS, *[MS] * 80).high_ns < 1.5 * MS
