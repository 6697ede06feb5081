"""Loading versions side by side, each from its record to a served model, on a loader thread."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from ortserve.batching.run_watch import RunEvents
from ortserve.clock import Clock
from ortserve.core.batch import Runner
from ortserve.engine.cpu_budget import cpu_budget
from ortserve.engine.runtime import Runtime
from ortserve.errors import DeviceLostError, ServeError, invalid_input
from ortserve.registry.assembly import Assembly
from ortserve.registry.capture_trial import CaptureTrials
from ortserve.registry.lifecycle import State, VersionRecord
from ortserve.registry.load_turns import MOST_LOADS, LoadTurns
from ortserve.registry.loaded import LoadedModel
from ortserve.registry.loader import load_model
from ortserve.registry.progress import Progress
from ortserve.registry.source import VersionSource
from ortserve.telemetry.logs import fit_fields, log_event
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import LoopActivity

logger: Final = logging.getLogger(__name__)

TOLD_EVERY_S: Final = 10.0
"""Between log lines of one load."""


class VersionLoader:
    """Opens models side by side, as ``LoadTurns`` allow. Loop thread only, but for the loading itself."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        metrics: Metrics,
        clock: Clock,
        runtime: Runtime | None = None,
        on_lost: Callable[[VersionRecord, str], object] | None = None,
        on_given_up: Callable[[VersionRecord, Runner, str, bool], object] | None = None,
        *,
        told_every_s: float = TOLD_EVERY_S,
        activity: LoopActivity | None = None,
    ) -> None:
        """``on_lost`` is told of a version whose devices are all lost, and why; it answers nobody any more. Likewise of
        one that loses a device while it loads, before it is FAILED. ``on_given_up`` is called for an instance whose run
        does not end, why, and whether it was the version's last.

        What a load is doing is logged every ``told_every_s`` for as long as it lasts. ``activity`` as in
        ``InlineBudget``.
        """
        self._loop = loop
        self._runtime = runtime or Runtime()
        self._metrics = metrics
        self._clock = clock
        self._assembly = Assembly(loop, clock, processors=cpu_budget(), activity=activity)
        self._trials = CaptureTrials()
        self._on_lost = on_lost
        self._on_given_up = on_given_up
        self._told_every_s = told_every_s
        processors = cpu_budget()
        self._turns = LoadTurns(processors)
        most = min(processors, MOST_LOADS)
        self._slots = asyncio.Semaphore(most)  # a load that waits is not timed, and reports no progress
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="load")

    async def load(self, record: VersionRecord, source: VersionSource) -> str:
        """Load a version, once no more loads are under way than may be.

        Args:
            record: Of this load; READY with what answers, or FAILED, when this returns.
            source: What to load.

        Returns:
            Why it failed, empty where it did not.
        """
        async with self._slots:
            return await self._load(record, source)

    async def _load(self, record: VersionRecord, source: VersionSource) -> str:
        began_ns = self._clock()
        name = f"{record.model}/{record.version}"

        def on_warming() -> None:
            self._loop.call_soon_threadsafe(_advance_to_warming, record)

        progress = record.progress = Progress(self._clock, on_warming)

        def load() -> LoadedModel:
            if source.problem:
                raise invalid_input(source.problem)
            options = source.configuration.options
            return load_model(
                source.path,
                name,
                options,
                self._clock,
                source.folder,
                self._runtime,
                self._trials,
                progress,
                self._turns,
            )

        on_lost = partial(self._on_lost, record) if self._on_lost is not None else None
        loaded: LoadedModel | None = None
        telling = self._loop.create_task(self._tell(record, progress, began_ns))
        try:
            loaded = await self._loop.run_in_executor(self._threads, load)
            events = self._run_events(record)
            record.served = self._assembly.serve(loaded, source.configuration, record.metrics, on_lost, events)
        except Exception as error:
            if loaded is not None:  # else its sessions and workers would stay for as long as the process
                record.metrics.release_sources()
                for instance in loaded.instances:
                    await asyncio.to_thread(instance.close)
            if not isinstance(error, ServeError):
                logger.error("loading failed unexpectedly", exc_info=error)
            if on_lost is not None and isinstance(error, DeviceLostError):
                on_lost(error.message)
            record.advance(State.FAILED, error.message if isinstance(error, ServeError) else "unexpected error")
            self._metrics.loaded(record.model, is_ok=False)
            return record.reason
        finally:
            telling.cancel()
        record.metrics.load_ns = self._clock() - began_ns
        record.advance(State.READY)
        self._metrics.loaded(record.model, is_ok=True)
        fields = {
            "model": record.model,
            "version": record.version,
            "seconds": round(record.metrics.load_ns / 1e9, 2),
            **record.served.properties,
        }
        log_event(logger, logging.INFO, "model is ready", **fit_fields(fields, logger.name, "model is ready"))
        return ""

    def _run_events(self, record: VersionRecord) -> RunEvents:
        """Count runs of a version that are over their limits, and tell of instances that are given up."""

        def on_given_up(runner: Runner, reason: str, is_last: bool) -> None:
            self._metrics.batch_overdue(record.model, is_abandoned=True)
            if self._on_given_up is not None:
                self._on_given_up(record, runner, reason, is_last)

        return RunEvents(lambda: self._metrics.batch_overdue(record.model), on_given_up)

    async def _tell(self, record: VersionRecord, progress: Progress, began_ns: int) -> None:
        # On the loop: ONNX Runtime gives back the interpreter's lock while it opens a session and while it computes.
        while True:
            await asyncio.sleep(self._told_every_s)
            log_event(
                logger,
                logging.INFO,
                "model is still loading",
                model=record.model,
                version=record.version,
                doing=progress.describe(),
                seconds=round((self._clock() - began_ns) / 1e9, 2),
            )

    def close(self) -> None:
        """Begin no further load. Does not wait for those that run, which would stop the loop."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _advance_to_warming(record: VersionRecord) -> None:
    if record.state is State.LOADING:
        record.advance(State.WARMING)
