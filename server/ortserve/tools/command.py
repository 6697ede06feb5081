"""The frame of all commands: common flags, readers of arguments, output in three forms, and the exit status."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, Final, NoReturn, TypeVar

import orjson
from pydantic import TypeAdapter

from ortserve.config.declaration import with_suggestions
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.tools.console import OutputClosedError, print_report, printable
from ortserve.tools.page import render_page
from ortserve.tools.report import LEVELS, Finding, Report
from ortserve.tools.staging import naming, replacement, signals_handled_by

_Value = TypeVar("_Value")
_Number = TypeVar("_Number", int, float)

OK: Final = 0
FAILED: Final = 1
"""The command failed, or its result is bad: a finding of the level of ``--fail-on``, or a missed bound."""
INVALID: Final = 2
"""Arguments or input files are wrong: also samples that a model or a server rejects."""
INTERRUPTED: Final = 130
"""The status that shells give to Ctrl-C."""

_OF_ARGUMENTS: Final = (ErrorKind.INVALID_INPUT, ErrorKind.REJECTED_BY_MODEL)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a command.

    Attributes:
        result: A dataclass, which ``--json`` writes. Its first field is ``schema``, such as ``ortserve.inspect/1``.
        report: The result for the terminal and the page.
        status: The exit status.
        error: An error after the result was known, such as a full disk. It is reported after the result.
    """

    result: Any
    report: Report
    status: int = OK
    error: OSError | None = None


class _LineFormatter(argparse.HelpFormatter):
    """Wraps each line of a description by itself."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join([fill(line, width, indent) for line in text.splitlines()])


class ToolParser(argparse.ArgumentParser):
    """The arguments of a tool. Adds ``--json`` and a flag for the page."""

    def __init__(
        self,
        name: str,
        description: str,
        *,
        page_flags: Sequence[str] = ("-o", "--output", "--page"),
        check: Callable[["ToolParser", argparse.Namespace], object] = lambda parser, given: None,
        epilog: str = "Exit status: 0 success, 1 a bad result or a failure, 2 wrong arguments or input files.",
    ) -> None:
        """``page_flags`` name the flag of the page: ``--page`` alone for tools whose ``-o`` is a model.

        ``check`` calls ``error`` for arguments that do not fit together.
        """
        width = min(110, get_terminal_size((110, 0)).columns)
        super().__init__(
            prog=f"ortserve {name}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=lambda prog: _LineFormatter(prog, max_help_position=34, width=width),
        )
        self._name, self._check = name, check
        output = self.add_argument_group("output")
        output.add_argument("--json", action="store_true", help="Print the result as JSON instead of tables.")
        text = "Also write a page for browsers."
        output.add_argument(*page_flags, dest="page", type=Path, metavar="PAGE.html", help=text)
        self.set_defaults(page_flag=page_flags[0])

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Read and check the arguments, and add them as ``command_line``. Exits with status 2 if they are wrong."""
        given = self.parse_intermixed_args(arguments)  # positional ones may come before and after flags
        self._check(self, given)
        given.command_line = (self._name, *arguments)
        return given

    def error(self, message: str) -> NoReturn:
        """Exit with the message, and with suggestions for unknown flags."""
        super().error(with_suggestions(message, self._option_string_actions))

    def flags_besides(self, *names: str) -> list[str]:
        """All flags, without ``--help`` and these ones."""
        return [flag for one in self._actions for flag in one.option_strings[-1:] if flag not in ("--help", *names)]

    def refuse(self, given: argparse.Namespace, flags: Iterable[str], expected: str) -> None:
        """Exit if one of these flags, which would have no effect, has a value other than its default."""
        for flag in flags:
            action = self._option_string_actions[flag]
            if getattr(given, action.dest) != action.default:
                self.error(f"{flag}: expected {expected}")


def number(kind: type[_Number], least: float, most: float = 999_999) -> Callable[[str], _Number]:
    """Reader of arguments that are numbers from ``least`` to ``most``. ``kind`` is int or float."""
    expected = f"expected {'an integer' if kind is int else 'a number'} from {least:,} to {most:,}"

    def read(text: str) -> _Number:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value <= most:  # nor NaN
            raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
        return value

    return read


def json_or_text(text: str) -> Any:
    """The value of a JSON text. Text that is not JSON is returned unchanged."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def several(read: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    """Reader of values that are separated by commas."""
    return lambda text: [read(part) for part in text.split(",")]


def add_fail_on(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--fail-on``: the lowest level of findings for which ``status_of`` returns ``FAILED``."""
    text = f"Exit with status 1 for findings of this level or a worse one: {', '.join(LEVELS)}, never. "
    text += f"Default: {default}."
    parser.add_argument("--fail-on", choices=(*LEVELS, "never"), default=default, metavar="LEVEL", help=text)


def add_destination(parser: ToolParser) -> None:
    """Add ``--output`` and ``--publish``. The parser is one with ``page_flags=("--page",)``."""
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="OUT.onnx", help="Write the model to this file.")
    text = "Publish the result as the next version of this model; without a value, of the model to which MODEL belongs."
    add("--publish", nargs="?", const="", metavar="REPOSITORY/name", help=text)
    text = "Publish even if inputs or outputs differ from those of the version that is served."
    add("--allow-changed-interface", action="store_true", help=text)
    add_golden(parser)


def add_golden(parser: argparse.ArgumentParser) -> None:
    """Add ``--golden``, which decides ``keeps_golden``."""
    text = "keep: the new version must agree with the golden samples of the served version, and gets a copy of them. "
    text += "none: it gets no samples. Default: keep."
    parser.add_argument("--golden", choices=("keep", "none"), default="keep", help=text)


def status_of(findings: Iterable[Finding], fail_on: str) -> int:
    """The exit status for findings."""
    bad = LEVELS[: LEVELS.index(fail_on) + 1] if fail_on in LEVELS else ()
    return FAILED if any(finding.level in bad for finding in findings) else OK


def run_tool(name: str, run: Callable[[argparse.Namespace], Outcome], arguments: argparse.Namespace) -> int:
    """Run a tool and write its output. Returns the exit status; errors are one line on standard error."""
    page: Path | None = arguments.page
    logging.getLogger("ortserve").addHandler(logging.NullHandler())  # results contain the warnings that matter
    try:
        expect_writable(arguments.page_flag, page, b"<!doctype html")
        with signals_handled_by(signal.default_int_handler):  # the block removes its unfinished files
            outcome = run(arguments)
        try:
            if page is not None:
                with replacement(page) as file:
                    file.write_text(render_page(outcome.report), encoding="utf-8")
        finally:  # print the result even if the page cannot be written
            with naming(Path("output")):
                _print(outcome, as_json=arguments.json)
        if outcome.error is not None:
            raise outcome.error
    except ServeError as error:
        return _fail(name, error.message, INVALID if error.kind in _OF_ARGUMENTS else FAILED)
    except KeyboardInterrupt:
        return _fail(name, "interrupted", INTERRUPTED)
    except OutputClosedError:
        _discard_output()
        return OK
    except MemoryError as error:
        return _fail(name, f"too little memory: {error}", FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(name, f"{where}{error.strerror or error}", FAILED)
    return outcome.status


def expect_writable(option: str, path: Path | None, begins: bytes) -> None:
    """Raise ServeError: invalid_input, if a file cannot be written to a path that an option gives.

    Names of models are refused, too: ``-o`` is a page for some commands and a model for others. So are existing files
    that do not begin with ``begins``, such as the samples or the ``model.yaml`` of another argument.
    """
    if path is None:
        return
    if path.suffix == ".onnx":
        raise invalid_input(f"{option}: expected a name other than that of a model, got '{path}'")
    written = [path] if path.exists() else []
    if path.is_file() or not written:
        written.append(path.resolve().parent)  # files are replaced, not overwritten
    if path.is_dir() or not all(os.access(place, os.W_OK) for place in written):
        raise invalid_input(f"{option}: expected a file in an existing folder that can be written, got '{path}'")
    if path.is_file() and path.stat().st_size and not _begins(path, begins):
        raise invalid_input(f"{option}: expected a new file, or one of an earlier run, got '{path}' of another kind")


def _begins(path: Path, begins: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(begins)) == begins


def _print(outcome: Outcome, *, as_json: bool) -> None:
    try:
        if as_json:
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(encoding="utf-8")  # JSON is UTF-8 in all locales
            sys.stdout.write(json_text(outcome.result))
        else:
            print_report(outcome.report)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    """Discard the rest of the output, whose reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def json_text(result: Any) -> str:
    """A result as JSON with a final line feed. NaN and infinities become null."""
    return TypeAdapter(type(result)).dump_json(result, indent=2).decode() + "\n"


def json_schema(result: type) -> dict[str, Any]:
    """The JSON Schema of a result."""
    return TypeAdapter(result).json_schema(mode="serialization")


def _fail(name: str, problem: str, status: int) -> int:
    sys.stderr.write(f"ortserve {name}: {printable(problem)}\n")
    return status
