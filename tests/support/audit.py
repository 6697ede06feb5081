"""Checks whether versions pinned in ``constraints.txt`` have known vulnerabilities: ``make audit``.

pip-audit queries a service on the network. If no service answers or knows the packages, nothing was audited; the script
reports this and succeeds, because a build must not depend on the network. A known vulnerability is a failure, and so is
every other error of pip-audit.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SERVICES: Final = ("osv", "pypi")
"""pip-audit's names of the services, queried in this order until one knows a version."""
_TIMEOUT_S: Final = 300
_UNREACHABLE: Final = re.compile(r"requests\.exceptions\.|pip_audit\._service\.|.*your network may be blocking")
"""The beginning of pip-audit's last line when a service does not answer, or not as expected."""


@dataclass(frozen=True)
class Audit:
    """The answer of a service.

    Attributes:
        audited: Number of versions that it knows.
        unknown: Names of packages that it does not know or did not report.
        found: A line for each vulnerability.
        error: Why pip-audit could not query at all.
    """

    audited: int = 0
    unknown: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    error: str = ""


def read_report(report: str) -> Audit:
    """Parse pip-audit's JSON; an invalid report counts as one without versions."""
    try:
        dependencies = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return Audit()
    known = [one for one in dependencies if "vulns" in one]
    found = [
        f"{one['name']} {one['version']}: {vulnerability['id']}, {_remedy(vulnerability['fix_versions'])}"
        for one in known
        for vulnerability in one["vulns"]
    ]
    return Audit(len(known), tuple(one["name"] for one in dependencies if "vulns" not in one), tuple(found))


def _remedy(fixed_in: Sequence[str]) -> str:
    return f"fixed in {', '.join(fixed_in)}" if fixed_in else "not fixed yet"


def conclude(audit: Audit) -> tuple[int, str]:
    """Returns the exit status and the text of the report."""
    if audit.error:
        return 1, f"audit: pip-audit failed: {audit.error}"
    if not audit.audited:
        return 0, "audit: nothing was audited: no service that knows these packages can be reached here"
    unknown = f"; unknown to it: {', '.join(audit.unknown)}" if audit.unknown else ""
    summary = f"audit: {audit.audited} versions, {len(audit.found)} known vulnerabilities{unknown}"
    return int(bool(audit.found)), "\n".join([summary, *(f"  {line}" for line in audit.found)])


def ask(service: str, requirements: Path, *more: str) -> Audit:
    """Query a service with pip-audit about the versions in a file, without installing them."""
    asked = ["--vulnerability-service", service, "--requirement", str(requirements), *more]
    flags = ["--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off"]
    command = [sys.executable, "-m", "pip_audit", *asked, *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Audit()
    last_line = (done.stderr.splitlines() or [""])[-1]
    if done.returncode and not done.stdout and not _UNREACHABLE.match(last_line):
        return Audit(error=last_line or f"exit status {done.returncode}")
    return read_report(done.stdout)


def main(arguments: Sequence[str]) -> int:
    """Audit ``constraints.txt``, or the file in ``arguments``."""
    requirements = Path(arguments[0]) if arguments else ROOT / "constraints.txt"
    audit = Audit()
    for service in SERVICES:
        audit = ask(service, requirements)
        if audit.audited or audit.error:
            break
    status, summary = conclude(audit)
    sys.stdout.write(f"{summary}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
