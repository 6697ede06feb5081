"""The registry: loads models, swaps what serves for what should, takes models out of service; no request is lost."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from ortserve.clock import Clock
from ortserve.config.model import LoadOptions
from ortserve.core.batch import Runner
from ortserve.engine.runtime import Runtime
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.catalog import Catalog
from ortserve.registry.client_config import read_client_model
from ortserve.registry.client_source import client_source
from ortserve.registry.lifecycle import UNLOADED, State, VersionRecord
from ortserve.registry.loading import VersionLoader
from ortserve.registry.repository import read_repositories
from ortserve.registry.retries import Retries
from ortserve.registry.source import ModelSource, VersionSource, read_source, read_sources
from ortserve.registry.swap import plan_swap
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import LoopActivity

logger: Final = logging.getLogger(__name__)

MOST_ABANDONED: Final = 3
"""Instances of a model that may be left to runs that do not end, and still be replaced."""
_NOT_POLLED: Final = "failed to poll from model repository"


class Registry:
    """Loads the models of the repositories and finds the one for a request. Loop thread only.

    Loads and unloads of one model wait for each other. What was begun goes on when its caller leaves.
    """

    def __init__(
        self,
        repositories: Sequence[Path],
        defaults: LoadOptions,
        metrics: Metrics,
        clock: Clock,
        runtime: Runtime | None = None,
        activity: LoopActivity | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            repositories: Folders of models.
            defaults: Hold for what a model's own options leave open.
            metrics: Of the server.
            clock: Monotonic nanoseconds.
            runtime: None for a plain one.
            activity: Where runs on the event loop show themselves; None where nothing watches the loop.
        """
        self._repositories = repositories
        self._defaults = defaults
        self._metrics = metrics
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._catalog = Catalog()
        self._loader = VersionLoader(
            self._loop, metrics, clock, runtime, self._on_lost, self._on_given_up, activity=activity
        )
        self.lost = ""
        """Which device is lost, and why; empty while none is. Only a new process can use it again."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sources: dict[str, ModelSource] = {}
        """What each model was last loaded from, or should have been."""
        self._retries = Retries()
        self._abandoned: dict[str, list[Runner]] = {}
        """Instances that were given up, by model; those whose runs have ended since are dropped when one is added."""
        self._changes: set[asyncio.Task[Any]] = set()
        self._drains: dict[asyncio.Task[None], str] = {}
        """What still drains or is freed, with its model: of a version that was loaded anew there is no other trace."""
        self.on_change: Callable[[], None] = _ignore
        """Called after the state of a version has changed, and when initial loading is over."""
        self.find: Final = self._catalog.find
        self.knows: Final = self._catalog.knows
        self.records: Final = self._catalog.records

    @property
    def is_loaded(self) -> bool:
        """Whether initial loading is over, however it ended."""
        return self._catalog.is_whole

    @property
    def is_changing(self) -> bool:
        """Whether models are being loaded or freed, or looked for in the repositories."""
        return not self._catalog.is_whole or bool(self._changes or self._drains)

    def ready_versions(self, name: str) -> list[int]:
        """The versions of a model that serve now, ascending."""
        return [record.version for record in self._catalog.ready(name)]

    def models(self) -> Mapping[str, Sequence[VersionRecord]]:
        """What is known of the versions of each model that was asked for, ascending."""
        return {
            name: sorted(self._catalog.of(name).values(), key=lambda record: record.version)
            for name in self._catalog.names()
        }

    async def names_in_repositories(self) -> list[str]:
        """The models that lie in the repositories now, loaded or not.

        Raises:
            ServeError: invalid_input, when a repository cannot be read.
        """
        return [files.name for files in await asyncio.to_thread(read_repositories, self._repositories)]

    async def load_all(self, only: Collection[str] | None = None) -> None:
        """Load what the repositories hold. A model that fails is recorded and keeps no other from loading.

        Args:
            only: Names of models; None for all.

        Raises:
            ServeError: invalid_input, when a repository cannot be read.
        """
        found = {source.name: source for source in await self._read()}
        names = found if only is None else sorted(only)
        missing = "it is in no repository"
        await self._apply_all([found.get(name) or ModelSource(name, problem=missing) for name in names])
        self._catalog.is_whole = True
        self.on_change()

    async def load(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, or load it anew where it has changed. Returns when it serves.

        What served before goes on serving until the new is warm, and if it fails.

        Args:
            name: Of the model.
            config: JSON of a configuration that holds until the next load, in the place of the model's own.
            files: The model's files by ``file:<version>/<file>``, in the place of its folder; with ``config`` only.

        Raises:
            ServeError: internal, saying why, in the words clients search for.
        """
        await self._finish(self._load(name, config, files or {}))

    async def unload(self, name: str) -> None:
        """Take a model out of service, at once for new requests. Returns when the running ones are answered.

        Those of loads before the last one are waited for, too. Does nothing for a model that is unknown or not loaded.
        """
        await self._finish(self._unload(name))

    async def poll(self) -> None:
        """Look at the repositories again: load what is new or has changed, unload what is gone.

        What failed is tried again where it has changed, and now and then as it stands: the reason may have passed.

        Raises:
            ServeError: invalid_input, when a repository cannot be read; then all stays as it is.
        """
        await self._finish(self._poll())

    async def close(self) -> None:
        """Drain and free every model; requests that were admitted are answered first."""
        changes = list(self._changes)
        for change in changes:
            change.cancel()
        await asyncio.gather(*changes, return_exceptions=True)
        for record in self.records():
            if record.state is State.READY:
                self._drain(record)
        await asyncio.gather(*self._drains)
        self._loader.close()

    async def _finish(self, change: Coroutine[Any, Any, None]) -> None:
        await asyncio.shield(self._begin_change(change))

    def _begin_change(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._on_changed)
        return task

    def _on_changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, in case the caller has left

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _read(self) -> list[ModelSource]:
        # Not on a loader thread, where it would wait for a model that is loading.
        return await asyncio.to_thread(read_sources, self._repositories, self._defaults)

    async def _load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        async with self._lock(name):
            kept = ExitStack()
            try:
                source = await asyncio.to_thread(self._find_source, kept, name, config, files)
                failures = await self._apply(source)
            finally:
                await asyncio.to_thread(kept.close)
        if source.problem:
            what = _NOT_POLLED if source.has_files else "no version is available"
            raise _load_failure(name, f"{what}: {source.problem}")
        if failures:
            raise _load_failure(name, "; ".join(failures))

    def _find_source(self, kept: ExitStack, name: str, config: str | None, files: Mapping[str, bytes]) -> ModelSource:
        """What to load a model from, on a thread; ``kept`` is closed when it is loaded.

        Raises:
            ServeError: internal, as ``load``.
        """
        try:
            client = read_client_model(name, config, files, self._defaults)
            if client is not None:
                return kept.enter_context(client_source(client, self._repositories))
        except ServeError as error:
            raise _load_failure(name, f"{_NOT_POLLED}: {error.message}") from None
        try:
            source = read_source(name, self._repositories, self._defaults)
        except ServeError:  # its text names the folder, which is none of a client's business
            raise _load_failure(name, f"{_NOT_POLLED}: a repository cannot be read") from None
        if source is None:
            raise _load_failure(name, f"{_NOT_POLLED}: no repository has a model of this name")
        return source

    async def _unload(self, name: str) -> None:
        async with self._lock(name):
            self._sources.pop(name, None)
            self._retries.forget(name)
            self._forget(record for record in self._catalog.of(name).values() if record.state is State.FAILED)
            for record in self._catalog.ready(name):
                self._drain(record, UNLOADED)
            # Those, too, that a reload or another version has sent away before.
            draining = [task for task, model in self._drains.items() if model == name]
            await asyncio.shield(asyncio.gather(*draining))

    async def _poll(self) -> None:
        found = await self._read()
        now_ns = self._clock()
        await self._apply_all(
            source
            for source in found
            if self._sources.get(source.name) != source or self._retries.is_due(source.name, now_ns)
        )
        for name in self._sources.keys() - {source.name for source in found}:
            log_event(logger, logging.INFO, "model is no longer in the repositories", model=name)
            await self._unload(name)

    async def _apply_all(self, sources: Iterable[ModelSource]) -> None:
        """Apply sources of different models side by side."""

        async def apply(source: ModelSource) -> None:
            async with self._lock(source.name):
                await self._apply(source)

        await asyncio.gather(*map(apply, sources))

    async def _apply(self, source: ModelSource) -> list[str]:
        """Make what serves of a model what ``source`` says; called with the model's lock.

        Returns:
            In words what failed. The old load of such a version, and versions that should go, then serve on.
        """
        name = source.name
        self._sources[name] = source
        if source.problem:
            self._note_problem(source)
            self._retries.forget(name)
            return [source.problem]
        records = self._catalog.of(name)
        self._forget(
            record
            for record in records.values()
            if record.version not in source.versions and record.state in (State.FAILED, State.GONE)
        )
        serving = self._catalog.ready(name)
        for record in serving:
            record.reason = ""
        swap = plan_swap({record.version: record.source for record in serving if record.source}, source.versions)
        for reason in source.without_effect if swap.load else ():
            log_event(logger, logging.WARNING, "configured without effect", model=name, reason=reason)
        incoming = [self._announce(name, version, source) for version in swap.load]
        failures = [
            f"version {record.version}: {reason}"
            for record in incoming
            if (reason := await self._load_version(record, source.versions[record.version]))
        ]
        if failures:
            self._retries.note(name, self._clock())
        else:
            self._retries.forget(name)
            for version in swap.retire:
                self._drain(self._catalog.of(name)[version], UNLOADED)
        return failures

    def _note_problem(self, source: ModelSource) -> None:
        name, problem = source.name, source.problem
        self._metrics.loaded(name, is_ok=False)
        serving = self._catalog.ready(name)
        for record in serving:
            record.reason = problem
        if serving:
            _log_failure("model cannot be reloaded, what served before goes on", serving[-1], problem)
            return
        self._forget(self._catalog.of(name).values())
        record = VersionRecord(name, 0, self._tell_change, is_required=source.is_required)
        self._show(record)
        record.advance(State.FAILED, problem)
        _log_failure("model cannot be served", record, problem)

    def _announce(self, name: str, version: int, source: ModelSource) -> VersionRecord:
        """A record of a load that begins, shown unless an old load of the same version serves meanwhile."""
        record = VersionRecord(
            name, version, self._tell_change, is_required=source.is_required, source=source.versions[version]
        )
        before = self._catalog.of(name).get(version)
        if before is None or before.state is not State.READY:
            self._show(record)
        return record

    def _show(self, record: VersionRecord) -> VersionRecord | None:
        self._metrics.show(record.metrics)
        before = self._catalog.put(record)
        self.on_change()
        return before

    def _tell_change(self) -> None:
        self.on_change()

    def _forget(self, records: Iterable[VersionRecord]) -> None:
        for record in list(records):
            self._catalog.drop(record)
            self._metrics.forget(record.model, record.label)
        self.on_change()

    async def _load_version(self, record: VersionRecord, source: VersionSource) -> str:
        """Load a version and, once it is warm, let it answer. Returns why it failed, empty where it did not."""
        reason = await self._loader.load(record, source)
        if reason:
            before = self._catalog.of(record.model)[record.version]
            if before is record:
                _log_failure("model cannot be served", record, reason)
            else:
                before.reason = reason
                _log_failure("model cannot be reloaded, what served before goes on", record, reason)
            return reason
        replaced = self._show(record)
        self._catalog.route(record.model)
        if replaced is not None and replaced.state is State.READY and replaced is not record:
            self._drain(replaced, UNLOADED)
        return ""

    def _drain(self, record: VersionRecord, reason: str = "") -> None:
        """Send a version no more requests, now, and free it when those it has are answered."""
        record.advance(State.DRAINING, reason)
        self._catalog.route(record.model)
        self._begin_end(record, self._retire(record))

    def _on_lost(self, record: VersionRecord, reason: str) -> None:
        """Know of a lost device, and take the version out of service that can run nothing any more."""
        self.lost = self.lost or reason
        _log_failure("device is lost", record, reason)
        if record.state is not State.READY:  # it was loading, and its loader says FAILED, or it is on its way out
            return
        record.advance(State.FAILED, reason)
        self._catalog.route(record.model)
        self._begin_end(record, self._free(record))

    def _on_given_up(self, record: VersionRecord, runner: Runner, reason: str, is_last: bool) -> None:
        """Load a version anew of which an instance is left to a run that does not end; until then without it.

        A version without instances is FAILED. It stays so where too many of the model's runs have not ended: each keeps
        a processor busy, and memory, for as long as the process lasts.
        """
        abandoned = [before for before in self._abandoned.get(record.model, ()) if before.is_running]
        self._abandoned[record.model] = [*abandoned, runner]
        if record.state is not State.READY:  # it is on its way out
            return
        may_replace = len(abandoned) < MOST_ABANDONED
        if not may_replace:
            reason = f"{reason}; {len(abandoned) + 1} runs of the model did not end: the server is to be restarted"
        _log_failure("instance is given up", record, reason)
        if is_last:
            record.advance(State.FAILED, reason)
            self._catalog.route(record.model)
            self._begin_end(record, self._free(record))
        else:
            record.reason = reason
        if may_replace:
            self._begin_change(self._replace(record))

    async def _replace(self, record: VersionRecord) -> None:
        """Load a version anew, unless that has happened, or it was to go, in the meantime."""
        async with self._lock(record.model):
            if self._catalog.of(record.model).get(record.version) is not record or record.source is None:
                return
            if record.state not in (State.READY, State.FAILED):
                return
            anew = VersionRecord(
                record.model,
                record.version,
                self._tell_change,
                is_required=record.is_required,
                source=record.source,
            )
            if record.state is not State.READY:
                self._show(anew)
            if await self._load_version(anew, record.source):
                self._retries.note(record.model, self._clock())

    def _begin_end(self, record: VersionRecord, end: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(end)
        self._drains[task] = record.model
        task.add_done_callback(self._drains.pop)

    async def _free(self, record: VersionRecord) -> None:
        assert record.served is not None
        await record.served.close()
        record.served = None
        record.metrics.release_sources()  # else its numbers, which may be shown for ever, would keep its buffers

    async def _retire(self, record: VersionRecord) -> None:
        await self._free(record)
        record.advance(State.GONE, record.reason)
        if record.is_unloaded and self._catalog.of(record.model).get(record.version) is record:
            self._metrics.forget(record.model, record.label)


def _ignore() -> None:
    pass


def _load_failure(name: str, reason: str) -> ServeError:
    return ServeError(ErrorKind.INTERNAL, f"failed to load '{name}', {reason}")


def _log_failure(event: str, record: VersionRecord, reason: str) -> None:
    log_event(logger, logging.ERROR, event, model=record.model, version=record.label, reason=reason)
