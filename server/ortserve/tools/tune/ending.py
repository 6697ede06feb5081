"""The end of a search: drops decisions of the winner that gain nothing, and confirms the others in new processes."""

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Final

from ortserve.errors import ServeError
from ortserve.tools.statistics import Estimate, estimate_ratio
from ortserve.tools.tune.budget import CONFIRMING_PAIRS, MIN_PAIRS
from ortserve.tools.tune.loads import Reading, steady
from ortserve.tools.tune.ratios import MIN_GAIN, is_confirmed, is_decided
from ortserve.tools.tune.result import Confirmation, KeyGain
from ortserve.tools.tune.search import Experiment, describe
from ortserve.tools.tune.sides import Side
from ortserve.tools.tune.space import Point, changes_of

_KEEPING_PAIRS: Final = 8
"""Maximum number of pairs that measure the gain of one decision."""
_MIN_PAIRS: Final = 3
_STEP: Final = 0.9
_MAX_STEPS: Final = 6


@dataclass(frozen=True, slots=True)
class Ending:
    """The result of the end of a search.

    Attributes:
        point: The best configuration; empty if it was not confirmed.
        confirmation: The comparison that confirmed the configuration, or that failed to.
        gains: The gain of each decision of the winner; empty if it was not confirmed.
        why: Why it was not confirmed, if not because of its ratio; else empty.
    """

    point: Point
    confirmation: Confirmation
    gains: tuple[KeyGain, ...] = ()
    why: str = ""


def end_search(experiment: Experiment, winner: Point, guess: float) -> Ending:
    """Leave out the decisions of the winner that gain nothing, and confirm the others.

    Args:
        experiment: The experiment of the search, whose processes have ended.
        winner: The best point of the search; not empty.
        guess: The rate that the current configuration is expected to sustain.

    Raises:
        ServeError: A configuration that worked in the search fails now.
    """
    kept, gains = leave_out(experiment, winner, guess) if len(winner) > 1 else (winner, ())
    ending = confirm(experiment, kept, guess)
    if not ending.point:
        return ending
    if len(kept) == 1:  # the confirmation is also the comparison without this decision
        (name,) = kept
        gain = KeyGain(name, changes_of(experiment.space, kept), ending.confirmation.ratio, is_kept=True)
        gains = (*(one for one in gains if one.parameter != name), gain)
    return replace(ending, gains=gains)


def confirm(experiment: Experiment, point: Point, guess: float) -> Ending:
    """Compare a configuration with the current one in new processes, for a number of pairs that is set beforehand."""
    changes = changes_of(experiment.space, point)
    experiment.show(f"confirming {describe(changes)}")
    goal, budget, logs = experiment.goal, experiment.budget, list[float]()
    processes, pairs = budget.confirmation(experiment.noise.pairs_for(MIN_GAIN))
    rates: list[float | None] = [None, None]
    current, best = list[Reading](), list[Reading]()
    for number in range(processes):
        if logs and budget.is_over:
            break
        with ExitStack() as stack:
            before = Side(stack.enter_context(closing(experiment.open({}))), guess)
            after = before.beside(stack.enter_context(closing(experiment.open(changes))))
            logs += experiment.compare(before, after, pairs)
            if number == processes - 1 and goal.rate_per_s is None and budget.left_s > budget.cost_s(0, _MAX_STEPS):
                experiment.show("looking for the constant rates that both sustain")
                rates = [sustain(experiment, side) for side in (before, after)]
        current += before.readings
        best += after.readings
    ratio, figures = estimate_ratio(logs), goal.figures(current)
    of_best = goal.scaled(goal.figures(best), figures, ratio.value)
    confirmation = Confirmation(ratio, len(logs), figures, of_best, *rates)
    too_few = len(logs) < min(pairs, MIN_PAIRS)
    why = "no time was left to confirm it; allow more with --max-minutes" if too_few else goal.misses(best, current)
    return Ending({} if why or not is_confirmed(ratio) else point, confirmation, why=why)


def sustain(experiment: Experiment, side: Side) -> float | None:
    """Find the highest constant rate with the percentile within the bound, in steps down from the expected rate.

    Returns None if no rate that was tried is within the bound.
    """
    rate = side.guess
    for _ in range(_MAX_STEPS):
        reading = side.contender.measure(steady(rate), len(side.readings))
        if reading.late_share <= 1 - experiment.goal.percentile / 100 + 1e-9:
            return rate
        rate *= _STEP
    return None


def leave_out(experiment: Experiment, winner: Point, guess: float) -> tuple[Point, tuple[KeyGain, ...]]:
    """Measure the configuration without each decision in turn, and drop decisions that gain nothing.

    Returns:
        The remaining decisions, and the gain of each decision. A decision also stays if there is no time to leave it
        out, or if the others fail or miss the bound without it.
    """
    kept, gains, budget = dict(winner), list[KeyGain](), experiment.budget
    names = [parameter.name for parameter in experiment.space if parameter.name in winner]
    names.reverse()  # begin with decisions that usually matter least
    if budget.left_s < budget.cost_s(5, CONFIRMING_PAIRS + _MIN_PAIRS):
        return winner, tuple(
            KeyGain(name, changes_of(experiment.space, {name: winner[name]}), None, True) for name in names
        )
    with ExitStack() as opened:
        full = Side(opened.enter_context(closing(experiment.open(changes_of(experiment.space, kept)))), guess)
        for number, name in enumerate(names):
            changes = changes_of(experiment.space, {name: winner[name]})
            without = {other: choice for other, choice in kept.items() if other != name}
            share_s = (budget.left_s - budget.cost_s(4, CONFIRMING_PAIRS)) / (len(names) - number)
            pairs = min(_KEEPING_PAIRS, int((share_s - budget.cost_s(1, 0)) / budget.cost_s(0, 1)))
            ratio: Estimate | None = None
            is_kept = True
            if without and pairs >= _MIN_PAIRS:
                experiment.show(f"leaving out {describe(changes)}")
                first = len(full.readings)
                try:
                    with ExitStack() as trial:
                        side = full.beside(
                            trial.enter_context(closing(experiment.open(changes_of(experiment.space, without))))
                        )
                        ratio = experiment.noise.estimate(experiment.compare(side, full, pairs, is_decided))
                        is_late = bool(experiment.goal.misses(side.readings, full.readings[first:]))
                        is_kept = is_late or is_confirmed(ratio)
                        if not is_kept:
                            opened.close()
                            opened.push(trial.pop_all())
                            kept, full = without, side
                except ServeError:
                    ratio = None
            gains.append(KeyGain(name, changes, ratio, is_kept))
    return kept, tuple(gains)
