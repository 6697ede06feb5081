"""Results of ``advice.py``: their records, the page of results, and the figures in ``docs/performance.md``."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

RESULTS: Final = Path(__file__).parent / "results"
GUIDE: Final = Path(__file__).parents[1] / "docs" / "performance.md"
_CELL: Final = re.compile(r"[^|\n]*<!-- measured: ([\w ,-]+) -->")
"""A cell of the guide that this module fills from the results of the trials named in its comment."""
_INTRODUCTION: Final = (
    "Each row compares two arms, each in a process of its own, in turns. The ratio is without ÷ with the advice, for "
    "rates with ÷ without, so that more than 1 is a gain: the median, and in parentheses the lowest and the highest "
    "pair of processes. `speed` compares medians of the wall time of a run. The cosine compares the outputs of both "
    "arms. The first trial compares an arm with itself: a ratio within its range is noise."
)
_UNITS: Final = {"cpu": "ms", "p95": "ms", "memory": "MiB", "open": "ms", "threads": "", "rate": "/s", "speed": "ms"}
_NAMES: Final = {"cpu": "CPU a run", "memory": "memory", "open": "opening", "p95": "95th percentile"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measure without and with the advice: both medians, and the median, lowest and highest ratio of a pair."""

    without: float
    advised: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a trial on one model; ``cosine`` compares the outputs of both arms."""

    figures: Mapping[str, Figure]
    cosine: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A trial with its results by model.

    Attributes:
        advice: The advice, in a sentence.
        label: The advice in a few words.
        without: Description of the arm that ignores the advice.
        advised: Description of the arm that follows it.
        expected: The expected result, stated before measuring.
        shows: The measures that the guide reports.
        results: Results by model.
    """

    advice: str
    label: str
    without: str
    advised: str
    expected: str
    shows: Sequence[str]
    results: Mapping[str, Result]


@dataclass(frozen=True, slots=True)
class Report:
    """All findings by their keys, and the machine, versions and date of the measurements."""

    circumstances: str
    findings: Mapping[str, Finding]


def save(report: Report) -> None:
    """Write the results as JSON."""
    (RESULTS / "advice.json").write_text(json.dumps(asdict(report), indent=1) + "\n")


def render(report: Report) -> None:
    """Write the page of results, and fill the figures of the guide."""
    (RESULTS / "advice.md").write_text(page(report))
    GUIDE.write_text(with_figures(GUIDE.read_text(), report))


def read() -> Report:
    """Read the committed results."""
    document = json.loads((RESULTS / "advice.json").read_text())
    findings = {}
    for key, one in document["findings"].items():
        results = {
            model: Result({name: Figure(**figure) for name, figure in result["figures"].items()}, result["cosine"])
            for model, result in one["results"].items()
        }
        findings[key] = Finding(**(one | {"shows": tuple(one["shows"]), "results": results}))
    return Report(document["circumstances"], findings)


def page(report: Report) -> str:
    """The page of results as Markdown."""
    lines = [
        "# What pieces of advice gained",
        "",
        report.circumstances,
        "",
        _INTRODUCTION,
    ]
    for key, finding in report.findings.items():
        lines += [
            "",
            f"## {key}",
            "",
            f"{finding.advice}",
            "",
            f"Without: {finding.without}. With: {finding.advised}. Expected: {finding.expected}.",
            "",
            "| model | measure | without | with | ratio | cosine |",
            "|---|---|---:|---:|---|---:|",
            *_rows(finding),
        ]
    return "\n".join(lines) + "\n"


def _rows(finding: Finding) -> Iterator[str]:
    for model, result in finding.results.items():
        for name, one in result.figures.items():
            unit = f" {_UNITS[name]}".rstrip()
            yield (
                f"| {model} | {name} | {_number(one.without)}{unit} | {_number(one.advised)}{unit} | {_ratio(one)} "
                f"| {result.cosine:.5f} |"
            )


def with_figures(guide: str, report: Report) -> str:
    """Returns the guide with its marked cells filled from these results."""
    return _CELL.sub(lambda cell: f" {_cell(cell[1], report)} <!-- measured: {cell[1]} -->", guide)


def keys_in(guide: str) -> set[str]:
    """The trials whose figures the guide shows."""
    return {key for cell in _CELL.findall(guide) for key in cell.split(", ")}


def _cell(keys: str, report: Report) -> str:
    findings = [report.findings[key] for key in keys.split(", ") if key in report.findings]
    if not findings:
        return "not measured yet"
    noise = _noise(report)
    return "<br>".join(_sentence(finding, noise, is_alone="," not in keys) for finding in findings)


def _noise(report: Report) -> float:
    """The largest ratio of speeds between processes of equal arms; at least 1."""
    speeds = [result.figures["speed"] for result in report.findings["noise"].results.values()]
    return max(max(one.high, 1 / one.low) for one in speeds)


def _sentence(finding: Finding, noise: float, *, is_alone: bool) -> str:
    models = "; ".join(
        f"{model}: {', '.join(_shown(name, result.figures[name], noise) for name in finding.shows)}{_loss(result)}"
        for model, result in finding.results.items()
    )
    return models if is_alone else f"*{finding.label}* {models}"


def _shown(name: str, one: Figure, noise: float) -> str:
    if name in ("speed", "rate"):
        is_gain = one.low > noise
        return f"{'**' * is_gain}{_ratio(one)}{'**' * is_gain}"
    unit = f" {_UNITS[name]}".rstrip()
    return f"{_NAMES.get(name, name)} {_number(one.without)} → {_number(one.advised)}{unit}"


def _loss(result: Result) -> str:
    return f", cosine {result.cosine:.4f}" if result.cosine < 0.9999 else ""


def _ratio(one: Figure) -> str:
    return f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
