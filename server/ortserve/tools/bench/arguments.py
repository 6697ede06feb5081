"""The arguments of ``ortserve bench``."""

import argparse
from pathlib import Path
from typing import Final

from ortserve.tools.address import ACCESS_FLAGS, add_access, is_url
from ortserve.tools.command import ToolParser, number, several

_DESCRIPTION: Final = """\
Measure latency and throughput: of a server of the Open Inference Protocol, by URL (http://, https://, grpc://,
grpcs://), or of a model in this process (a file, or REPOSITORY/name[/version]). Several targets take turns.
"""
PROTOCOLS: Final = ("rest", "rest-binary", "grpc", "grpc-stream", "shm")
WAYS: Final = ("run", "bound", "batcher")

_OF_MODELS: Final = ("--way", "--provider", "--threads")
_OF_SERVERS: Final = ("--model", "--protocol", "--sequences", "--processes", "--connections", *ACCESS_FLAGS)
"""Flags that have no effect on targets of the other kind."""
_count, _share, _seconds, _period = number(int, 1), number(float, 0, 1), number(float, 0), number(float, 0.001)


def _check(parser: ToolParser, given: argparse.Namespace) -> None:
    if bool(given.targets) == bool(given.compare):
        parser.error("expected a target, or two results with --compare")
    if given.compare:
        parser.refuse(given, parser.flags_besides("--compare", "--json", "--page"), "a target, got --compare")
    kinds = {is_url(target) for target in given.targets}
    if kinds == {True}:
        parser.refuse(given, _OF_MODELS, "a model in this process, got a URL")
    if False in kinds:
        flags = _OF_SERVERS if kinds == {False} else ("--sequences", "--processes")
        parser.refuse(given, flags, "the URL of a server, which begins with http:// or grpc://, got a model")
    if given.inputs:
        parser.refuse(given, ("--free-dim",), "synthetic inputs, got --inputs")
    if given.find_capacity:
        parser.refuse(given, ("--rounds", "--precision"), "--concurrency, --rate or --arrivals, got --find-capacity")
    if given.sequences:
        expected = "a closed loop of one process, whose answers are not compared, got --sequences"
        parser.refuse(given, ("--rate", "--arrivals", "--find-capacity", "--processes", "--compare-outputs"), expected)
        if "shm" in given.protocol.split(","):
            parser.error("--protocol: expected one without shared memory, got shm and --sequences")


def build_parser() -> ToolParser:
    """The arguments. Tests of the documents use them, too."""
    parser = ToolParser("bench", _DESCRIPTION, check=_check)
    add = parser.add_argument
    add("targets", nargs="*", metavar="TARGET", help="URL of a server, or a model.")
    add = parser.add_argument_group("what to run").add_argument
    add("--model", default="", metavar="NAME[/VERSION]", help="Name of the model on the server.")
    text = f"Protocols to a server: {', '.join(PROTOCOLS)}; shm is system shared memory. "
    text += "Default: rest for http, grpc for grpc."
    add("--protocol", default="", metavar="P,…", help=text)
    text = "How a model in this process runs: run (bare session.run), bound (bound memory) or batcher (like a server). "
    text += "Default: run."
    add("--way", default="run", metavar="W,…", help=text)
    add("--batch", type=several(_count), default=[1], metavar="N,…", help="Rows per request. Default: 1.")
    add("--inputs", type=Path, metavar="DATA", help="Samples to send, .npz or a folder. Default: synthetic inputs.")
    text = "Size of the free dimensions of synthetic inputs, except the number of rows."
    add("--free-dim", type=_count, metavar="N", help=text)
    text = "Model whose outputs the answers must equal. Default: answers to single requests, or bare runs of the model."
    add("--compare-outputs", metavar="MODEL", help=text)
    add("--provider", metavar="NAME", help="Execution provider for a model in this process; no other is used.")
    add("--threads", type=_count, metavar="N", help="Threads per run of a model in this process.")
    add = parser.add_argument_group("load").add_argument
    text = "Closed loop: number of callers, each of which waits for its answer. Default: 1."
    add("--concurrency", type=several(_count), metavar="N,…", help=text)
    text = "Closed loop: each caller sends sequences of this many requests, one after the other."
    add("--sequences", type=_count, metavar="N", help=text)
    text = "Open loop: requests per second."
    add("--rate", "--rates", type=several(number(float, 1e-6, 9_999_999)), metavar="R,…", help=text)
    text = "Open loop: pattern of arrivals, constant, poisson, bursts:N, or a file of times in seconds, one per line. "
    text += "Default: constant."
    add("--arrivals", default="constant", metavar="KIND", help=text)
    add("--find-capacity", action="store_true", help="Search for the highest rate that is sustained (within --slo).")
    add("--seconds", type=_period, default=10.0, metavar="S", help="Maximum time for each load. Default: 10.")
    text = "Time for which the load runs before the measurement. Default: 1."
    add("--warmup", dest="warmup_s", type=_seconds, default=1.0, metavar="S", help=text)
    text = "Number of turns of all loads, which divide --seconds. Default: 1."
    add("--rounds", type=_count, default=1, metavar="N", help=text)
    add("--processes", type=_count, default=1, metavar="N", help="Generator processes, for servers. Default: 1.")
    text = "Maximum number of connections per generator process. Default: 512."
    add("--connections", type=_count, default=512, metavar="N", help=text)
    text = "Time limit of an answer. Default: 10."
    add("--timeout", dest="timeout_s", type=_period, default=10.0, metavar="S", help=text)
    add = parser.add_argument_group("verdict").add_argument
    text = "Percentile that --slo and --precision use. Default: 99."
    add("--percentile", type=number(float, 0.01, 99.9999), default=99.0, metavar="P", help=text)
    text = "Stop when half the 95 %% interval of the percentile is at most this share of it, such as 0.05."
    add("--precision", type=_share, metavar="SHARE", help=text)
    text = "Latency bound: the answers within it are counted, and the exit status is 1 if the percentile exceeds it."
    add("--slo", dest="slo_ms", type=_seconds, metavar="MS", help=text)
    text = "Share of requests that may fail without exit status 1. Default: 0."
    add("--allow-errors", type=_share, default=0.0, metavar="SHARE", help=text)
    add("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="Compare two results of --json.")
    add_access(parser)
    return parser
