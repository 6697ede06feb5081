"""Which distribution of ONNX Runtime is installed, and whether a server can run on it.

``onnxruntime`` and ``onnxruntime-gpu`` install into the same folder. Where both are, the files are those of whichever
came last, pip does not mind, and the GPU is silently not used; so a server refuses to start there.
"""

from collections.abc import Collection
from importlib import metadata
from typing import Final

RUNTIMES: Final = ("onnxruntime", "onnxruntime-gpu")


def installed_runtimes() -> dict[str, str]:
    """Version by name of each distribution that is installed, by its metadata; imports nothing."""
    found = {}
    for name in RUNTIMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def runtime_problem(installed: Collection[str]) -> str | None:
    """Say what is wrong with these distributions and what to type; ``None`` where exactly one is there."""
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
