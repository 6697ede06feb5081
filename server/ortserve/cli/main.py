"""``ortserve``: hands the words after the command's name to the command."""

import sys
from collections.abc import Sequence

from ortserve.cli import health, serve, version

_USAGE = """\
usage: ortserve COMMAND ...

Serve ONNX models with ONNX Runtime over REST and gRPC.

commands:
  serve     serve the models of one or more repositories
  health    ask the server that runs here whether it is ready
  version   print the versions of ortserve and of what it runs on

ortserve COMMAND --help says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the process' exit status, 2 for words or options that cannot be used."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    try:
        match command:
            case "serve":
                return serve.main(arguments)
            case "health":
                return health.main(arguments)
            case "version" | "--version":
                return version.main(arguments)
            case "help" | "--help" | "-h":
                sys.stdout.write(_USAGE)
                return 0
    except SystemExit as left:  # argparse's way out, of --help too
        return left.code if isinstance(left.code, int) else 2
    problem = f"there is no command {command!r}" if command else "a command is needed"
    sys.stderr.write(f"ortserve: {problem}\n\n{_USAGE}")
    return 2
