"""Compares two configurations, which alternate under the same load."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final, Literal, Protocol, TypeAlias

from ortserve.errors import ErrorKind, ServeError
from ortserve.tools.tune.loads import EDGE, RAMP, Offer, Reading, ramp, steady
from ortserve.tools.tune.result import Figures
from ortserve.tools.tune.space import Changes

Objective: TypeAlias = Literal["throughput", "latency", "cost", "memory"]
_SHIFT: Final = 2.5
"""Factor by which a ramp moves if the sustained rate may lie outside of it."""
_MAX_SHIFTS: Final = 6
_MIN_RATE: Final = 0.2
"""Lowest expected rate, in requests per second. Ramps of slower configurations are centred on it."""


class Contender(Protocol):
    """A configuration of the model that is ready for loads, in a process of its own.

    Attributes:
        probed_per_s: Answers per second to a few callers in a closed loop, measured when it was opened.
    """

    probed_per_s: float

    def measure(self, offer: Offer, seed: int) -> Reading:
        """Offer a load and wait for its end. Raises ServeError if the process ended."""
        ...

    def close(self) -> None:
        """End the process. Further calls do nothing."""
        ...


class Lab(Protocol):
    """Opens configurations."""

    def open(self, changes: Changes, version: int | None = None) -> Contender:
        """Open the model with changes of its configuration.

        Args:
            changes: Keys that differ from the current configuration, with their values.
            version: Another version of the model, whose outputs may differ; None for the tuned one.

        Raises:
            ServeError: The model cannot be opened with these changes, or its outputs are wrong.
        """
        ...


@dataclass(frozen=True, slots=True)
class Goal:
    """The objective of a search, and its load.

    Attributes:
        objective: ``throughput``: requests per second within the bound. The others are measured at a constant rate:
            ``latency``, its percentile; ``cost``, processor time per answer; ``memory`` of the process.
        slo_s: The latency bound; None without one.
        percentile: The percentile of the bound.
        rate_per_s: The constant rate; None for ``throughput``.
    """

    objective: Objective
    slo_s: float | None
    percentile: float
    rate_per_s: float | None = None

    def figure(self, reading: Reading) -> float:
        """The figure that is compared. Larger is better."""
        match self.objective:
            case "throughput":
                return reading.rate_per_s
            case "latency":
                return 1 / max(1e-6, reading.tail_ms)
            case "cost":
                return 1 / max(1e-6, reading.cpu_ms)
            case "memory":
                return 1 / max(1, reading.memory_nbytes)

    def figures(self, readings: Sequence[Reading]) -> Figures:
        """Medians of the rounds, and the largest error."""
        return Figures(
            throughput_per_s=median(one.rate_per_s for one in readings) if self.rate_per_s is None else None,
            p50_ms=median(one.p50_ms for one in readings),
            tail_ms=median(one.tail_ms for one in readings),
            cpu_ms=median(one.cpu_ms for one in readings),
            memory_nbytes=int(median(one.memory_nbytes for one in readings)),
            error=max(one.error for one in readings),
        )

    def scaled(self, figures: Figures, current: Figures, ratio: float) -> Figures:
        """The figures of a candidate, with the compared one replaced by the current configuration's times the ratio.

        The ratio comes from pairs of rounds. The medians of both sides could contradict it if the machine changes.
        """
        match self.objective:
            case "throughput":
                return replace(figures, throughput_per_s=(current.throughput_per_s or 0.0) * ratio)
            case "latency":
                return replace(figures, tail_ms=current.tail_ms / ratio)
            case "cost":
                return replace(figures, cpu_ms=current.cpu_ms / ratio)
            case "memory":
                return replace(figures, memory_nbytes=round(current.memory_nbytes / ratio))

    def misses(self, candidate: Sequence[Reading], current: Sequence[Reading]) -> str:
        """How a candidate misses the bound at the constant rate, if it does so more than the current configuration.

        The median of the rounds decides, so that one stall of the machine does not fail a candidate. Returns an empty
        text for a candidate within the bound.
        """
        if self.slo_s is None or self.rate_per_s is None:
            return ""
        late, usual = (median(reading.late_share for reading in side) for side in (candidate, current))
        allowed = max(1 - self.percentile / 100, usual)
        if late <= allowed + 2 * math.sqrt(allowed / max(1, sum(reading.requests for reading in candidate))):
            return ""
        return f"{late:.1%} of requests take longer than {self.slo_s * 1e3:g} ms"


@dataclass(slots=True)
class Side:
    """A contender in a comparison.

    Attributes:
        contender: The contender.
        guess: The rate that it is expected to sustain.
        readings: The figures of each round.
        has_failed: Whether the contender is unusable.
    """

    contender: Contender
    guess: float
    readings: list[Reading] = field(default_factory=list)
    has_failed: bool = False

    def beside(self, other: Contender) -> "Side":
        """A side for another contender. The expected rate is scaled if the probed rates of both differ much."""
        factor = other.probed_per_s / self.contender.probed_per_s
        return Side(other, self.guess * (1.0 if 1 / RAMP < factor < RAMP else factor))

    def measure(self, goal: Goal, seed: int, *, may_fall: bool = False) -> float:
        """Measure one round. Returns the logarithm of the figure.

        A ramp is repeated at another rate if its result is near one of its ends. Only ``may_fall`` allows a lower rate:
        a candidate that is much worse needs no exact figure.

        Raises:
            ServeError: The configuration is unusable.
        """
        for _ in range(_MAX_SHIFTS):
            offer = ramp(self.guess, goal.slo_s or 0.0) if goal.rate_per_s is None else steady(goal.rate_per_s)
            self.has_failed = True
            reading = self.contender.measure(offer, seed)
            self.has_failed = bool(reading.problem)
            if reading.problem:
                raise ServeError(ErrorKind.INTERNAL, reading.problem)
            if goal.rate_per_s is not None:
                break
            if reading.rate_per_s >= offer.high / EDGE:
                self.guess *= _SHIFT
            elif may_fall and reading.rate_per_s <= offer.low * EDGE and offer.low > _MIN_RATE:
                self.guess /= _SHIFT
            else:
                self.guess = max(_MIN_RATE, math.sqrt(self.guess * reading.rate_per_s))
                break
        self.readings.append(reading)
        return math.log(goal.figure(reading))


def take_pair(current: Side, candidate: Side, goal: Goal, *, is_swapped: bool) -> float:
    """Measure both sides with the same pattern of requests, the current one first unless ``is_swapped``.

    Callers swap every second pair (A B B A), so that drift over time affects both sides.

    Returns:
        The logarithm of the candidate's figure divided by the current one's.

    Raises:
        ServeError: One of the sides is unusable.
    """
    seed, figures = len(current.readings), dict[bool, float]()
    for is_current in (not is_swapped, is_swapped):
        side = current if is_current else candidate
        figures[is_current] = side.measure(goal, seed, may_fall=is_current)
    return figures[False] - figures[True]
