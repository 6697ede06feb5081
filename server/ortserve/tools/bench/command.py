"""The command line of ``ortserve bench``."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product

from ortserve import __version__
from ortserve.engine.process_limits import cpu_budget
from ortserve.errors import invalid_input
from ortserve.tools.address import Address, address_of, is_url
from ortserve.tools.bench.arguments import PROTOCOLS, WAYS
from ortserve.tools.bench.comparison import compare_results, present_comparison, read_result
from ortserve.tools.bench.generators import Generators
from ortserve.tools.bench.load import Load
from ortserve.tools.bench.measure import Measurement, result_problems
from ortserve.tools.bench.prepare import prepare_model, prepare_server
from ortserve.tools.bench.presentation import present
from ortserve.tools.bench.result import BenchResult
from ortserve.tools.command import FAILED, INTERRUPTED, OK, Outcome
from ortserve.tools.console import printable, progress


def run(given: argparse.Namespace) -> Outcome:
    """Measure or compare. Raises ServeError."""
    return _compare(given) if given.compare else _measure(given)


def _measure(given: argparse.Namespace) -> Outcome:
    loads = _loads(given)
    chosen = [choice for target in given.targets for choice in _choices(target, given)]
    began = datetime.now(UTC).isoformat(timespec="seconds")
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(progress("preparing"))
        generators = stack.enter_context(Generators(given.processes))  # the processes start while targets are prepared
        targets = [
            prepare_server(address, way, batch, given, stack) if address else prepare_model(target, way, batch, given)
            for (target, address, way), batch in product(chosen, given.batch)
        ]
        measurement = Measurement(generators, given, lambda line: step(0, line))
        if given.find_capacity:
            searches = [measurement.find_capacity(target) for target in targets]
            points, capacities = [point for found, _ in searches for point in found], [one for _, one in searches]
        else:
            points, capacities = measurement.measure(targets, loads), []
    if measurement.is_interrupted and not points:
        raise KeyboardInterrupt  # there is no partial result
    problems = result_problems(points, given, is_search=given.find_capacity)
    result = BenchResult(
        version=__version__,
        began=began,
        machine=f"{cpu_budget()} processors, load {os.getloadavg()[0]:.1f} at the end",
        model=given.model,
        inputs="; ".join(dict.fromkeys(target.origin for target in targets)),
        percentile=given.percentile,
        slo_ms=given.slo_ms,
        points=tuple(points),
        capacities=tuple(capacities),
        is_interrupted=measurement.is_interrupted,
        problems=tuple(problems),
    )
    if given.json:  # the report contains the problems
        sys.stderr.writelines(f"ortserve bench: {printable(problem)}\n" for problem in problems)
    status = INTERRUPTED if result.is_interrupted else FAILED if problems else OK
    return Outcome(result, present(result, has_pictures=given.page is not None), status)


def _compare(given: argparse.Namespace) -> Outcome:
    first, second = given.compare
    comparison = compare_results(read_result(first), read_result(second), (str(first), str(second)))
    return Outcome(comparison, present_comparison(comparison), FAILED if comparison.problems else OK)


def _loads(given: argparse.Namespace) -> list[Load]:
    """The loads. Raises ServeError: invalid_input, for contradictory options."""
    is_file = given.arrivals not in ("constant", "poisson") and not given.arrivals.startswith("bursts:")
    if sum(map(bool, (given.concurrency, given.rate or is_file, given.find_capacity))) > 1:
        raise invalid_input("expected one of --concurrency, --rate, --arrivals FILE and --find-capacity, got several")
    if is_file and given.rate:
        expected = "expected constant, poisson or bursts:N with --rate, or a file without --rate"
        raise invalid_input(f"--arrivals: {expected}, got --rate and '{given.arrivals}'")
    if given.arrivals != "constant" and not (is_file or given.rate or given.find_capacity):
        raise invalid_input(
            f"--arrivals: expected --rate or --find-capacity to be given, too, got only '{given.arrivals}'"
        )
    if is_file or given.rate:
        return [Load(None, rate, given.arrivals) for rate in ([0.0] if is_file else given.rate)]
    return [Load(concurrency) for concurrency in given.concurrency or [1]]


def _choices(target: str, given: argparse.Namespace) -> list[tuple[str, Address | None, str]]:
    """The target with each of its ways. The address of a model is None. Raises ServeError: invalid_input."""
    address, option, names = None, "--way", given.way
    known: Sequence[str] = WAYS
    if is_url(target):
        address = address_of(target, given)
        if not given.model:
            raise invalid_input(f"{target}: expected --model with the name of its model")
        option, names = "--protocol", given.protocol or ("grpc" if address.is_grpc else "rest")
        known = [one for one in PROTOCOLS if one == "shm" or one.startswith("grpc") == address.is_grpc]
    for name in names.split(","):
        if name not in known:
            raise invalid_input(f"{option}: expected {', '.join(known)} for this target, got '{name}'")
    return [(target, address, name) for name in names.split(",")]
