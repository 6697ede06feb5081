"""The end of a search: the winner against the current configuration in new processes, and each decision left out."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

from ortserve.errors import ServeError
from ortserve.tools.tune.budget import CONFIRMING_PAIRS, KEEPING_PAIRS
from ortserve.tools.tune.loads import steady
from ortserve.tools.tune.ratios import estimate_ratio, is_confirmed, is_worth_keeping
from ortserve.tools.tune.result import Confirmation, KeyGain
from ortserve.tools.tune.search import Bench, describe
from ortserve.tools.tune.sides import Side
from ortserve.tools.tune.space import Point, changes_of

_PROCESSES: Final = 2
"""New processes of each configuration in a confirmation: where its memory lies differs from one to the next."""
_MOST_PAIRS: Final = 16
_STEP: Final = 0.9
_MOST_STEPS: Final = 6


@dataclass(frozen=True, slots=True)
class Ending:
    """What the end of a search found.

    Attributes:
        point: The best configuration; empty if it was not confirmed.
        confirmation: Of this point; of the winner, if it was not confirmed.
        gains: Of each decision of the winner.
    """

    point: Point
    confirmation: Confirmation
    gains: tuple[KeyGain, ...] = ()


def end_search(bench: Bench, winner: Point, guess: float) -> Ending:
    """Confirm the winner, leave out what gains nothing, and confirm what is left.

    Args:
        bench: Of the search; no process of its own is open.
        winner: Of the search; not empty.
        guess: The rate that the current configuration sustains.

    Raises:
        ServeError: A configuration that worked in the search fails now.
    """
    confirmation = confirm(bench, winner, guess)
    if not is_confirmed(confirmation.ratio):
        return Ending({}, confirmation)
    if len(winner) == 1:
        gain = KeyGain(next(iter(winner)), changes_of(bench.space, winner), confirmation.ratio, is_kept=True)
        return Ending(winner, confirmation, (gain,))
    kept, gains = leave_out(bench, winner, confirmation.best.throughput_per_s or guess)
    if kept and kept != winner:
        again = confirm(bench, kept, guess)
        if is_confirmed(again.ratio):
            return Ending(kept, again, gains)
    restored = tuple(KeyGain(gain.parameter, gain.changes, gain.ratio, is_kept=True) for gain in gains)
    return Ending(winner, confirmation, restored)


def confirm(bench: Bench, point: Point, guess: float) -> Confirmation:
    """Compare a configuration with the current one in new processes, for a number of pairs that is set beforehand."""
    changes = changes_of(bench.space, point)
    bench.show(f"confirming {describe(changes)}")
    pairs = bench.budget.pairs_within(2 * _PROCESSES, CONFIRMING_PAIRS, _MOST_PAIRS)
    goal, logs, sides = bench.goal, list[float](), list[tuple[Side, Side]]()
    rates: list[float | None] = [None, None]
    for number in range(_PROCESSES):
        with ExitStack() as stack:
            before, after = (
                Side(stack.enter_context(closing(bench.open(one))), guess) for one in ({}, changes)
            )
            logs += bench.compare(before, after, pairs // _PROCESSES)
            sides.append((before, after))
            is_last = number == _PROCESSES - 1
            if is_last and goal.rate_per_s is None and bench.budget.left_s > bench.budget.cost_s(0, _MOST_STEPS):
                bench.show("looking for the constant rates that both sustain")
                rates = [sustain(bench, side) for side in (before, after)]
    current, best = (
        Side(one.contender, one.guess, [reading for pair in sides for reading in pair[index].readings])
        for index, one in enumerate(sides[0])
    )
    return Confirmation(estimate_ratio(logs), len(logs), current.figures(goal), best.figures(goal), *rates)


def sustain(bench: Bench, side: Side) -> float | None:
    """The highest constant rate, stepwise downwards, that keeps the percentile within the bound; None if none did."""
    rate = side.guess
    for _ in range(_MOST_STEPS):
        reading = side.contender.measure(steady(rate, bench.goal.percentile), len(side.readings))
        if reading.late_share <= 1 - bench.goal.percentile / 100 + 1e-9:
            return rate
        rate *= _STEP
    return None


def leave_out(bench: Bench, winner: Point, guess: float) -> tuple[Point, tuple[KeyGain, ...]]:
    """Leave out one decision after the other, for good if nothing is lost without it.

    Returns:
        What is left, and the gain of each decision. Decisions for which there is no time stay.
    """
    kept = dict(winner)
    gains: list[KeyGain] = []
    budget = bench.budget
    with ExitStack() as stack:
        full = Side(stack.enter_context(closing(bench.open(changes_of(bench.space, kept)))), guess)
        for name in _least_first(bench, winner):
            changes = changes_of(bench.space, {name: winner[name]})
            without = {other: number for other, number in kept.items() if other != name}
            end_s = budget.cost_s(2 * _PROCESSES, CONFIRMING_PAIRS)
            if not without or budget.left_s < end_s + budget.cost_s(1, KEEPING_PAIRS):
                gains.append(KeyGain(name, changes, None, is_kept=True))
                continue
            bench.show(f"leaving out {describe(changes)}")
            side = Side(stack.enter_context(closing(bench.open(changes_of(bench.space, without)))), guess)
            try:
                logs = [-log for log in bench.compare(full, side, KEEPING_PAIRS)]
            except ServeError:  # the others do not work without it
                gains.append(KeyGain(name, changes, None, is_kept=True))
                continue
            is_kept = is_worth_keeping(logs, bench.noise)
            gains.append(KeyGain(name, changes, estimate_ratio(logs), is_kept))
            if not is_kept:
                kept, full = without, side
            else:
                side.contender.close()
    return kept, tuple(gains)


def _least_first(bench: Bench, point: Point) -> Sequence[str]:
    """Its parameters: those that usually matter least first."""
    names = [parameter.name for parameter in bench.space if parameter.name in point]
    return names[::-1]
