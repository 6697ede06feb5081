"""The speed check in virtual time: the candidates that are too slow, and the time to detect them."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Final

import pytest

from ortserve.registry.load.batch_sizes import SizeLatency
from ortserve.registry.speed_check import (
    CERTAIN_SPEED_RUNS,
    MAX_REJECTED_SPEED_RUNS,
    MAX_SPEED_ROUNDS,
    MIN_SPEED_ROUNDS,
    common_sizes,
    find_slowdown,
)

MS: Final = 1_000_000


class Machine:
    """A clock that runs advance."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.runs = 0

    def runner(self, times_ms: Sequence[float]) -> "Runner":
        return Runner(self, chain(times_ms, repeat(times_ms[-1])))


class Runner:
    def __init__(self, machine: Machine, times_ms: Iterator[float]) -> None:
        self._machine = machine
        self._times_ms = times_ms

    async def __call__(self, rows: int) -> int:
        taken_ns = round(next(self._times_ms) * MS)
        self._machine.now_ns += taken_ns
        self._machine.runs += 1
        return taken_ns


def slowdown(
    candidate: Sequence[float], serving: Sequence[float], sizes: Sequence[int] = (8,)
) -> tuple[str | None, int]:
    machine = Machine()
    runs = machine.runner(candidate), machine.runner(serving)
    return asyncio.run(find_slowdown(sizes, *runs, 1.5, lambda: machine.now_ns)), machine.runs


@pytest.mark.parametrize(
    ("candidate", "serving", "runs"),
    [
        ([1], [1], 2 * CERTAIN_SPEED_RUNS),
        ([1.4], [1], 2 * CERTAIN_SPEED_RUNS),
        (
            [9] * CERTAIN_SPEED_RUNS + [1.5],
            [1],
            2 * CERTAIN_SPEED_RUNS + 2,
        ),  # other work on the machine delayed its first runs
        ([1], [9, 8, 1], 2 * CERTAIN_SPEED_RUNS + 4),  # it delayed those of the serving version
        ([1], range(1, MAX_SPEED_ROUNDS + 1), 2 * MAX_SPEED_ROUNDS),  # it delayed all of them
        ([0.15], [0.06], 2 * CERTAIN_SPEED_RUNS),  # 2.5 times slower, but only by 0.09 ms
        ([1], [0, 0, 1], 2 * CERTAIN_SPEED_RUNS + 2),  # the serving version rejected the first runs
    ],
)
def test_candidate_that_is_fast_enough_passes(candidate: list[float], serving: Sequence[float], runs: int) -> None:
    assert slowdown(candidate, serving) == ("", runs)


def test_few_interrupted_runs_of_the_serving_version_do_not_hide_a_slow_candidate() -> None:
    assert "takes 3.000 ms, 3.00 times the 1.000 ms" in (slowdown([3], [4, 2.5, 9, 3, 6, 8, 2, 1])[0] or "")


def test_candidate_that_could_not_be_compared_passes_without_a_verdict() -> None:
    assert slowdown([3], [0]) == (None, MAX_REJECTED_SPEED_RUNS)
    assert slowdown([3], [1, 1, 0]) == (None, 2 * 2 + MAX_REJECTED_SPEED_RUNS)


def test_size_that_could_not_be_compared_leaves_no_verdict_but_hides_no_slow_one() -> None:
    compared, rejected = [1] * CERTAIN_SPEED_RUNS, [0] * MAX_REJECTED_SPEED_RUNS
    assert slowdown([1], [*compared, *rejected], sizes=(1, 4))[0] is None
    assert "a batch of 4 rows takes" in (slowdown([3], [*rejected, 1], sizes=(1, 4))[0] or "")


def test_slow_candidate_is_named_with_its_figures() -> None:
    text, runs = slowdown([3], [1])

    assert text == (
        "a batch of 8 rows takes 3.000 ms, 3.00 times the 1.000 ms of the serving version; expected at most 1.5 times"
    )
    assert runs == 2 * MAX_SPEED_ROUNDS


def test_serving_version_that_rejects_most_runs_lets_no_slow_candidate_pass() -> None:
    """One run of the serving version in the first three rounds, delayed by other work, must not decide."""
    text, _ = slowdown([3], [0, 0, 5, *([0, 1] * MAX_SPEED_ROUNDS)])
    assert "3.00 times the 1.000 ms" in (text or "")


def test_long_runs_end_early_but_each_size_is_compared() -> None:
    assert slowdown([40_000], [10_000])[1] == 2 * MIN_SPEED_ROUNDS
    assert slowdown([10_000], [10_000], sizes=(1, 4))[1] == 2 * 2 * MIN_SPEED_ROUNDS


def test_sizes_are_those_that_both_have() -> None:
    one, other = ([SizeLatency(rows, 1, 1, 1, 1) for rows in sizes] for sizes in ([1, 2, 4, 8, 16], [1, 2, 4, 8]))

    assert common_sizes(one, other) == [1, 4, 8]
    assert common_sizes(one, []) == []
