"""Costs of counting and tracing: ``loadtests/metrics_cost.py`` and ``loadtests/tracing_cost.py`` run and report."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import metrics_cost
import tracing_cost

FIGURE = re.compile(r"^\| (.+) \| \d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\) \|$", re.MULTILINE)


@pytest.fixture(autouse=True)
def level_of_the_library() -> Iterator[None]:
    logger = logging.getLogger("opentelemetry")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("main", "arguments", "rows"),
    [
        (
            metrics_cost.main,
            ["--models=20"],
            ["prometheus_client.Histogram", "telemetry.metrics", "prometheus_client", "telemetry.families"],
        ),
        (
            tracing_cost.main,
            [],
            [
                "left out by the ratio",
                "its caller wants none",
                "begins a trace",
                "in its caller's trace",
                "spans made and encoded",
            ],
        ),
    ],
    ids=["metrics", "tracing"],
)
def test_report_has_a_figure_of_every_case_and_says_where_it_was_measured(
    main: Callable[[list[str]], None],
    arguments: list[str],
    rows: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.md"
    main(["--rounds=1", "--requests=10", *arguments, f"--report={report}"])
    text = report.read_text()
    assert capsys.readouterr().out == text
    assert FIGURE.findall(text) == rows
    assert "processors (" in text
    assert "Load average at the beginning" in text
