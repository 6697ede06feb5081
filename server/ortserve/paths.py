"""Checks what a path leads to, and opens files. Each function raises OSError if the system cannot tell.

From Python 3.14 on, ``Path.is_dir``, ``is_file`` and ``exists`` return False in that case: the models of a network file
system that fails for a moment would look as if they had been removed.
"""

import errno
import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, Final

MISSING: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors of a path that leads to nothing, for example because it is a link to itself."""
NO_FILE: Final = "expected a file, got something else"
"""The problem of a path that leads to something else than a file, such as a pipe, which would block its reader."""


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


def is_other(path: Path) -> bool:
    """Whether something is there that is neither a regular file nor a link to one."""
    mode = _mode(path)
    return mode != 0 and not S_ISREG(mode)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, to read it. Raises OSError for anything else, without waiting for it."""
    try:
        return open(path, "rb", opener=_open_regular)
    except ValueError:  # a model may name a file with a NUL, which no file has
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None


def read_file(path: Path) -> bytes:
    """The content of what ``open_file`` opens. Raises OSError as it does."""
    with open_file(path) as file:
        return file.read()


def _open_regular(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # another program, such as a file server, has a lease on it, which only files can have
        descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if not S_ISREG(mode):
        os.close(descriptor)
        raise (
            IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if S_ISDIR(mode)
            else OSError(errno.EINVAL, NO_FILE)
        )
    return descriptor


def _mode(path: Path) -> int:
    """The mode of a file or folder; 0 if nothing is there."""
    try:
        return path.stat().st_mode
    except ValueError:  # as in ``open_file``
        return 0
    except OSError as error:
        if error.errno in MISSING:
            return 0
        raise
