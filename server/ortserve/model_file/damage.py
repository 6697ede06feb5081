"""Finds damaged files of a model, as far as the model's record shows. Sessions and tools report the damage."""

from pathlib import Path
from typing import Final

from ortserve.model_file.graph import Model
from ortserve.paths import MISSING, open_file

_POINTER: Final = b"version https://git-lfs.github.com/spec/v1\n"
_LARGEST_POINTER: Final = 1024
"""Pointers are smaller than this number of bytes, as the specification of Git LFS requires."""


def find_pointer(path: Path, model: Model) -> str:
    """Name the first file of a model that is a Git LFS pointer; empty if there is none. Blocks on the disk.

    ONNX Runtime would use the pointer's text as weights if it is long enough.
    """
    if _is_pointer(path):
        return f"{path.name} is a Git LFS pointer, not a model: run 'git lfs pull'"
    pointers = (name for name in model.external_files if _is_pointer(path.parent / name))
    return next((f"{name} is a Git LFS pointer, not weights: run 'git lfs pull'" for name in pointers), "")


def find_damage(path: Path, model: Model) -> str:
    """Describe the damage of a model's files; empty if all are complete. Blocks on the disk.

    Args:
        path: The model file.
        model: The record of the file.
    """
    if pointer := find_pointer(path, model):
        return pointer
    if not model.is_readable:
        problem = _read_error(path) or ("it is not one or is truncated" if path.stat().st_size else "the file is empty")
        return f"expected an ONNX model, {problem}"
    for name, needed in model.external_files.items():
        problem = _read_error(file := path.parent / name)
        if not problem and (found := file.stat().st_size) < needed.nbytes:
            problem = f"at least {needed.nbytes:,} bytes, got {found:,}"
        if problem:
            return f"expected weights, as of tensor '{needed.tensor}', in {name}: {problem}"
    return ""


def _read_error(file: Path) -> str:
    """Why a file cannot be opened, such as missing permission; empty if it can."""
    try:
        open_file(file).close()
    except OSError as error:
        return "there is no such file" if error.errno in MISSING else f"it cannot be read: {error.strerror}"
    return ""


def _is_pointer(file: Path) -> bool:
    """Whether a file is a Git LFS pointer; False for an unreadable file."""
    try:
        if file.stat().st_size >= _LARGEST_POINTER:
            return False
        with open_file(file) as stream:
            return stream.read(len(_POINTER)) == _POINTER
    except OSError:
        return False
