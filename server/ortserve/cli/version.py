"""The command ``ortserve version``: prints the versions of ortserve, Python and ONNX Runtime, for bug reports."""

import argparse
import platform
from collections.abc import Sequence

from ortserve import __version__
from ortserve.cli.output import write_output
from ortserve.core.compiled import IS_COMPILED
from ortserve.engine.distributions import installed_runtimes


def main(arguments: Sequence[str]) -> int:
    """Print one line per part. Reads the versions of installed packages without importing them."""
    argparse.ArgumentParser(
        prog="ortserve version", description="Print the versions of ortserve, Python and ONNX Runtime."
    ).parse_args(arguments)
    versions = {
        "ortserve": __version__,
        "request path": "compiled" if IS_COMPILED else "interpreted",
        "Python": platform.python_version(),
        **installed_runtimes(),
    }
    return write_output("version", "".join(f"{name} {version}\n" for name, version in versions.items()))
