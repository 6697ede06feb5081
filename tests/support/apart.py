"""Packages that tests need but that conflict with the project's own: installed separately, once per machine."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ortserve-tests"
"""Folder outside the tree, shared by all clones on a machine."""

_INSTALL_S: Final = 300


class UnavailableError(Exception):
    """A dependency is not available on this machine; the text says which and why."""


def installed_apart(name: str, *requirements: str) -> Path:
    """A folder with these packages, for ``PYTHONPATH`` or for other files in it. The first caller installs them.

    Args:
        name: Name of the folder; it includes the versions, so that another version uses another folder. So does
            another version of Python, for which packages have other binaries.
        requirements: Requirements and options of pip.

    Raises:
        UnavailableError: pip could not install them.
    """
    folder = CACHE / f"{name}-{sys.implementation.cache_tag}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            whole = Path(scratch) / "whole"
            # Imported modules are compiled on import; compiling all would take longer than the rest.
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", f"--target={whole}"]
            run_tool([*pip, *requirements])
            keep(whole, folder)
    return folder


def keep(made: Path, folder: Path) -> None:
    """Move a finished folder to its place atomically, even if other processes do the same."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def run_tool(command: Sequence[str]) -> None:
    """Run a command that must succeed.

    Raises:
        UnavailableError: The command failed or took too long.
    """
    tool = " ".join(command[:3])
    try:
        subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_INSTALL_S, check=True)
    except subprocess.CalledProcessError as error:
        last = error.stdout.decode(errors="replace").strip().splitlines()[-1:]
        raise UnavailableError(f"{tool}: {''.join(last)}") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{tool} took over {_INSTALL_S} s") from None
