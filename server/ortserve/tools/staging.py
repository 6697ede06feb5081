"""Writes files atomically: into a hidden folder beside their target, from which they are moved when complete."""

import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def staging_folder(beside: Path) -> Iterator[Path]:
    """A new folder in the folder of ``beside``. It is removed at the end, with its remaining content.

    Its name begins with a dot, so that repositories do not take it for a model or a version.

    Raises:
        OSError: The folder of ``beside`` does not exist or cannot be written, or the disk is full. Errors of the block
            that name a file of the new folder, which disappears, name ``beside`` instead.
    """
    folder = beside.absolute().parent / f".ortserve-{secrets.token_hex(8)}"
    try:  # an interruption between the next two lines leaves no folder either
        with naming(beside, instead_of=folder):
            folder.mkdir(mode=0o700)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def naming(file: Path, instead_of: Path | None = None) -> Iterator[None]:
    """Add the file to errors of the block that name none, as those of writes to a full disk. They get a ``strerror``.

    Args:
        file: The file.
        instead_of: A folder that errors must not name, nor its files.
    """
    try:
        yield
    except OSError as error:
        named = [name for name in (error.filename, error.filename2) if isinstance(name, str)]  # two by a copy
        is_inside = instead_of is not None and any(Path(name).is_relative_to(instead_of) for name in named)
        if is_inside and error.errno is not None:
            error.strerror = os.strerror(error.errno)  # without advice about the folder, such as to set TMPDIR
        if error.strerror is None:  # an error without a number has only a text
            error.strerror = str(error)
        if is_inside or not named:
            error.filename = str(file)
        raise


@contextmanager
def replacement(file: Path) -> Iterator[Path]:
    """The path to write a file to. At the end of the block, what was written there replaces ``file`` as a whole.

    After an error in the block, ``file`` is as before. A link stays, and its target is replaced; the permissions of an
    existing file stay. Something that is no file, such as ``/dev/stdout``, is itself the path to write to.

    Raises:
        OSError: The folder of the file cannot be written, or the disk is full. The error names ``file``.
    """
    target = file.resolve()
    with naming(file, instead_of=target):
        if file.exists() and not file.is_file():  # not ``target``, which does not exist if it is a pipe
            yield file
            return
        with staging_folder(target) as folder:
            staged = folder / target.name
            yield staged
            if target.exists():
                shutil.copymode(target, staged)
            sync(staged)
            staged.replace(target)
            sync(target.parent)


def install_files(staged: Path, target: Path) -> None:
    """Move all files of a folder to the folder of ``target``. Existing files are replaced. Main thread only.

    The file with the name of ``target`` is moved last, so that a model never refers to missing files. Interruptions
    wait until all files are moved.
    """
    files = sorted((file for file in staged.rglob("*") if file.is_file()), key=lambda file: file.name == target.name)
    for file in files:
        sync(file)
    came: list[int] = []
    with signals_handled_by(lambda number, _: came.append(number)):
        for file in files:
            place = target.parent / file.relative_to(staged)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)
    if came:
        signal.raise_signal(came[0])
    sync(target.parent)


@contextmanager
def signals_handled_by(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals by ``handler`` within the block, unless the process ignores them. Main thread only.

    Without ``numbers``, Ctrl-C and SIGTERM are handled.
    """
    previous = {number: signal.getsignal(number) for number in numbers or (signal.SIGINT, signal.SIGTERM)}
    for number, usual in previous.items():
        if usual is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, usual in previous.items():
            signal.signal(number, usual)


def sync(path: Path) -> None:
    """Write a file or folder through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
