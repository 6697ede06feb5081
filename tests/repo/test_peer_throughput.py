"""The comparison with other servers: its documents show its results, and it counts and ends whole servers."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import psutil
import pytest

from harness import Load, cpu_s
from manifests import ROOT
from pages import DOCS, sections
from peer_throughput import ARMS, FROM_PYPI, HERE, PEERS, Servers, report
from proxies import free_ports

RESULTS: Final = (HERE / "results" / "compiled" / "peer_throughput.md").read_text()
README: Final = sections(ROOT / "README.md")["performance"]
BENCHMARKS: Final = sections(DOCS / "benchmarks.md")["throughput-against-other-servers"]
BURN_S: Final = 0.2


Table: TypeAlias = dict[str, dict[str, str]]
"""Cells by the first cell of their row and the head of their column."""


def tables(text: str) -> Iterator[Table]:
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip(" *") for cell in line.strip("|").split("|")] for line in block.splitlines())
        yield {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def row_of(server: str, table: Table) -> dict[str, str]:
    (row,) = (row for name, row in table.items() if name.startswith(server))
    return row


def rounded(figure: str) -> str:
    """A figure of the results as documents show it: ``14.40 (13.95 to 14.75)`` is ``14 (14 to 15)``."""
    digits = 0 if float(figure.split()[0]) >= 10 else 2
    return re.sub(r"[\d.]+", lambda number: f"{float(number[0]):,.{digits}f}", figure)


def test_documents_show_the_results() -> None:
    measured, against = tables(RESULTS)
    (readme,) = tables(README)
    (benchmarks,) = tables(BENCHMARKS)
    assert len(readme) == len(benchmarks) == len(measured)
    for server, row in measured.items():
        ratio = against.get(server, {})
        figures = {
            "requests/s": rounded(row["requests/s"].split()[0]),
            "p50 ms": row["p50 ms"],
            "p99 ms": row["p99 ms"],
            "CPU µs per request": rounded(row["CPU µs a request"].split()[0]),
            "ortserve's requests/s, times as many": rounded(ratio["requests/s, times as many"]) if ratio else "",
            "goal": ratio.get("expected", ""),
        }
        assert row_of(server, benchmarks) == figures
        assert row_of(server, readme).items() <= figures.items()


def test_results_name_the_pinned_versions() -> None:
    for peer in FROM_PYPI:
        package, version = peer.requirement.split("==")
        assert re.match(rf"\S.* {re.escape(version)}( \(|$)", peer.name), package
    assert next(tables(RESULTS)).keys() - {"ortserve", "FastAPI"} <= {peer.name for peer in FROM_PYPI}


def test_every_peer_is_listed_and_set_up() -> None:
    script = (HERE / "peer_throughput.py").read_text()
    (row,) = re.findall(r"^\| `peer_throughput.py` \| (.*?) \|", (HERE / "README.md").read_text(), re.MULTILINE)
    assert all(peer.name[: peer.name.index(peer.requirement.split("==")[1]) - 1] in row for peer in FROM_PYPI)
    assert len(ARMS) == len(FROM_PYPI) + 1, "FastAPI needs no package of its own"
    assert all(file.stem in script for file in PEERS.iterdir() if not file.name.startswith("_"))


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    return Servers(tmp_path, free_ports().http)


def test_a_server_is_started_checked_counted_and_ended(servers: Servers) -> None:
    arm = servers.fastapi()
    with arm.start() as pid:
        assert pid is not None
        arm.check()
        with pytest.raises(AssertionError):
            replace(arm, values=lambda answer: [2 * value for value in arm.values(answer)]).check()
        assert cpu_s(pid) > 0
    assert not psutil.pid_exists(pid)


def test_processor_time_includes_processes_that_ended() -> None:
    burn = f"import time\nwhile time.process_time() < {BURN_S}: pass"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_s(process.pid) >= BURN_S
        process.communicate(b"\n")


def test_report_shows_the_fastest_server_first(tmp_path: Path) -> None:
    loads = {"ortserve": [Load(300, 1, 2, 30)], "slow": [Load(100, 3, 4, 90)], "fast": [Load(200, 2, 3, 0)]}
    report(loads, {"fast"}, 32, tmp_path)
    measured, against = tables((tmp_path / "peer_throughput.md").read_text())
    assert [*measured, *against] == ["ortserve", "fast", "slow", "fast", "slow"]
    assert [row["CPU µs a request"][:5] for row in measured.values()] == ["30.00", "-", "90.00"]
    assert against["slow"]["requests/s, times as many"] == "3.00 (3.00 to 3.00)"
    assert (tmp_path / "peer_throughput.png").stat().st_size > 1000
