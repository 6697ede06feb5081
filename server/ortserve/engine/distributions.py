"""Finds the installed distributions of ONNX Runtime from their metadata, without importing them."""

import sys
from collections.abc import Collection
from importlib import metadata
from typing import Final

RUNTIMES: Final = ("onnxruntime", "onnxruntime-gpu")


def installed_runtimes() -> dict[str, str]:
    """The installed distributions of ONNX Runtime with their versions, from their metadata.

    Only the first folder of the module search path that has one counts, because Python imports the package from there.
    A distribution in another folder does not share its files.
    """
    for folder in sys.path:
        here = {name: list(metadata.distributions(name=name, path=[folder])) for name in RUNTIMES}
        if found := {name: each[0].version for name, each in here.items() if each}:
            return found
    return {}


def runtime_problem(installed: Collection[str]) -> str | None:
    """The problem with these distributions, with the commands that solve it; None if exactly one is installed.

    ``onnxruntime`` and ``onnxruntime-gpu`` install into the same folder. If both are installed, the later installation
    has overwritten the files of the other, without a warning of pip, and the GPU may silently be unused. So the server
    does not start.
    """
    if len(installed) == 1:
        return None
    if not installed:
        return (
            "ONNX Runtime is not installed. Install it with: "
            "pip install 'ortserve[cpu]', or for NVIDIA GPUs: pip install 'ortserve[gpu]'"
        )
    return (
        f"{' and '.join(installed)} are both installed and overwrite each other's files. Remove both with: "
        f"pip uninstall {' '.join(installed)}, then install one: "
        "pip install 'ortserve[cpu]', or for NVIDIA GPUs: pip install 'ortserve[gpu]'"
    )
