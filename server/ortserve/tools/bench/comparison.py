"""Reads results and compares two of them. Pure, except for reading."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ortserve.errors import invalid_input
from ortserve.tools.bench.result import BenchComparison, BenchResult, Change, Point
from ortserve.tools.bench.statistics import Estimate, compare


def read_result(file: Path) -> BenchResult:
    """Read what ``--json`` printed.

    Raises:
        ServeError: invalid_input, if it is something else.
    """
    try:
        return TypeAdapter(BenchResult).validate_json(file.read_bytes())
    except OSError as error:
        raise invalid_input(f"--compare {file}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise invalid_input(f"--compare {file}: expected a result of bench --json: {where}: {first['msg']}") from None


def compare_results(first: BenchResult, second: BenchResult, names: tuple[str, str]) -> BenchComparison:
    """Compare the points that have the same load, way and batch."""
    pairs, lonely = _pairs(first.points, second.points)
    changes: list[Change] = []
    problems: list[str] = []
    for one, other in pairs:
        values = [("throughput per s", one.throughput, other.throughput)]
        for percentile in one.percentiles:
            match = other.percentile(percentile.percent)
            if match is not None:
                values.append((f"p{percentile.percent:g} ms", percentile.estimate(), match.estimate()))
        changes += [_change(one, name, before, after) for name, before, after in values]
        slow = {"first": one.generator.too_slow_because, "second": other.generator.too_slow_because}
        problems += [f"{one.way} {one.load}: {which}: {why[0]}" for which, why in slow.items() if why]
    if not pairs:
        problems.append("the results have no load in common")
    return BenchComparison("ortserve.bench.comparison/1", *names, tuple(changes), tuple(lonely), tuple(problems))


def _pairs(first: tuple[Point, ...], second: tuple[Point, ...]) -> tuple[list[tuple[Point, Point]], list[str]]:
    """Points of one key in their order, so that several targets are compared one by one; and keys of only one side."""
    left = list(second)
    pairs, lonely = [], []
    for one in first:
        match = next((other for other in left if other.key == one.key), None)
        if match is None:
            lonely.append(f"{one.way} {one.load} batch {one.batch}")
            continue
        left.remove(match)
        pairs.append((one, match))
    return pairs, lonely + [f"{other.way} {other.load} batch {other.batch}" for other in left]


def _change(point: Point, value: str, before: Estimate, after: Estimate) -> Change:
    found = compare(before, after)
    return Change(
        point.way,
        point.load,
        point.batch,
        value,
        before.value,
        after.value,
        found.ratio,
        found.low,
        found.high,
        found.is_significant,
    )
