"""The command line of ``ortserve bench``."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ortserve import __version__
from ortserve.engine.process_limits import cpu_budget
from ortserve.errors import invalid_input
from ortserve.tools.bench.comparison import compare_results, read_result
from ortserve.tools.bench.encoding import PROTOCOLS
from ortserve.tools.bench.generators import Generators
from ortserve.tools.bench.load import Load
from ortserve.tools.bench.measure import Measurement, Settings, result_problems
from ortserve.tools.bench.plans import WAYS
from ortserve.tools.bench.prepare import Options, Prepared, prepare
from ortserve.tools.bench.presentation import present, present_comparison
from ortserve.tools.bench.result import BenchResult, Capacity, Point
from ortserve.tools.bench.server import Address, parse_address
from ortserve.tools.command import FAILED, INTERRUPTED, OK, Outcome, ToolParser, run_tool
from ortserve.tools.console import progress
from ortserve.tools.subject import is_url

_DESCRIPTION: Final = """\
Measure latency and throughput: of a server of the Open Inference Protocol, by URL (http://, https://, grpc://,
grpcs://), or of a model in this process (a file, or REPOSITORY/name[/version]). Several targets take turns.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    if bool(given.targets) == bool(given.compare):
        parser.error("expected a target, or two results with --compare")
    return run_tool("bench", _compare if given.compare else _measure, given)


def build_parser() -> ToolParser:
    """All arguments, also for the tests of documents."""
    parser = ToolParser("bench", _DESCRIPTION)
    add = parser.add_argument
    add("targets", nargs="*", metavar="TARGET", help="URL of a server, or a model.")
    what = parser.add_argument_group("what to run")
    add = what.add_argument
    add("--model", default="", metavar="NAME[/VERSION]", help="The model, on servers.")
    add(
        "--protocol",
        default="",
        metavar="P,…",
        help=f"Of {', '.join(PROTOCOLS)}; shm is system shared memory. Default: rest for http, grpc for grpc.",
    )
    add(
        "--way",
        default="run",
        metavar="W,…",
        help="Of a model in this process: run (bare session.run), bound (on bound "
        "memory), batcher (as the server batches). Default: run.",
    )
    add("--batch", type=_counts, default=[1], metavar="N,…", help="Rows of a request. Default: 1.")
    add("--inputs", type=Path, metavar="FILE.npz", help="Samples to send; made from the signature if not given.")
    add("--free-dim", type=_count, metavar="N", help="Size of free dimensions of made inputs other than the rows.")
    add(
        "--compare-outputs",
        metavar="MODEL",
        help="Compare the answers with this model's. Without it, answers under load "
        "are compared with answers to lone requests.",
    )
    add("--provider", metavar="NAME", help="The only execution provider, in this process.")
    add("--threads", type=_count, metavar="N", help="Threads of a run, in this process.")
    load = parser.add_argument_group("load")
    add = load.add_argument
    add("--concurrency", type=_counts, metavar="N,…", help="Closed loop: callers that wait for answers. Default: 1.")
    add("--rate", "--rates", type=_rates, metavar="R,…", help="Open loop: requests per second.")
    add(
        "--arrivals",
        default="constant",
        metavar="KIND",
        help="Of an open loop: constant, poisson, bursts:N, or a file of "
        "times in seconds, one a line. Default: constant.",
    )
    add("--find-capacity", action="store_true", help="Search for the highest rate that is sustained (within --slo).")
    add("--seconds", type=_seconds, default=10.0, metavar="S", help="Most for each load. Default: 10.")
    add("--warmup", type=_seconds, default=1.0, metavar="S", help="Load before, not measured. Default: 1.")
    add("--rounds", type=_count, default=1, metavar="N", help="Have the loads take turns so often, sharing --seconds.")
    add("--processes", type=_count, default=1, metavar="N", help="Of the generator, for servers. Default: 1.")
    add(
        "--connections",
        type=_count,
        default=512,
        metavar="N",
        help="Most connections or streams of a generator process.",
    )
    add("--timeout", type=_seconds, default=10.0, metavar="S", help="For an answer. Default: 10.")
    verdict = parser.add_argument_group("verdict")
    add = verdict.add_argument
    add("--percentile", type=_percent, default=99.0, metavar="P", help="The percentile that matters. Default: 99.")
    add(
        "--precision",
        type=_share,
        metavar="SHARE",
        help="Stop when half the 95 %% interval of the percentile is within this share of it: 0.05.",
    )
    add(
        "--slo",
        type=_seconds,
        metavar="MS",
        help="Latency bound: counts answers within it; status 1 if the percentile misses it.",
    )
    add("--allow-errors", type=_share, default=0.0, metavar="SHARE", help="Failed requests for status 0. Default: 0.")
    add("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="Compare two results of --json.")
    access = parser.add_argument_group("access")
    access.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="Of each request, such as 'Authorization: Bearer KEY'.",
    )
    access.add_argument("--ca", type=Path, metavar="FILE", help="Certificates to trust instead of the system's.")
    return parser


def _measure(given: argparse.Namespace) -> Outcome:
    loads = _loads(given)
    chosen = [choice for target in given.targets for choice in _choices(target, given)]
    model, _, version = given.model.partition("/")
    options = Options(
        model=model,
        version=version,
        inputs=given.inputs,
        free_dim=given.free_dim,
        timeout_s=given.timeout,
        most_connections=given.connections,
        provider=given.provider,
        threads=given.threads,
        reference=given.compare_outputs,
    )
    settings = Settings(
        seconds=given.seconds,
        warmup_s=given.warmup,
        percent=given.percentile,
        precision=given.precision,
        slo_ms=given.slo,
        timeout_s=given.timeout,
        rounds=given.rounds,
    )
    if any(address is None for _, address, _ in chosen) and given.processes > 1:
        raise invalid_input("--processes: a model in this process has one generator")
    began = datetime.now(UTC).isoformat(timespec="seconds")
    points: list[Point] = []
    capacities: list[Capacity] = []
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(progress("preparing"))
        generators = stack.enter_context(Generators(given.processes))  # they begin meanwhile
        targets = [
            stack.enter_context(prepare(target, address, way, batch, options))
            for target, address, way in chosen
            for batch in given.batch
        ]
        measurement = Measurement(generators, settings, lambda line: step(0, line))
        if given.find_capacity:
            for prepared in targets:
                if not measurement.is_interrupted:
                    found, capacity = measurement.find_capacity(prepared, given.arrivals)
                    points += found
                    capacities.append(capacity)
        else:
            points = measurement.measure(targets, loads)
    problems = result_problems(
        points, settings.percent, settings.slo_ms, given.allow_errors, is_search=given.find_capacity
    )
    result = _result(given, targets, began, points, capacities, problems, is_interrupted=measurement.is_interrupted)
    status = INTERRUPTED if result.is_interrupted else FAILED if problems else OK
    if given.json:  # the report shows them, too
        for problem in problems:
            sys.stderr.write(f"ortserve bench: {problem}\n")
    return Outcome(result, present(result, has_pictures=given.output is not None), status)


def _result(
    given: argparse.Namespace,
    targets: Sequence[Prepared],
    began: str,
    points: Sequence[Point],
    capacities: Sequence[Capacity],
    problems: Sequence[str],
    *,
    is_interrupted: bool,
) -> BenchResult:
    machine = f"{cpu_budget()} processors, load {os.getloadavg()[0]:.1f} at the end"
    return BenchResult(
        schema="ortserve.bench/1",
        version=__version__,
        began=began,
        machine=machine,
        model=given.model,
        inputs="; ".join(dict.fromkeys(prepared.origin for prepared in targets)),
        percentile=given.percentile,
        slo_ms=given.slo,
        points=tuple(points),
        capacities=tuple(capacities),
        is_interrupted=is_interrupted,
        problems=tuple(problems),
    )


def _compare(given: argparse.Namespace) -> Outcome:
    first, second = given.compare
    comparison = compare_results(read_result(first), read_result(second), (str(first), str(second)))
    return Outcome(comparison, present_comparison(comparison), FAILED if comparison.problems else OK)


def _loads(given: argparse.Namespace) -> list[Load]:
    """Raises ServeError: invalid_input, for options that contradict each other."""
    is_file = given.arrivals not in ("constant", "poisson") and not given.arrivals.startswith("bursts:")
    if sum(map(bool, (given.concurrency, given.rate or is_file, given.find_capacity))) > 1:
        raise invalid_input("expected one of --concurrency, --rate, --arrivals FILE and --find-capacity, got several")
    if is_file:
        return [Load(None, 0.0, given.arrivals)]
    if given.rate:
        return [Load(None, rate, given.arrivals) for rate in given.rate]
    return [Load(concurrency) for concurrency in given.concurrency or [1]]


def _choices(target: str, given: argparse.Namespace) -> list[tuple[str, Address | None, str]]:
    """Each way of a target. Raises ServeError: invalid_input."""
    if not is_url(target):
        return [(target, None, way) for way in _names("--way", given.way, WAYS)]
    if not given.model:
        raise invalid_input(f"{target}: expected --model with the name of its model")
    address = parse_address(target, given.header, given.ca)
    fitting = [one for one in PROTOCOLS if one == "shm" or one.startswith("grpc") == address.is_grpc]
    usual = "grpc" if address.is_grpc else "rest"
    return [(target, address, way) for way in _names("--protocol", given.protocol or usual, fitting)]


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise invalid_input(f"{option}: expected {', '.join(known)} for this target, got '{name}'")
    return names


def _numbers(text: str, pattern: str, what: str) -> list[float]:
    parts = text.split(",")
    if any(not re.fullmatch(pattern, part) or not part or float(part) <= 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected {what}, got '{text}'")
    return [float(part) for part in parts]


def _counts(text: str) -> list[int]:
    return [int(number) for number in _numbers(text, r"\d{1,6}", "numbers above 0, separated by commas")]


def _count(text: str) -> int:
    return int(_numbers(text, r"\d{1,6}", "a number above 0")[0])


def _rates(text: str) -> list[float]:
    return _numbers(text, r"\d{1,7}(\.\d+)?", "requests per second, separated by commas")


def _seconds(text: str) -> float:
    if text in ("0", "0.0"):
        return 0.0
    return _numbers(text, r"\d{0,6}(\.\d+)?", "a number")[0]


def _percent(text: str) -> float:
    return _numbers(text, r"\d{1,2}(\.\d+)?", "a percentile such as 99.9")[0]


def _share(text: str) -> float:
    if text == "0":
        return 0.0
    share = _numbers(text, r"[01]?(\.\d+)?", "a share from 0 to 1")[0]
    if share > 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got '{text}'")
    return share
