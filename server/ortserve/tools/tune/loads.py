"""Loads of trials, and what a trial reads from them. Pure.

The highest rate within a latency bound is found by one ramp: requests at random, ever faster, from half of the expected
rate to twice as much. A search by constant rates takes ten loads; a ramp takes one, so that it can be repeated in turn
with another configuration.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

RAMP: Final = 2.0
"""A ramp begins at the expected rate divided by this, and ends at the product."""
EDGE: Final = 1.15
"""A rate so near to an end of the ramp may lie outside."""
_LATE_SHARE: Final = 0.1
"""Of requests in a stretch of a ramp that is still sustained. A stretch of a ramp has too few requests for one percent;
a constant rate decides about the percentile that was asked for."""
_MOST_REQUESTS: Final = 30_000


@dataclass(frozen=True, slots=True)
class Offer:
    """Requests at random: at one rate, or faster and faster by a constant factor.

    Attributes:
        low: Requests per second at the beginning.
        high: At the end.
        seconds: From beginning to end.
    """

    low: float
    high: float
    seconds: float

    @property
    def growth(self) -> float:
        """The logarithm of the rate grows by this in a second."""
        return math.log(self.high / self.low) / self.seconds

    def times_s(self, seed: int) -> np.ndarray:
        """When to send each request. The same seed makes the same pattern at any rate."""
        growth = self.growth
        count = self.low * self.seconds if growth < 1e-9 else (self.high - self.low) / growth
        gaps = np.random.default_rng(seed).exponential(1.0, int(count + 6 * math.sqrt(count) + 10))
        passed = np.cumsum(gaps) / self.low
        times = passed if growth < 1e-9 else np.log1p(passed * growth) / growth
        return np.asarray(times[times < self.seconds])

    def rate_at(self, time_s: float) -> float:
        """The rate at this time."""
        return self.low * math.exp(self.growth * time_s)


def ramp(rate: float, slo_s: float) -> Offer:
    """The ramp around an expected rate: as slow as the bound demands, with at least some hundred requests."""
    # A queue that grows from the moment of saturation on reaches the bound only after sqrt(2 slo / growth).
    seconds = min(15.0, max(0.8, 11 * slo_s, min(4.0, 200 / rate)))
    high = rate * RAMP
    seconds = min(seconds, max(0.3, _MOST_REQUESTS / (high - rate / RAMP) * 2 * math.log(RAMP)))
    return Offer(rate / RAMP, high, seconds)


def steady(rate: float) -> Offer:
    """A constant rate for some hundred requests, within limits of time."""
    return Offer(rate, rate, min(5.0, max(0.4, 200 / rate)))


def sustained_rate(offer: Offer, due_s: np.ndarray, is_good: np.ndarray) -> float:
    """The rate of a ramp up to which requests were answered in time.

    The ramp is cut where the requests in time before it, less what late ones count against them, are most. One late
    request counts as much as nine in time, so that a stall of the machine in the middle does not end the ramp.

    Args:
        offer: The ramp.
        due_s: When requests were due, ascending.
        is_good: Whether they were answered within the bound.

    Returns:
        The rate there; that at the beginning if nothing was in time.
    """
    weights = np.where(is_good, _LATE_SHARE, _LATE_SHARE - 1)
    sums = np.cumsum(weights)
    if not len(sums) or sums.max() <= 0:
        return offer.low
    return offer.rate_at(float(due_s[int(sums.argmax())]))


@dataclass(frozen=True, slots=True)
class Reading:
    """What one load found.

    Attributes:
        requests: That were sent.
        late_share: Failed, or answered beyond the bound; only failed ones without a bound.
        rate_per_s: Sustained in a ramp; the offered one at a constant rate.
        p50_ms: Of the answers; of a ramp, of its first half. Without answers, of the ages of what failed.
        tail_ms: The percentile that was asked for, likewise.
        cpu_ms: Processor time of the process for an answer.
        memory_nbytes: Of the process, after the load.
        error: The largest error of an output so far, relative to the largest element.
        problem: What makes the configuration unusable: wrong outputs, or failures; empty if nothing does.
    """

    requests: int
    late_share: float
    rate_per_s: float
    p50_ms: float
    tail_ms: float
    cpu_ms: float
    memory_nbytes: int
    error: float = 0.0
    problem: str = ""


def read(
    offer: Offer,
    due_s: np.ndarray,
    ages_s: np.ndarray,
    is_answered: np.ndarray,
    *,
    slo_s: float | None,
    percentile: float,
    cpu_s: float,
    memory_nbytes: int,
) -> Reading:
    """Read what became of the requests of a load.

    Args:
        offer: The load.
        due_s: When each request was due, ascending.
        ages_s: From then to its answer, or to its failure.
        is_answered: Whether it was.
        slo_s: The bound.
        percentile: That the bound is for.
        cpu_s: Of the process meanwhile.
        memory_nbytes: Of the process.
    """
    is_good = is_answered & (ages_s <= (math.inf if slo_s is None else slo_s))
    is_ramp = offer.high > offer.low
    answers = ages_s[is_answered]
    calm = ages_s[is_answered & (due_s <= offer.seconds / 2)] if is_ramp else answers
    seen = next((ages for ages in (calm, answers, ages_s) if len(ages)), np.zeros(1))
    p50, tail = (np.percentile(seen, [50, percentile]) * 1e3).tolist()
    return Reading(
        len(due_s),
        1 - float(is_good.mean()) if len(due_s) else 1.0,
        sustained_rate(offer, due_s, is_good) if is_ramp else offer.low,
        p50,
        tail,
        cpu_s / max(1, len(answers)) * 1e3,
        memory_nbytes,
    )
