"""Reads results of ``--json``, and compares two of them."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ortserve.errors import invalid_input
from ortserve.tools.bench.result import BenchComparison, BenchResult, Change, Point
from ortserve.tools.statistics import Estimate, compare


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
