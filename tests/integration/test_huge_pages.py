"""A server requests huge pages for weights at its start, unless its operator has set the tunable."""

import os
import re
from pathlib import Path

import pytest

from ortserve.cli import huge_pages
from servers import ServerProcess

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")

pytestmark = pytest.mark.skipif(
    not MODE.is_file() or "[madvise]" not in MODE.read_text(), reason="the kernel gives no huge pages on request"
)


def tunables(given: str) -> list[str]:
    """The tunables of a server that was started with the given ones."""
    server = ServerProcess("--example", *PORTS, env={"GLIBC_TUNABLES": given})
    try:
        server.wait_for_line("listening", "http")
        variables = Path(f"/proc/{server.pid}/environ").read_text()
        server.stop()
    finally:
        server.kill()
    return re.findall(r"glibc\.[\w.=]+", variables)  # glibc separates them by NUL when it reads them


def test_server_starts_anew_with_huge_pages_and_keeps_other_tunables() -> None:
    assert tunables("glibc.malloc.arena_max=8") == ["glibc.malloc.arena_max=8", "glibc.malloc.hugetlb=1"]


def test_setting_of_the_operator_holds() -> None:
    assert tunables("glibc.malloc.hugetlb=0") == ["glibc.malloc.hugetlb=0"]


@pytest.mark.parametrize("mode", ["[always] madvise never", "always madvise [never]", None])
def test_nothing_starts_anew_where_the_kernel_gives_pages_to_all_or_none(
    mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "enabled"
    if mode is not None:
        path.write_text(mode)
    monkeypatch.setattr(huge_pages, "_MODE", path)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started anew"))

    huge_pages.restart_with_huge_pages()
