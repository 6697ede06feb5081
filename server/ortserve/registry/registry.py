"""The registry: decides which versions of which models serve, and loads and unloads them without losing requests."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from ortserve.batching.response_cache import ResponseCache
from ortserve.batching.sequences import SequenceRuns
from ortserve.clock import Clock
from ortserve.config.model import LoadOptions
from ortserve.device.devices import DeviceRuntime
from ortserve.engine.process_limits import cpu_budget
from ortserve.errors import ErrorKind, NotInMemoryError, ServeError
from ortserve.registry.catalog import UNLOADED, Catalog, State, VersionRecord
from ortserve.registry.dependents import Dependents, dependents_of, members_of, reject_cycles
from ortserve.registry.draining import Draining
from ortserve.registry.labels import Labels, needed_versions
from ortserve.registry.load.assembly import Assembly
from ortserve.registry.recording import Recordings
from ortserve.registry.repository.source import ModelSource, plan_changes
from ortserve.registry.residency.demand import Demands
from ortserve.registry.residency.host_room import HostRoom
from ortserve.registry.residency.ledger import HostLedger, LoadCost
from ortserve.registry.retries import LoadRetries
from ortserve.registry.serving import ServedVersion
from ortserve.registry.source_reader import NOT_POLLED, SourceReader, load_failure
from ortserve.registry.state_file import ModelState, StateFile
from ortserve.registry.stores.mirrors import Mirrors
from ortserve.registry.version_loader import VersionLoader
from ortserve.registry.versions import Versions
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import LoopActivity

logger: Final = logging.getLogger(__name__)


class Registry:
    """Loads the models of the repositories and finds the one for a request. Loop thread only.

    Changes of one model run one after the other. A change that has begun completes even if its caller is cancelled.

    Members are loaded before the ensembles that contain them. An ensemble holds the loads of its members, so that it is
    connected anew after each change of one. A change of a model that holds its lock may take those of the ensembles
    that contain it, never the other way round.
    """

    def __init__(
        self,
        repositories: Sequence[Path],
        defaults: LoadOptions,
        metrics: Metrics,
        clock: Clock,
        runtime: DeviceRuntime | None = None,
        activity: LoopActivity | None = None,
        cache: ResponseCache | None = None,
        recordings: Recordings | None = None,
        state: StateFile | None = None,
        mirrors: Mirrors | None = None,
        *,
        memory_budget_bytes: int | None = None,
        on_demand_wait_s: float = 30.0,
    ) -> None:
        """Load nothing yet.

        Args:
            repositories: Folders of models.
            defaults: Hold for options that a model's own configuration does not set.
            metrics: Of the server.
            clock: Monotonic nanoseconds.
            runtime: None for a plain one.
            activity: Reports runs on the event loop; None if the loop is not watched.
            cache: For models with ``response_cache``; None if no model uses one.
            recordings: Of the server; None if it records no requests.
            state: What calls changed earlier; None for nothing, and to keep nothing.
            mirrors: Keep some of the repositories' folders up to date; None if all are folders of the operator.
            memory_budget_bytes: As the option of this name, also for ``on_demand_wait_s``.
            on_demand_wait_s: Of requests and loads.
        """
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._catalog = Catalog()
        ledger = HostLedger()
        self._draining = Draining(self._catalog, ledger, metrics)
        self._room = HostRoom(
            self._catalog,
            ledger,
            self._draining,
            clock,
            metrics.residency,
            is_changing=self._must_stay,
            budget_bytes=memory_budget_bytes,
            wait_s=on_demand_wait_s,
        )
        assembly = Assembly(
            self._loop, clock, processors=cpu_budget(), activity=activity, cache=cache, recordings=recordings
        )
        self._loader = VersionLoader(self._catalog, ledger, assembly, clock, runtime, max_loads=self._room.max_loads)
        self._versions = Versions(
            self._catalog,
            self._room,
            self._loader,
            self._draining,
            metrics,
            clock,
            on_change=self._on_change,
            on_replace=self._start_replacing,
        )
        self._demands = Demands(
            clock,
            metrics.residency,
            load=self._load_demanded,
            start=self._start,
            expect=self._expect,
            wait_s=on_demand_wait_s,
        )
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sources: dict[str, ModelSource] = {}
        """The source of the latest load of each model, failed or not."""
        self._without_files: set[str] = set()
        """Models whose files clients sent, which are gone: they cannot be loaded again."""
        self._retries = LoadRetries()
        self._labels = Labels(self._catalog, self._sources, state or StateFile(None))
        self._reader = SourceReader(repositories, defaults, mirrors, self._labels.named_versions)
        self._dependents = Dependents(
            self._catalog, self._versions, self._draining, self._sources, self._lock, self._stays_out
        )
        self._changes: set[asyncio.Task[Any]] = set()
        self.on_change: Callable[[], None] = _ignore
        """Called after the state of a version has changed, and when initial loading is over."""
        self.find: Final = self._catalog.find
        self.labels: Final = self._catalog.labels
        self.state_of: Final = self._labels.state_of
        self.rollout: Final = self._labels.rollout
        self.roll_out: Final = self._catalog.roll_out
        self.on_versions: Callable[[str], None] = _ignore_name
        """Called with a model whose configuration, labels or rollout may have changed."""
        self.names_in_repositories: Final = self._reader.names
        self.knows: Final = self._catalog.knows
        self.records: Final = self._catalog.records
        self.successor: Final = self._versions.successor
        self.memory_use: Final = self._room.memory_use
        self.changed_models: Final = self._labels.changed_models

    @property
    def lost(self) -> str:
        """Which device is lost, and why; empty while none is. Only a new process can use it again."""
        return self._versions.lost

    @property
    def is_loaded(self) -> bool:
        """Whether initial loading is over, successful or not."""
        return self._catalog.is_complete

    @property
    def is_changing(self) -> bool:
        """Whether models are being loaded or freed, or the repositories are being read."""
        return not self._catalog.is_complete or bool(self._changes) or self._draining.is_under_way

    def ready_versions(self, name: str) -> list[int]:
        """The versions of a model that serve now, ascending."""
        return [record.version for record in self._catalog.ready(name)]

    def models(self) -> Mapping[str, Sequence[VersionRecord]]:
        """The known versions of each model, ascending."""
        return {
            name: sorted(self._catalog.of(name).values(), key=lambda record: record.version)
            for name in self._catalog.names()
        }

    async def load_all(self, only: Collection[str] | None = None) -> None:
        """Load the models of the repositories. A model that fails is recorded and does not stop others from loading.

        Args:
            only: Names of models; None for all.

        Raises:
            ServeError: invalid_input, if a repository cannot be read.
        """
        found = {source.name: source for source in await self._reader.read_all(only)}
        names = found if only is None else sorted(only)
        missing = "it is in no repository"
        sources = [found.get(name) or ModelSource(name, problem=missing) for name in _with_members(names, found)]
        # Required and pinned ones, and their members, get their processors and memory first.
        required = _with_members([source.name for source in sources if source.is_required], found)
        pinned = _with_members([source.name for source in sources if source.is_pinned], found)
        sources.sort(key=lambda source: (source.name not in required, source.name not in pinned))
        at_start = [source.name for source in sources if not source.is_on_demand]
        await self._apply_all(sources, forced=_with_members(at_start, found))
        self._catalog.is_complete = True
        self.on_change()

    async def load(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, or reload it if it has changed. Returns when it serves.

        The previous load serves until the new one is warm, and keeps serving if the new one fails.

        Args:
            name: Of the model.
            config: JSON of a configuration that replaces the model's own until the next load.
            files: The model's files by ``file:<version>/<file>``, instead of those in its folder; with ``config`` only.

        Raises:
            ServeError: internal, with the reason. Its first words are Triton's, which clients search for.
        """
        await asyncio.shield(self._start(self._load(name, config, files or {})))

    async def wait_for(
        self, name: str, version: str, received_ns: int | None = None, timeout_ns: int | None = None
    ) -> ServedVersion:
        """Find the version that answers, as ``find``, after a load on demand if it is not in memory.

        Args:
            name: Of the model.
            version: As for ``find``.
            received_ns: When the request was received (monotonic); None for now.
            timeout_ns: Its time limit; None if it has none. ``on_demand_wait_s`` limits the wait in any case.

        Raises:
            ServeError: As ``find`` and ``Demands.wait``.
        """
        try:
            return self.find(name, version)
        except NotInMemoryError:
            pass
        try:
            await self._demands.wait(name, self._clock() if received_ns is None else received_ns, timeout_ns)
        except ServeError:
            with suppress(ServeError):  # another version failed, or is still loading
                return self.find(name, version)
            raise
        return self.find(name, version)

    async def unload(self, name: str, *, with_members: bool = False) -> None:
        """Take a model out of service, at once for new requests. Returns when its admitted requests are answered.

        Also waits for draining versions of earlier loads. Does nothing for a model that is unknown or not loaded. The
        ensembles that contain the model go out of service first, and come back when it is loaded again.

        Args:
            name: Of the model.
            with_members: Whether the members of an ensemble are unloaded, too, but for those of other ensembles.
        """
        await asyncio.shield(self._start(self._unload(name, with_members=with_members)))

    async def poll(self) -> None:
        """Read the repositories again: load models that are new or have changed, unload those that are gone.

        A failed model is retried when it has changed, and from time to time as it is: the cause may have passed.

        Raises:
            ServeError: invalid_input, if a repository cannot be read; then nothing changes.
        """
        await asyncio.shield(self._start(self._poll()))

    def begin_drain(self) -> None:
        """Accept no new sequences; those that have begun may end."""
        for sequences in self._sequences():
            sequences.begin_drain()

    async def wait_for_sequences(self) -> None:
        """Wait until every sequence has ended. Call it after ``begin_drain``."""
        await asyncio.gather(*(sequences.wait_until_empty() for sequences in self._sequences()))

    def _sequences(self) -> list[SequenceRuns]:
        serving = [record.served for record in self._catalog.records() if record.state is State.READY]
        return [served.sequences for served in serving if served is not None and served.sequences is not None]

    async def close(self) -> None:
        """Drain and free every model. Admitted requests are answered first."""
        changes = list(self._changes)
        for change in changes:
            change.cancel()
        await asyncio.gather(*changes, return_exceptions=True)
        await self._draining.close()
        self._loader.close()
        await self._reader.close()

    def _start(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # Retrieved here in case the caller was cancelled; asyncio would log it otherwise.

    def _on_change(self) -> None:
        self.on_change()

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        if self._versions.is_loading(name) and await self._is_newer(name, config):
            self._versions.cancel_loads(name, "a newer load of the model was requested")
        source, failures = await self._load_once(name, config, files, None)
        if failures is None:  # It is an ensemble, some of whose members do not serve.
            closure = await self._reader.read_members(source)
            known = self._sources | closure
            await self._apply_all(
                (member for member in closure.values() if member.name != name and not self._is_served(member)),
                forced=closure,
            )
            source, failures = await self._load_once(name, config, files, known)
        if source.problem:
            event = NOT_POLLED if source.has_files else "no version is available"
            raise load_failure(name, f"{event}: {source.problem}")
        if failures:
            raise load_failure(name, "; ".join(failures))

    async def _load_once(
        self, name: str, config: str | None, files: Mapping[str, bytes], known: Mapping[str, ModelSource] | None
    ) -> tuple[ModelSource, list[str] | None]:
        """Load a model. Returns None for the failures if members of an ensemble must be loaded first.

        Args:
            name: Of the model.
            config: As in ``load``.
            files: As in ``load``.
            known: The sources of all members, which had their loads; None if they may be missing.
        """
        async with self._lock(name), self._reader.open(name, config, files) as source:
            if known is None and self._dependents.missing_members(source):
                return source, None
            (source,) = reject_cycles([source], self._sources if known is None else known)
            self._note_files(name, has_files=not files)
            failures = await self._apply(source, is_forced=True)
            if files:
                self._versions.withdraw(name)
            return source, failures

    async def _is_newer(self, name: str, config: str | None) -> bool:
        """Whether a load would read other files or options than the latest one."""
        return config is not None or await self._reader.read(name) not in (None, self._sources.get(name))

    def _is_served(self, source: ModelSource) -> bool:
        return bool(self.ready_versions(source.name)) and self._sources.get(source.name) == source

    async def _unload(self, name: str, *, with_members: bool = False) -> None:
        self._versions.cancel_loads(name, "the model is unloaded")
        await self._dependents.drop(name)
        async with self._lock(name):
            source = self._sources.pop(name, None)
            self._labels.forget(name)
            self._retries.forget(name)
            self._without_files.discard(name)
            self._versions.withdraw(name)
            self._versions.drain_all(name)
            await self._dependents.drop(name)  # Those that were loaded meanwhile hold the model.
            await self._draining.wait(name)
            await self._reader.release(name)
        if with_members:
            for member in members_of(source):
                if not dependents_of(member, self._sources):
                    await self._unload(member, with_members=True)

    async def _poll(self) -> None:
        found = await self._reader.read_all()
        now_ns = self._clock()
        changed = [
            source
            for source in found
            if self._sources.get(source.name) != source or self._retries.is_due(source.name, now_ns)
        ]
        for source in changed:
            self._versions.cancel_loads(source.name, "its files or options have changed")
        by_name = {source.name: source for source in found}
        kept = [source.name for source in changed if members_of(source) and not self._stays_out(source)]
        forced = _with_members(kept, by_name)
        missing = [by_name[name] for name in forced if not self._catalog.ready(name)]
        await self._apply_all([*changed, *missing], forced=forced)
        for name in self._sources.keys() - by_name.keys():
            log_event(logger, logging.INFO, "model is no longer in the repositories", model=name)
            await self._unload(name)

    async def _apply_all(self, sources: Iterable[ModelSource], *, forced: Collection[str]) -> None:
        """Apply the sources of different models side by side, but an ensemble after its members.

        ``forced`` are models that are loaded even if a request could load them.
        """
        loading = {source.name: source for source in reject_cycles(sources, self._sources)}
        tasks: dict[str, asyncio.Task[None]] = {}

        async def apply(source: ModelSource) -> None:
            members = [tasks[member] for member in members_of(source) if member in tasks]
            if members:
                await asyncio.wait(members)
            async with self._lock(source.name):
                await self._apply(source, loading.keys(), is_forced=source.name in forced)

        tasks.update((name, self._loop.create_task(apply(source))) for name, source in loading.items())
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()

    async def _apply(
        self,
        source: ModelSource,
        applied: Collection[str] = (),
        *,
        is_forced: bool = False,
        is_awaited: bool = False,
    ) -> list[str]:
        """Load and drain versions of a model until those of ``source`` serve; called with the model's lock.

        Args:
            source: Of the model.
            applied: Ensembles that need not follow, because they are loaded after the model anyway.
            is_forced: Whether to load the model even if a request could load it.
            is_awaited: Whether requests may wait for the load.

        Returns:
            For each load that failed, its version and the reason. Then the previous loads of these versions keep
            serving, and so do versions that ``source`` does not have.
        """
        name = source.name
        self._sources[name] = source
        if source.problem:
            self._versions.reject(source)
            self._retries.forget(name)
            return [source.problem]
        self._labels.follow(name)  # Before the first load of a model, so that no other version answers meanwhile.
        if not is_forced and self._stays_out(source):
            self._versions.offer(source)
            self._retries.forget(name)
            return []
        self._versions.forget(
            record
            for record in self._catalog.of(name).values()
            if record.version not in source.versions and record.state in (State.FAILED, State.GONE)
        )
        if self._stays_out(source):  # The series of an evicted version end with its last request, and then go on.
            await self._draining.wait(name)
        serving = self._catalog.ready(name)
        for record in serving:
            record.reason = ""
        changes = plan_changes({record.version: record.source for record in serving if record.source}, source.versions)
        for reason in source.without_effect if changes.load else ():
            log_event(logger, logging.WARNING, "option has no effect", model=name, reason=reason)
        incoming = [self._versions.announce(name, version, source, is_awaited=is_awaited) for version in changes.load]
        failures = [
            f"version {record.version}: {reason}"
            for record in incoming
            if (reason := await self._versions.load(record, source.versions[record.version]))
        ]
        if any(record.state is State.FAILED for record in incoming):  # Others got no room; requests load them.
            self._retries.note_failure(name, self._clock())
        elif not failures:
            self._retries.forget(name)
        self._labels.follow(name)
        self.on_versions(name)
        if not failures:
            kept = self._labels.named_versions(name).intersection(changes.retire)
            for version in sorted(kept):
                log_event(logger, logging.WARNING, "version is kept for its label", model=name, version=version)
            for version in set(changes.retire) - kept:
                self._draining.drain(self._catalog.of(name)[version], UNLOADED)
        if self._catalog.ready(name) != serving:
            await self._dependents.follow(name, applied)
        return failures

    async def change_state(self, name: str, state: ModelState) -> None:
        """Keep what a call changed of a model, then put its labels into effect in one step.

        Versions that are needed no more drain afterwards, and ensembles follow.

        Raises:
            ServeError: conflict, if the change cannot be kept; nothing has changed then.
        """
        await self._labels.change(name, state)
        self.on_versions(name)
        self._start(self._settle_labels(name))

    async def _settle_labels(self, name: str) -> None:
        """Retire the versions of a model that neither its policy nor a label needs any more."""
        async with self._lock(name):
            source = self._sources.get(name)
            if source is None:
                return
            named = self._labels.named_versions(name)
            needed = needed_versions(source, named)
            # Otherwise an earlier version may serve in place of one that failed.
            if needed.issubset(self.ready_versions(name)):
                versions = {number: version for number, version in source.versions.items() if number in needed}
                self._sources[name] = replace(source, versions=versions)
                for record in self._catalog.ready(name):
                    if record.version not in needed | named:
                        self._draining.drain(record, UNLOADED)
            await self._dependents.follow(name)

    async def _load_demanded(self, name: str) -> None:
        """Load a model that requests wait for, with the members of an ensemble.

        Raises:
            ServeError: not_ready, if there is no room, or with the reason of the failure.
        """
        source = self._sources.get(name)
        for member in () if source is None else self._dependents.missing_members(source):
            if any(record.makes_requests_wait for record in self._catalog.of(member).values()):
                await asyncio.shield(self._demands.join(member).task)
                continue
            try:
                self.find(member, "")
            except ServeError as error:
                raise _not_loaded(name, error.message) from None
        async with self._lock(name):
            source = self._sources.get(name)
            if source is None or not any(record.is_on_demand for record in self._catalog.of(name).values()):
                return
            failures = await self._apply(source, is_forced=True, is_awaited=True)
        for record in self._catalog.of(name).values():
            if record.no_room is not None:
                raise record.no_room
        if failures:
            raise _not_loaded(name, "; ".join(failures))

    def _expect(self, name: str) -> LoadCost:
        return self._room.expect(self._sources[name])

    def _stays_out(self, source: ModelSource) -> bool:
        """Whether a model is not in memory, and the next request for it loads it."""
        known = self._catalog.of(source.name).values()
        if any(record.state is State.READY for record in known):
            return False
        return source.is_on_demand or any(record.is_on_demand for record in known)

    def _must_stay(self, name: str) -> bool:
        """Whether a model must not be evicted now: it is changed, or cannot be loaded again."""
        lock = self._locks.get(name)
        return (lock is not None and lock.locked()) or name in self._without_files

    def _note_files(self, name: str, *, has_files: bool) -> None:
        if has_files:
            self._without_files.discard(name)
        else:
            self._without_files.add(name)

    def _start_replacing(self, record: VersionRecord) -> None:
        self._start(self._replace(record))

    async def _replace(self, record: VersionRecord) -> None:
        async with self._lock(record.model):
            if await self._versions.replace(record):
                self._retries.note_failure(record.model, self._clock())
            else:
                await self._dependents.follow(record.model)


def _with_members(names: Iterable[str], found: Mapping[str, ModelSource]) -> list[str]:
    """The names, and those of all models that the ensembles among them contain, however deep."""
    wanted: dict[str, None] = {}
    pending = list(names)[::-1]
    while pending:
        name = pending.pop()
        if name not in wanted:
            wanted[name] = None
            pending += [member for member in members_of(found.get(name)) if member in found]
    return list(wanted)


def _ignore_name(_: str) -> None:
    pass


def _not_loaded(name: str, reason: str) -> ServeError:
    return ServeError(ErrorKind.NOT_READY, f"failed to load '{name}', {reason}", retry_after_s=1)


def _ignore() -> None:
    pass
