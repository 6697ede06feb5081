"""The search: trials that alternate with the current configuration, first parameter by parameter, then by a sampler."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from ortserve.errors import ServeError
from ortserve.tools.statistics import Estimate, estimate_ratio
from ortserve.tools.tune.budget import Budget
from ortserve.tools.tune.journal import Journal, key_of
from ortserve.tools.tune.ratios import MIN_GAIN, Noise, is_hopeless
from ortserve.tools.tune.result import State, Trial
from ortserve.tools.tune.sides import Contender, Goal, Lab, Side, take_pair
from ortserve.tools.tune.space import Changes, Parameter, Point, changes_of, default_point, joint_points

_PAIRS: Final = 4
"""Maximum number of pairs of a trial."""
_FLOOR_PAIRS: Final = 3
_FLOOR_SHARE: Final = 0.25
"""Share of the time limit after which two pairs are enough."""
_MAX_REPEATED: Final = 30
"""The search ends after this number of proposals in a row that were tried before: the sampler has nothing new."""
_PATIENCE: Final = 20
"""The search ends after this number of proposals in a row that were no better: it will hardly find more."""


@dataclass(slots=True)
class Experiment:
    """The parts that a search and its end work with.

    Attributes:
        lab: Opens configurations.
        goal: The objective and the load.
        space: All parameters.
        budget: The time budget.
        noise: The noise of all pairs so far.
        show: Receives a line about the current work.
        max_trials: Maximum number of trials, without the one of the current configuration.
    """

    lab: Lab
    goal: Goal
    space: tuple[Parameter, ...]
    budget: Budget
    noise: Noise
    show: Callable[[str], object]
    max_trials: int = 10_000

    def open(self, changes: Changes, version: int | None = None) -> Contender:
        """Open a configuration, and learn how long that takes. Raises ServeError."""
        began_s = self.budget.spent_s
        contender = self.lab.open(changes, version)
        self.budget.opened(self.budget.spent_s - began_s)
        return contender

    def compare(
        self, one: Side, other: Side, count: int, is_enough: Callable[[list[float], Noise], bool] | None = None
    ) -> list[float]:
        """Measure up to ``count`` pairs of two sides, and learn their noise and duration.

        After the first pair, it stops if the time is over or ``is_enough`` returns True.

        Returns:
            For each pair, the logarithm of the figure of ``other`` divided by the figure of ``one``.

        Raises:
            ServeError: One of the sides is unusable.
        """
        logs: list[float] = []
        budget = self.budget
        while len(logs) < count and not (logs and (budget.is_over or (is_enough and is_enough(logs, self.noise)))):
            began_s = budget.spent_s
            logs.append(take_pair(one, other, self.goal, is_swapped=len(logs) % 2 == 1))
            budget.measured(budget.spent_s - began_s)
        self.noise.learn(logs)
        return logs


def measure_floor(experiment: Experiment, current: Side) -> Estimate | None:
    """Compare the current configuration with itself, in two processes. Real differences exceed this noise.

    Returns:
        The ratio; None if no request is answered within the bound, so that there is nothing to compare.

    Raises:
        ServeError: The current configuration does not run.
    """
    experiment.show("measuring the noise of this machine")
    current.measure(experiment.goal, 0, may_fall=True)
    if current.readings.pop().late_share == 1:
        return None
    with closing(experiment.open({})) as twin:

        def is_enough(logs: list[float], _: Noise) -> bool:
            return len(logs) > 1 and experiment.budget.is_mostly_spent(_FLOOR_SHARE)

        return estimate_ratio(experiment.compare(current, current.beside(twin), _FLOOR_PAIRS, is_enough))


class Search:
    """Trials against the current configuration until the time is over, or nothing better is found."""

    def __init__(self, experiment: Experiment, journal: Journal, current: Side) -> None:
        """``current`` is not closed."""
        self._experiment = experiment
        self._journal = journal
        self._current = current
        self._best: Point = {}

    def run(self) -> Point | None:
        """Search; returns the best point, None if no trial was better than the current configuration."""
        self._enter_current()
        for point in self._coordinates():
            if not self._has_time():
                return self._winner()
            if self._is_better(self._find(point), self._best):
                self._best = point
        repeated = lost = 0
        while self._has_time() and repeated < _MAX_REPEATED and lost < _PATIENCE:
            point = self._journal.ask()
            known = self._journal.trials.get(key_of(point))
            if known is not None:
                repeated += 1
                self._journal.tell(point, known, math.log(known.ratio.value) if known.ratio else None)
                continue
            repeated = 0
            if self._is_better(self._measure(point), self._best):
                self._best, lost = point, 0
            else:
                lost += 1
        return self._winner()

    def _enter_current(self) -> None:
        """Record the current configuration as the first trial. The sampler starts from it, and the chart shows it."""
        if key_of({}) not in self._journal.trials:
            self._journal.enqueue({})
            self._journal.ask()
            readings = self._current.readings
            figures = self._experiment.goal.figures(readings) if readings else None
            ratio = Estimate(1.0, 1.0, 1.0)
            trial = Trial(0, {}, state="measured", why="", ratio=ratio, pairs=0, figures=figures)
            self._journal.tell({}, trial, 0.0)

    def _coordinates(self) -> Iterator[Point]:
        """Points with one more change than the best point so far. The defaults come first, if they differ."""
        space = self._experiment.space
        if defaults := default_point(space):
            yield defaults
        for parameter in space:
            for number in range(1, len(parameter.choices)):
                yield {**self._best, parameter.name: number}
            if parameter.name == "instances":
                for joint in joint_points(space):
                    yield {**self._best, **joint}

    def _has_time(self) -> bool:
        budget = self._experiment.budget
        if len(self._journal.trials) > self._experiment.max_trials:
            return False
        return budget.left_s > budget.end_s(len(self._winner() or ())) + budget.cost_s(1, 2)

    def _find(self, point: Point) -> Trial:
        """The trial of a point: from the journal, or new."""
        known = self._journal.trials.get(key_of(point))
        if known is not None:
            return known
        self._journal.enqueue(point)
        while True:  # points of an interrupted search come first
            asked = self._journal.ask()
            trial = self._measure(asked)
            if asked == point:
                return trial

    def _measure(self, point: Point) -> Trial:
        """Measure the point that ``ask`` returned, and record the trial."""
        experiment, current = self._experiment, self._current
        changes = changes_of(experiment.space, point)
        number = len(self._journal.trials)
        experiment.show(f"trial {number}: {describe(changes)}")
        before = len(current.readings)
        logs: list[float] = []
        figures = None
        try:
            with closing(experiment.open(changes)) as contender:
                side = current.beside(contender)
                logs = experiment.compare(current, side, _PAIRS, is_hopeless)
                figures = experiment.goal.figures(side.readings)
                why = experiment.goal.misses(side.readings, current.readings[before:])
        except ServeError as error:
            if current.has_failed:  # no trial can be compared any more
                raise
            why = error.message
        ratio = None if why else experiment.noise.estimate(logs)
        state: State = "failed" if why else "pruned" if len(logs) < _PAIRS else "measured"
        reference = self._journal.trials[key_of({})].figures
        if ratio and figures and reference:
            figures = experiment.goal.scaled(figures, reference, ratio.value)
        mean = None if why else sum(logs) / len(logs)
        if state == "pruned" and experiment.budget.is_over:
            why = "the time was over"
        trial = Trial(number, changes, state=state, why=why, ratio=ratio, pairs=len(logs), figures=figures)
        self._journal.tell(point, trial, mean)
        return trial

    def _is_better(self, trial: Trial, than: Point) -> bool:
        """Whether a trial beats the current configuration beyond the noise, and the best point by a worthwhile gain."""
        known = self._journal.trials.get(key_of(than))
        best = known.ratio.value if known and known.ratio else 1.0
        return self._low(trial) > 0 and trial.ratio is not None and trial.ratio.value > best * (1 + MIN_GAIN)

    def _low(self, trial: Trial) -> float:
        """The logarithm of the ratio, less one standard error."""
        if trial.ratio is None:
            return -math.inf
        return math.log(trial.ratio.value) - self._experiment.noise.spread / math.sqrt(max(1, trial.pairs))

    def _winner(self) -> Point | None:
        """The point of the best trial. Among trials that may be equally good, the one with the fewest changes wins."""
        good = {key: trial for key, trial in self._journal.trials.items() if self._low(trial) > 0}
        if not good:
            return None
        least = max(map(self._low, good.values()))
        equal = [key for key, trial in good.items() if trial.ratio and math.log(trial.ratio.value) >= least]
        simplest = min(equal, key=lambda key: (len(key), -self._low(good[key])))
        return dict(simplest)


def describe(changes: Changes) -> str:
    """The changes as one line of text."""
    texts = (f"{key.removeprefix('session.entries.')}: {json.dumps(value)}" for key, value in changes.items())
    return ", ".join(texts) or "the current configuration"
