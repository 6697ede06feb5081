"""``ortserve version``: what a report of a bug should begin with."""

import argparse
import platform
import sys
from collections.abc import Sequence

from ortserve import __version__
from ortserve.cli.environment import installed_runtimes
from ortserve.core.compiled import IS_COMPILED


def main(arguments: Sequence[str]) -> int:
    """Print a line for each part. Says what is installed without importing it."""
    argparse.ArgumentParser(
        prog="ortserve version", description="Print the versions of ortserve and of what it runs on."
    ).parse_args(arguments)
    versions = {
        "ortserve": __version__,
        "request path": "compiled" if IS_COMPILED else "interpreted",
        "Python": platform.python_version(),
        **installed_runtimes(),
    }
    sys.stdout.writelines(f"{name} {version}\n" for name, version in versions.items())
    return 0
