"""A result as a report. Pure."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

from ortserve.tools.bench.points import NO_VERDICT, PERCENTS
from ortserve.tools.bench.result import BenchComparison, BenchResult, Point
from ortserve.tools.pictures import chart
from ortserve.tools.report import (
    Block,
    Cell,
    Facts,
    Finding,
    Findings,
    Level,
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


def present(result: BenchResult, *, has_pictures: bool) -> Report:
    """The report of a measurement. Only pages have pictures, which take seconds to draw."""
    points = result.points
    names = _Names(points)
    title = "ortserve bench" + (f" of {result.model}" if result.model else "")
    blocks: list[Block] = [
        Facts(
            "Measurement",
            {
                "target": ", ".join(dict.fromkeys(point.target for point in points)),
                "way": ", ".join(dict.fromkeys(point.way for point in points)),
                "server": ", ".join(dict.fromkeys(point.server for point in points)) or None,
                "began": result.began,
                "inputs": result.inputs,
                "machine of the generator": result.machine,
                **({"ended": "early, by Ctrl-C: these are partial results"} if result.is_interrupted else {}),
            },
        )
    ]
    if not points:
        return Report(title, [*blocks, Findings(_findings(result, names))])
    blocks += [_latencies(result, names), _rates(result, names)]
    blocks += [
        Table(
            "Capacity",
            ["target", "way", "rows", "sustained /s", "too much /s"],
            [[one.target, one.way, one.batch, one.sustained_per_s, one.exceeded_per_s] for one in result.capacities],
            note="Sustained: nothing piles up, at most 0.1 % fail"
            + (f", and p{result.percentile:g} is within {result.slo_ms:g} ms." if result.slo_ms else "."),
        )
    ] * bool(result.capacities)
    blocks += [*_details(points, names), Findings(_findings(result, names))]
    if not has_pictures:
        return Report(title, blocks)
    curves = [list(group) for _, group in groupby(points, lambda point: (point.target, point.way, point.batch))]
    if any(len(curve) > 1 for curve in curves):
        blocks.append(Picture("Latency against load", _curve(curves, result.percentile)))
    for number, point in enumerate(points[:_MOST_HISTOGRAMS]):
        if point.histogram:
            blocks.append(Picture(f"Latencies: {names.text(point)}", _histogram(point, number)))
    return Report(title, blocks)


class _Names:
    """What tells the points of a result apart: columns and words for that which differs, and for the load."""

    def __init__(self, points: Sequence[Point]) -> None:
        values: dict[str, list[object]] = {
            "target": [point.target for point in points],
            "way": [point.way for point in points],
            "rows": [point.batch for point in points],
        }
        self._shown = [name for name, found in values.items() if len(set(found)) > 1]
        self.columns = [*self._shown, "load"]

    def cells(self, point: Point) -> list[Cell]:
        """The first cells of a row, below ``columns``."""
        values: dict[str, Cell] = {"target": point.target, "way": point.way, "rows": point.batch}
        return [*(values[name] for name in self._shown), point.load]

    def text(self, point: Point) -> str:
        """The same as words."""
        return ", ".join(f"{cell} rows" if isinstance(cell, int) else str(cell) for cell in self.cells(point))


def _latencies(result: BenchResult, names: _Names) -> Table:
    percents = sorted({*PERCENTS, result.percentile})
    rows: list[list[Cell]] = []
    for point in result.points:
        found = [point.percentile(percent) for percent in percents]
        asked = point.percentile(result.percentile)
        interval = "\u2013"
        if asked is not None and asked.low_ms is not None and asked.high_ms is not None:
            interval = f"{number_text(asked.low_ms)} to {number_text(asked.high_ms)}"
        rows.append([*names.cells(point), *(one.ms if one else None for one in found), point.most_ms, interval])
    return Table(
        "Latency in ms",
        [
            *names.columns,
            *(f"p{percent:g}" for percent in percents),
            "max",
            f"p{result.percentile:g} 95 %",
        ],
        rows,
        note="Open loops count from the moment when a request was due. Closed loops count from its sending, and hide "
        "stalls: callers that wait send nothing.",
    )


def _rates(result: BenchResult, names: _Names) -> Table:
    rows: list[list[Cell]] = []
    for point in result.points:
        spread = None
        if point.throughput.low is not None and point.throughput.high is not None:
            spread = f"{number_text(point.throughput.low)} to {number_text(point.throughput.high)}"
        failed = sum(one.count for one in point.failures)
        usage = point.usage
        rows.append(
            [
                *names.cells(point),
                point.throughput.value,
                spread,
                point.rows_per_s,
                *([point.goodput_per_s] if result.slo_ms is not None else []),
                failed,
                usage.cpu_us_per_request if usage else None,
                bytes_text(usage.resident_bytes) if usage else None,
                f"{point.seconds:.1f} s, {point.stopped_because}",
            ]
        )
    goodput = [f"within {result.slo_ms:g} ms /s"] if result.slo_ms is not None else []
    columns = ["answers /s", "95 %", "rows /s", *goodput, "failed", "server CPU µs", "server memory", "measured"]
    return Table("Throughput", [*names.columns, *columns], rows)


def _details(points: Sequence[Point], names: _Names) -> list[Block]:
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
    own: list[list[Cell]] = [
        [
            names.text(point),
            point.generator.processes,
            round(100 * point.generator.cpu_share, 1),
            point.generator.late_p50_us,
            point.generator.late_p99_us,
            "not compared" if point.outputs is None else f"{point.outputs.checked:,} with {point.outputs.expected}",
        ]
        for point in points
    ]
    tables = [
        Table("Failures", ["load", "kind", "count", "one of them"], failures),
        Table("Time on the server in ms, mean / p99", ["load", *phases], times, "As it says itself."),
        Table("Batches", ["load", "rows: batches"], batches, most_rows=30),
        Table("Generator", ["load", "processes", "CPU %", "late p50 µs", "late p99 µs", "answers compared"], own),
    ]
    return [table for table in tables if table.rows]


def _findings(result: BenchResult, names: _Names) -> list[Finding]:
    points = result.points
    slow = [f"{names.text(point)}: {reason}" for point in points for reason in point.generator.too_slow_because]
    overloaded = [names.text(point) for point in points if point.is_overloaded]
    drifting = [
        f"{names.text(point)}: the median moved by {point.drift:+.0%} during the measurement"
        for point in points
        if point.drift and not point.is_overloaded
    ]
    unsettled = [
        f"{names.text(point)}: the first {point.unsettled_s:.1f} s differ from the rest"
        for point in points
        if point.unsettled_s
    ]
    missed = [problem for problem in result.problems if NO_VERDICT not in problem]
    kinds: list[tuple[str, Level, list[str], str, str]] = [
        (
            "generator_too_slow",
            "problem",
            slow,
            "The figures may be those of the generator or of a busy machine, so there is no verdict.",
            "Lower the rate, use --processes, free processors, or run the generator on another machine.",
        ),
        ("missed", "problem", missed, "The exit status is not 0.", "See the tables."),
        (
            "overloaded",
            "warning",
            [f"{name}: requests came faster than answers" for name in overloaded],
            "More and more requests waited: the latencies grow with the time measured.",
            "Take percentiles at a lower rate; --find-capacity finds the highest that is sustained.",
        ),
        (
            "drifting",
            "warning",
            drifting,
            "Something has not settled, so another measurement may find other values.",
            "Measure longer, with a longer --warmup, or on a quieter machine.",
        ),
        (
            "unsettled",
            "advice",
            unsettled,
            "Models, caches and batch sizes settle under load; a stall at the beginning looks the same.",
            "Give a longer --warmup, and see whether it stays.",
        ),
    ]
    return [
        Finding(kind, level, "; ".join(seen[:_MOST_SEEN]), matters, remedy, tuple(seen))
        for kind, level, seen, matters, remedy in kinds
        if seen
    ]


def _curve(curves: Sequence[Sequence[Point]], percent: float) -> str:
    def draw(axes: "Axes") -> None:
        for curve in curves:
            for shown in (50.0, percent):
                found = [(point.throughput.value, point.percentile(shown)) for point in curve]
                pairs = sorted((x, one.ms) for x, one in found if one)
                name = f"p{shown:g} {curve[0].way}" + (f", {curve[0].batch} rows" if curve[0].batch > 1 else "")
                name += f" {curve[0].target}" if len({one[0].target for one in curves}) > 1 else ""
                style = "-" if shown == percent else "--"
                axes.plot(
                    [x for x, _ in pairs], [y for _, y in pairs], style, marker="o", markersize=3, label=name[:60]
                )
        axes.set(xlabel="answers per second", ylabel="latency in ms", yscale="log")
        axes.legend(fontsize=7)

    return chart(draw, name="curve")


def _histogram(point: Point, number: int) -> str:
    def draw(axes: "Axes") -> None:
        edges = point.histogram_ms
        widths = [right - left for left, right in pairwise(edges)]
        axes.bar(edges[:-1], point.histogram, widths, align="edge")
        for one in point.percentiles:
            if one.percent in (50.0, 99.0):
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
        rows.append(
            [one.way, one.load, one.batch, one.value, one.first, one.second, f"{one.ratio:.3f}", interval, verdict]
        )
    columns = ["way", "load", "rows", "value", "first", "second", "second / first", "95 %", "difference"]
    blocks: list[Block] = [
        Facts("Results", {"first": comparison.first, "second": comparison.second}),
        Table(
            "Changes",
            columns,
            rows,
            note="Noise is that within each result. Conditions that changed between them are not in it: measure both "
            "targets in one run with --rounds.",
        ),
    ]
    texts = [*comparison.problems, *(f"only in one of the results: {name}" for name in comparison.only_in_one)]
    if texts:
        findings = [Finding("not_compared", "warning", text, "It has no verdict.", "Measure again.") for text in texts]
        blocks.append(Findings(findings))
    return Report("ortserve bench: comparison", blocks)
