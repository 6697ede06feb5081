"""The command ``ortserve``: runs the subcommand that its first argument names."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

_TOOLS = (
    *("inspect", "profile", "bench", "doctor", "check", "compare", "optimize", "quantize", "tune", "publish"),
    *("golden", "models"),
)
_OPENS_MODELS = ("serve", "profile", "bench", "compare", "optimize", "quantize", "tune")
"""Commands that restart with huge pages: the server, and the tools whose figures should match those of the server."""
_TOOLS_NEED = (
    *("onnxruntime", "rich", "jinja2", "onnx", "matplotlib", "psutil", "squarify"),
    *("onnx_ir", "onnxscript", "onnxslim", "optuna", "ruamel", "sympy"),
)

_USAGE = """\
usage: ortserve COMMAND ...

Serve ONNX models with ONNX Runtime over REST and gRPC.

commands:
  serve     serve the models of one or more repositories
  health    check whether the server on this machine is ready
  inspect   show what a model contains, and what limits its speed
  profile   show what each operator of a model costs
  bench     measure latency and throughput of a server or a model
  doctor    check what this machine, its ONNX Runtime and a server can do
  check     load the models of a repository without serving them
  compare   compare two models: outputs, speed, size and memory
  optimize  make a model faster or smaller, checked against it at each step
  quantize  make a model with integer weights, and measure what it costs and gains
  tune      search for the options with which a model serves a load best
  models    show and change the models of a running server
  publish   make a model the next version of a model in a repository
  golden    record inputs and expected outputs of a version, and check them
  version   print the versions of ortserve, Python and ONNX Runtime

Run ortserve COMMAND --help for the options of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status of the process, 2 for invalid arguments or options."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if sys.stdout is None or sys.stderr is None:  # the caller has closed it, as with >&- in a shell
        _open_closed_streams()
    with _ended_by_ctrl_c(command):
        try:
            if argv is None and command in _OPENS_MODELS:
                # Imported here and below: each command imports only what it needs, and no import precedes the handler
                # of Ctrl-C.
                from ortserve.cli.huge_pages import restart_with_huge_pages

                restart_with_huge_pages()
            return _run(command, arguments)
        except SystemExit as left:  # argparse exits this way, also after --help
            return left.code if isinstance(left.code, int) else 2


def _run(command: str, arguments: Sequence[str]) -> int:
    match command:
        case "serve":
            from ortserve.cli import serve

            return serve.main(arguments)
        case "health":
            from ortserve.cli import health

            return health.main(arguments)
        case tool if tool in _TOOLS:
            return run_tool(tool, arguments)
        case "version" | "--version":
            from ortserve.cli import version

            return version.main(arguments)
        case "help" if arguments:
            return _run(arguments[0], ["--help"])
        case "help" | "--help" | "-h":
            from ortserve.cli.output import write_output

            return write_output("help", _USAGE)
    problem = "expected a command, got none"
    if command:
        from ortserve.config.declaration import did_you_mean

        problem = f"unknown command {command!r}{did_you_mean(command, ('serve', 'health', 'version', *_TOOLS))}"
    sys.stderr.write(f"ortserve: {problem}\n\n{_USAGE}")
    return 2


def run_tool(command: str, arguments: Sequence[str]) -> int:
    """Run one of ``ortserve.tools``, if the packages that they need are installed. Returns the exit status.

    Raises:
        SystemExit: An argument is wrong, or ``--help`` is one of them.
    """
    if missing := [name for name in _TOOLS_NEED if find_spec(name) is None]:
        extras = "cpu,tools" if "onnxruntime" in missing else "tools"
        sys.stderr.write(f"ortserve {command} needs {', '.join(missing)}: pip install 'ortserve[{extras}]'\n")
        return 1
    if strange := [text for text in arguments if text != text.encode(errors="replace").decode()]:
        sys.stderr.write(f"ortserve {command}: expected arguments in the encoding of the locale, got {strange[0]!r}\n")
        return 2
    # The arguments are read first, because the libraries of most commands take a second to import.
    given = import_module(f"ortserve.tools.{command}.arguments").build_parser().read(arguments)
    run = import_module(f"ortserve.tools.{command}.command").run
    return int(import_module("ortserve.tools.command").run_tool(command, run, given))


def _open_closed_streams() -> None:
    """Open the null device in place of closed standard streams, so that no other file gets their descriptors."""
    while os.open(os.devnull, os.O_RDWR) < 2:
        pass
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


@contextmanager
def _ended_by_ctrl_c(command: str) -> Iterator[None]:
    """End the process at Ctrl-C. The block imports libraries, which turn KeyboardInterrupt into other errors.

    Commands that have something to do at Ctrl-C install their own handlers while they run.
    """

    def leave(*_: object) -> None:
        sys.stderr.write(f"ortserve {command}: interrupted\n")
        sys.stderr.flush()
        os._exit(130)

    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:  # shells let background commands ignore Ctrl-C
        signal.signal(signal.SIGINT, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked by ``restart_with_huge_pages``
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
