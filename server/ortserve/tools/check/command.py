"""``ortserve check``: loads the models of a repository as the server would, each version in a process of its own."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from ortserve.errors import invalid_input
from ortserve.paths import is_model_file
from ortserve.tools.command import FAILED, Outcome, status_of
from ortserve.tools.doctor.findings import find_in_models
from ortserve.tools.doctor.loading import check_models
from ortserve.tools.doctor.machine import Files, read_memory
from ortserve.tools.doctor.options import check_options
from ortserve.tools.doctor.presentation import models_table
from ortserve.tools.doctor.result import ModelCheck
from ortserve.tools.report import Finding, Findings, Report, Table, worst_first


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The versions of a repository that a server would load, each loaded in a process of its own.

    Attributes:
        schema: Name and number of this schema.
        repository: The repository as given.
        findings: The findings, the worst first.
        models: Each version that a server would load, and each model without one.
    """

    schema: str = "ortserve.check/1"
    repository: str
    findings: tuple[Finding, ...]
    models: tuple[ModelCheck, ...]


def run(given: argparse.Namespace) -> Outcome:
    """Check the models.

    Raises:
        ServeError: invalid_input: the repository cannot be read, or has no model of this name.
    """
    repository = Path(given.repository)
    if not repository.is_dir() and not is_model_file(repository):
        raise invalid_input(f"'{given.repository}': expected a folder of models or an .onnx file on this machine")
    options, found = check_options(given.config)
    if any(one.kind == "invalid_option" for one in found):
        raise invalid_input("; ".join(one.seen for one in found if one.kind == "invalid_option"))
    free_bytes = read_memory(Files()).free_bytes
    models = check_models(
        repository,
        options,
        free_bytes,
        given.seconds_per_model,
        only=given.model,
        jobs=given.jobs,
    )
    findings = tuple(worst_first(find_in_models(models, None, free_bytes)))
    result = CheckResult(repository=str(repository), findings=findings, models=tuple(models))
    failing = {one.label for one in models if one.problem or one.skipped}
    title = f"{len(models) - len(failing)} of {len(models)} can be served: {repository}"
    rows = [(one.label, one.golden) for one in models if one.golden]
    golden = (Table("Golden samples", ("version", "result"), rows),) if rows else ()
    report = Report(title, (Findings(findings), *models_table(models), *golden))
    fails = failing and given.fail_on != "never"
    return Outcome(result, report, FAILED if fails else status_of(findings, given.fail_on))
