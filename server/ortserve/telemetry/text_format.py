"""Writes Prometheus' text format, fast enough for a thousand models: a scrape competes with the event loop.

What prometheus_client's own writer spends most on is done once here: the part of a line before its value is kept from
one scrape to the next, and so is the whole text of a histogram that has counted nothing since.
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

import threading
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from ortserve.telemetry.families import Family, HistogramCounts, Labels, bucket_bounds, spell_number

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class TextFormat:
    """Writes what a registry collects. From any thread; one scrape waits for another."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._heads: dict[tuple[str, Labels], str] = {}
        self._histograms: dict[tuple[str, Labels], tuple[HistogramCounts, str]] = {}

    def write(self) -> bytes:
        """All families as they stand."""
        with self._lock:
            # Only what was written this time is kept, so that series which go leave nothing behind.
            old_heads, self._heads = self._heads, {}
            old_histograms, self._histograms = self._histograms, {}
            parts: list[str] = []
            for metric in self._registry.collect():
                parts.extend(_head_of_family(metric))
                if isinstance(metric, Family):
                    parts.extend(self._values(metric, old_heads))
                    parts.extend(self._texts(metric, old_histograms))
                else:
                    parts.extend(_foreign(metric))
            return "".join(parts).encode()

    def _values(self, family: Family, old: dict[tuple[str, Labels], str]) -> Iterator[str]:
        name, names = family.declaration.name, family.declaration.labels
        for labels, value in family.values.items():
            key = name, labels
            head = old.get(key) or _head(name, zip(names, labels, strict=True))
            self._heads[key] = head
            yield f"{head}{spell_number(value)}\n"

    def _texts(self, family: Family, old: dict[tuple[str, Labels], tuple[HistogramCounts, str]]) -> Iterator[str]:
        for counts in family.histograms:
            key = family.declaration.name, counts.labels
            known = old.get(key)
            if known is None or known[0] != counts:
                known = counts, _histogram(family, counts)
            self._histograms[key] = known
            yield known[1]


def _head_of_family(metric: Metric) -> tuple[str, str]:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    text = metric.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {text}\n", f"# TYPE {name} {'untyped' if metric.type == 'unknown' else metric.type}\n"


def _histogram(family: Family, known: HistogramCounts) -> str:
    declaration = family.declaration
    labels = [*zip(declaration.labels, known.labels, strict=True)]
    bucket = _head(f"{declaration.name}_bucket", [*labels, ("le", "\0")])
    before, after = bucket.split("\0")
    cumulative = list(known.cumulative())
    return "".join(
        [
            *(
                f"{before}{bound}{after}{count}\n"
                for bound, count in zip(bucket_bounds(declaration), cumulative, strict=True)
            ),
            f"{_head(f'{declaration.name}_count', labels)}{cumulative[-1]}\n",
            f"{_head(f'{declaration.name}_sum', labels)}{spell_number(known.total / family.scale)}\n",
        ]
    )


def _foreign(metric: Metric) -> Iterator[str]:
    """Of the library's own collectors: gauges and counters of the process."""
    for sample in metric.samples:
        yield f"{_head(sample.name, sample.labels.items())}{spell_number(sample.value)}\n"


def _head(name: str, labels: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{label}="{_escape(value)}"' for label, value in labels)
    return f"{name}{{{inside}}} " if inside else f"{name} "


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
