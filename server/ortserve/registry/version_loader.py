"""Runs one load of a version: the load pipeline on a thread, or the connection of an ensemble to its members."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from ortserve.batching.run_limits import RunEvents
from ortserve.clock import Clock, monotonic_ns
from ortserve.core.thread_pool import ThreadPool
from ortserve.device.devices import DeviceRuntime
from ortserve.engine.process_limits import cpu_budget
from ortserve.engine.thread_priority import LONGEST_SLICE_NS, set_slice
from ortserve.errors import ErrorKind, NotInMemoryError, ServeError, invalid_input
from ortserve.paths import open_file
from ortserve.registry.catalog import Catalog, State, VersionRecord
from ortserve.registry.ensemble.members import find_members
from ortserve.registry.ensemble.plan import make_plan
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.load.assembly import Assembly
from ortserve.registry.load.capture_trial import CaptureTrials
from ortserve.registry.load.golden_check import check_ensemble
from ortserve.registry.load.load_limits import MAX_LOADS, LoadLimiter, LoadSlots
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.load.progress import Progress
from ortserve.registry.load.trial_load import TrialLoad, try_load
from ortserve.registry.repository.fingerprints import changed_file, watch_files
from ortserve.registry.repository.model_files import read_output_labels
from ortserve.registry.repository.source import VersionSource
from ortserve.registry.residency.ledger import HostAccount, HostLedger
from ortserve.registry.residency.memory_room import NoRoomError
from ortserve.registry.served_version import ServedVersion
from ortserve.registry.speed_check import check_speed
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)

PROGRESS_LOG_INTERVAL_S: Final = 10.0
"""Interval between log lines of one load."""

_SILENCE_S: Final = 30.0
"""Time after which the files of a load are read to see whether they answer, and maximum time for the answer of each.
Samba and other file servers keep a file from being opened for up to 45 s."""
_MAX_GIVEN_UP: Final = 64
"""Number of loads that were given up and still wait for files, with two threads each, beside which others can begin."""

_Result = TypeVar("_Result")


class FilesChangedError(ServeError):
    """A file of a version changed during the load of the version."""

    def __init__(self, name: str) -> None:
        message = f"{name} changed while it was loaded: expected files that stay as they are"
        super().__init__(ErrorKind.INVALID_INPUT, message)


class VersionLoader:
    """Loads versions that hold a slot and reserved memory. Loop thread only; it opens models on its own threads."""

    def __init__(
        self,
        catalog: Catalog,
        ledger: HostLedger,
        assembly: Assembly,
        clock: Clock,
        runtime: DeviceRuntime | None = None,
        *,
        max_loads: int = MAX_LOADS,
        progress_log_interval_s: float = PROGRESS_LOG_INTERVAL_S,
    ) -> None:
        """Load nothing yet. The number of processors limits concurrent loads, too."""
        self._loop = asyncio.get_running_loop()
        self._catalog = catalog
        self._ledger = ledger
        self._assembly = assembly
        self._clock = clock
        self._runtime = runtime or DeviceRuntime()
        self._trials = CaptureTrials()
        processors = cpu_budget()
        max_loads = min(processors, max_loads)
        self.slots: Final = LoadSlots(max_loads)
        """A load holds a slot from before it reserves memory until it ends."""
        self._limiter = LoadLimiter(processors)
        threads = 2 * (max_loads + _MAX_GIVEN_UP)
        self._threads = ThreadPool(threads, "load", set_slice, (LONGEST_SLICE_NS,))
        self._progress_log_interval_s = progress_log_interval_s
        self._tried: dict[str, dict[int, VersionSource]] = {}
        """The versions of each model that passed a trial load."""

    async def load(self, record: VersionRecord, source: VersionSource, events: RunEvents) -> ServedVersion:
        """Load a version. After an error, everything that the load opened is closed.

        Sets the progress of the record, and its state to WARMING once the model is open.

        Raises:
            ServeError: Why the version cannot serve. NoRoomError, if a member of an ensemble is not in memory.
        """
        options = source.configuration.options
        progress = record.progress = Progress(self._clock, partial(self._begin_warming, record))
        reporting = self._loop.create_task(self._log_progress(record, progress))
        try:
            if source.problem:
                raise invalid_input(source.problem)
            if options.ensemble is not None:
                return await self._load_ensemble(record, source, progress)
            if options.trial_load:
                await self._try_first(record, source, progress)
            opening = self._loop.run_in_executor(self._threads, self._load_measured, record, source, progress)
            account = record.account
            assert account is not None
            discard = partial(_discard_model, self._ledger, account)
            loaded = await self._while_files_answer(source, progress, opening, discard)
            try:
                before = self._serving(record)
                await check_speed(record.model, loaded, options, before, progress, self._threads, self._clock)
                return self._assembly.serve(loaded, source.configuration, record.metrics, events)
            except BaseException:  # also cancellation, because the server stops
                record.metrics.release_sources()
                await asyncio.to_thread(discard, loaded)
                raise
        finally:
            reporting.cancel()

    def close(self) -> None:
        """Begin no further load. Does not wait for loads under way on threads, which would block the loop."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _try_first(self, record: VersionRecord, source: VersionSource, progress: Progress) -> None:
        """Load a version in another process, unless it has passed that already. Raises as ``try_load`` does."""
        known, tried = self._catalog.of(record.model), self._tried.get(record.model, {})
        if tried.get(record.version) == source:
            return
        runtime = self._runtime
        trial = TrialLoad(
            source.path,
            f"{record.model}/{record.version}",
            source.configuration.options,
            source.folder,
            runtime.libraries,
            runtime.has_global_threads,
        )
        began_ns = self._clock()
        trying = self._loop.run_in_executor(self._threads, self._try_load, trial, progress)
        await self._while_files_answer(source, progress, trying)
        seconds = round((self._clock() - began_ns) / 1e9, 2)
        log_event(
            logger, logging.INFO, "trial load passed", model=record.model, version=record.version, seconds=seconds
        )
        tried = {version: one for version, one in tried.items() if version in known}
        self._tried[record.model] = {**tried, record.version: source}

    def _try_load(self, trial: TrialLoad, progress: Progress) -> None:
        with self._limiter.permit(partial(progress.show, "waiting for other loads")) as permit:
            progress.give_back = permit.release
            try_load(trial, progress)

    async def _while_files_answer(
        self,
        source: VersionSource,
        progress: Progress,
        loading: asyncio.Future[_Result],
        discard: Callable[[_Result], object] = lambda _: None,
    ) -> _Result:
        """Wait for a load, but not for ever for files on a file server that does not answer.

        Reading a byte of each file shows whether a long load waits for a file, or computes, such as an engine of
        TensorRT. A load that is given up gives back what it shares with others. Its thread ends at its next step if the
        files answer again.

        Args:
            source: The files.
            progress: Progress of the load.
            loading: The load.
            discard: Called on a thread with the result of a load that was given up.

        Raises:
            ServeError: The error of the load; not_ready, if a file does not answer.
        """
        try:
            while not (await asyncio.wait({loading}, timeout=_SILENCE_S))[0]:
                if silent := await self._find_silent(source, loading):
                    break
            else:
                return loading.result()
        except asyncio.CancelledError:
            loading.cancel()
            raise
        problem = f"{silent} has not answered for {_SILENCE_S:g} s"
        progress.cancel(problem)
        progress.give_back()
        loading.add_done_callback(partial(self._discard, discard))
        if isinstance(loading, asyncio.Task):
            loading.cancel()
        raise ServeError(ErrorKind.NOT_READY, problem)

    async def _find_silent(self, source: VersionSource, loading: asyncio.Future[Any]) -> str:
        """Name a file of a version that does not answer; empty if all do, or if the load has ended meanwhile.

        Also empty if no thread becomes free to read a file: that says nothing about the file.
        """
        for file in dict.fromkeys((source.path, *(Path(known.path) for known in source.fingerprints))):
            begun: asyncio.Future[None] = self._loop.create_future()
            begin = partial(self._loop.call_soon_threadsafe, begun.set_result, None)
            reading: asyncio.Future[Any] = self._loop.run_in_executor(self._threads, _read_byte, file, begin)
            for step in (begun, reading):
                await asyncio.wait({loading, step}, timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
                if loading.done() or not step.done():
                    reading.cancel()
                    return file.name if step is reading and not loading.done() else ""
        return ""

    def _discard(self, discard: Callable[[_Result], object], ended: asyncio.Future[_Result]) -> None:
        """Discard what a load that was given up opened. Its error, if it failed, has no reader any more."""
        if not ended.cancelled() and ended.exception() is None:
            with suppress(RuntimeError):  # the server ends
                self._threads.submit(discard, ended.result())

    def _load_measured(self, record: VersionRecord, source: VersionSource, progress: Progress) -> LoadedModel:
        """Load a model on a thread, and measure the memory that the load takes.

        Raises:
            ServeError: The error of ``load_model``; FilesChangedError, if a file changed meanwhile.
        """
        if source.configuration.options.trial_load and (name := changed_file(source.fingerprints)):
            raise invalid_input(
                f"trial_load: {name} changed after the version was tried: expected files that stay as they are"
            )
        account = record.account
        assert account is not None
        changed = watch_files(source.fingerprints)
        self._ledger.begin(account)
        try:
            loaded = load_model(
                path=source.path,
                name=f"{record.model}/{record.version}",
                options=source.configuration.options,
                folder=source.folder,
                runtime=self._runtime,
                trials=self._trials,
                progress=progress,
                limiter=self._limiter,
            )
        finally:
            self._ledger.end(account)
        try:
            if name := changed():  # What was read first, such as the proof that rows are independent, does not hold.
                raise FilesChangedError(name)
        except BaseException:
            _discard_model(self._ledger, account, loaded)
            raise
        return loaded

    def _begin_warming(self, record: VersionRecord) -> None:
        """Record that the model is open. Called on the thread of the load."""
        if record.account is not None:
            self._ledger.note_open(record.account)
        self._loop.call_soon_threadsafe(_advance_to_warming, record)

    async def _load_ensemble(self, record: VersionRecord, source: VersionSource, progress: Progress) -> ServedEnsemble:
        """Connect an ensemble to its members. Closes it if the server stops meanwhile. Raises as ``_connect``."""
        connecting = self._loop.create_task(self._connect(record, source))
        try:
            return await self._while_files_answer(source, progress, connecting)
        except asyncio.CancelledError:  # the server stops
            (ended,) = await asyncio.gather(connecting, return_exceptions=True)
            if not isinstance(ended, BaseException):
                await ended.close()
            raise

    async def _connect(self, record: VersionRecord, source: VersionSource) -> ServedEnsemble:
        """Connect an ensemble to its members, which already serve.

        Raises:
            ServeError: invalid_input; not_ready, if a member got no room in memory.
        """
        options = source.configuration.options
        output_labels = await self._loop.run_in_executor(self._threads, read_output_labels, options, source.folder)
        plan = make_plan(record.model, options)
        try:
            members = find_members(record.model, plan, self._catalog)
        except NotInMemoryError as error:
            raise NoRoomError(error.message, is_lasting=False, retry_after_s=1) from None
        served = self._assembly.serve_ensemble(plan, members, source.configuration, output_labels, record.metrics)
        try:
            if golden := await check_ensemble(served, source.path, source.folder, self._threads, self._clock):
                served.properties = {**served.properties, "golden": golden}
        except BaseException:
            await served.close()
            raise
        return served

    def _serving(self, record: VersionRecord) -> ServedVersion | None:
        """The version that a load may replace: the previous load of the same version, if it serves.

        Otherwise the one that answers requests without a version, or the highest ready one; None without any.
        """
        ready = self._catalog.ready(record.model)
        same = [before for before in ready if before.version == record.version]
        if not same:
            with suppress(ServeError):
                return self._catalog.find(record.model, "")
        return (same or ready)[-1].served if ready else None

    async def _log_progress(self, record: VersionRecord, progress: Progress) -> None:
        began_ns = self._clock()
        # The loop runs during a load: ONNX Runtime releases the interpreter lock while it opens a session and in runs.
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


def _discard_model(ledger: HostLedger, account: HostAccount, loaded: LoadedModel) -> None:
    """Close a model that will not serve, while no load is measured."""
    ledger.release(account, loaded.close)


def _read_byte(file: Path, begin: Callable[[], object]) -> None:
    """Read a byte of a file, and ignore errors: the caller measures only whether the file server answers.

    Each call reads another place, because the system has bytes that were read before in memory. ``begin`` is called
    first.
    """
    begin()
    with suppress(OSError), open_file(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        os.pread(opened.fileno(), 1, monotonic_ns() % max(1, size))


def _advance_to_warming(record: VersionRecord) -> None:
    if record.state is State.LOADING:
        record.advance(State.WARMING)
