"""Checks what a path leads to. Each function raises OSError if the system cannot tell.

From Python 3.14 on, ``Path.is_dir``, ``is_file`` and ``exists`` return False in that case: the models of a network file
system that fails for a moment would look as if they had been removed.
"""

import errno
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Final

MISSING: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors of a path that leads to nothing, for example because it is a link to itself."""


def is_folder(path: Path) -> bool:
    """Whether a folder, or a link to one, is there."""
    return S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Whether a regular file, or a link to one, is there."""
    return S_ISREG(_mode(path))


def is_model_file(path: Path) -> bool:
    """Whether an ``.onnx`` file, or a link to one, is there."""
    return path.suffix == ".onnx" and is_file(path)


def exists(path: Path) -> bool:
    """Whether anything is there. A broken link leads to nothing."""
    return _mode(path) != 0


def _mode(path: Path) -> int:
    """The mode of a file or folder; 0 if nothing is there."""
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in MISSING:
            return 0
        raise
