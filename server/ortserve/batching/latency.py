"""How long a batch of n rows takes, learned in warm-up and from every batch since, and how long its answers take."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MIN_OBSERVATIONS: Final = 8
"""A prediction rejects no request before this many batches of its shape class have run."""

_GAIN: Final = 0.1
"""Weight of an observation in the knots around it."""
_MAX_BATCH_RATIO: Final = 2.0
"""An observation counts as at most twice and at least half of the prediction, so that one batch that was interrupted
for milliseconds does not mislead the next hundred. If the second of a size takes less than half as long as the first,
the first was interrupted and no longer counts."""
_MIN_NS: Final = 1.0
_MAX_NS: Final = 2.0**63
"""Limits of the times that are learned, so that predictions are positive and finite. No real run exceeds them."""
_QUANTILE: Final = 0.95
"""Share of the observations whose error ``LatencyModel.residual_ns`` is to exceed."""
_QUANTILE_GAIN: Final = 0.1
"""How far an observation moves ``residual_ns``, as a share of the prediction."""
_FALL: Final = 0.985
_RISE: Final = math.pow(_FALL, -_QUANTILE / (1 - _QUANTILE))
"""An observation moves ``residual_ns`` by at least these factors. Other work that slows down all batches for seconds
raises it to a multiple of the prediction; in steps of the prediction, it would reject requests for hundreds of batches
afterwards. One rise undoes 19 falls, as many as there are for each rise at this quantile."""

_MEAN_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4
"""Weights of an observation in the mean and in the mean deviation (RFC 6298)."""
_DEVIATIONS: Final = 2
"""Two mean deviations are 1.6 standard deviations of a normal distribution: 19 of 20 batches are answered faster."""
_ANSWER_INTERVAL_NS: Final = 2_000_000
"""Minimum time between two measured batches, because a measurement takes a turn of the event loop."""
_MAX_ANSWER_RATIO: Final = 10
"""An observation counts as at most this multiple of the mean, so that one long pause does not reject the next hundred
requests."""


@dataclass(frozen=True, slots=True)
class Line:
    """L(n) ≈ a·n + b, in nanoseconds."""

    a_ns: float
    b_ns: float


class LatencyModel:
    """L(n) in nanoseconds: knots at powers of two with linear interpolation, and the error of the prediction.

    Every observation moves the two knots around its size, each by its share (an exponentially weighted mean of ratios),
    so frequent sizes also correct those between them. ``residual_ns`` follows the 95th percentile of the
    observed minus the predicted time.
    """

    def __init__(self, known: Iterable[tuple[int, float]] = (), *, max_ratio: float = _MAX_BATCH_RATIO) -> None:
        """Begin with known times.

        Args:
            known: Rows and nanoseconds that were measured before, such as in warm-up. Times outside the limits, such
                as 0, are ignored.
            max_ratio: An observation counts as at most this multiple of its prediction, and at least the inverse.
        """
        self._max_ratio = max_ratio
        self._sizes: list[int] = []
        self._knots: dict[int, float] = {}
        self._once: set[int] = set()
        """Knots that one observation set."""
        self.observations = 0
        self.residual_ns = 0.0
        for rows, ns in known:
            if _MIN_NS <= ns < _MAX_NS:
                self._set_knot(rows, ns)

    def observe(self, rows: int, ns: float) -> None:
        """Learn from a batch. A time outside the limits, such as 0, is ignored."""
        if not _MIN_NS <= ns < _MAX_NS:
            return
        self.observations += 1
        size = 1 << (rows - 1).bit_length()
        predicted = self._knots.get(rows)
        if predicted is None:
            predicted = self.predict_ns(rows)
        if predicted is None or size not in self._knots:
            # A new knot, scaled up if the batch has fewer rows than the knot.
            at_size = self.predict_ns(size)
            self._set_knot(size, ns if not predicted or at_size is None else ns * at_size / predicted)
            self._once.add(size)
            return
        if size in self._once and self._sizes[bisect_left(self._sizes, rows)] == size:  # the prediction used this knot
            self._once.remove(size)
            if ns < predicted / _MAX_BATCH_RATIO:
                self._knots[size] = max(_MIN_NS, self._knots[size] * ns / predicted)
                return
        residual_ns, step = ns - predicted, _QUANTILE_GAIN * predicted
        if residual_ns > self.residual_ns:
            self.residual_ns = max(self.residual_ns + step * _QUANTILE, self.residual_ns * _RISE)
        else:
            self.residual_ns = max(0.0, min(self.residual_ns - step * (1 - _QUANTILE), self.residual_ns * _FALL))
        ratio = min(max(ns / predicted, 1 / self._max_ratio), self._max_ratio) - 1
        if size == rows:
            self._knots[rows] *= 1 + _GAIN * ratio
            return
        index = bisect_left(self._sizes, rows)
        above = self._sizes[index]
        if index == 0 or above == rows:
            self._knots[above] *= 1 + _GAIN * ratio
            return
        below = self._sizes[index - 1]
        share = (rows - below) / (above - below)
        # A knot far below its neighbour would otherwise vanish before the neighbour has learned.
        self._knots[above] = max(_MIN_NS, self._knots[above] * (1 + _GAIN * share * ratio))
        self._knots[below] = max(_MIN_NS, self._knots[below] * (1 + _GAIN * (1 - share) * ratio))

    def observe_terminated(self, rows: int, ns: float) -> None:
        """Learn from a batch that was terminated after ``ns``: only a prediction below that is wrong."""
        if (self.predict_ns(rows) or math.inf) < ns:
            self.observe(rows, ns)

    def predict_ns(self, rows: int) -> float | None:
        """L(rows), positive and finite; None without any knot. Beyond the largest knot the last slope continues."""
        known = self._knots.get(rows)
        if known is not None:
            return known
        sizes = self._sizes
        if not sizes:
            return None
        index = bisect_left(sizes, rows)
        if index == len(sizes):
            return self._extend(rows)
        above = sizes[index]
        if index == 0:
            return self._knots[above]
        below = sizes[index - 1]
        low, high = self._knots[below], self._knots[above]
        return low + (high - low) * (rows - below) / (above - below)

    def line(self, max_rows: int) -> Line | None:
        """The straight line through L(1) and L(max_rows); None without any knot."""
        one, most = self.predict_ns(1), self.predict_ns(max_rows)
        if one is None or most is None:
            return None
        a_ns = max(0.0, (most - one) / (max_rows - 1)) if max_rows > 1 else 0.0
        return Line(a_ns, max(0.0, one - a_ns))

    def knots(self) -> dict[int, float]:
        """Times by rows."""
        return {rows: self._knots[rows] for rows in self._sizes}

    def _extend(self, rows: int) -> float:
        last = self._sizes[-1]
        if len(self._sizes) == 1:
            # With one knot, the part that does not grow with the rows is unknown and taken as 0.
            return self._knots[last] * max(1.0, rows / last)
        before = self._sizes[-2]
        slope = max(0.0, (self._knots[last] - self._knots[before]) / (last - before))
        return self._knots[last] + slope * (rows - last)

    def _set_knot(self, rows: int, ns: float) -> None:
        is_new = rows not in self._knots
        self._knots[rows] = min(ns, _MAX_NS)  # before its size is listed: a scrape on another thread may read both
        if is_new:
            insort(self._sizes, rows)


class AnswerTime:
    """How long encoding and writing the answers of a batch takes: a mean and a mean deviation.

    Both are exponentially weighted, as TCP estimates round trips (RFC 6298, section 2). Loop thread only.

    Attributes:
        high_ns: The time in which nearly all batches are answered; 0 before the first measurement.
        due_ns: Time from which the next batch may be measured (monotonic).
    """

    __slots__ = ("_deviation_ns", "_mean_ns", "due_ns", "high_ns")

    def __init__(self) -> None:
        self._mean_ns = 0.0
        self._deviation_ns = 0.0
        self.high_ns = 0.0
        self.due_ns = 0

    def observe(self, computed_ns: int, now_ns: int) -> None:
        """Learn from a batch whose outputs reached the loop at ``computed_ns`` and whose answers are written now."""
        self.due_ns = now_ns + _ANSWER_INTERVAL_NS
        ns = now_ns - computed_ns
        if not self._mean_ns:
            self._mean_ns = float(ns)
        else:
            off_ns = min(ns, _MAX_ANSWER_RATIO * self._mean_ns) - self._mean_ns
            self._mean_ns += _MEAN_GAIN * off_ns
            self._deviation_ns += _DEVIATION_GAIN * (abs(off_ns) - self._deviation_ns)
        self.high_ns = self._mean_ns + _DEVIATIONS * self._deviation_ns

    def reserved_ns(self, left_ns: int) -> int:
        """The part of the time until a deadline that is reserved for the answer.

        At least half of the time remains for the queue and the run, so that a wrong measurement cannot reject all
        requests.
        """
        return int(min(self.high_ns, max(0, left_ns) / 2))
