"""Whether the files of a model are whole, as far as its record shows. Sessions and tools name the damage."""

from pathlib import Path
from typing import Final

from ortserve.model_file.graph import Model

_POINTER: Final = b"version https://git-lfs.github.com/spec/v1\n"
_LARGEST_POINTER: Final = 1024
"""Bytes; as the specification of Git LFS requires."""


def find_pointer(path: Path, model: Model) -> str:
    """Name the first file of a model that is a Git LFS pointer; empty if there is none. Blocks on the disk.

    ONNX Runtime would take the pointer's text for weights, if they need no more bytes.
    """
    if _is_pointer(path):
        return f"{path.name} is a Git LFS pointer, not a model: run 'git lfs pull'"
    pointers = (name for name in model.external_files if _is_pointer(path.parent / name))
    return next((f"{name} is a Git LFS pointer, not weights: run 'git lfs pull'" for name in pointers), "")


def find_damage(path: Path, model: Model) -> str:
    """Describe why the files of a model cannot be opened; empty if all are whole. Blocks on the disk.

    Args:
        path: The model file.
        model: Its record.
    """
    if pointer := find_pointer(path, model):
        return pointer
    if not model.is_readable:
        if not path.is_file():
            return "expected an ONNX model, found no regular file"
        problem = "it is not one or is truncated" if path.stat().st_size else "the file is empty"
        return f"expected an ONNX model, {problem}"
    for name, needed in model.external_files.items():
        file = path.parent / name
        found = file.stat().st_size if file.is_file() else None
        if found is None or found < needed.nbytes:
            problem = "there is no such file" if found is None else f"at least {needed.nbytes:,} bytes, got {found:,}"
            return f"expected weights, as of tensor '{needed.tensor}', in {name}: {problem}"
    return ""


def _is_pointer(file: Path) -> bool:
    """Whether a file is a pointer. Files that cannot be read are none; a pipe is not opened."""
    try:
        if not file.is_file() or file.stat().st_size >= _LARGEST_POINTER:
            return False
        with file.open("rb") as stream:
            return stream.read(len(_POINTER)) == _POINTER
    except OSError:
        return False
