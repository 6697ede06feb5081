"""Makes reports of searches. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from ortserve.tools.page import chart
from ortserve.tools.report import (
    Block,
    Cell,
    Finding,
    Findings,
    Picture,
    Report,
    Table,
    Text,
    cells_of,
    facts_of,
    table_of,
)
from ortserve.tools.tune.result import Figures, Trial, TuneResult
from ortserve.tools.tune.search import describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SEARCH: Final = {"objective", "slo_ms", "percentile", "rate_per_s", "inputs", "machine", "seconds", "noise"}
_OTHERS: Final = [one.name for one in fields(TuneResult) if one.name not in _SEARCH]
_AXES: Final = {
    "throughput": "requests per second within the bound",
    "latency": "answers per second of CPU time",
    "cost": "answers per second of CPU time",
    "memory": "memory in MiB, negative",
}


def present(result: TuneResult, *, has_pictures: bool) -> Report:
    """The report of a search. Only pages have pictures."""
    tables: list[Table] = []
    if found := result.confirmation:
        sides = (("current", found.current, found.current_per_s), ("best", found.best, found.best_per_s))
        rows = [{"configuration": name, **_cells(one), "constant rate /s": rate} for name, one, rate in sides]
        note = f"New processes in turn, {found.pairs} pairs: the best is {found.ratio} times as good."
        tables.append(Table.of("Confirmation", rows, note))
    gains: list[dict[str, Cell]] = [
        {"keys": describe(one.changes), "ratio": str(one.ratio or "not measured"), "is kept": one.is_kept}
        for one in result.gains
    ]
    tables.append(Table.of("Gain of each change, compared with leaving it out", gains))
    note = "With the same configuration. model.yaml chooses versions by version_policy, such as {specific: [2]}."
    tables.append(table_of("Other versions", result.variants, note=note))
    trials: list[dict[str, Cell]] = [
        {
            "trial": one.number,
            "changes": describe(one.changes),
            "ratio": str(one.ratio or one.why),
            "state": f"{one.state}: {one.why}" if one.ratio and one.why else one.state,
            **_cells(one.figures),
            "front": one.is_on_front,
        }
        for one in result.trials
    ]
    tables.append(Table.of("Trials, against the current configuration in turn", trials, max_rows=15))
    blocks: list[Block] = [Text(result.conclusion), facts_of("Search", result, without=_OTHERS)]
    if result.yaml:
        blocks.append(Text(f"{result.written or result.why_not_written}:\n\n{result.yaml.rstrip()}"))
    if has_pictures and any(one.figures and one.ratio for one in result.trials):
        blocks.append(
            Picture("Trials", _front(result), "The line joins the trials that no other trial beats in both figures.")
        )
    blocks += [one for one in tables if one.rows]
    return Report(f"ortserve tune {result.model}", [*blocks, Findings(list(_findings(result)))])


def _cells(figures: Figures | None) -> dict[str, Cell]:
    return cells_of(figures or Figures(*[None] * len(fields(Figures))))  # type: ignore[arg-type]


def _findings(result: TuneResult) -> Iterator[Finding]:
    if result.is_too_noisy:
        yield Finding(
            "noisy_machine",
            "warning",
            f"the current configuration, measured against itself, had the ratio {result.noise}",
            "The search can miss gains that are smaller than this noise.",
            "Stop other work on this machine, or allow more time with --max-minutes.",
        )
    for one in result.variants:
        if one.ratio and one.ratio.low and one.ratio.low > 1:
            yield Finding(
                "better_version",
                "advice",
                f"version {one.version} is {one.ratio} times as good, with errors up to {one.error:.2g}",
                "model.yaml holds for all versions, so the search cannot choose it.",
                "Check its outputs with ortserve compare, then serve it: version_policy: "
                f"{{specific: [{one.version}]}}",
            )


def _front(result: TuneResult) -> str:
    def draw(axes: "Axes") -> None:
        shown = [(one, place_of(one.figures, result.objective)) for one in result.trials if one.figures and one.ratio]
        for state, marker in (("measured", "o"), ("pruned", ".")):
            places = [place for one, place in shown if one.state == state]
            axes.scatter([x for x, _ in places], [y for _, y in places], marker=marker, label=state)
        front = sorted(place for one, place in shown if one.is_on_front)
        axes.plot([x for x, _ in front], [y for _, y in front], linewidth=1, label="front")
        if result.confirmation:
            for name, figures in (("current", result.confirmation.current), ("best", result.confirmation.best)):
                axes.annotate(name, place_of(figures, result.objective))
        axes.set_xlabel(f"p{result.percentile:g} ms")
        axes.set_ylabel(_AXES[result.objective])
        axes.legend()

    return chart(draw, name="front")


def place_of(figures: Figures, objective: str) -> tuple[float, float]:
    """The point of a configuration in the chart: the percentile of its latency, and a figure to be maximized."""
    if objective == "throughput":
        return figures.tail_ms, figures.throughput_per_s or 0.0
    if objective == "memory":
        return figures.tail_ms, -figures.memory_nbytes / 2**20
    return figures.tail_ms, 1e3 / max(1e-6, figures.cpu_ms)


def mark_front(trials: Sequence[Trial], objective: str) -> tuple[Trial, ...]:
    """All trials, with a mark for those that no other trial beats in both latency and objective."""
    places = {one.number: place_of(one.figures, objective) for one in trials if one.figures and one.ratio}

    def is_beaten(x: float, y: float) -> bool:
        return any(a <= x and b >= y and (a, b) != (x, y) for a, b in places.values())

    front = {number for number, place in places.items() if not is_beaten(*place)}
    return tuple(replace(one, is_on_front=one.number in front) for one in trials)
