"""``ortserve check``: loads the models of a repository as the server would, each version in a process of its own."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ortserve.errors import invalid_input
from ortserve.tools.check.result import CheckResult
from ortserve.tools.command import FAILED, Outcome, ToolParser, add_fail_on, number, run_tool, status_of
from ortserve.tools.doctor.findings import find_in_models
from ortserve.tools.doctor.loading import check_models
from ortserve.tools.doctor.machine import Files, read_memory
from ortserve.tools.doctor.options import check_options
from ortserve.tools.doctor.presentation import models_table
from ortserve.tools.report import Findings, Report, Table, worst_first


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    return run_tool("check", run, build_parser().parse_args(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Create the arguments."""
    parser = ToolParser(
        "check",
        "Load the models of a repository as the server would, without serving: configuration, graph, execution "
        "provider, warm-up, golden samples, ensembles. Each version loads in another process. Changes nothing.",
        epilog="Exit status: 0 all can be served, 1 a finding of the level of --fail-on, 2 wrong arguments.",
    )
    add = parser.add_argument
    add("repository", type=Path, metavar="REPOSITORY", help="folder of models")
    add("--model", metavar="NAME", help="Check only this model, and the members of an ensemble.")
    add(
        "--jobs",
        type=number(int, 1, 64),
        default=1,
        metavar="N",
        help="Number of versions that are loaded at the same time. Default: 1.",
    )
    text = "Time limit to load one version. Default: 600."
    add("--seconds-per-model", type=number(float, 0.1, 86400), default=600.0, metavar="SECONDS", help=text)
    add(
        "--config", type=Path, metavar="FILE", help="Options file of the server, which sets the defaults of the models."
    )
    add_fail_on(parser, "problem")
    return parser


def run(arguments: argparse.Namespace) -> Outcome:
    """Check the models.

    Raises:
        ServeError: invalid_input: the repository cannot be read, or has no model of this name.
    """
    repository = arguments.repository
    if not repository.is_dir():
        raise invalid_input(f"'{repository}': expected a folder of models")
    options, found = check_options(arguments.config)
    if any(one.kind == "invalid_option" for one in found):
        raise invalid_input("; ".join(one.seen for one in found if one.kind == "invalid_option"))
    free_bytes = read_memory(Files()).free_bytes
    models = check_models(
        repository,
        options,
        free_bytes,
        arguments.seconds_per_model,
        only=arguments.model,
        jobs=arguments.jobs,
    )
    findings = tuple(worst_first(find_in_models(models, None, free_bytes)))
    result = CheckResult(repository=str(repository), findings=findings, models=tuple(models))
    failing = {one.label for one in models if one.problem or one.skipped}
    title = f"{len(models) - len(failing)} of {len(models)} can be served: {repository}"
    rows = [(one.label, one.golden) for one in models if one.golden]
    golden = (Table("Golden samples", ("version", "result"), rows),) if rows else ()
    report = Report(title, (Findings(findings), *models_table(models), *golden))
    return Outcome(result, report, FAILED if failing else status_of(findings, arguments.fail_on))
