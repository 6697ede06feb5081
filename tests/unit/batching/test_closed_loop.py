"""The decision to wait for returning callers, with generated histories."""

import random
from collections.abc import Callable

import pytest

from ortserve.batching.closed_loop import ClosedLoopWait
from ortserve.batching.latency import Line

US = 1_000
MS = 1_000_000
GPU_LIKE = Line(50 * US, 1500 * US)
CPU_LIKE = Line(MS, MS)
SOLO_NS = 1550 * US


def taught(
    arrivals_us: Callable[[random.Random], list[float]], answers: int = 200, cycle_ns: int = 3 * MS
) -> ClosedLoopWait:
    """A profile after many answers, each followed by arrivals (µs after it). The last answer is at time 0."""
    draw = random.Random(0)
    echo = ClosedLoopWait(-answers * cycle_ns, SOLO_NS)
    for number in range(answers):
        at_ns = (number - answers) * cycle_ns
        echo.on_answer(at_ns, SOLO_NS)
        for after_us in sorted(arrivals_us(draw)):
            echo.on_arrival(1, at_ns + int(after_us * US))
    echo.on_answer(0, SOLO_NS)
    return echo


def test_callers_that_return_together_are_waited_for() -> None:
    echo = taught(lambda draw: [100, 200, 300, 400])
    echo.on_arrival(1, 100 * US)
    until_ns = echo.wait_until(1, 64, GPU_LIKE, 100 * US)
    assert until_ns is not None
    assert 300 * US <= until_ns <= 500 * US


def test_wait_ends_once_all_callers_have_returned() -> None:
    echo = taught(lambda draw: [100, 200, 300, 400])
    for count, at_us in enumerate((100, 200, 300, 400), start=1):
        echo.on_arrival(1, at_us * US)
        waits = echo.wait_until(count, 64, GPU_LIKE, at_us * US) is not None
        assert waits == (count < 4)


def test_independent_callers_are_never_waited_for() -> None:
    draw = random.Random(1)
    echo = ClosedLoopWait(0, SOLO_NS)
    at_ns, waits = 0, 0
    for _ in range(2000):
        echo.on_answer(at_ns, SOLO_NS)
        next_ns = at_ns + 3 * MS
        come_ns = at_ns
        while (come_ns := come_ns + int(draw.expovariate(1 / (300 * US)))) < next_ns:
            echo.on_arrival(1, come_ns)
            waits += echo.wait_until(1, 64, GPU_LIKE, come_ns) is not None
        at_ns = next_ns
    assert waits < 200  # of about 20,000 arrivals: the estimate varies a little


def test_rows_that_gain_too_little_are_not_delayed() -> None:
    echo = taught(lambda draw: [700])
    echo.on_arrival(8, 10 * US)
    assert echo.wait_until(8, 64, CPU_LIKE, 10 * US) is None


def test_full_batch_and_unknown_class_start_at_once() -> None:
    assert ClosedLoopWait(0, SOLO_NS).wait_until(1, 64, GPU_LIKE, 0) is None
    assert taught(lambda draw: [100, 200]).wait_until(64, 64, GPU_LIKE, 50 * US) is None


def test_moment_lies_within_half_the_time_of_a_row_alone() -> None:
    echo = taught(lambda draw: [draw.uniform(0, 2000) for _ in range(12)], cycle_ns=10 * MS)
    until_ns = echo.wait_until(1, 64, GPU_LIKE, 0)
    assert until_ns is None or until_ns <= SOLO_NS // 2
    assert echo.wait_until(1, 64, GPU_LIKE, SOLO_NS // 2) is None


@pytest.mark.parametrize(("more_rows", "stays_on"), [(0, False), (3, True)])
def test_class_that_gains_nothing_by_waiting_stops(more_rows: int, stays_on: bool) -> None:
    echo = taught(lambda draw: [100, 200, 300, 400])
    for _ in range(1000):
        assert echo.begin_wait(1, 0)
        assert not echo.begin_wait(1, 100 * US), "it is the same wait"
        echo.end_wait(1 + more_rows, GPU_LIKE, 400 * US)
    assert echo.is_on == stays_on
    assert (echo.wait_until(1, 64, GPU_LIKE, 0) is not None) == stays_on


def test_class_whose_waits_were_delayed_by_other_work_waits_again_later() -> None:
    echo = taught(lambda draw: [100, 200, 300, 400])
    for pause in (10_000, 20_000, 40_000):
        for _ in range(1000):
            assert echo.begin_wait(1, 0)
            echo.end_wait(4, GPU_LIKE, 20 * MS)  # the loop was busy
        assert not echo.is_on
        for _ in range(pause):
            assert not echo.is_on
            echo.on_answer(0, SOLO_NS)
        assert echo.is_on


def test_pauses_do_not_add_up_over_times_in_which_waits_gained() -> None:
    echo = taught(lambda draw: [100, 200, 300, 400])
    for _ in range(3):
        for late_ns in (400 * US, 20 * MS):
            for _ in range(1000):
                assert echo.begin_wait(1, 0)
                echo.end_wait(4, GPU_LIKE, late_ns)
        for _ in range(10_000):
            assert not echo.is_on
            echo.on_answer(0, SOLO_NS)
        assert echo.is_on


def test_batches_without_a_wait_and_vain_waits_teach_nothing() -> None:
    echo = ClosedLoopWait(0, SOLO_NS)
    for _ in range(2000):
        echo.end_wait(1, GPU_LIKE, 400 * US)
        assert echo.begin_wait(1, 0)
        echo.abandon_wait()
    assert echo.is_on
