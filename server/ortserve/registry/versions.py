"""Versions of models: loaded on a thread, serving, replaced, drained and freed. The registry decides which and when."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from ortserve.batching.response_cache import ResponseCache
from ortserve.batching.run_limits import RunEvents
from ortserve.clock import Clock
from ortserve.core.batch import Runner
from ortserve.device.devices import DeviceRuntime
from ortserve.engine.process_limits import cpu_budget
from ortserve.errors import DeviceLostError, ServeError, invalid_input
from ortserve.registry.catalog import UNLOADED, Catalog, State, VersionRecord
from ortserve.registry.ensemble.members import find_members
from ortserve.registry.ensemble.plan import make_plan
from ortserve.registry.ensemble.served import ServedEnsemble
from ortserve.registry.gates import check_ensemble, check_speed
from ortserve.registry.load.assembly import Assembly
from ortserve.registry.load.capture_trial import CaptureTrials
from ortserve.registry.load.coordination import MAX_LOADS, LoadLimiter, Progress
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.recording import Recordings
from ortserve.registry.repository.model_files import read_labels
from ortserve.registry.repository.source import ModelSource, VersionSource
from ortserve.registry.serving import ServedVersion
from ortserve.telemetry.logs import fit_fields, log_event
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import LoopActivity

logger: Final = logging.getLogger(__name__)

MAX_ABANDONED: Final = 3
"""Instances of one model that may be abandoned, because their runs do not end, and still be replaced by a new load."""
PROGRESS_LOG_INTERVAL_S: Final = 10.0
"""Between log lines of one load."""


class Versions:
    """Loads, replaces, drains and frees versions, and keeps their records in the catalog.

    Loop thread only. Models are opened on threads of its own.
    """

    def __init__(
        self,
        catalog: Catalog,
        metrics: Metrics,
        clock: Clock,
        on_change: Callable[[], None],
        on_replace: Callable[[VersionRecord], object],
        runtime: DeviceRuntime | None = None,
        activity: LoopActivity | None = None,
        cache: ResponseCache | None = None,
        recordings: Recordings | None = None,
        *,
        progress_log_interval_s: float = PROGRESS_LOG_INTERVAL_S,
    ) -> None:
        """Load nothing yet.

        Args:
            catalog: Of the registry.
            metrics: Of the server.
            clock: Monotonic nanoseconds.
            on_change: Called after the state of a version has changed.
            on_replace: Called with a version that has abandoned an instance and should be loaded anew by ``replace``.
            runtime: The process's; None for a plain one.
            activity: As in ``InlineBudget``.
            cache: As in ``Assembly``.
            recordings: Of the server; None if it records no requests.
            progress_log_interval_s: Between log lines of one load.
        """
        self._loop = asyncio.get_running_loop()
        self._catalog = catalog
        self._metrics = metrics
        self._clock = clock
        self._on_change = on_change
        self._on_replace = on_replace
        self._runtime = runtime or DeviceRuntime()
        self._progress_log_interval_s = progress_log_interval_s
        processors = cpu_budget()
        self._assembly = Assembly(
            self._loop, clock, processors=processors, activity=activity, cache=cache, recordings=recordings
        )
        self._trials = CaptureTrials()
        self._limiter = LoadLimiter(processors)
        max_loads = min(processors, MAX_LOADS)
        self._slots = asyncio.Semaphore(max_loads)
        self._threads = ThreadPoolExecutor(max_loads, thread_name_prefix="load")
        self._abandoned: dict[str, list[Runner]] = {}
        """Abandoned instances by model. Those whose runs have ended since are dropped when another one is added."""
        self._drains: dict[asyncio.Task[None], str] = {}
        """Tasks that drain and free versions, with the model. A version that was replaced leaves no other trace."""
        self.lost = ""
        """Which device is lost, and why; empty while none is. Only a new process can use it again."""

    @property
    def is_draining(self) -> bool:
        """Whether any version is drained or freed now."""
        return bool(self._drains)

    def announce(self, name: str, version: int, source: ModelSource) -> VersionRecord:
        """Make the record of a load that begins. It is shown, unless the previous load of the version still serves."""
        record = VersionRecord(
            name, version, self._on_change, is_required=source.is_required, source=source.versions[version]
        )
        before = self._catalog.of(name).get(version)
        if before is None or before.state is not State.READY:
            self._show(record)
        return record

    async def load(self, record: VersionRecord, source: VersionSource) -> str:
        """Load a version, as soon as fewer loads are under way than the limit.

        A previous load of the version serves until the new one is warm, and keeps serving if the new one fails.

        Args:
            record: Of this load. It is READY or FAILED when this returns.
            source: What to load.

        Returns:
            Why it failed; empty if it serves.
        """
        async with self._slots:  # A load that waits here is not timed and reports no progress.
            began_ns = self._clock()
            on_warming = partial(self._loop.call_soon_threadsafe, _advance_to_warming, record)
            record.progress = Progress(self._clock, on_warming)
            reporting = self._loop.create_task(self._log_progress(record, record.progress, began_ns))
            loaded: LoadedModel | None = None
            try:
                if source.problem:
                    raise invalid_input(source.problem)
                if source.configuration.options.ensemble is not None:
                    record.served = await self._load_ensemble(record, source)
                else:
                    loaded = await self._load_model(record, record.progress, source)
                    record.served = self._assembly.serve(
                        loaded,
                        source.configuration,
                        record.metrics,
                        partial(self._on_lost, record),
                        self._events(record),
                    )
            except Exception as error:
                if not isinstance(error, ServeError):
                    logger.error("loading failed unexpectedly", exc_info=error)
                return await self._fail(record, error, loaded)
            finally:
                reporting.cancel()
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
        replaced = self._show(record)
        self._catalog.route(record.model)
        if replaced is not None and replaced.state is State.READY and replaced is not record:
            self.drain(replaced, UNLOADED)
        return ""

    async def _load_model(self, record: VersionRecord, progress: Progress, source: VersionSource) -> LoadedModel:
        loaded = await self._loop.run_in_executor(
            self._threads,
            partial(
                load_model,
                source.path,
                f"{record.model}/{record.version}",
                source.configuration.options,
                self._clock,
                source.folder,
                self._runtime,
                self._trials,
                progress,
                self._limiter,
            ),
        )
        options, before = source.configuration.options, self._serving(record)
        try:
            await check_speed(record.model, loaded, options, before, progress, self._threads, self._clock)
        except BaseException:  # Also if the server stops meanwhile.
            for instance in loaded.instances:
                await asyncio.to_thread(instance.close)
            raise
        return loaded

    async def _load_ensemble(self, record: VersionRecord, source: VersionSource) -> ServedEnsemble:
        """Connect an ensemble to its members, which serve already. Raises ServeError: invalid_input."""
        options = source.configuration.options
        labels = await asyncio.to_thread(read_labels, options, source.folder)
        plan = make_plan(record.model, options)
        members = find_members(record.model, plan, self._catalog)
        served = self._assembly.serve_ensemble(plan, members, source.configuration, labels, record.metrics)
        try:
            if golden := await check_ensemble(served, source.path, source.folder, self._clock):
                served.properties = {**served.properties, "golden": golden}
        except BaseException:
            await served.close()
            raise
        return served

    def _serving(self, record: VersionRecord) -> ServedVersion | None:
        """The version that a load takes over from: the previous load of the same version, or else the highest."""
        ready = self._catalog.ready(record.model)
        same = [before for before in ready if before.version == record.version]
        return (same or ready)[-1].served if ready else None

    async def replace(self, record: VersionRecord) -> str:
        """Load a version anew that has abandoned an instance, unless it was replaced or drained in the meantime.

        Returns:
            Why the load failed; empty if it serves or was not needed.
        """
        if self._catalog.of(record.model).get(record.version) is not record or record.source is None:
            return ""
        if record.state not in (State.READY, State.FAILED):
            return ""
        successor = VersionRecord(
            record.model, record.version, self._on_change, is_required=record.is_required, source=record.source
        )
        if record.state is not State.READY:
            self._show(successor)
        return await self.load(successor, record.source)

    def reject(self, source: ModelSource) -> None:
        """Record a model whose source has a problem. Versions that serve keep serving."""
        name, problem = source.name, source.problem
        self._metrics.loaded(name, is_ok=False)
        serving = self._catalog.ready(name)
        for record in serving:
            record.reason = problem
        if serving:
            _log_failure("model reload failed, the previous load keeps serving", serving[-1], problem)
            return
        self.forget(self._catalog.of(name).values())
        record = VersionRecord(name, 0, self._on_change, is_required=source.is_required)
        self._show(record)
        record.advance(State.FAILED, problem)
        _log_failure("model cannot be served", record, problem)

    def forget(self, records: Iterable[VersionRecord]) -> None:
        """Remove records from the catalog and their series from the metrics."""
        for record in list(records):
            self._catalog.drop(record)
            self._metrics.forget(record.model, record.label)
        self._on_change()

    def drain(self, record: VersionRecord, reason: str = "") -> None:
        """Send a version no more requests from now on, and free it when its admitted requests are answered."""
        record.advance(State.DRAINING, reason)
        self._catalog.route(record.model)
        self._start(record, self._retire(record))

    async def wait_until_drained(self, name: str) -> None:
        """Wait for all draining versions of a model, those of replaced loads included."""
        await asyncio.shield(asyncio.gather(*(task for task, model in self._drains.items() if model == name)))

    async def close(self) -> None:
        """Drain and free every version, and begin no further load.

        Does not wait for loads that are under way on threads, which would block the loop.
        """
        for record in self._catalog.records():
            if record.state is State.READY:
                self.drain(record)
        await asyncio.gather(*self._drains)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _fail(self, record: VersionRecord, error: Exception, loaded: LoadedModel | None) -> str:
        if loaded is not None:  # Otherwise its sessions and workers would live as long as the process.
            record.metrics.release_sources()
            for instance in loaded.instances:
                await asyncio.to_thread(instance.close)
        if isinstance(error, DeviceLostError):
            self._on_lost(record, error.message)
        reason = error.message if isinstance(error, ServeError) else "unexpected error"
        record.advance(State.FAILED, reason)
        self._metrics.loaded(record.model, is_ok=False)
        shown = self._catalog.of(record.model).get(record.version, record)
        if shown is record:
            _log_failure("model cannot be served", record, reason)
        else:
            shown.reason = reason
            _log_failure("model reload failed, the previous load keeps serving", record, reason)
        return reason

    async def _log_progress(self, record: VersionRecord, progress: Progress, began_ns: int) -> None:
        # The loop runs meanwhile: ONNX Runtime releases the interpreter lock while it opens a session and during runs.
        while True:
            await asyncio.sleep(self._progress_log_interval_s)
            log_event(
                logger,
                logging.INFO,
                "model is still loading",
                model=record.model,
                version=record.version,
                doing=progress.describe(),
                seconds=round((self._clock() - began_ns) / 1e9, 2),
            )

    def _show(self, record: VersionRecord) -> VersionRecord | None:
        self._metrics.show(record.metrics)
        before = self._catalog.put(record)
        self._on_change()
        return before

    def _events(self, record: VersionRecord) -> RunEvents:
        return RunEvents(lambda: self._metrics.batch_overdue(record.model), partial(self._on_abandoned, record))

    def _on_lost(self, record: VersionRecord, reason: str) -> None:
        """Note a lost device, and take the version out of service that can run nothing without it."""
        self.lost = self.lost or reason
        _log_failure("device is lost", record, reason)
        if record.state is not State.READY:  # Its load fails, or it is draining already.
            return
        record.advance(State.FAILED, reason)
        self._catalog.route(record.model)
        self._start(record, self._free(record))

    def _on_abandoned(self, record: VersionRecord, runner: Runner, reason: str, is_last: bool) -> None:
        """Have a version loaded anew, one of whose instances was abandoned because its run does not end.

        A version without instances is FAILED until then. It stays FAILED if too many runs of the model have not ended:
        each keeps a processor busy, and memory, for as long as the process lives.
        """
        self._metrics.batch_overdue(record.model, is_abandoned=True)
        running = [earlier for earlier in self._abandoned.get(record.model, ()) if earlier.is_running]
        self._abandoned[record.model] = [*running, runner]
        if record.state is not State.READY:
            return
        may_replace = len(running) < MAX_ABANDONED
        if not may_replace:
            reason = f"{reason}; {len(running) + 1} runs of the model did not end: restart the server"
        _log_failure("instance abandoned", record, reason)
        if is_last:
            record.advance(State.FAILED, reason)
            self._catalog.route(record.model)
            self._start(record, self._free(record))
        else:
            record.reason = reason
        if may_replace:
            self._on_replace(record)

    def _start(self, record: VersionRecord, ending: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(ending)
        self._drains[task] = record.model
        task.add_done_callback(self._drains.pop)

    async def _free(self, record: VersionRecord) -> None:
        assert record.served is not None
        await record.served.close()
        record.served = None
        record.metrics.release_sources()  # Its series may be shown for a long time and must not keep its buffers alive.

    async def _retire(self, record: VersionRecord) -> None:
        await self._free(record)
        record.advance(State.GONE, record.reason)
        if record.is_unloaded and self._catalog.of(record.model).get(record.version) is record:
            self._metrics.forget(record.model, record.label)


def _advance_to_warming(record: VersionRecord) -> None:
    if record.state is State.LOADING:
        record.advance(State.WARMING)


def _log_failure(event: str, record: VersionRecord, reason: str) -> None:
    log_event(logger, logging.ERROR, event, model=record.model, version=record.label, reason=reason)
