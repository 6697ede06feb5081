"""Checks of a loaded version that need other versions: its speed beside theirs, and golden samples of ensembles.

The load of a model file checks its own golden samples (``load/golden_check``). Loop thread only.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.core.batch import Arrays
from ortserve.core.inflight import InflightRequest
from ortserve.core.terms import Scheduling
from ortserve.core.timing import Timing
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.ensemble.served import ServedEnsemble
from ortserve.registry.load.batch_sizes import RunBounds, WorkerRuns, as_batch
from ortserve.registry.load.coordination import Progress
from ortserve.registry.load.golden_check import as_batched, as_sent, check_samples
from ortserve.registry.load.golden_samples import (
    GOLDEN_MISSING,
    GoldenSample,
    golden_folder,
    read_golden,
)
from ortserve.registry.load.inputs import InputGenerator
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.load.speed_gate import common_sizes, find_slowdown
from ortserve.registry.served import ServedModel
from ortserve.registry.serving import ServedVersion
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

_MAX_TOGETHER: Final = 16
"""Maximum number of concurrent requests to an ensemble."""
_MAX_RETRY_S: Final = 0.05
"""Maximum wait before another attempt to time a version that rejected a request."""


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
        await asyncio.sleep(min(error.retry_after_s or _MAX_RETRY_S, _MAX_RETRY_S))
        return 0
    timing = request.timing
    return timing.computed_ns - timing.staged_ns if timing.batch_rows == rows else 0


async def check_ensemble(served: ServedEnsemble, path: Path, folder: Path | None, clock: Clock) -> str:
    """Check the golden samples of an ensemble by running them as its requests.

    Returns:
        The result of ``check_samples``; empty without samples.

    Raises:
        ServeError: invalid_input, from ``check_samples``, or if required samples are missing.
    """
    options, signature = served.options, served.signature
    golden = await asyncio.to_thread(read_golden, golden_folder(path, folder, options), signature)
    if golden is None:
        if options.golden_required:
            raise invalid_input(GOLDEN_MISSING)
        return ""
    if served.takes_sequences:
        raise invalid_input("golden samples: expected none of an ensemble with sequences: its members may have some")
    loop = asyncio.get_running_loop()

    async def answer(sample: GoldenSample) -> Arrays:
        inputs = as_sent(signature, sample.inputs)
        request = InflightRequest(Timing(clock()), inputs, 1)
        served.submit(request, served.terms(clock()))
        outputs = served.cut_back(await request, inputs)
        return as_batched(signature, outputs)

    async def answer_all(samples: Sequence[GoldenSample]) -> list[Arrays]:
        return await asyncio.gather(*map(answer, samples))

    def run(samples: Sequence[GoldenSample]) -> list[Arrays]:
        return asyncio.run_coroutine_threadsafe(answer_all(samples), loop).result()

    samples = golden.samples if len(golden.samples) > 1 else ()
    groups = [samples[begin : begin + _MAX_TOGETHER] for begin in range(0, len(samples), _MAX_TOGETHER)]
    return await asyncio.to_thread(check_samples, golden, signature, groups, run)
