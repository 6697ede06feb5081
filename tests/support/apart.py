"""Packages that tests need, but that cannot live beside the project's own: installed apart, once a machine."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ortserve-tests"
"""Outside the tree, so that every clone on a machine shares it."""

_INSTALL_S: Final = 300


class UnavailableError(Exception):
    """Something cannot be had on this machine; the text says what and why."""


def installed_apart(name: str, *requirements: str) -> Path:
    """A folder with these packages, for ``PYTHONPATH`` or for what lies in it; made by the first who asks for it.

    Args:
        name: Of the folder; it holds the versions, so that another version is another folder.
        requirements: As pip takes them, options among them.

    Raises:
        UnavailableError: pip could not install them.
    """
    folder = CACHE / name
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            whole = Path(scratch) / "whole"
            # Bytecode of what is imported is made then; that of all takes longer than the rest.
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", f"--target={whole}"]
            run_tool([*pip, *requirements])
            keep(whole, folder)
    return folder


def keep(made: Path, folder: Path) -> None:
    """Put a folder that was made aside in its place: whole or not at all, whoever else does the same."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def run_tool(command: Sequence[str]) -> None:
    """Run a command to its good end.

    Raises:
        UnavailableError: It failed, or took too long.
    """
    tool = " ".join(command[:3])
    try:
        subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_INSTALL_S, check=True)
    except subprocess.CalledProcessError as error:
        last = error.stdout.decode(errors="replace").strip().splitlines()[-1:]
        raise UnavailableError(f"{tool}: {''.join(last)}") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{tool} took over {_INSTALL_S} s") from None
