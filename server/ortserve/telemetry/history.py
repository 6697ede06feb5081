"""Rates of a model version from two readings of its counts, and a ring of the rates of the last 15 minutes.

The code is pure: the console's ``service/observation`` decides when to read. The counts of ``series`` only grow.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, zip_longest
from typing import Final

import numpy as np

from ortserve.core.timing import PHASES
from ortserve.errors import ErrorKind
from ortserve.telemetry.declarations import REQUEST_DURATION
from ortserve.telemetry.series import ModelMetrics

RING_INTERVAL_S: Final = 5
RING_SAMPLES: Final = 180
"""Number of samples in a ring: 15 minutes."""
_ERRORS_EVERY: Final = 12
"""Number of samples between two stored counts of errors: a minute."""

REFUSALS: Final = frozenset((ErrorKind.OVERLOADED, ErrorKind.DEADLINE, ErrorKind.NOT_READY))
"""Kinds of errors with which the server rejects valid requests; the others are failures."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a version at one moment. Two readings are equal if nothing was counted between them.

    Attributes:
        at_ns: Monotonic time of the reading.
        durations: Number of answered requests in each bucket of durations, over all protocols.
        phases_ns: Total time of each phase.
        rows: Rows of answered requests.
        batches: Number of batches that ran.
        batch_rows: Rows of the batches that ran.
        refused: Requests that failed with one of ``REFUSALS``.
        failed: Requests that failed otherwise, except for requests that their callers cancelled.
    """

    at_ns: int = field(compare=False)
    durations: Sequence[int]
    phases_ns: Sequence[int]
    rows: int
    batches: int
    batch_rows: int
    refused: int
    failed: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates and means between two readings. Durations are milliseconds, 0 if no request was answered.

    ``requests_per_s`` counts answered requests, ``batch_rows`` is the mean size of a batch, and the phases are means.
    """

    requests_per_s: float = 0.0
    rows_per_s: float = 0.0
    refused_per_s: float = 0.0
    failed_per_s: float = 0.0
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0
    batch_rows: float = 0.0
    queue_rows: float = 0.0
    saturation: float = 0.0
    decode_ms: float = 0.0
    queue_ms: float = 0.0
    stage_ms: float = 0.0
    compute_ms: float = 0.0
    encode_ms: float = 0.0


COLUMNS: Final = tuple(field.name for field in fields(Rates))
"""Names of the values in a row of a ring, in this order."""
IDLE: Final = Rates()


def read_counts(metrics: ModelMetrics, at_ns: int) -> Counts:
    """Read the counts of a version. The time grows with the number of sizes of its batches. Loop thread only."""
    known = [series.counts for series in metrics.answered.values()]
    durations = known[0][:] if len(known) == 1 else [sum(counts) for counts in zip(*known, strict=True)]
    refused = failed = 0
    for (_, kind), series in metrics.failed.items():
        if kind in REFUSALS:
            refused += sum(series.counts)
        elif kind is not ErrorKind.CANCELLED:
            failed += sum(series.counts)
    batches = batch_rows = 0
    for rows, batch in metrics.batches.items():
        batches += batch.count
        batch_rows += rows * batch.count
    return Counts(
        at_ns,
        durations=durations,
        phases_ns=[phase.total for phase in metrics.phases],
        rows=metrics.rows,
        batches=batches,
        batch_rows=batch_rows,
        refused=refused,
        failed=failed,
    )


def rates(before: Counts, after: Counts, *, queue_rows: int, saturation: float | None) -> Rates:
    """Compute the rates between two readings of one version.

    Args:
        before: The earlier reading.
        after: The later reading.
        queue_rows: Rows in the queue now.
        saturation: The current saturation; None if unknown, which counts as 0.
    """
    seconds = max(after.at_ns - before.at_ns, 1) / 1e9
    buckets = [new - old for new, old in zip_longest(after.durations, before.durations, fillvalue=0)]
    answered, batches = sum(buckets), after.batches - before.batches
    p50, p90, p99 = (1000 * quantile(buckets, REQUEST_DURATION.buckets, share) for share in (0.5, 0.9, 0.99))
    phases_ms = {
        f"{phase}_ms": (new - old) / 1e6 / answered if answered else 0.0
        for phase, new, old in zip(PHASES, after.phases_ns, before.phases_ns, strict=True)
    }
    return Rates(
        requests_per_s=answered / seconds,
        rows_per_s=(after.rows - before.rows) / seconds,
        refused_per_s=(after.refused - before.refused) / seconds,
        failed_per_s=(after.failed - before.failed) / seconds,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        batch_rows=(after.batch_rows - before.batch_rows) / batches if batches else 0.0,
        queue_rows=queue_rows,
        saturation=saturation or 0.0,
        **phases_ms,
    )


def quantile(buckets: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the observations lie, interpolated inside a bucket as Prometheus does.

    Args:
        buckets: Number of observations in each bucket; the last bucket has no upper bound.
        bounds: Upper bounds of the other buckets.
        share: A number from 0 to 1.

    Returns:
        0 without observations; the largest bound for a value beyond it.
    """
    total = sum(buckets)
    if not total:
        return 0.0
    rank = share * total
    for index, below in enumerate(accumulate(buckets)):
        if below >= rank and buckets[index]:
            break
    if index == len(bounds):
        return bounds[-1]
    low = bounds[index - 1] if index else 0.0
    return low + (bounds[index] - low) * (rank - (below - buckets[index])) / buckets[index]


class Ring:
    """The rates of one version over the last 15 minutes, in 11 KB, and the counts of errors by kind at each minute."""

    def __init__(self, sample: int, errors: Mapping[str, int]) -> None:
        """Create an empty ring.

        Args:
            sample: Number of the first sample. All rings of a server use the same numbers.
            errors: The counts of errors before the first sample.
        """
        self._rows = np.zeros((RING_SAMPLES, len(COLUMNS)), np.float32)
        self._errors = deque([errors], maxlen=RING_SAMPLES // _ERRORS_EVERY)
        self._first = self._next = sample
        self.last_active = sample
        """The last sample that differs from ``IDLE``."""

    def add(self, sample: int, now: Rates, errors: Mapping[str, int]) -> None:
        """Add the rates of a sample; ``errors`` are counts since the load."""
        for missed in range(max(self._next, sample - RING_SAMPLES), sample):
            self._rows[missed % RING_SAMPLES] = 0
        self._rows[sample % RING_SAMPLES] = [getattr(now, name) for name in COLUMNS]
        # A late sample has a later number: errors since the sample before count from this one.
        minutes = sample // _ERRORS_EVERY - (self._next - 1) // _ERRORS_EVERY
        if minutes:
            self._errors.extend([self._errors[-1]] * min(minutes - 1, RING_SAMPLES))
            self._errors.append(errors)
        self._next = sample + 1
        if now != IDLE:
            self.last_active = sample

    def restart_errors(self, last: Mapping[str, int]) -> None:
        """Continue with the counts of a new load, which begin at 0; ``last`` are the last counts of the old load."""
        earlier = [
            {kind: before.get(kind, 0) - last.get(kind, 0) for kind in {**before, **last}} for before in self._errors
        ]
        self._errors = deque(earlier, maxlen=self._errors.maxlen)

    def is_forgotten(self, sample: int) -> bool:
        """Whether all samples of the ring are idle."""
        return sample - self.last_active >= RING_SAMPLES

    def rows(self) -> list[list[float]]:
        """The samples, oldest first."""
        first = max(self._first, self._next - RING_SAMPLES)
        order = np.arange(first, self._next) % RING_SAMPLES
        return [[float(f"{value:.4g}") for value in row] for row in self._rows[order].tolist()]

    def recent_errors(self, errors: Mapping[str, int]) -> dict[str, int]:
        """The errors of the last 15 minutes by kind; ``errors`` are the counts now."""
        before = self._errors[0]
        recent = {kind: errors.get(kind, 0) - before.get(kind, 0) for kind in {**before, **errors}}
        return {kind: count for kind, count in recent.items() if count > 0}


def errors_by_kind(metrics: ModelMetrics) -> dict[str, int]:
    """The number of failed requests of a version since its load, by kind of error."""
    counts: dict[str, int] = {}
    for (_, kind), series in metrics.failed.items():
        counts[kind.value] = counts.get(kind.value, 0) + sum(series.counts)
    return counts
