"""What ``ortserve check --json`` prints."""

from dataclasses import dataclass

from ortserve.tools.doctor.result import ModelCheck
from ortserve.tools.report import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The versions of a repository that would serve, each loaded in another process.

    Attributes:
        schema: Of this result.
        repository: As given.
        findings: What is wrong or unexpected, the worst first.
        models: Each version that would serve, and each model without one.
    """

    schema: str = "ortserve.check/1"
    repository: str
    findings: tuple[Finding, ...]
    models: tuple[ModelCheck, ...]
