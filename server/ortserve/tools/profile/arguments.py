"""The arguments of ``ortserve profile``."""

import argparse
from pathlib import Path
from typing import Final

from ortserve.tools.address import ACCESS_FLAGS, add_access, is_url
from ortserve.tools.command import ToolParser, number

_DESCRIPTION: Final = """
Show what each operator of a model costs. TARGET is model.onnx or REPOSITORY/name[/version], or the URL of a server and
the name of a model that it serves, whose next batches are then copied and profiled there.
"""
_OF_MODELS: Final = ("--compare", "--runs", "--seconds", "--provider", "--threads", "--set")
_OF_SERVERS: Final = ("--requests", "--timeout", *ACCESS_FLAGS)
"""Flags that have no effect on targets of the other kind."""
UNCHANGED: Final = "default"
"""The word of ``--compare`` for the settings as they are."""


def _check(parser: ToolParser, given: argparse.Namespace) -> None:
    if given.target is None and given.compare is None:
        parser.error("expected a TARGET, or --compare with two models")
    if given.target is not None and is_url(given.target) and given.model is None:
        parser.error("MODEL: expected the name of a model after the URL, got none")
    if given.target is not None and not is_url(given.target) and given.model is not None:
        expected = "expected the URL of a server before it, which begins with http://"
        parser.error(f"MODEL: {expected}, got '{given.target}'")
    if given.model is None:
        parser.refuse(given, _OF_SERVERS, "the URL of a server, which begins with http:// or grpc://, got a model")
    else:
        parser.refuse(given, _OF_MODELS, "a model in this process, got a URL")
        if given.inputs is None:
            parser.refuse(given, ("--rows",), "requests to send, got a URL without --inputs")
    if given.trace is not None and given.trace == given.page:
        parser.error(f"--trace: expected another file than that of -o, got '{given.trace}'")


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser("profile", _DESCRIPTION, check=_check)
    count, seconds = number(int, 1), number(float, 1e-3)
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help="Model file, REPOSITORY/name[/version], or URL.")
    add("model", nargs="?", metavar="MODEL", help="With a URL: the name of the model.")
    text = "Samples, .npz or a folder. With a URL, the command sends them. Default: synthetic inputs."
    add("--inputs", type=Path, metavar="DATA", help=text)
    add("--rows", type=count, default=1, metavar="N", help="Rows per run, or per request sent. Default: 1.")
    add = parser.add_argument_group("runs in this process").add_argument
    text = "Number of runs with profiling, and of runs without. Default: 50."
    add("--runs", type=count, default=50, metavar="N", help=text)
    add("--seconds", type=seconds, default=60.0, help="Time limit of all runs. Default: 60.")
    add("--provider", metavar="NAME", help="Execution provider: cpu, cuda, tensorrt, openvino.")
    add("--threads", type=count, metavar="N", help="Threads per run.")
    text = "Session setting as in model.yaml, or an entry such as session.dynamic_block_base; may be repeated."
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = f"Compare two models, or two settings of TARGET: KEY=VALUE[,…] (also threads and provider) or {UNCHANGED}."
    add("--compare", nargs=2, metavar=("A", "B"), help=text)
    add = parser.add_argument_group("batches of a server").add_argument
    text = "Number of requests whose batches are copied. Default: 100."
    add("--requests", type=count, default=100, metavar="N", help=text)
    add("--timeout", type=seconds, default=30.0, metavar="S", help="Time to wait for these requests. Default: 30.")
    add_access(parser)
    text = "Write ONNX Runtime's trace to this file, for Perfetto."
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help=text)
    return parser
