"""A result as a report. Pure."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ortserve.tools.bench.statistics import Estimate
from ortserve.tools.pictures import chart
from ortserve.tools.report import Block, Cell, Facts, Finding, Findings, Picture, Report, Table, Text, bytes_text
from ortserve.tools.tune.result import Figures, Trial, TuneResult
from ortserve.tools.tune.search import describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ratio_text(ratio: Estimate | None) -> str | None:
    """A ratio with its interval: ``1.32 (1.21 to 1.44)``."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return None if ratio is None else f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def present(result: TuneResult, *, has_pictures: bool) -> Report:
    """The report of a search. Only pages have pictures."""
    tail = f"p{result.percentile:g} ms"
    bound = None if result.slo_ms is None else f"p{result.percentile:g} within {result.slo_ms:g} ms"
    load = "found for each configuration" if result.rate_per_s is None else f"{result.rate_per_s:.4g}/s"
    facts: dict[str, Cell] = {
        "objective": result.objective,
        "bound": bound,
        "rate": load,
        "inputs": result.inputs,
        "machine": result.machine,
        "trials": len(result.trials) - 1,
        "took": f"{result.seconds:.0f} s",
        "current against itself": ratio_text(result.noise),
    }
    blocks: list[Block] = [Text(result.conclusion), Facts("Search", facts)]
    if found := result.confirmation:
        sides = (("current", found.current, found.current_per_s), ("best", found.best, found.best_per_s))
        rows = [[name, *_cells(figures), rate] for name, figures, rate in sides]
        columns = ["configuration", "requests /s", "p50 ms", tail, "CPU ms", "memory", "error", "constant rate /s"]
        note = f"New processes in turn, {found.pairs} pairs: the best is {ratio_text(found.ratio)} times as good."
        blocks.append(Table("Confirmation", columns, rows, note))
    if result.gains:
        gains = [
            [describe(one.changes), ratio_text(one.ratio) or "not measured", "kept" if one.is_kept else "left out"]
            for one in result.gains
        ]
        blocks.append(Table("Gains, each against leaving it out", ["keys", "ratio", ""], gains))
    if result.yaml:
        blocks.append(Text(f"{result.written or result.why_not_written}:\n\n{result.yaml.rstrip()}"))
    if result.variants:
        versions: list[list[Cell]] = [
            [one.version, ratio_text(one.ratio) or one.why, one.error, "; ".join(one.commands) or None]
            for one in result.variants
        ]
        note = "With the same configuration. model.yaml chooses versions by version_policy, such as {specific: [2]}."
        blocks.append(Table("Other versions", ["version", "ratio", "error", "made by"], versions, note))
    if has_pictures and (points := [one for one in result.trials if one.figures and one.ratio]):
        blocks.append(
            Picture("Trials", _front(points, result), "The line joins those that no other one beats in both.")
        )
    rows = [
        [
            one.number,
            describe(one.changes),
            ratio_text(one.ratio) or one.why,
            one.state if one.number else "",
            *_cells(one.figures)[:-1],
            _mark(one),
        ]
        for one in result.trials
    ]
    columns = ["trial", "changes", "ratio", "", "requests /s", "p50 ms", tail, "CPU ms", "memory", "front"]
    blocks.append(Table("Trials, against the current configuration in turn", columns, rows, most_rows=15))
    blocks.append(Findings(list(_findings(result))))
    return Report(f"ortserve tune {result.model}", [one for one in blocks if not isinstance(one, Table) or one.rows])


def _cells(figures: Figures | None) -> list[Cell]:
    if figures is None:
        return [None] * 6
    memory = bytes_text(figures.memory_nbytes)
    return [figures.throughput_per_s, figures.p50_ms, figures.tail_ms, figures.cpu_ms, memory, figures.error]


def _mark(trial: Trial) -> str:
    return "yes" if trial.is_on_front else ""


def _findings(result: TuneResult) -> Iterator[Finding]:
    if result.is_too_noisy:
        yield Finding(
            "noisy_machine",
            "warning",
            f"the current configuration against itself: {ratio_text(result.noise)}",
            "Only large gains can be told from the noise, so smaller ones may have been missed.",
            "Stop other work on this machine, or allow more time by --max-minutes.",
        )
    for one in result.variants:
        if one.ratio and one.ratio.low and one.ratio.low > 1:
            yield Finding(
                "better_version",
                "advice",
                f"version {one.version} is {ratio_text(one.ratio)} times as good, with errors up to {one.error:.2g}",
                "model.yaml holds for all versions, so the search cannot choose it.",
                f"Check its outputs by ortserve compare, then serve it: version_policy: {{specific: [{one.version}]}}",
            )


def _front(trials: Sequence[Trial], result: TuneResult) -> str:
    def draw(axes: "Axes") -> None:
        places = {one.number: place_of(one, result.objective) for one in trials}
        for state, marker in (("measured", "o"), ("pruned", ".")):
            shown = [places[one.number] for one in trials if one.state == state]
            axes.scatter([x for x, _ in shown], [y for _, y in shown], marker=marker, label=state)
        front = sorted(places[one.number] for one in trials if one.is_on_front)
        axes.plot([x for x, _ in front], [y for _, y in front], linewidth=1, label="front")
        if result.confirmation:
            for name, figures in (("current", result.confirmation.current), ("best", result.confirmation.best)):
                axes.annotate(name, _place(figures, result.objective))
        axes.set_xlabel(f"p{result.percentile:g} ms")
        axes.set_ylabel(_AXES[result.objective])
        axes.legend()

    return chart(draw, name="front")


_AXES = {
    "throughput": "requests per second within the bound",
    "latency": "answers per second of CPU time",
    "cost": "answers per second of CPU time",
    "memory": "memory in MiB, negative",
}


def place_of(trial: Trial, objective: str) -> tuple[float, float]:
    """Where a trial with figures is in the picture: the percentile of its latency, and what is better if higher."""
    assert trial.figures is not None
    return _place(trial.figures, objective)


def _place(figures: Figures, objective: str) -> tuple[float, float]:
    if objective == "throughput":
        return figures.tail_ms, figures.throughput_per_s or 0.0
    if objective == "memory":
        return figures.tail_ms, -figures.memory_nbytes / 2**20
    return figures.tail_ms, 1e3 / max(1e-6, figures.cpu_ms)
