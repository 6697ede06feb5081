"""What is exposed: declarations, and families of what was counted, as prometheus_client's registry takes them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from ortserve.telemetry.histogram import HistogramSeries

Labels: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Declaration:
    """A metric as Prometheus and the reference page know it. ``buckets`` are upper bounds in the metric's unit."""

    name: str
    type: Literal["histogram", "gauge", "counter"]
    labels: Labels
    help: str
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram's series at one moment. ``counts`` are those of each bucket alone, ``total`` is in its own unit."""

    labels: Labels
    counts: tuple[int, ...]
    total: int

    def cumulative(self) -> Iterator[int]:
        """Prometheus wants how many were at most each bound; the last is how many there were."""
        below = 0
        for count in self.counts:
            below += count
            yield below


class Family(Metric):
    """A family at one moment, which ``telemetry.text_format`` writes without making the library's samples of it.

    Attributes:
        declaration: Its name, type, labels and text.
        values: By the values of its labels; of gauges and counters.
        histograms: Of histograms.
        scale: How many of a histogram's units make one of its declaration's.
    """

    def __init__(
        self,
        declaration: Declaration,
        values: Mapping[Labels, float] | None = None,
        histograms: Iterable[tuple[Labels, HistogramSeries]] = (),
        scale: int = 1,
    ) -> None:
        super().__init__(declaration.name.removesuffix("_total"), declaration.help, prometheus_type(declaration))
        del self.__dict__["samples"]  # which the library's class has made, and which ``samples`` makes when asked for
        self.declaration: Final = declaration
        self.values: Final[Mapping[Labels, float]] = values or {}
        self.histograms: Final = [
            HistogramCounts(labels, counts, series.total)
            for labels, series in histograms
            if any(counts := tuple(series.counts))
        ]
        self.scale: Final = scale

    @cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        """As the library's own writers and ``get_sample_value`` want them."""
        declaration = self.declaration
        name, names = declaration.name, declaration.labels
        samples = [Sample(name, dict(zip(names, labels, strict=True)), value) for labels, value in self.values.items()]
        bounds = bucket_bounds(declaration)
        for known in self.histograms:
            labels = dict(zip(names, known.labels, strict=True))
            cumulative = list(known.cumulative())
            samples += [
                Sample(f"{name}_bucket", labels | {"le": bound}, count)
                for bound, count in zip(bounds, cumulative, strict=True)
            ]
            samples += [
                Sample(f"{name}_count", labels, cumulative[-1]),
                Sample(f"{name}_sum", labels, known.total / self.scale),
            ]
        return samples


def prometheus_type(declaration: Declaration) -> str:
    """The library's word for it. Counters under Triton's names have no ``_total``, so that no format takes them so."""
    if declaration.type == "counter" and not declaration.name.endswith("_total"):
        return "unknown"
    return declaration.type


def bucket_bounds(declaration: Declaration) -> list[str]:
    """Values of the label ``le``."""
    return [*map(spell_number, declaration.buckets), "+Inf"]


def spell_number(value: float) -> str:
    """As the text format wants it, which is as Go reads it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)
