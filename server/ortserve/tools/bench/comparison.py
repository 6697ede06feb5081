"""``ortserve bench --compare``: reads two results of ``--json``, compares them, and presents the comparison."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter, ValidationError

from ortserve.errors import invalid_input
from ortserve.tools.bench.result import BenchResult, Point
from ortserve.tools.report import Block, Cell, Facts, FindingCatalog, Findings, Report, Table
from ortserve.tools.statistics import Estimate, compare

_CATALOG: Final = FindingCatalog("""
not_compared (warning): It was not compared.
    → Measure again.
""")


@dataclass(frozen=True, slots=True)
class Change:
    """A value in two results: the ratio of the second to the first, and whether the difference is beyond the noise."""

    way: str
    load: str
    batch: int
    value: str
    first: float
    second: float
    ratio: float
    low: float | None
    high: float | None
    is_significant: bool


@dataclass(frozen=True, slots=True)
class BenchComparison:
    """The result of ``--compare``: changes from the first to the second result, and the loads of only one of them."""

    schema: Literal["ortserve.bench.comparison/1"]
    first: str
    second: str
    changes: tuple[Change, ...]
    only_in_one: tuple[str, ...]
    problems: tuple[str, ...]


def read_result(file: Path) -> BenchResult:
    """Read a result that ``--json`` has printed.

    Raises:
        ServeError: invalid_input: the file cannot be read, or is no result.
    """
    try:
        return TypeAdapter(BenchResult).validate_json(file.read_bytes())
    except OSError as error:
        raise invalid_input(f"--compare {file}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise invalid_input(f"--compare {file}: expected a result of bench --json: {problem}") from None


def compare_results(first: BenchResult, second: BenchResult, names: tuple[str, str]) -> BenchComparison:
    """Compare the points with equal way, load and batch. Several such points are paired in their order."""
    left = list(second.points)
    changes: list[Change] = []
    problems: list[str] = []
    unmatched: list[Point] = []
    for one in first.points:
        other = next((other for other in left if _key(other) == _key(one)), None)
        if other is None:
            unmatched.append(one)
            continue
        left.remove(other)
        before, after = _values(one), _values(other)
        for name in (name for name in before if name in after):
            ratio = compare(before[name], after[name])
            change = Change(
                way=one.way,
                load=one.load,
                batch=one.batch,
                value=name,
                first=before[name].value,
                second=after[name].value,
                ratio=ratio.value,
                low=ratio.low,
                high=ratio.high,
                is_significant=ratio.is_significant,
            )
            changes.append(change)
        slow = {"first": one.generator.too_slow_because, "second": other.generator.too_slow_because}
        problems += [f"{one.way} {one.load}: {which}: {why[0]}" for which, why in slow.items() if why]
    if len(unmatched) == len(first.points):
        problems.append("the results have no load in common")
    only = [f"{one.target} {one.way} {one.load} batch {one.batch}" for one in (*unmatched, *left)]
    return BenchComparison("ortserve.bench.comparison/1", *names, tuple(changes), tuple(only), tuple(problems))


def _key(point: Point) -> tuple[str, str, int]:
    return point.way, point.load, point.batch


def _values(point: Point) -> dict[str, Estimate]:
    percentiles = {f"p{one.percent:g} ms": Estimate(one.ms, one.low_ms, one.high_ms) for one in point.percentiles}
    return {"throughput per s": point.throughput, **percentiles}


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
        "The noise is the spread within each result. It does not cover conditions that changed between the results: "
        "measure both targets in one run with --rounds."
    )
    texts = [*comparison.problems, *(f"only in one of the results: {name}" for name in comparison.only_in_one)]
    findings = [_CATALOG.finding("not_compared", text) for text in texts]
    facts = Facts("Results", {"first": comparison.first, "second": comparison.second})
    blocks: list[Block] = [facts, Table("Changes", columns, rows, note)]
    return Report("ortserve bench: comparison", [*blocks, *([Findings(findings)] if findings else [])])
