"""The audit of dependencies fails on known vulnerabilities, and an unreachable service does not count as a pass."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from audit import ROOT, Audit, ask, conclude, read_report

VULNERABLE = {"name": "a", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1", "2.0"]}]}
CLEAN = {"name": "b", "version": "2.0", "vulns": []}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("dependencies", "status", "message"),
    [
        ([CLEAN], 0, "audit: 1 versions, 0 known vulnerabilities"),
        ([CLEAN, UNKNOWN], 0, "audit: 1 versions, 0 known vulnerabilities; unknown to it: c"),
        ([VULNERABLE, CLEAN], 1, "audit: 2 versions, 1 known vulnerabilities\n  a 1.0: PYSEC-1, fixed in 1.1, 2.0"),
        ([UNKNOWN], 0, "audit: nothing was audited: no service that knows these packages can be reached here"),
    ],
)
def test_report_yields_a_status_and_a_message(dependencies: list[dict[str, Any]], status: int, message: str) -> None:
    assert conclude(read_report(json.dumps({"dependencies": dependencies, "fixes": []}))) == (status, message)


@pytest.mark.parametrize("report", ["", "Traceback", "[]", "{}", "null"])
def test_malformed_report_yields_an_empty_audit(report: str) -> None:
    assert read_report(report) == Audit()


class Service(BaseHTTPRequestHandler):
    """Answers like the database of open source vulnerabilities; it knows one vulnerability of ``bad``."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found: dict[str, Any] = {}
        if asked["package"]["name"] == "bad":
            ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]}]
            affected = [{"package": {"name": "bad", "ecosystem": "PyPI"}, "ranges": ranges}]
            found = {"vulns": [{"id": "PYSEC-2030-1", "summary": "bad", "affected": affected}]}
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()
    server.server_close()
    thread.join()


def test_pip_audit_reports_known_vulnerabilities(service: str, tmp_path: Path) -> None:
    (tmp_path / "pins.txt").write_text("good==1.0\nbad==1.0\n")
    assert conclude(ask("osv", tmp_path / "pins.txt", "--osv-url", service)) == (
        1,
        "audit: 2 versions, 1 known vulnerabilities\n  bad 1.0: PYSEC-2030-1, fixed in 1.1",
    )


def test_unreachable_service_differs_from_one_without_findings(tmp_path: Path) -> None:
    (tmp_path / "pins.txt").write_text("good==1.0\n")
    assert ask("osv", tmp_path / "pins.txt", "--osv-url", "http://127.0.0.1:9/v1/query") == Audit()


def test_error_of_pip_audit_fails_the_audit(tmp_path: Path) -> None:
    (tmp_path / "pins.txt").write_text("good>=1.0\n")
    status, message = conclude(ask("osv", tmp_path / "pins.txt", "--osv-url", "http://127.0.0.1:9/v1/query"))
    assert status == 1
    assert "pip-audit failed: ERROR:pip_audit._cli:requirement good is not pinned to an exact version" in message


def test_every_version_is_pinned_once() -> None:
    """pip-audit can query only pinned versions."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.\-]+==[\w.]+", line) for line in lines)
    assert len(set(lines)) == len(lines)
