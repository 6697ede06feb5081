"""Compares the speed of a loaded version with that of the version that serves. Loop thread only.

Runs of the loaded version, the candidate, and of the one that serves alternate, so that other work on the machine
affects both, and the shortest run of each counts. On a busy machine the first runs of the serving version may all have
been interrupted, so that a slow candidate looks as fast: few rounds suffice only if they agree on its shortest run. A
round counts only if both ran: a serving version that is overloaded rejects many runs, and few of them say little.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, TypeAlias

from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.core.inflight import InflightRequest, Scheduling
from ortserve.core.timing import Timing
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.load.batch_sizes import RunBounds, SizeLatency, WorkerRuns, as_batch
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.load.progress import Progress
from ortserve.registry.served_model import ServedModel
from ortserve.registry.served_version import ServedVersion
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_MAX_SPEED_RETRY_S: Final = 0.05
"""Maximum wait before another attempt to time a version that rejected a request."""

SpeedRun: TypeAlias = Callable[[int], Awaitable[int]]
"""Times one run with the given number of rows, in ns. The serving version's returns 0 for one that cannot be compared,
mostly because it rejected the request. Raises ServeError."""

MAX_SPEED_ROUNDS: Final = 32
"""Maximum rounds of one size."""
MIN_SPEED_ROUNDS: Final = 3
"""Minimum rounds of one size. With fewer it is not compared."""
CERTAIN_SPEED_RUNS: Final = 5
"""A size passes as soon as its shortest runs are within the bound and this many runs of the serving version are about
as short as its shortest one."""
_SAME_SPEED: Final = 1.1
"""Runs up to this multiple of the shortest one are about as short. Times of interrupted runs differ by more."""
MAX_REJECTED_SPEED_RUNS: Final = 32
"""Maximum number of attempts of one size that give no time of the serving version."""
IGNORED_SLOWDOWN_NS: Final = 100_000
"""Smaller differences do not count as a slowdown, because the wakeup of a thread may cause them."""
_SPEED_BUDGET_NS: Final = 10_000_000_000
"""Time limit for all sizes together. Each size has ``MIN_SPEED_ROUNDS``, or as many attempts, in any case."""


async def check_speed(
    name: str,
    loaded: LoadedModel,
    options: ModelOptions,
    serving: ServedVersion | None,
    progress: Progress,
    threads: Executor,
    clock: Clock,
) -> None:
    """Compare a loaded version with the one that serves, if ``max_slowdown`` is set.

    The version that serves runs a few requests with synthetic inputs, beside those of its callers.

    Raises:
        ServeError: invalid_input, with the size and both times, if the loaded version is too slow.
    """
    if options.max_slowdown is None or serving is None:
        return
    found = loaded.warm_up
    if not isinstance(serving, ServedModel) or serving.takes_sequences or options.sequences is not None:
        reason = "max_slowdown: ensembles and models with sequences are not compared"
        log_event(logger, logging.WARNING, "option has no effect", model=name, reason=reason)
        return
    before = serving.loaded.warm_up
    sizes = common_sizes(found.latencies, before.latencies)
    if not sizes or found.inputs is None or before.inputs is None:
        reason = "max_slowdown: warm-up measured no batch size of both versions"
        log_event(logger, logging.WARNING, "option has no effect", model=name, reason=reason)
        return
    progress.begin(f"comparing its speed with version {serving.version}")
    bounds = RunBounds(progress, options.warmup_run_timeout_s, options.run_grace_s)
    worker = WorkerRuns(loaded.instances[0], bounds)
    own = partial(_time_own, worker, found.inputs, threads)
    slowdown = await find_slowdown(
        sizes, own, partial(_time_served, serving, before.inputs, clock), options.max_slowdown, clock
    )
    if slowdown is None:
        reason = f"max_slowdown: version {serving.version} did not run enough of the requests to be compared"
        log_event(logger, logging.WARNING, "speed was not compared at all batch sizes", model=name, reason=reason)
    elif slowdown:
        raise invalid_input(f"max_slowdown: {slowdown} (version {serving.version})")


def common_sizes(one: Sequence[SizeLatency], other: Sequence[SizeLatency]) -> list[int]:
    """Sizes to compare: the smallest, the middle and the largest that warm-up measured for both versions. Pure."""
    sizes = sorted({size.rows for size in one} & {size.rows for size in other})
    return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}) if sizes else []


def is_slower(candidate_ns: int, serving_ns: int, max_slowdown: float) -> bool:
    """Whether the shortest runs show a slowdown beyond the bound. Pure."""
    return candidate_ns > serving_ns * max_slowdown and candidate_ns - serving_ns > IGNORED_SLOWDOWN_NS


def is_certain(times_ns: Sequence[int]) -> bool:
    """Whether enough runs are about as short as the shortest one, which was then not interrupted. Pure."""
    return sum(one <= min(times_ns) * _SAME_SPEED for one in times_ns) >= CERTAIN_SPEED_RUNS


async def find_slowdown(
    sizes: Sequence[int], candidate: SpeedRun, serving: SpeedRun, max_slowdown: float, clock: Clock
) -> str | None:
    """Compare a candidate with the version that serves, size by size.

    Returns:
        The size and both times if the candidate is slower than allowed after all rounds; empty otherwise. None if a
        size could not be compared, and no other one shows a slowdown.

    Raises:
        ServeError: A run failed.
    """
    stop_ns = clock() + _SPEED_BUDGET_NS
    is_whole = True
    for rows in sizes:
        own: list[int] = []
        others: list[int] = []
        rejected = 0
        while len(own) < MAX_SPEED_ROUNDS and rejected < MAX_REJECTED_SPEED_RUNS:
            if len(own) + rejected >= MIN_SPEED_ROUNDS and clock() >= stop_ns:
                break
            other_ns = await serving(rows)
            if not other_ns:
                rejected += 1
                continue
            others.append(other_ns)
            own.append(await candidate(rows))
            if is_certain(others) and not is_slower(min(own), min(others), max_slowdown):
                break
        if len(own) < MIN_SPEED_ROUNDS:
            is_whole = False
        elif is_slower(own_ns := min(own), other_ns := min(others), max_slowdown):
            return (
                f"a batch of {rows} rows takes {own_ns / 1e6:.3f} ms, {own_ns / other_ns:.2f} times the "
                f"{other_ns / 1e6:.3f} ms of the serving version; expected at most {max_slowdown:g} times"
            )
    return "" if is_whole else None


async def _time_own(worker: WorkerRuns, inputs: InputGenerator, threads: Executor, rows: int) -> int:
    batch = as_batch(inputs.generate(rows, rows), rows)
    result = await asyncio.get_running_loop().run_in_executor(threads, worker.run, batch)
    return result.computed_ns - result.staged_ns


async def _time_served(serving: ServedModel, inputs: InputGenerator, clock: Clock, rows: int) -> int:
    """Time a request to the version that serves. Returns 0 if it did not run as one batch, or was rejected."""
    request = InflightRequest(Timing(clock()), inputs.generate(rows, rows), rows)
    terms = serving.terms(clock(), scheduling=Scheduling(serving.options.priority_levels))
    try:
        serving.submit_own(request, terms)
        await request
    except ServeError as error:  # It is overloaded, or is being replaced: do not ask again at once.
        await asyncio.sleep(min(error.retry_after_s or _MAX_SPEED_RETRY_S, _MAX_SPEED_RETRY_S))
        return 0
    timing = request.timing
    return timing.computed_ns - timing.staged_ns if timing.batch_rows == rows else 0
