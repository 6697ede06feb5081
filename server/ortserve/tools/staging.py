"""Writes files atomically: into a hidden folder beside their target, from which they are moved when complete."""

import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staging_folder(beside: Path) -> Iterator[Path]:
    """A new folder in the folder of ``beside``. It is removed at the end, with its remaining content.

    Its name begins with a dot, so that repositories do not take it for a model or a version.

    Raises:
        OSError: The folder of ``beside`` does not exist or cannot be written.
    """
    folder = beside.absolute().parent / f".ortserve-{secrets.token_hex(8)}"
    try:  # an interruption between the next two lines leaves no folder either
        folder.mkdir(mode=0o700)
        with naming(beside):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the file to errors of the block that name none, as those of writes to a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def install_files(staged: Path, target: Path) -> None:
    """Move all files of a folder to the folder of ``target``. Existing files are replaced. Main thread only.

    The file with the name of ``target`` is moved last, so that a model never refers to missing files. Interruptions
    wait until all files are moved.
    """
    files = sorted((file for file in staged.rglob("*") if file.is_file()), key=lambda file: file.name == target.name)
    for file in files:
        sync(file)
    with _without_interruption():
        for file in files:
            place = target.parent / file.relative_to(staged)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)
    sync(target.parent)


@contextmanager
def _without_interruption() -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM at the end of the block."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def sync(path: Path) -> None:
    """Write a file or folder through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
