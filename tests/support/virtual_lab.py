"""A lab without processes: configurations have known capacities, and measurements have noise and a virtual duration."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.tune.budget import Budget
from ortserve.tools.tune.ending import Ending, end_search
from ortserve.tools.tune.journal import open_journal
from ortserve.tools.tune.loads import Offer, Reading
from ortserve.tools.tune.ratios import Noise
from ortserve.tools.tune.search import Experiment, Search, measure_floor
from ortserve.tools.tune.sides import Goal, Side
from ortserve.tools.tune.space import Changes, Parameter, Point

RATE = 500.0
GOAL = Goal("throughput", 0.02, 99.0)
MEMORY = Goal("memory", 0.02, 99.0, RATE / 2)
SPACE = (
    Parameter("threads", ({}, {"intra_op_threads": 1}, {"intra_op_threads": 2})),
    Parameter("spinning", ({}, {"session.spinning": True})),
    Parameter("instances", ({}, {"instances": 2}, {"instances": 4})),
    Parameter("max_rows", ({}, {"max_rows": 1}, {"max_rows": 8}, {"max_rows": 32})),
    Parameter("graph", ({}, {"session.graph_optimization": "basic"})),
)


class VirtualLab:
    """Opens virtual configurations."""

    def __init__(
        self,
        truth: Callable[[Changes], float],
        *,
        seed: int = 0,
        spread: float = 0.05,
        between: float = 0.005,
        open_s: float = 1.5,
    ) -> None:
        """``truth`` returns the factor of the capacity, 0 for configurations that fail.

        Spreads are those of logarithms.
        """
        self.truth = truth
        self.random = np.random.default_rng(seed)
        self.spread = spread
        self.between = between
        self.open_s = open_s
        self.now_s = 0.0
        self.opened: list[Changes] = []
        self.running = 0
        self.on_open: Callable[[Changes], None] = lambda changes: None
        self.memory: Callable[[Changes], int] = lambda changes: 10**8
        self.slowness: Callable[[float], float] = lambda now_s: 1.0
        """Slowdown by other work on the machine, as a function of time."""

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds * self.slowness(self.now_s)

    def open(self, changes: Changes, version: int | None = None) -> "VirtualContender":
        self.pass_time(self.open_s)
        self.on_open(changes)
        self.opened.append(dict(changes))
        factor = self.truth(changes)
        if not factor:
            raise ServeError(ErrorKind.INTERNAL, "wrong outputs: output 'y': off by 1")
        self.running += 1
        rate = RATE * factor * math.exp(self.random.normal(0, self.between))
        return VirtualContender(self, rate, self.memory(changes))


class VirtualContender:
    """A configuration with a capacity. If ``left`` is set, it fails after that many loads."""

    def __init__(self, lab: VirtualLab, rate: float, nbytes: int) -> None:
        self.lab = lab
        self.rate = self.probed_per_s = rate
        self.nbytes = nbytes
        self.left: int | None = None
        self.is_closed = False

    def measure(self, offer: Offer, seed: int) -> Reading:
        lab = self.lab
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ServeError(ErrorKind.INTERNAL, "its process ended")
        lab.pass_time(offer.seconds + 0.3)
        factor = math.exp(lab.random.normal(0, lab.spread))
        rate = min(offer.high, max(offer.low, self.rate * factor)) if offer.high > offer.low else offer.low
        late = 0.0 if offer.high > offer.low or offer.low < self.rate else 0.5
        return Reading(1000, late, rate, 1.0, 2e3 / self.rate / factor, 1.0, self.nbytes)

    def close(self) -> None:
        self.lab.running -= not self.is_closed
        self.is_closed = True


def end(lab: VirtualLab, winner: Point, goal: Goal = GOAL) -> Ending:
    """End a search with this winner."""
    experiment = Experiment(lab, goal, SPACE, Budget(600, lambda: lab.now_s), Noise(), lambda line: None)
    experiment.noise.learn([-lab.spread, lab.spread] * 10)
    return end_search(experiment, winner, RATE)


def search(
    lab: VirtualLab, *, minutes: float, journal: Path | None = None, kill_current_after: int | None = None
) -> tuple[Ending | None, int]:
    """Run a whole search. Returns its ending and the number of trials."""
    budget = Budget(minutes * 60, lambda: lab.now_s)
    experiment = Experiment(lab, GOAL, SPACE, budget, Noise(), lambda line: None)
    with open_journal(journal, {"model": "m"}, SPACE, resume=None) as opened:
        contender = lab.open({})
        try:
            current = Side(contender, RATE / 3)
            measure_floor(experiment, current)
            contender.left = kill_current_after
            winner = Search(experiment, opened, current).run()
        finally:
            contender.close()
        ending = end_search(experiment, winner, current.guess) if winner else None
        return ending, len(opened.trials)
