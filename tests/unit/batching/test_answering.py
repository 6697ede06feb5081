"""The learned time from outputs to written answers."""

import random

from ortserve.batching.latency import AnswerTime

MS = 1_000_000


def taught(*times_ns: int) -> AnswerTime:
    answers = AnswerTime()
    for ns in times_ns:
        answers.observe(0, ns)
    return answers


def test_no_time_is_reserved_before_the_first_measurement() -> None:
    assert taught().reserved_ns(10 * MS) == 0


def test_time_of_answers_is_reserved() -> None:
    assert taught(2 * MS).reserved_ns(10 * MS) == 2 * MS


def test_half_of_the_remaining_time_stays_for_the_run() -> None:
    assert taught(500 * MS).reserved_ns(6 * MS) == 3 * MS


def test_no_time_is_reserved_of_a_passed_deadline() -> None:
    assert taught(2 * MS).reserved_ns(-MS) == 0


def test_some_batches_are_measured() -> None:
    answers = taught()
    assert answers.due_ns == 0
    answers.observe(5 * MS, 6 * MS)
    assert answers.due_ns == 8 * MS


def test_few_answers_take_longer_than_the_learned_time() -> None:
    seeded = random.Random(7)
    answers, longer = AnswerTime(), 0
    for number in range(20_000):
        ns = round(seeded.gammavariate(4, MS / 4))
        longer += number >= 1000 and ns > answers.high_ns
        answers.observe(0, ns)
    assert 0.03 < longer / 19_000 < 0.1


def test_one_long_pause_counts_as_ten_times_the_mean_and_is_soon_forgotten() -> None:
    answers = taught(*[MS] * 100, 1000 * MS)
    assert answers.high_ns < 7 * MS
    for _ in range(40):
        answers.observe(0, MS)
    assert answers.high_ns < 1.1 * MS


def test_pause_at_the_first_batch_is_soon_forgotten() -> None:
    assert taught(1000 * MS, *[MS] * 80).high_ns < 1.5 * MS
