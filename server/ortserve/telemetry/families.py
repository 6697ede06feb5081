"""Metric families at a scrape, and their text in Prometheus' format.

The writer must be fast enough for a thousand models, because a scrape competes with the event loop. It caches the parts
on which prometheus_client's own writer spends most of its time: the part of a line before the value, and the whole text
of a histogram that has not changed since the last scrape.
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from ortserve.telemetry.declarations import Declaration, Labels, Tags
from ortserve.telemetry.series import HistogramSeries

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

SeriesKey: TypeAlias = tuple[str, Labels, Tags]
"""The name of a metric, and the label values and tags of one of its series."""


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram series at one moment. ``counts`` are per bucket, not cumulative; ``total`` is in the series' unit."""

    labels: Labels
    counts: tuple[int, ...]
    total: int

    def cumulative(self) -> Iterator[int]:
        """The number of values up to each bound, as Prometheus expects; the last one is the number of all values."""
        below = 0
        for count in self.counts:
            below += count
            yield below


class Family(Metric):
    """A family at one moment. ``TextFormat`` writes it without creating the library's samples.

    Attributes:
        declaration: Name, type, labels and description.
        values: Values of a gauge or counter, by label values.
        histograms: Series of a histogram.
        scale: Number of the series' units in one unit of the declaration.
        tags: Further labels of all series of a model, by the model's name.
    """

    def __init__(
        self,
        declaration: Declaration,
        values: Mapping[Labels, float] | None = None,
        histograms: Iterable[tuple[Labels, HistogramSeries]] = (),
        scale: int = 1,
    ) -> None:
        super().__init__(declaration.name.removesuffix("_total"), declaration.help, prometheus_type(declaration))
        del self.__dict__["samples"]  # set by the library's class; ``samples`` creates them on demand
        self.declaration: Final = declaration
        self.values: Final[Mapping[Labels, float]] = values or {}
        self.histograms: Final = [
            HistogramCounts(labels, counts, series.total)
            for labels, series in histograms
            if any(counts := tuple(series.counts))
        ]
        self.scale: Final = scale
        self.tags: Mapping[str, Tags] = {}
        names = declaration.labels
        self._model: Final = names.index("model") if "model" in names else None

    def tags_of(self, labels: Labels) -> Tags:
        """The tags of the model that these label values name."""
        return self.tags.get(labels[self._model], ()) if self.tags and self._model is not None else ()

    def pairs(self, labels: Labels) -> list[tuple[str, str]]:
        """All labels of a series, with their names."""
        return [*zip(self.declaration.labels, labels, strict=True), *self.tags_of(labels)]

    @cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        """The samples for the library's own writers and ``get_sample_value``."""
        declaration = self.declaration
        name = declaration.name
        samples = [Sample(name, dict(self.pairs(labels)), value) for labels, value in self.values.items()]
        bounds = bucket_bounds(declaration)
        for known in self.histograms:
            labels = dict(self.pairs(known.labels))
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
    """The library's type for a declaration.

    Counters under Triton's names lack the suffix ``_total``, which the library and OpenMetrics require of counters.
    """
    if declaration.type == "counter" and not declaration.name.endswith("_total"):
        return "unknown"
    return declaration.type


def bucket_bounds(declaration: Declaration) -> list[str]:
    """The values of the label ``le``."""
    return [*map(spell_number, declaration.buckets), "+Inf"]


def spell_number(value: float) -> str:
    """Write a number as the text format requires it, in Go's syntax."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)


class TextFormat:
    """Writes the metrics of a registry. Thread-safe; concurrent scrapes wait for each other."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._heads: dict[SeriesKey, str] = {}
        self._histograms: dict[SeriesKey, tuple[HistogramCounts, str]] = {}

    def write(self) -> bytes:
        """All families with their current values."""
        with self._lock:
            # Keep only the entries of this scrape, so that removed series free their memory.
            old_heads, self._heads = self._heads, {}
            old_histograms, self._histograms = self._histograms, {}
            parts: list[str] = []
            for metric in self._registry.collect():
                parts.extend(_help_and_type(metric))
                if isinstance(metric, Family):
                    parts.extend(self._value_lines(metric, old_heads))
                    parts.extend(self._histogram_texts(metric, old_histograms))
                else:
                    parts.extend(_foreign(metric))
            return "".join(parts).encode()

    def _value_lines(self, family: Family, old: dict[SeriesKey, str]) -> Iterator[str]:
        name = family.declaration.name
        for labels, value in family.values.items():
            key = name, labels, family.tags_of(labels)
            head = old.get(key) or _head(name, family.pairs(labels))
            self._heads[key] = head
            yield f"{head}{spell_number(value)}\n"

    def _histogram_texts(self, family: Family, old: dict[SeriesKey, tuple[HistogramCounts, str]]) -> Iterator[str]:
        for counts in family.histograms:
            key = family.declaration.name, counts.labels, family.tags_of(counts.labels)
            known = old.get(key)
            if known is None or known[0] != counts:
                known = counts, _histogram_text(family, counts)
            self._histograms[key] = known
            yield known[1]


def _help_and_type(metric: Metric) -> tuple[str, str]:
    """The two comment lines before the samples of a family."""
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    # Counters under Triton's names are counters in this format, as Triton writes them.
    kind = metric.declaration.type if isinstance(metric, Family) else metric.type
    text = metric.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {text}\n", f"# TYPE {name} {'untyped' if kind == 'unknown' else kind}\n"


def _histogram_text(family: Family, counts: HistogramCounts) -> str:
    name = family.declaration.name
    labels = _labels(family.pairs(counts.labels))
    before_bound = f'{name}_bucket{{{labels},le="'  # every histogram has labels
    cumulative = list(counts.cumulative())
    return "".join(
        [
            *(
                f'{before_bound}{bound}"}} {count}\n'
                for bound, count in zip(bucket_bounds(family.declaration), cumulative, strict=True)
            ),
            f"{name}_count{{{labels}}} {cumulative[-1]}\n",
            f"{name}_sum{{{labels}}} {spell_number(counts.total / family.scale)}\n",
        ]
    )


def _foreign(metric: Metric) -> Iterator[str]:
    """The lines of the library's own collectors: gauges and counters of the process."""
    for sample in metric.samples:
        yield f"{_head(sample.name, sample.labels.items())}{spell_number(sample.value)}\n"


def _head(name: str, labels: Iterable[tuple[str, str]]) -> str:
    """The part of a line before the value."""
    inside = _labels(labels)
    return f"{name}{{{inside}}} " if inside else f"{name} "


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    return ",".join(f'{label}="{_escape(value)}"' for label, value in labels)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def with_tags(families: Iterable[Metric], tags: Mapping[str, Tags]) -> Iterator[Metric]:
    """Add the tags of models, by name, to families before they are written."""
    for family in families:
        if tags and isinstance(family, Family):
            family.tags = tags
        yield family
