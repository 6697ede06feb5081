"""The command ``ortserve serve``: reads the options, checks their combinations, and runs the server."""

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, Final, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from ortserve.config.declaration import describe_default, describe_option, describe_unit, with_suggestions
from ortserve.config.options import (
    OPTION_GROUPS,
    OptionsError,
    ServerOptions,
    combination_problems,
    flag_name,
    read_options_and_origins,
    split_list,
    state_folder,
    variable_name,
)
from ortserve.config.repository_url import Repository
from ortserve.config.triton_names import hint_for_flag
from ortserve.engine.distributions import installed_runtimes, runtime_problem
from ortserve.paths import is_model_file, open_file
from ortserve.telemetry.logs import json_line

_REPORT_S: Final = 5.0
"""Time after which a file system that does not answer, such as NFS without its server, is reported."""

_EPILOG: Final = """\
Each option can also be set by an environment variable (--http-port is ORTSERVE_HTTP_PORT; lists are separated by
commas) or in the options file (http_port: 8000). A flag overrides the variable, the variable overrides the file.
"""


def main(arguments: Sequence[str]) -> int:
    """Serve until a stop signal. Returns 2, with one line per problem on standard error, for invalid options."""
    # Intermixed: repositories may come before and after flags.
    flags = vars(build_parser().parse_intermixed_args(arguments))
    config_path = flags.pop("config", None)
    asked_format = flags.get("log_format") or os.environ.get(variable_name("log_format"))
    try:
        with _silence_reported(asked_format, "--config: the file"):
            options, origins = read_options_and_origins(flags, config_path)
    except OptionsError as error:
        return _refuse(asked_format or error.file_log_format, *error.problems)
    refuse = partial(_refuse, options.log_format)
    if not options.repositories and not options.example:
        return refuse("repositories: expected at least one folder, .onnx file, URL or --example, got none")
    find_problem = partial(_repository_problem, log_format=options.log_format)
    if problems := list(filter(None, map(find_problem, options.repositories))):
        return refuse(*problems)
    _wait_for_files(options)
    if problems := combination_problems(options):
        return refuse(*problems)
    if problem := runtime_problem(installed_runtimes()):
        return refuse(problem)
    from ortserve.app.run import run  # imported here, because it imports the engine

    return run(options, origins)


def _repository_problem(repository: Repository, *, log_format: str) -> str:
    """Why a folder of models or a model file cannot be read; empty if it can, and for a repository in a store."""
    if not isinstance(repository, Path):
        return ""
    try:
        # The dot needs the right to search the folder, too.
        with (
            _silence_reported(log_format, f"repositories: '{repository}'"),
            open_file(repository) if is_model_file(repository) else os.scandir(f"{repository}/."),
        ):
            return ""
    except OSError as error:
        expected = "a folder of models or an .onnx file"
        return f"repositories: expected {expected}, got '{repository}': {error.strerror}"


def _wait_for_files(options: ServerOptions) -> None:
    """Access the files of the other options, which the server opens without a time limit of its own.

    Reports contain no paths: a key may have been given instead of the path of its file.
    """
    for name in sorted(ServerOptions.model_fields.keys() - {"repositories"}):
        value = state_folder(options) if name == "state_dir" else getattr(options, name)
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                # The server itself reports what it cannot open.
                with _silence_reported(options.log_format, f"{name}: the path"), suppress(OSError, ValueError):
                    path.stat()


@contextmanager
def _silence_reported(log_format: object, accessed: str) -> Iterator[None]:
    """Report once if the context does not end within ``_REPORT_S``."""
    text = f"{accessed} has not answered for {_REPORT_S:g} s; waiting"
    report = threading.Timer(_REPORT_S, _write, (log_format, "WARNING", "the server waits", text))
    report.daemon = True
    with suppress(RuntimeError):  # the system permits no further thread
        report.start()
    try:
        yield
    finally:
        report.cancel()


def build_parser() -> argparse.ArgumentParser:
    """Create one flag per option. Values stay texts, so that one validator checks them from all sources."""
    # argparse instead of pydantic-settings' parser, whose help shows no bounds and "tuple[str,...]" for a list.
    parser = _Parser(
        prog="ortserve serve",
        usage="ortserve serve [REPOSITORY ...] [--example] [--config FILE] [options]",
        description="Serve the models of one or more repositories over REST and gRPC.",
        epilog=_EPILOG,
        formatter_class=_wide_formatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    repositories = ServerOptions.model_fields["repositories"]
    parser.add_argument("repositories", nargs="*", metavar="REPOSITORY", help=_plain(repositories))
    server = parser.add_argument_group("server")
    server.add_argument("--config", type=Path, metavar="FILE", help="YAML options file. [environment: ORTSERVE_CONFIG]")
    inherited = {parser.add_argument_group(title): group for title, group in OPTION_GROUPS.items()}
    for name, field in ServerOptions.model_fields.items():
        if name != "repositories":
            flags = next((flags for flags, group in inherited.items() if name in group.model_fields), server)
            _add_flag(flags, name, field)
    return parser


class _Parser(argparse.ArgumentParser):
    """Suggests similar flags for unknown ones, and this server's flags for those of Triton."""

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "expected no value, got")
        hint = "".join(hint_for_flag(word.partition("=")[0]) for word in message.split())
        super().error(message + hint if hint else with_suggestions(message, self._option_string_actions))


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    text = f"{_plain(field)} [{_values(name, field)}default: {describe_default(field) or 'unset'}]".replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(flag_name(name), action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(field.annotation) is tuple:
        group.add_argument(flag_name(name), type=split_list, action="extend", metavar="NAME,...", help=text)
    else:
        group.add_argument(flag_name(name), metavar=_metavar(name, field.annotation), help=text)


def _metavar(name: str, annotation: Any) -> str:
    kinds = (annotation, *get_args(annotation))  # an option without a default may also be None
    if choices := next((kind for kind in kinds if get_origin(kind) is Literal), None):
        return "{" + ",".join(get_args(choices)) + "}"
    if Path in kinds:
        return "PATH"
    return describe_unit(name).upper() or ("TEXT" if str in kinds else "N")


def _values(name: str, field: FieldInfo) -> str:
    if field.annotation in (bool, str, Path | None) or get_origin(field.annotation) in (Literal, tuple):
        return ""
    return f"{describe_option(name, field)}; "


def _plain(field: FieldInfo) -> str:
    return " ".join((field.description or "").replace("``", "").split())


def _wide_formatter(prog: str) -> argparse.HelpFormatter:
    width = min(110, get_terminal_size((110, 0)).columns)
    return argparse.HelpFormatter(prog, max_help_position=34, width=width)


def _refuse(log_format: object, *problems: str) -> int:
    for problem in problems:
        _write(log_format, "ERROR", "the server cannot start", problem)
    return 2


def _write(log_format: object, level: str, message: str, reason: str) -> None:
    """Write a line before the log is configured, in its format if that is JSON."""
    line = f"ortserve serve: {reason}"
    if log_format == "json":
        line = json_line(time.time(), level, __name__, message, {"reason": reason})
    sys.stderr.write(f"{line}\n")
