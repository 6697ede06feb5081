"""The end of a search: the winner against the current configuration in new processes, and each decision left out."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

from ortserve.errors import ServeError
from ortserve.tools.tune.budget import CONFIRMING_PAIRS
from ortserve.tools.tune.loads import steady
from ortserve.tools.tune.ratios import LEAST_GAIN, estimate_ratio, is_confirmed, is_decided, is_worth_keeping
from ortserve.tools.tune.result import Confirmation, KeyGain
from ortserve.tools.tune.search import Bench, describe
from ortserve.tools.tune.sides import Side
from ortserve.tools.tune.space import Point, changes_of

_KEEPING_PAIRS: Final = 8
"""Most, to see what one decision gains."""
_LEAST_PAIRS: Final = 3
_STEP: Final = 0.9
_MOST_STEPS: Final = 6


@dataclass(frozen=True, slots=True)
class Ending:
    """What the end of a search found.

    Attributes:
        point: The best configuration; empty if it was not confirmed.
        confirmation: Of this point, or of the one that was not confirmed.
        gains: Of each decision of the winner.
    """

    point: Point
    confirmation: Confirmation
    gains: tuple[KeyGain, ...] = ()


def end_search(bench: Bench, winner: Point, guess: float) -> Ending:
    """Leave out the decisions of the winner that gain nothing, and confirm what is left.

    Args:
        bench: Of the search; no process of its own is open.
        winner: Of the search; not empty.
        guess: The rate that the current configuration sustains.

    Raises:
        ServeError: A configuration that worked in the search fails now.
    """
    kept, gains = leave_out(bench, winner, guess) if len(winner) > 1 else (winner, ())
    confirmation = confirm(bench, kept, guess)
    if not is_confirmed(confirmation.ratio):
        return Ending({}, confirmation)
    if len(kept) == 1:  # the confirmation has left it out, too
        (name,) = kept
        gain = KeyGain(name, changes_of(bench.space, kept), confirmation.ratio, is_kept=True)
        gains = (*(one for one in gains if one.parameter != name), gain)
    return Ending(kept, confirmation, gains)


def confirm(bench: Bench, point: Point, guess: float) -> Confirmation:
    """Compare a configuration with the current one in new processes, for a number of pairs that is set beforehand."""
    changes = changes_of(bench.space, point)
    bench.show(f"confirming {describe(changes)}")
    processes, pairs = bench.budget.confirmation(bench.noise.pairs_for(LEAST_GAIN))
    goal, logs, sides = bench.goal, list[float](), list[tuple[Side, Side]]()
    rates: list[float | None] = [None, None]
    for number in range(processes):
        with ExitStack() as stack:
            before = Side(stack.enter_context(closing(bench.open({}))), guess)
            after = before.beside(stack.enter_context(closing(bench.open(changes))))
            logs += bench.compare(before, after, pairs)
            sides.append((before, after))
            if (
                number == processes - 1
                and goal.rate_per_s is None
                and bench.budget.left_s > bench.budget.cost_s(0, _MOST_STEPS)
            ):
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
        reading = side.contender.measure(steady(rate), len(side.readings))
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
        names = _least_first(bench, winner)
        for number, name in enumerate(names):
            changes = changes_of(bench.space, {name: winner[name]})
            without = {other: number for other, number in kept.items() if other != name}
            share_s = (budget.left_s - budget.cost_s(4, CONFIRMING_PAIRS)) / (len(names) - number)
            pairs = min(_KEEPING_PAIRS, int((share_s - budget.cost_s(1, 0)) / budget.cost_s(0, 1)))
            if not without or pairs < _LEAST_PAIRS:
                gains.append(KeyGain(name, changes, None, is_kept=True))
                continue
            bench.show(f"leaving out {describe(changes)}")
            side = full.beside(stack.enter_context(closing(bench.open(changes_of(bench.space, without)))))
            try:
                logs = bench.compare(side, full, pairs, is_decided)
            except ServeError:  # the others do not work without it
                gains.append(KeyGain(name, changes, None, is_kept=True))
                continue
            is_kept = is_worth_keeping(logs, bench.noise)
            gains.append(KeyGain(name, changes, bench.noise.estimate(logs), is_kept))
            if not is_kept:
                kept, full = without, side
            else:
                side.contender.close()
    return kept, tuple(gains)


def _least_first(bench: Bench, point: Point) -> Sequence[str]:
    """Its parameters: those that usually matter least first."""
    names = [parameter.name for parameter in bench.space if parameter.name in point]
    return names[::-1]
