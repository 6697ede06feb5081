"""The protocol's statistics of a model version, made from the numbers that the metrics count anyway.

Made when somebody asks, on the event loop for the statistics call and on the scraping thread for Triton's metric names;
nothing is counted here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ortserve.errors import ErrorKind
from ortserve.telemetry.histogram import HistogramSeries
from ortserve.telemetry.metrics import ModelMetrics

FAILURE_REASONS: Final[Mapping[ErrorKind, str]] = {
    ErrorKind.OVERLOADED: "REJECTED",
    ErrorKind.DEADLINE: "REJECTED",
    ErrorKind.NOT_READY: "REJECTED",
    ErrorKind.CANCELLED: "CANCELED",
    ErrorKind.REJECTED_BY_MODEL: "BACKEND",
    ErrorKind.INTERNAL: "BACKEND",
    ErrorKind.CONFLICT: "OTHER",
}
"""Triton's reasons of failures by our kinds. Kinds that are not here are the caller's mistakes, found before a request
was accepted; the protocol's statistics leave those out. Unlike Triton's they count refusals for want of room."""

REASONS: Final = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


@dataclass(frozen=True, slots=True)
class Duration:
    """How often, and nanoseconds in all."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchSizeStatistics:
    """The batches of one size; the counts are executions."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class InferStatistics:
    """``success`` spans a request from its complete body to its answer; the parts are those of successful requests."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class VersionStatistics:
    """A model version's numbers since it was loaded.

    Attributes:
        last_done_ns: When a request was last answered (monotonic); 0 if none was.
        inference_count: Rows of answered requests.
        execution_count: Batches that ran.
        failures: Requests that failed, by Triton's reasons.
        batches: By their size, ascending.
    """

    name: str
    version: str
    last_done_ns: int
    inference_count: int
    execution_count: int
    inference: InferStatistics
    failures: Mapping[str, int]
    batches: tuple[BatchSizeStatistics, ...]


def read_statistics(model: ModelMetrics) -> VersionStatistics:
    """Only reads, so that a scrape may ask from its own thread; its numbers may then be a request apart."""
    success = _sum(model.answered.copy().values())
    by_reason = {reason: Duration() for reason in REASONS}
    for (_, kind), series in model.failed.copy().items():
        reason = FAILURE_REASONS.get(kind)
        if reason is not None:
            known = by_reason[reason]
            by_reason[reason] = Duration(known.count + sum(series.counts), known.ns + series.total)
    _, queue, stage, compute, encode = (Duration(success.count, phase.total) for phase in model.phases)
    return VersionStatistics(
        model.name,
        model.version,
        model.last_done_ns,
        model.rows,
        sum(model.batch_rows.counts),
        InferStatistics(
            success,
            Duration(sum(d.count for d in by_reason.values()), sum(d.ns for d in by_reason.values())),
            queue,
            stage,
            compute,
            encode,
        ),
        {reason: duration.count for reason, duration in by_reason.items()},
        tuple(
            BatchSizeStatistics(
                rows,
                Duration(series.count, series.stage_ns),
                Duration(series.count, series.compute_ns),
                Duration(series.count, series.return_ns),
            )
            for rows, series in sorted(model.batches.copy().items())
        ),
    )


def _sum(series: Iterable[HistogramSeries]) -> Duration:
    known = list(series)
    return Duration(sum(sum(one.counts) for one in known), sum(one.total for one in known))
