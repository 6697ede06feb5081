"""A result as a report. Pure."""

from collections.abc import Sequence
from dataclasses import astuple
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

from ortserve.tools.bench.points import NO_VERDICT, PERCENTS
from ortserve.tools.bench.result import BenchComparison, BenchResult, Point
from ortserve.tools.page import chart
from ortserve.tools.report import (
    Block,
    Catalog,
    Cell,
    Facts,
    Finding,
    Findings,
    Picture,
    Report,
    Table,
    bytes_text,
    number_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_HISTOGRAMS: Final = 12
_MOST_SEEN: Final = 4
"""Cases of a finding in its text; all are in ``where``."""
_CATALOG: Final = Catalog("""
generator_too_slow (problem): The figures may be those of the generator or of a busy machine, so there is no verdict.
    → Lower the rate, use --processes, free processors, or run the generator on another machine.
generator_beside_server (warning): It takes processors from the server: throughput may be too low by this share, and
    latencies too long.
    → Measure latencies at a moderate --rate; run the generator on another machine for the throughput.
missed (problem): The exit status is not 0.
    → See the tables.
overloaded (warning): More and more requests waited: the latencies grow with the time measured.
    → Take percentiles at a lower rate; --find-capacity finds the highest that is sustained.
outputs_not_compared (warning): Wrong answers are not detected.
    → Give random operators a seed, or compare with a model without them: --compare-outputs MODEL.
""")
_FULL: Final = 0.9
_MUCH: Final = 0.1


def present(result: BenchResult, *, has_pictures: bool) -> Report:
    """The report of a measurement. Only pages have pictures, which take seconds to draw."""
    points = result.points
    names = _Names(points)
    facts: dict[str, Cell] = {
        "target": ", ".join(dict.fromkeys(point.target for point in points)),
        "way": ", ".join(dict.fromkeys(point.way for point in points)),
        "server": ", ".join(dict.fromkeys(point.server for point in points)) or None,
        "began": result.began,
        "inputs": result.inputs,
        "machine of the generator": result.machine,
        **({"ended": "early, by Ctrl-C: these are partial results"} if result.is_interrupted else {}),
    }
    capacities: list[list[Cell]] = [list(astuple(one)) for one in result.capacities]
    bound = f", and p{result.percentile:g} is within {result.slo_ms:g} ms" if result.slo_ms else ""
    tables = [
        _latencies(result, names),
        _rates(result, names),
        Table(
            "Capacity",
            ["target", "way", "rows", "sustained /s", "too much /s"],
            capacities,
            f"Sustained: nothing piles up, at most 0.1 % fail{bound}.",
        ),
        *_details(points, names),
    ]
    blocks: list[Block] = [Facts("Measurement", facts), *(table for table in tables if table.rows)]
    blocks.append(Findings(_findings(result, names)))
    if has_pictures:
        curves = [list(group) for _, group in groupby(points, lambda point: (point.target, point.way, point.batch))]
        if any(len(curve) > 1 for curve in curves):
            blocks.append(Picture("Latency against load", _curve(curves, result.percentile)))
        for number, point in enumerate(points[:_MOST_HISTOGRAMS]):
            if point.histogram:
                blocks.append(Picture(f"Latencies: {names.text(point)}", _histogram(point, number)))
    return Report("ortserve bench" + (f" of {result.model}" if result.model else ""), blocks)


class _Names:
    """What tells the points of a result apart: columns and words for that which differs, and for the load."""

    def __init__(self, points: Sequence[Point]) -> None:
        fields = {"target": "target", "way": "way", "rows": "batch"}
        self._shown = {
            name: field for name, field in fields.items() if len({getattr(point, field) for point in points}) > 1
        }
        self.columns = [*self._shown, "load"]

    def cells(self, point: Point) -> list[Cell]:
        """The first cells of a row, below ``columns``."""
        return [*(getattr(point, field) for field in self._shown.values()), point.load]

    def text(self, point: Point) -> str:
        """The same as words."""
        return ", ".join(f"{cell} rows" if isinstance(cell, int) else str(cell) for cell in self.cells(point))


def _range(low: float | None, high: float | None) -> str | None:
    return None if low is None or high is None else f"{number_text(low)} to {number_text(high)}"


def _latencies(result: BenchResult, names: _Names) -> Table:
    percents = sorted({*PERCENTS, result.percentile})
    rows: list[list[Cell]] = []
    for point in result.points:
        found = [point.percentile(percent) for percent in percents]
        asked = point.percentile(result.percentile)
        interval = _range(asked.low_ms, asked.high_ms) if asked else None
        rows.append([*names.cells(point), *(one.ms if one else None for one in found), point.most_ms, interval])
    return Table(
        "Latency in ms",
        [*names.columns, *(f"p{percent:g}" for percent in percents), "max", f"p{result.percentile:g} 95 %"],
        rows,
        note="Open loops count from the moment when a request was due. Closed loops count from its sending, and hide "
        "stalls: callers that wait send nothing.",
    )


def _rates(result: BenchResult, names: _Names) -> Table:
    has_goodput = result.slo_ms is not None
    rows: list[list[Cell]] = []
    for point in result.points:
        usage, rate = point.usage, point.throughput
        values: list[Cell] = [
            *(rate.value, _range(rate.low, rate.high), rate.value * point.batch),
            *([point.goodput_per_s] if has_goodput else []),
            point.failed,
            usage.cpu_us_per_request if usage else None,
            bytes_text(usage.resident_bytes) if usage else None,
            f"{point.seconds:.1f} s, {point.stopped_because}",
        ]
        rows.append([*names.cells(point), *values])
    goodput = [f"within {result.slo_ms:g} ms /s"] if has_goodput else []
    columns = ["answers /s", "95 %", "rows /s", *goodput, "failed", "server CPU µs", "server memory", "measured"]
    return Table("Throughput", [*names.columns, *columns], rows)


def _details(points: Sequence[Point], names: _Names) -> list[Table]:
    failures: list[list[Cell]] = [
        [names.text(point), one.kind, one.count, one.example] for point in points for one in point.failures
    ]
    phases = list(dict.fromkeys(one.name for point in points for one in point.phases))
    times: list[list[Cell]] = []
    for point in (point for point in points if point.phases):
        found = {one.name: f"{number_text(one.mean_ms)} / {number_text(one.p99_ms)}" for one in point.phases}
        times.append([names.text(point), *(found.get(name) for name in phases)])
    batches: list[list[Cell]] = [
        [names.text(point), ", ".join(f"{one.rows}: {one.batches:,}" for one in point.batches)]
        for point in points
        if point.batches
    ]
    own: list[list[Cell]] = []
    for point in points:
        one, outputs = point.generator, point.outputs
        compared = f"{outputs.checked:,} with {outputs.expected}" if outputs else "not compared"
        cells = [
            one.processes,
            round(100 * one.cpu_share, 1),
            one.late_p50_us,
            one.late_p99_us,
            one.waited_us,
            compared,
        ]
        own.append([names.text(point), *cells])
    return [
        Table("Failures", ["load", "kind", "count", "one of them"], failures),
        Table("Time on the server in ms, mean / p99", ["load", *phases], times, "As it says itself."),
        Table("Batches", ["load", "rows: batches"], batches, most_rows=30),
        Table("Generator", ["load", "processes", "CPU %", "late p50 µs", "late p99 µs", "waited µs", "compared"], own),
    ]


def _findings(result: BenchResult, names: _Names) -> list[Finding]:
    points = result.points
    slow = [f"{names.text(point)}: {reason}" for point in points for reason in point.generator.too_slow_because]
    missed = [problem for problem in result.problems if NO_VERDICT not in problem]
    overloaded = [f"{names.text(one)}: requests came faster than answers" for one in points if one.is_overloaded]
    beside = [f"{names.text(one)}: {text}" for one in points if (text := _beside(one))]
    random = [
        f"{names.text(one)}: compared with {one.outputs.expected}"
        for one in points
        if one.outputs and not one.outputs.checked
    ]
    cases = {
        "generator_too_slow": slow,
        "generator_beside_server": beside,
        "missed": missed,
        "overloaded": overloaded,
        "outputs_not_compared": random,
    }
    return [_CATALOG.finding(kind, "; ".join(found[:_MOST_SEEN]), *found) for kind, found in cases.items() if found]


def _beside(point: Point) -> str:
    """How much the generator took of full processors that it shares with the server; empty if it was little."""
    usage, own = point.usage, point.generator.cpu_share
    if usage is None or usage.machine_busy < _FULL or own < _MUCH * (own + usage.processors):
        return ""
    seen = f"this machine was {usage.machine_busy:.0%} busy, and of its and the server's processor time"
    return f"{seen} the generator took {own / (own + usage.processors):.0%}"


def _curve(curves: Sequence[Sequence[Point]], percent: float) -> str:
    has_targets = len({curve[0].target for curve in curves}) > 1

    def draw(axes: "Axes") -> None:
        for curve in curves:
            point = curve[0]
            name = point.way + (f", {point.batch} rows" if point.batch > 1 else "")
            name += f" {point.target}" if has_targets else ""
            for shown, style in {50.0: "--", percent: "-"}.items():
                pairs = sorted((one.throughput.value, found.ms) for one in curve if (found := one.percentile(shown)))
                label = f"p{shown:g} {name}"[:60]
                axes.plot(*zip(*pairs, strict=True), style, marker="o", markersize=3, label=label)
        axes.set(xlabel="answers per second", ylabel="latency in ms", yscale="log")
        axes.legend(fontsize=7)

    return chart(draw, name="curve")


def _histogram(point: Point, number: int) -> str:
    def draw(axes: "Axes") -> None:
        edges = point.histogram_ms
        axes.bar(edges[:-1], point.histogram, [right - left for left, right in pairwise(edges)], align="edge")
        for one in (one for one in point.percentiles if one.percent in (50.0, 99.0)):
            axes.axvline(one.ms, linestyle="--", linewidth=1, color="black")
            axes.annotate(f"p{one.percent:g}", (one.ms, max(point.histogram)), fontsize=8)
        axes.set(xlabel="latency in ms", ylabel="answers", xscale="log", yscale="symlog")

    return chart(draw, name=f"latencies{number}", height=2.4)


def present_comparison(comparison: BenchComparison) -> Report:
    """The report of ``--compare``."""
    rows: list[list[Cell]] = []
    for one in comparison.changes:
        interval = None if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        verdict = ("more" if one.ratio > 1 else "less") if one.is_significant else "within the noise"
        cells: list[Cell] = [one.way, one.load, one.batch, one.value, one.first, one.second]
        rows.append([*cells, f"{one.ratio:.3f}", interval, verdict])
    columns = ["way", "load", "rows", "value", "first", "second", "second / first", "95 %", "difference"]
    note = (
        "Noise is that within each result. Conditions that changed between them are not in it: measure both targets "
        "in one run with --rounds."
    )
    texts = [*comparison.problems, *(f"only in one of the results: {name}" for name in comparison.only_in_one)]
    findings = [Finding("not_compared", "warning", text, "It has no verdict.", "Measure again.") for text in texts]
    facts = Facts("Results", {"first": comparison.first, "second": comparison.second})
    blocks: list[Block] = [facts, Table("Changes", columns, rows, note)]
    return Report("ortserve bench: comparison", [*blocks, *([Findings(findings)] if findings else [])])
