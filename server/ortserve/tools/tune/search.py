"""The search: trials in turn with the current configuration, one parameter after the other, then by a sampler."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from ortserve.errors import ServeError
from ortserve.tools.bench.statistics import Estimate
from ortserve.tools.tune.budget import Budget
from ortserve.tools.tune.journal import Journal, key_of, point_of
from ortserve.tools.tune.ratios import LEAST_GAIN, Noise, estimate_ratio, is_hopeless
from ortserve.tools.tune.result import Trial
from ortserve.tools.tune.sides import Contender, Goal, Lab, Side, take_pairs
from ortserve.tools.tune.space import Changes, Parameter, Point, changes_of, joint_points

_PAIRS: Final = 4
"""Most of a trial."""
_FLOOR_PAIRS: Final = 4
_MOST_REPEATED: Final = 30
"""Proposals in a row that were tried already: the sampler has nothing new."""
_PATIENCE: Final = 20
"""Proposals in a row that were no better: it will hardly find more."""


@dataclass(slots=True)
class Bench:
    """What a search works with.

    Attributes:
        lab: Opens configurations.
        goal: What is made better.
        space: All parameters.
        budget: Of time.
        noise: Of all pairs so far.
        show: Gets a line about now.
    """

    lab: Lab
    goal: Goal
    space: tuple[Parameter, ...]
    budget: Budget
    noise: Noise
    show: Callable[[str], object]

    def open(self, changes: Changes, version: int | None = None) -> Contender:
        """Open a configuration, and learn how long that takes. Raises ServeError."""
        began_s = self.budget.spent_s
        contender = self.lab.open(changes, version)
        self.budget.opened(self.budget.spent_s - began_s)
        return contender

    def compare(self, one: Side, other: Side, count: int, *, stops_early: bool = False) -> list[float]:
        """Pairs of two sides; their noise and duration are learned. Raises ServeError."""
        began_s, rounds = self.budget.spent_s, len(one.readings)
        enough = (lambda logs: is_hopeless(logs, self.noise)) if stops_early else (lambda logs: False)
        try:
            logs = take_pairs(one, other, self.goal, count, enough)
        finally:
            self.budget.measured(self.budget.spent_s - began_s, len(one.readings) - rounds)
        self.noise.learn(logs)
        return logs


def measure_floor(bench: Bench, current: Side) -> Estimate:
    """The current configuration against itself, in another process: what a difference must exceed. Raises ServeError."""
    bench.show("measuring the noise of this machine")
    with closing(bench.open({})) as twin:
        return estimate_ratio(bench.compare(current, Side(twin, current.guess), _FLOOR_PAIRS))


class Search:
    """Trials against the current configuration until the time is over, or nothing better is found."""

    def __init__(self, bench: Bench, journal: Journal, current: Side) -> None:
        """``current`` stays open."""
        self._bench = bench
        self._journal = journal
        self._current = current
        self._best: Point = {}

    def run(self) -> Point | None:
        """Search; returns the best point, None if no trial was better than the current configuration."""
        for point in self._coordinates():
            if not self._has_time():
                return self._winner()
            if self._is_better(self._find(point), self._best):
                self._best = point
        repeated = lost = 0
        while self._has_time() and repeated < _MOST_REPEATED and lost < _PATIENCE:
            _, point = self._journal.ask()
            known = self._journal.trials.get(key_of(point))
            if known is not None or not point:
                repeated += 1
                if known is None:
                    known = Trial(0, {}, "measured", "", Estimate(1.0), 0, None)
                self._journal.tell(point, known, math.log(known.ratio.value) if known.ratio else None)
                continue
            repeated = 0
            if self._is_better(self._measure(point), self._best):
                self._best, lost = point, 0
            else:
                lost += 1
        return self._winner()

    def _coordinates(self) -> Iterator[Point]:
        """One changed parameter after the other, on top of what was better so far."""
        space = self._bench.space
        for parameter in space:
            for number in range(1, len(parameter.choices)):
                yield {**self._best, parameter.name: number}
            if parameter.name == "instances":
                for joint in joint_points(space):
                    yield {**self._best, **joint}

    def _has_time(self) -> bool:
        budget = self._bench.budget
        return budget.left_s > budget.end_s(len(self._best) + 1) + budget.cost_s(1, 2)

    def _find(self, point: Point) -> Trial:
        """The trial of a point: from the journal, or new."""
        known = self._journal.trials.get(key_of(point))
        if known is not None:
            return known
        self._journal.enqueue(point)
        while True:  # points of a search that was cut off come first
            _, asked = self._journal.ask()
            trial = self._measure(asked)
            if key_of(asked) == key_of(point):
                return trial

    def _measure(self, point: Point) -> Trial:
        """Try the point that was asked, and write what it is."""
        bench, current = self._bench, self._current
        changes = changes_of(bench.space, point)
        number = len(self._journal.trials) + 1
        bench.show(f"trial {number}: {describe(changes)}")
        before = len(current.readings)
        logs: list[float] = []
        figures = None
        try:
            with closing(bench.open(changes)) as contender:
                side = Side(contender, current.guess)
                logs = bench.compare(current, side, _PAIRS, stops_early=True)
                figures = side.figures(bench.goal)
                why = bench.goal.misses(side.readings, current.readings[before:])
        except ServeError as error:
            why = error.message
        if why:
            trial = Trial(number, changes, "failed", why, None, len(logs), figures)
        else:
            state = "pruned" if len(logs) < _PAIRS else "measured"
            trial = Trial(number, changes, state, "", estimate_ratio(logs), len(logs), figures)
        self._journal.tell(point, trial, None if why else sum(logs) / len(logs))
        return trial

    def _is_better(self, trial: Trial, than: Point) -> bool:
        """Whether a trial is better than the best so far by more than a small gain, and than nothing by its noise."""
        known = self._journal.trials.get(key_of(than))
        best = known.ratio.value if known and known.ratio else 1.0
        return self._low(trial) > 0 and trial.ratio is not None and trial.ratio.value > best * (1 + LEAST_GAIN)

    def _low(self, trial: Trial) -> float:
        """The logarithm of the ratio, less one standard error."""
        if trial.ratio is None:
            return -math.inf
        return math.log(trial.ratio.value) - self._bench.noise.spread / math.sqrt(max(1, trial.pairs))

    def _winner(self) -> Point | None:
        """The point of the best trial, with its noise counted against it."""
        trials = self._journal.trials
        key = max(trials, key=lambda one: self._low(trials[one]), default=None)
        return point_of(key) if key is not None and self._low(trials[key]) > 0 else None


def describe(changes: Changes) -> str:
    """Changes in a line."""
    texts = (f"{key.removeprefix('session.entries.')}: {json.dumps(value)}" for key, value in changes.items())
    return ", ".join(texts) or "the current configuration"
