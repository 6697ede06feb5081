"""The performance guide names only existing things, and its figures equal those of ``loadtests/advice.py``."""

import re
from functools import cache
from typing import Final

import pytest
import yaml

import advice_report
from advice_trials import TRIALS, finding
from manifests import ROOT
from ortserve.config.model import ModelOptions
from ortserve.config.options import ServerOptions, flag_name
from ortserve.config.session import SESSION_ENTRIES, provider_parts
from ortserve.engine.provider_options import make_provider_options
from ortserve.engine.providers import full_name
from pages import flags_in, flags_of_tool, spans

GUIDE: Final = advice_report.GUIDE.read_text()
SPANS: Final = tuple(dict.fromkeys(spans(GUIDE)))
OF_OTHERS: Final = {
    "enable_profiling",
    "graph.output",
    "model.yaml",
    "onnxruntime_perf_test",
    "quantize_static",
    "randn",
    "traceEvents",
}
"""Names of ONNX Runtime, ONNX and numpy that the guides mention."""
COMMANDS: Final = tuple(span for span in SPANS if re.match(r"ortserve [a-z]+\b", span))
TOOLS: Final = sorted({command.split()[1] for command in COMMANDS})


def test_figures_are_those_of_the_results() -> None:
    report = advice_report.read()
    assert advice_report.with_figures(GUIDE, report) == GUIDE, "run: python loadtests/advice.py --render"
    assert advice_report.page(report) == (advice_report.RESULTS / "advice.md").read_text()


def test_results_are_those_of_the_trials() -> None:
    report = advice_report.read()
    assert list(report.findings) == list(TRIALS)
    for key, found in report.findings.items():
        assert found == finding(key, TRIALS[key], found.results), f"run: python loadtests/advice.py --only {key}"
        assert list(found.results) == list(TRIALS[key].models)


def test_every_trial_is_in_the_guide() -> None:
    assert advice_report.keys_in(GUIDE) == set(TRIALS)


def test_no_figure_is_written_by_hand() -> None:
    by_hand = re.sub(r"[^|\n]*<!-- measured: [^\n]*? -->|`[^`]*`", "", GUIDE)
    figures = re.findall(r"\b[\d.,]+ ?(?:%|times|ms|µs|s|MB|MiB|GB|GiB)(?!\w)", by_hand)
    assert figures == ["2 GB"], "the limit of ONNX files"


@pytest.mark.parametrize("tool", TOOLS)
def test_commands_and_their_flags_exist(tool: str) -> None:
    used = {flag for command in COMMANDS if command.split()[1] == tool for flag in flags_in(command)}
    assert used <= flags_of_tool(tool)


def test_lone_flags_exist() -> None:
    lone = {span for span in SPANS if span.startswith("--")}
    options = {flag_name(name) for name in ServerOptions.model_fields}
    of_tools = {flag for tool in TOOLS for flag in flags_of_tool(tool)} if lone - options else set()
    assert {flag for span in lone for flag in flags_in(span)} <= options | of_tools


@pytest.mark.parametrize("text", [span for span in SPANS if re.match(r"[a-z_]+: ", span)])
def test_options_are_valid(text: str) -> None:
    options = ModelOptions.model_validate(yaml.safe_load(text))
    for wish in options.execution_providers or ():
        name, given = provider_parts(wish)
        make_provider_options(full_name(name), given)


@cache
def words_of_the_package() -> set[str]:
    files = (ROOT / "server" / "ortserve").rglob("*.py")
    return {word for path in files for word in re.findall(r"\w+", path.read_text())}


@pytest.mark.parametrize("name", [span for span in SPANS if re.fullmatch(r"[a-z][\w.]*", span)])
def test_names_exist(name: str) -> None:
    if name.startswith(("session.", "optimization.")):
        assert name in SESSION_ENTRIES
    else:
        assert name in words_of_the_package() | OF_OTHERS | {"ortserve"}
