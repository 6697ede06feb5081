"""Finds damaged files of a model, as far as the model's record shows. Sessions and tools report the damage."""

from os import fstat
from pathlib import Path
from typing import Final

from ortserve.model_file.graph import Model
from ortserve.paths import MISSING, open_file

_POINTER: Final = b"version https://git-lfs.github.com/spec/v1\n"
_LARGEST_POINTER: Final = 1024
"""Pointers are smaller than this number of bytes, as the specification of Git LFS requires."""
_ORT_FORMAT: Final = b"ORTM"
"""Bytes 4 to 7 of a model in ONNX Runtime's own format."""


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
        return f"expected an ONNX model, {_read_error(path) or _describe_content(path)}"
    for name, needed in model.external_files.items():
        problem = _read_error(file := path.parent / name)
        if not problem and (found := file.stat().st_size) < needed.nbytes:
            problem = f"at least {needed.nbytes:,} bytes, got {found:,}"
        if problem:
            return f"expected weights, as of tensor '{needed.tensor}', in {name}: {problem}"
    return ""


def _describe_content(file: Path) -> str:
    """Describe the content of a file that is no ONNX model."""
    with open_file(file) as stream:
        start = stream.read(8)
    if not start:
        return "the file is empty"
    if start[4:] == _ORT_FORMAT:
        return "it is in ORT format: serve the ONNX model from which it was converted"
    return "it is not one or is truncated"


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
        with open_file(file) as stream:
            return fstat(stream.fileno()).st_size < _LARGEST_POINTER and stream.read(len(_POINTER)) == _POINTER
    except OSError:
        return False
