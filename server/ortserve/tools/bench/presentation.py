"""Makes reports of results. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

from ortserve.tools.bench.points import NO_VERDICT, PERCENTS
from ortserve.tools.bench.result import BenchResult, Point
from ortserve.tools.page import chart
from ortserve.tools.report import (
    Block,
    Cell,
    Facts,
    Finding,
    FindingCatalog,
    Findings,
    Picture,
    Report,
    Table,
    bytes_text,
    cells_of,
    number_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_HISTOGRAMS: Final = 12
_MAX_SEEN: Final = 4
"""Cases that the text of a finding names. ``where`` has all of them."""
_CATALOG: Final = FindingCatalog("""
generator_too_slow (problem): The generator or other work may have limited the figures, so there is no verdict.
    → Lower the rate, use --processes, free processors, or run the generator on another machine.
generator_beside_server (warning): The generator takes processors from the server: throughput may be too low by this
    share, and latencies too long.
    → Measure latencies at a moderate --rate; run the generator on another machine for the throughput.
generator_between_runs (warning): The generator works between the runs of a caller, so throughput is lower by this
    share than that of runs alone. Latencies do not contain it.
    → Take the time of a run from the latencies.
missed (problem): The exit status is not 0.
    → See the tables.
overloaded (warning): More and more requests waited, so the latencies grow with the duration of the measurement.
    → Take percentiles at a lower rate; --find-capacity finds the highest rate that is sustained.
outputs_not_compared (warning): Wrong answers are not detected.
    → Give random operators a seed, or compare with a model without them: --compare-outputs MODEL. For a model with
    sequences, compare the answers to whole sequences in a test of your own. If a request before the load failed,
    measure again when the server answers.
""")
_FULL: Final = 0.9
_MUCH: Final = 0.1
_LEAST_ANSWERS: Final = 100
"""Answers of each caller from which on the answers at the ends of the measurement do not matter."""


def present(result: BenchResult, *, has_pictures: bool) -> Report:
    """The report of a measurement. Only pages show pictures, and drawing them takes seconds."""
    points, names = result.points, _Names(result.points)
    facts: dict[str, Cell] = {
        "target": ", ".join(dict.fromkeys(point.target for point in points)),
        "way": ", ".join(dict.fromkeys(point.way for point in points)),
        "server": ", ".join(dict.fromkeys(point.server for point in points if point.server)) or None,
        "began": result.began,
        "inputs": result.inputs,
        "machine of the generator": result.machine,
        **({"ended": "interrupted by Ctrl-C; the results are partial"} if result.is_interrupted else {}),
    }
    tables = (table for table in _tables(result, names) if table.rows)
    blocks: list[Block] = [Facts("Measurement", facts), *tables, Findings(_findings(result, names))]
    if has_pictures:
        answered = [point for point in points if point.percentiles]
        curves = [list(group) for _, group in groupby(answered, lambda point: (point.target, point.way, point.batch))]
        if any(len(curve) > 1 for curve in curves):
            blocks.append(Picture("Latency against load", _curve(curves, result.percentile)))
        for number, point in enumerate(points[:_MAX_HISTOGRAMS]):
            if point.histogram:
                blocks.append(Picture(f"Latencies: {names.text(point)}", _histogram(point, number)))
    return Report("ortserve bench" + (f" of {result.model}" if result.model else ""), blocks)


class _Names:
    """The cells that identify a point within a result: the fields that differ between points, and the load."""

    def __init__(self, points: Sequence[Point]) -> None:
        fields = {"target": "target", "way": "way", "rows": "batch"}
        self._shown = {
            name: field for name, field in fields.items() if len({getattr(one, field) for one in points}) > 1
        }

    def cells(self, point: Point) -> dict[str, Cell]:
        """The first cells of a row."""
        return {**{name: getattr(point, field) for name, field in self._shown.items()}, "load": point.load}

    def text(self, point: Point) -> str:
        """The same as words."""
        cells = self.cells(point).values()
        return ", ".join(f"{cell} rows" if isinstance(cell, int) else str(cell) for cell in cells)

    def row(self, point: Point, cells: Mapping[str, Cell]) -> dict[str, Cell]:
        """A row with the same words in its first cell."""
        return {"load": self.text(point), **cells}


def _range(low: float | None, high: float | None) -> str | None:
    return None if low is None or high is None else f"{number_text(low)} to {number_text(high)}"


def _tables(result: BenchResult, names: _Names) -> Iterator[Table]:
    """All tables. Those without rows are not shown."""
    points, percent, slo_ms = result.points, result.percentile, result.slo_ms
    note = (
        "Open loops measure from the time when a request was due. Closed loops measure from the time when it was sent, "
        "and hide stalls, because callers that wait send nothing."
    )
    yield Table.of("Latency in ms", [names.cells(point) | _latencies(point, percent) for point in points], note)
    yield Table.of("Throughput", [names.cells(point) | _rates(point, slo_ms) for point in points])
    bound = f", and p{percent:g} is within {slo_ms:g} ms" if slo_ms else ""
    note = f"A sustained rate builds up no backlog, and at most 0.1 % of its requests fail{bound}."
    columns = ["target", "way", "rows", "sustained /s", "not sustained /s"]
    yield Table("Capacity", columns, [astuple(one) for one in result.capacities], note)
    yield Table.of("Failures", [names.row(point, cells_of(one)) for point in points for one in point.failures])
    note = "As the server or the batcher reports them."
    phases = [names.row(point, _phases(point)) for point in points if point.phases]
    yield Table.of("Phases of a request in ms, mean / p99", phases, note)
    batches = [
        names.row(point, {"rows: batches": ", ".join(f"{one.rows}: {one.batches:,}" for one in point.batches)})
        for point in points
        if point.batches
    ]
    yield Table.of("Batches", batches, max_rows=30)
    yield Table.of("Generator", [names.row(point, _generator(point)) for point in points])


def _phases(point: Point) -> dict[str, Cell]:
    return {one.name: f"{number_text(one.mean_ms)} / {number_text(one.p99_ms)}" for one in point.phases}


def _latencies(point: Point, percent: float) -> dict[str, Cell]:
    found = {one: point.percentile(one) for one in sorted({*PERCENTS, percent})}
    asked = found[percent]
    return {
        **{f"p{one:g}": held.ms if held else None for one, held in found.items()},
        "max": point.most_ms,
        f"p{percent:g} 95 %": _range(asked.low_ms, asked.high_ms) if asked else None,
    }


def _rates(point: Point, slo_ms: float | None) -> dict[str, Cell]:
    usage, rate = point.usage, point.throughput
    return {
        "answers /s": rate.value,
        "95 %": _range(rate.low, rate.high),
        "rows /s": rate.value * point.batch,
        **({} if slo_ms is None else {f"within {slo_ms:g} ms /s": point.goodput_per_s}),
        "failed": point.failed,
        "server CPU µs": usage.cpu_us_per_request if usage else None,
        "server memory": bytes_text(usage.resident_bytes) if usage else None,
        "measured": f"{point.seconds:.1f} s, {point.stopped_because}",
    }


def _generator(point: Point) -> dict[str, Cell]:
    own, outputs = point.generator, point.outputs
    compared = outputs.expected if outputs else "not compared"
    return {
        "processes": own.processes,
        "CPU %": round(100 * own.cpu_share, 1),
        "late p50 µs": own.late_p50_us,
        "late p99 µs": own.late_p99_us,
        "waited µs": own.waited_us,
        "compared": f"{outputs.checked:,} with {compared}" if outputs and outputs.checked else compared,
    }


def _findings(result: BenchResult, names: _Names) -> list[Finding]:
    cases: dict[str, list[str]] = {kind: [] for kind in _CATALOG.kinds}
    cases["missed"] = [problem for problem in result.problems if NO_VERDICT not in problem]
    for point in result.points:
        name, outputs = names.text(point), point.outputs
        cases["generator_too_slow"] += [f"{name}: {reason}" for reason in point.generator.too_slow_because]
        if beside := _beside(point):
            cases["generator_beside_server"].append(f"{name}: {beside}")
        if (between := _between_runs(point)) > _MUCH:
            cases["generator_between_runs"].append(f"{name}: {between:.0%} of the time passes between runs")
        if point.is_overloaded:
            cases["overloaded"].append(f"{name}: requests came faster than answers")
        if outputs and not outputs.checked:
            cases["outputs_not_compared"].append(f"{name}: compared with {outputs.expected}")
    return [_CATALOG.finding(kind, "; ".join(found[:_MAX_SEEN]), *found) for kind, found in cases.items() if found]


def _beside(point: Point) -> str:
    """The share of busy processors that the generator took from the server; empty if it was small."""
    usage, own = point.usage, point.generator.cpu_share
    # Other work keeps a machine busy, too: at a low rate, generator and server may both use next to nothing.
    if usage is None or usage.machine_busy < _FULL or own < _MUCH * max(1.0, own + usage.processors):
        return ""
    seen = f"this machine was {usage.machine_busy:.0%} busy, and of its and the server's processor time"
    return f"{seen} the generator took {own / (own + usage.processors):.0%}"


def _between_runs(point: Point) -> float:
    """The share of the time of callers in this process in which no run is under way; 0 if it is not known."""
    callers, mean_ms = point.concurrency, point.mean_ms
    if point.server or not callers or mean_ms is None or point.failed or point.answers < _LEAST_ANSWERS * callers:
        return 0.0
    return 1 - point.throughput.value * mean_ms / 1e3 / callers


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
            place = (one.ms, max(point.histogram))
            axes.annotate(f"p{one.percent:g}", place, (3, -4), textcoords="offset points", fontsize=8)
        axes.set(xlabel="latency in ms", ylabel="answers", xscale="log", yscale="symlog")

    return chart(draw, name=f"latencies{number}", height=2.4)
