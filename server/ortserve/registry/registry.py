"""The registry: decides which versions of which models serve, and loads and unloads them without losing requests."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence, Set
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, Final

from ortserve.batching.response_cache import ResponseCache
from ortserve.clock import Clock
from ortserve.config.model import LoadOptions
from ortserve.device.devices import DeviceRuntime
from ortserve.engine.process_limits import cpu_budget
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.catalog import Catalog, VersionRecord
from ortserve.registry.changes import Changes
from ortserve.registry.draining import Draining
from ortserve.registry.ensemble_sources import closure_of, members_of, missing_members, reject_cycles
from ortserve.registry.initial_load import InitialLoad, start_order
from ortserve.registry.labels import Labels
from ortserve.registry.load.assembly import Assembly
from ortserve.registry.on_demand import LoadsOnDemand
from ortserve.registry.reconciler import Reconciler
from ortserve.registry.recording import Recordings
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.residency.ledger import HostLedger
from ortserve.registry.residency.memory_room import MemoryRoom
from ortserve.registry.source_reader import NOT_POLLED, RequestedLoad, SourceReader, load_failure
from ortserve.registry.state_file import StateFile
from ortserve.registry.stores.mirrors import Mirrors
from ortserve.registry.version_loader import VersionLoader
from ortserve.registry.versions import Versions
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import LoopActivity

logger: Final = logging.getLogger(__name__)

_UNLOADED: Final = "the model is unloaded"
"""Why a load of a model was cancelled, if a call or a poll unloads the model."""


class Registry:
    """Loads the models of the repositories and finds the one for a request. Loop thread only.

    A change of a model that has begun completes even if its caller is cancelled.
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
        gpu_memory_budget_bytes: int | None = None,
        on_demand_wait_s: float = 30.0,
        is_polled: bool = False,
    ) -> None:
        """Load nothing yet.

        ``defaults`` are values of options that a model's own configuration does not set. Without ``state``, new changes
        by calls, such as labels, are rejected. ``mirrors`` synchronize some of the ``repositories`` with stores; the
        others belong to the operator. ``on_demand_wait_s`` limits the wait of a request for a load, and that of a load
        for memory. If ``is_polled``, ``poll`` is called regularly, and loads on demand follow changes of files.
        """
        self._loop = asyncio.get_running_loop()
        self._catalog = Catalog(is_polled=is_polled)
        ledger = HostLedger()
        self._draining = Draining(self._catalog, ledger, metrics)
        self._room = MemoryRoom(
            self._catalog,
            ledger,
            self._draining,
            clock,
            metrics.residency,
            must_stay=self._must_stay,
            budget_bytes=memory_budget_bytes,
            gpu_budget_bytes=gpu_memory_budget_bytes,
            devices=runtime.devices if runtime is not None else None,
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
            on_change=lambda: self.on_change(),
            on_replace=lambda record: self._start(self._reconciler.load_again(record)),
        )
        self._changes = Changes()
        self._sources: dict[str, ModelSource] = {}
        """The source of the latest load of each model, failed or not, except versions that a client failed to load."""
        state = state or StateFile(None)
        state.on_change = self._on_state_stored
        self._labels = Labels(self._catalog, self._sources, state)
        self._reader = SourceReader(repositories, defaults, mirrors, self._labels.named_versions)
        self._reconciler = Reconciler(
            self._catalog,
            self._versions,
            self._draining,
            self._labels,
            self._sources,
            self._changes,
            clock,
            on_model_change=lambda name: self.on_model_change(name),
            start=self._start,
        )
        on_demand = LoadsOnDemand(
            self._catalog,
            self._reconciler,
            self._changes,
            self._room,
            self._sources,
            self._reader,
            clock,
            metrics.residency,
            start=self._start,
            wait_s=on_demand_wait_s,
            follows_changes=is_polled,
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._has_begun: Final = asyncio.Event()
        """Whether polls may follow changes of the repositories: the initial load will read them no more."""
        self._found: Set[str] = frozenset()
        """The models in the repositories at the latest poll."""
        self._leaving: set[str] = set()
        """Models that a poll unloads when the loads that it began have ended."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after the state of a version has changed, and when initial loading is over."""
        self.on_model_change: Callable[[str], None] = lambda name: None
        """Called with a model whose versions, configuration, labels or rollout may have changed."""

        # Calls that one part of the registry answers alone: attributes, so that a request makes no additional call.
        self.find: Final = self._catalog.find
        self.find_or_begin: Final = on_demand.find_or_begin
        self.wait_for: Final = on_demand.wait_for
        self.labels: Final = self._catalog.labels
        self.state_of: Final = state.of
        self.rollout: Final = self._labels.rollout
        self.set_rollout: Final = self._catalog.set_rollout
        self.names_in_repositories: Final = self._reader.names
        self.knows: Final = self._catalog.knows
        self.names: Final = self._catalog.names
        self.records: Final = self._catalog.records
        self.successor: Final = self._versions.successor
        self.wait_for_sequences: Final = self._draining.wait_for_sequences
        self.memory_use: Final = self._room.memory_use
        self.changed_models: Final = state.models
        self.change_state: Final = state.put
        """Stores a change that a call made to a model. Its labels then take effect in one step, versions that are no
        longer needed drain, and ensembles are reconnected."""

    @property
    def lost(self) -> str:
        """The lost device and the reason; empty if no device is lost. Only a new process can use the device again."""
        return self._versions.lost

    @property
    def is_loaded(self) -> bool:
        """Whether initial loading has ended, successfully or not."""
        return self._catalog.is_complete

    @property
    def is_changing(self) -> bool:
        """Whether models are being loaded or freed, or the repositories are being read."""
        return not self._catalog.is_complete or bool(self._tasks) or self._draining.is_under_way

    def ready_versions(self, name: str) -> list[int]:
        """The versions of a model that serve now, ascending."""
        return [record.version for record in self._catalog.ready(name)]

    def records_of(self, name: str) -> list[VersionRecord]:
        """The known versions of a model, ascending; empty for an unknown model."""
        return sorted(self._catalog.of(name).values(), key=lambda record: record.version)

    def models(self) -> Mapping[str, Sequence[VersionRecord]]:
        """The known versions of each model, ascending. Takes 2 µs for each model; a server may have thousands."""
        return {name: self.records_of(name) for name in self._catalog.names()}

    async def load_all(self, only: Collection[str] | None = None) -> None:
        """Load the models in ``only``, or all models of the repositories. A failed model does not stop the others.

        Raises:
            ServeError: invalid_input, if a repository cannot be read.
        """
        initial = InitialLoad(only, self._catalog, self._reader, self._reconciler, self._room, self._start)
        await initial.run(self._has_begun.set)
        await self._changes.wait(self._changes.sources)  # of newer files, which superseded loads of the start
        self._catalog.is_complete = True
        self.on_change()

    async def load(
        self, name: str, *, config: str | None = None, files: Mapping[str, bytes | memoryview] | None = None
    ) -> None:
        """Load a model, or reload it if it has changed. Returns when it serves.

        The previous load serves until the new one is warm, and keeps serving if the new one fails.

        Args:
            name: Name of the model.
            config: JSON of a configuration that replaces the model's own until the next load.
            files: The model's files by ``file:<version>/<file>``. They replace its folder and require ``config``.

        Raises:
            ServeError: internal, with the reason. Its first words are Triton's, which clients search for.
        """
        await asyncio.shield(self._start(self._load(RequestedLoad(name, config, files or {}))))

    async def unload(self, name: str, *, with_members: bool = False) -> None:
        """Take a model out of service, at once for new requests. Returns when its admitted requests are answered.

        Also waits for draining versions of earlier loads. Does nothing for a model that is unknown or not loaded. The
        ensembles that contain the model go out of service first, and come back when it is loaded again.
        ``with_members`` unloads the members of an ensemble, too, except members of other ensembles.
        """
        await asyncio.shield(self._start(self._unload(name, with_members=with_members)))

    async def wait_for_poll(self, interval_s: float) -> None:
        """Wait for the time between two polls, or until files that the last poll began to fetch are there.

        The first poll also waits until the initial load has begun all loads, but not until they have ended.
        """
        await self._has_begun.wait()
        await self._reader.wait_for_poll(interval_s)

    async def poll(self) -> None:
        """As ``begin_poll``; returns when all changes are complete."""
        await asyncio.shield(await self.begin_poll())

    async def begin_poll(self) -> asyncio.Task[None]:
        """Read the repositories again. Loads new and changed models, and unloads models that were removed.

        Changes in stores are followed by the poll after their files have arrived, for which ``wait_for_poll`` returns
        early.

        A failed model is retried when it has changed. An unchanged one is retried at growing intervals, because the
        cause may have passed. Returns the task of the changes, for which the next poll need not wait: a load that takes
        long delays only later changes of its model, and the unloads of the same poll.

        Raises:
            ServeError: invalid_input, if a repository cannot be read; then nothing changes.
        """
        found = await self._reader.poll()
        self._found = {source.name for source in found}
        return self._start(self._apply_poll(found))

    def begin_drain(self) -> None:
        """Accept no new sequences, and give up fetches from stores, for which loads by clients wait."""
        self._draining.begin_drain()
        self._reader.refuse_fetches("the server stops")

    async def close(self) -> None:
        """Drain and free every model. Admitted requests are answered first."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._draining.close()
        self._loader.close()
        await self._reader.close()

    def _start(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Retrieved here in case the caller was cancelled; asyncio would log it otherwise.

    async def _load(self, load: RequestedLoad) -> None:
        name = load.name
        lock = self._changes.lock(name)
        unload = lock.unload
        if self._versions.is_loading(name):
            is_newer = await self._reader.is_newer(load, self._sources.get(name))
            if is_newer and not unload.done():
                self._versions.cancel_loads(name, "a newer load of the model was requested", is_superseded=True)
        closure: dict[str, ModelSource] = {}
        with ExitStack() as together:
            while True:  # A second round follows if members of an ensemble had to be loaded first.
                async with lock, self._reader.open(load) as source:
                    if unload.done():
                        raise load_failure(name, f"its load was cancelled: {_UNLOADED}")
                    if closure or not missing_members(source, self._catalog.serves):
                        (source,) = reject_cycles([source], self._sources | closure)
                        is_by_client = load.config is not None
                        failures = await self._reconciler.apply(source, is_forced=True, is_by_client=is_by_client)
                        self._versions.end_on_demand(name, only_sent=True)  # Their files are deleted now.
                        break
                closure = await self._reader.read_members(source)
                together.enter_context(self._room.loading_together(closure))
                await self._load_members(source, closure, unload)
        if source.problem:
            event = NOT_POLLED if source.has_files else "no version is available"
            raise load_failure(name, f"{event}: {source.problem}")
        if failures:
            raise ServeError(ErrorKind.INTERNAL, f"load failed for model '{name}': {'; '.join(failures)}")

    async def _load_members(
        self, ensemble: ModelSource, closure: Mapping[str, ModelSource], unload: asyncio.Future[None]
    ) -> None:
        """Load the models in ``closure`` that an ensemble contains and that do not serve. The caller holds no lock.

        Returns early if an unload of the ensemble begins. The loads go on: the unload must not wait for models that
        stay.
        """
        members = [one for one in closure.values() if one.name != ensemble.name and not self._is_served(one)]
        loading = self._start(self._reconciler.apply_all(members, forced=closure))
        await next(asyncio.as_completed((loading, unload)))

    def _is_served(self, source: ModelSource) -> bool:
        """Whether all versions of a source serve."""
        records = self._catalog.of(source.name).values()
        is_partial = any(record.is_on_demand or record.is_loading for record in records)
        return bool(self.ready_versions(source.name)) and not is_partial and self._sources.get(source.name) == source

    async def _unload(self, name: str, *, with_members: bool = False) -> None:
        withdrawn = self._changes.withdraw(name)
        self._versions.cancel_loads(name, _UNLOADED)
        async with AsyncExitStack() as changing:
            with self._reader.refusing_fetches(_UNLOADED, name):
                await self._reconciler.dependents.drop(name)
                await changing.enter_async_context(self._changes.lock(name))
            source = await self._reconciler.remove(name) or withdrawn
            await self._reader.release(name)
        if with_members:
            for member in members_of(source):
                if not self._reconciler.dependents.of(member):
                    await self._unload(member, with_members=True)

    async def _apply_poll(self, found: Sequence[ModelSource]) -> None:
        found = reject_cycles(found, self._sources)  # as the latest change did, or each poll would begin another one
        changed = [source for source in found if self._reconciler.is_due(source)]
        self._reconciler.renew_fingerprints(found)
        for source in changed:
            if not source.problem:  # Otherwise no load follows, and the one under way is the best that can serve.
                self._versions.cancel_loads(source.name, "its files or options have changed", is_superseded=True)
        if not self.is_loaded:
            self._room.start_order = start_order(found)
        by_name = {source.name: source for source in found}
        names = {source.name for source in changed}
        kept = [  # ensembles that changed, or that did not serve because of a member that changed
            source.name
            for source in found
            if members_of(source)
            and names.intersection(closure_of([source.name], by_name))
            and (source.name in names or not self._catalog.ready(source.name))
            and not self._versions.waits_for_request(source)
        ]
        forced = closure_of(kept, by_name)
        missing = [by_name[name] for name in forced if not self._catalog.ready(name)]
        gone = (self._sources | self._changes.sources).keys() - by_name.keys() - self._leaving
        self._leaving |= gone
        for name in gone:
            self._changes.withdraw(name)
        try:
            with self._room.loading_together(*(closure_of([name], by_name) for name in kept)):
                await self._reconciler.apply_all([*changed, *missing], forced=forced)
            for name in gone:
                if name not in self._found:  # it may have come back
                    log_event(logger, logging.INFO, "model is no longer in the repositories", model=name)
                    await self._unload(name)
        finally:
            self._leaving -= gone

    def _on_state_stored(self, name: str) -> None:
        """Put the labels and the rollout of a model into effect after a call has changed them and they are stored."""
        self._labels.apply(name)
        self.on_model_change(name)
        self._start(self._reconciler.settle_labels(name))

    def _must_stay(self, name: str) -> bool:
        """Whether a model must not be evicted now: a change of it is under way, or it cannot be loaded again."""
        serving = [record.source for record in self._catalog.ready(name)]
        return self._changes.is_under_way(name) or any(source is not None and source.is_sent for source in serving)
