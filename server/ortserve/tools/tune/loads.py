"""Loads of trials, and the figures of a load. Pure.

One ramp finds the highest rate within a latency bound: random requests, whose rate grows from half of the expected rate
to twice that rate. A search by constant rates takes ten loads. A ramp is one load, so it can be repeated alternately
with another configuration.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

RAMP: Final = 2.0
"""A ramp begins at the expected rate divided by this, and ends at the product."""
EDGE: Final = 1.15
"""If the rate that a ramp finds is within this factor of an end, the true rate may lie outside of the ramp."""
_LATE_SHARE: Final = 0.1
"""Share of late requests in a stretch of a ramp that counts as sustained. A stretch has too few requests for one
percent. Constant rates decide about the percentile of the search."""
_MAX_REQUESTS: Final = 30_000


@dataclass(frozen=True, slots=True)
class Offer:
    """Random requests, at a constant rate or at a rate that grows exponentially.

    Attributes:
        low: Requests per second at the beginning.
        high: Requests per second at the end.
        seconds: Duration.
    """

    low: float
    high: float
    seconds: float

    @property
    def growth(self) -> float:
        """Growth of the logarithm of the rate per second."""
        return math.log(self.high / self.low) / self.seconds

    def times_s(self, seed: int) -> np.ndarray:
        """Times to send the requests at, from the beginning. The same seed makes the same pattern at any rate."""
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
    """The ramp around an expected rate: as slow as the bound demands, for some hundred requests in limited time."""
    # A queue that grows from the moment of saturation on reaches the bound only after sqrt(2 slo / growth).
    seconds = min(15.0, max(0.8, 11 * slo_s, min(4.0, 200 / rate)))
    high = rate * RAMP
    seconds = min(seconds, max(0.3, _MAX_REQUESTS / (high - rate / RAMP) * 2 * math.log(RAMP)))
    return Offer(rate / RAMP, high, seconds)


def steady(rate: float) -> Offer:
    """A constant rate for some hundred requests, within limits of time."""
    return Offer(rate, rate, min(5.0, max(0.4, 200 / rate)))


def sustained_rate(offer: Offer, due_s: np.ndarray, is_good: np.ndarray) -> float:
    """The rate of a ramp up to which requests were answered in time.

    Requests are summed up in their order: those in time add to the sum, and a late one subtracts as much as nine in
    time add. The ramp counts as sustained up to the maximum of the sum, so a stall of the machine does not end it.

    Args:
        offer: The ramp.
        due_s: Times at which requests were due, ascending.
        is_good: Whether they were answered within the bound.

    Returns:
        The rate at the maximum; the rate at the beginning if the sum is never positive.
    """
    weights = np.where(is_good, _LATE_SHARE, _LATE_SHARE - 1)
    sums = np.cumsum(weights)
    if not len(sums) or sums.max() <= 0:
        return offer.low
    return offer.rate_at(float(due_s[int(sums.argmax())]))


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of one load.

    Attributes:
        requests: The number of requests.
        late_share: Share of requests that failed or were answered beyond the bound; of failures only without a bound.
        rate_per_s: The rate that a ramp found to be sustained; the offered rate of a constant load.
        p50_ms: Median latency of answers; in a ramp, of those in its first half. Without answers, the median time
            until requests failed.
        tail_ms: The percentile of the search, of the same times.
        cpu_ms: Processor time of the process per answer.
        memory_nbytes: Resident memory of the process after the load.
        error: The largest error of an output so far, relative to the largest element.
        problem: Why the configuration is unusable: wrong outputs, or failures; empty if it is usable.
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
    """Compute the figures of a load.

    Args:
        offer: The load.
        due_s: Time at which each request was due, ascending.
        ages_s: Time from then to the answer or failure of the request.
        is_answered: Whether the request was answered.
        slo_s: The latency bound; None without one.
        percentile: The percentile of the bound.
        cpu_s: Processor time of the process during the load.
        memory_nbytes: Resident memory of the process.
    """
    is_good = is_answered & (ages_s <= (math.inf if slo_s is None else slo_s))
    is_ramp = offer.high > offer.low
    answers = ages_s[is_answered]
    calm = ages_s[is_answered & (due_s <= offer.seconds / 2)] if is_ramp else answers
    seen = next((ages for ages in (calm, answers, ages_s) if len(ages)), np.zeros(1))
    p50, tail = (np.percentile(seen, [50, percentile]) * 1e3).tolist()
    return Reading(
        requests=len(due_s),
        late_share=1 - float(is_good.mean()) if len(due_s) else 1.0,
        rate_per_s=sustained_rate(offer, due_s, is_good) if is_ramp else offer.low,
        p50_ms=p50,
        tail_ms=tail,
        cpu_ms=cpu_s / max(1, len(answers)) * 1e3,
        memory_nbytes=memory_nbytes,
    )
