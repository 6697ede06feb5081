"""The result of ``ortserve check``, as ``--json`` prints it."""

from dataclasses import dataclass

from ortserve.tools.doctor.result import ModelCheck
from ortserve.tools.report import Finding


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
