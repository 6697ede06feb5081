"""The Makefile explains itself, and its commands work in every folder and reject an old Python at once."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from manifests import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a space in its path and the Makefile with the files that its rules name."""
    path = tmp_path / "my clone"
    path.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, path)
    return path


def make(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    # Without the variables of a make that runs the tests, whose directories it would print.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_help_names_every_target(folder: Path) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    named = re.findall(r"^make ([\w-]+)", make(folder, "help").stdout, re.MULTILINE)
    assert sorted(named) == sorted(targets[1].split())


def test_compiled_package_is_on_the_path_of_a_folder_with_a_space(folder: Path) -> None:
    command = make(folder, "--dry-run", "test-compiled").stdout.splitlines()[-1]
    assert shlex.split(command)[0] == f"PYTHONPATH={folder}/.venv/compiled"


def test_old_python_is_rejected_before_anything_is_installed(folder: Path) -> None:
    old = folder / "python3"
    program = "import sys; sys.version_info = (3, 10, 12); sys.version = '3.10.12 (main)'"
    old.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{program}\n$2"\n')
    old.chmod(0o755)
    done = make(folder, "serve", "PYTHON=./python3")
    assert done.returncode == 2
    assert "ortserve needs Python 3.11 or newer, got 3.10.12 from ./python3; name another: make serve" in done.stderr
    assert not (folder / ".venv").exists()
