"""The registry: decides which versions of which models serve, and loads and unloads them without losing requests."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from ortserve.batching.response_cache import ResponseCache
from ortserve.batching.sequences import SequenceRuns
from ortserve.clock import Clock
from ortserve.config.ensemble import LATEST
from ortserve.config.model import LoadOptions
from ortserve.config.rollout import RolloutOptions
from ortserve.device.devices import DeviceRuntime
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.catalog import UNLOADED, Catalog, State, VersionRecord
from ortserve.registry.dependents import dependents_of, members_of, reject_cycles, required_versions
from ortserve.registry.labels import follow_file, needed_versions
from ortserve.registry.recording import Recordings
from ortserve.registry.repository.client_model import client_source, read_client_model
from ortserve.registry.repository.model_files import read_repositories
from ortserve.registry.repository.source import ModelSource, plan_changes, read_source, read_sources
from ortserve.registry.state_file import ModelState, StateFile
from ortserve.registry.stores.mirrors import Mirrors
from ortserve.registry.versions import Versions
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import LoopActivity

logger: Final = logging.getLogger(__name__)

_NOT_POLLED: Final = "failed to poll from model repository"
_FIRST_RETRY_S: Final = 60.0
_MAX_RETRY_S: Final = 3600.0
"""Between two retries; the wait doubles with each failure."""


class LoadRetries:
    """When to retry loads that failed although their files have not changed: what they lacked may be there by then."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[int, float]] = {}
        """By model: when a retry is due (clock of the registry, ns), and how long that wait was (s)."""

    def note_failure(self, name: str, now_ns: int) -> None:
        """Schedule the next retry of a model."""
        _, waited_s = self._due.get(name, (0, _FIRST_RETRY_S / 2))
        wait_s = min(2 * waited_s, _MAX_RETRY_S)
        self._due[name] = now_ns + round(wait_s * 1e9), wait_s

    def forget(self, name: str) -> None:
        """Retry a model no more: it serves, or should not."""
        self._due.pop(name, None)

    def is_due(self, name: str, now_ns: int) -> bool:
        """Whether a retry of the model is due."""
        due = self._due.get(name)
        return due is not None and now_ns >= due[0]


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
        """
        self._repositories = repositories
        self._mirrors = mirrors
        self._defaults = defaults
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._catalog = Catalog()
        self._versions = Versions(
            self._catalog, metrics, clock, self._on_change, self._start_replacing, runtime, activity, cache, recordings
        )
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._sources: dict[str, ModelSource] = {}
        """The source of the latest load of each model, failed or not."""
        self._retries = LoadRetries()
        self._state = state or StateFile(None)
        self._file_labels: dict[str, dict[str, int]] = {}
        """Of the models' configurations, as they are in effect."""
        self._changes: set[asyncio.Task[Any]] = set()
        self.on_change: Callable[[], None] = _ignore
        """Called after the state of a version has changed, and when initial loading is over."""
        self.find: Final = self._catalog.find
        self.labels: Final = self._catalog.labels
        self.state_of: Final = self._state.of
        self.roll_out: Final = self._catalog.roll_out
        self.on_versions: Callable[[str], None] = _ignore_name
        """Called with a model whose configuration, labels or rollout may have changed."""
        self.knows: Final = self._catalog.knows
        self.records: Final = self._catalog.records

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
        return not self._catalog.is_complete or bool(self._changes) or self._versions.is_draining

    def ready_versions(self, name: str) -> list[int]:
        """The versions of a model that serve now, ascending."""
        return [record.version for record in self._catalog.ready(name)]

    def models(self) -> Mapping[str, Sequence[VersionRecord]]:
        """The known versions of each model, ascending."""
        return {
            name: sorted(self._catalog.of(name).values(), key=lambda record: record.version)
            for name in self._catalog.names()
        }

    async def names_in_repositories(self) -> list[str]:
        """The models that are in the repositories now, loaded or not.

        Raises:
            ServeError: invalid_input, if a repository cannot be read.
        """
        found = {files.name for files in await asyncio.to_thread(read_repositories, self._repositories)}
        return sorted(found if self._mirrors is None else found | await self._mirrors.names())

    async def load_all(self, only: Collection[str] | None = None) -> None:
        """Load the models of the repositories. A model that fails is recorded and does not stop others from loading.

        Args:
            only: Names of models; None for all.

        Raises:
            ServeError: invalid_input, if a repository cannot be read.
        """
        found = {source.name: source for source in await self._read_sources(only)}
        names = found if only is None else sorted(only)
        missing = "it is in no repository"
        await self._apply_all(
            [found.get(name) or ModelSource(name, problem=missing) for name in _with_members(names, found)]
        )
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
        await self._versions.close()
        if self._mirrors is not None:
            await self._mirrors.close()

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

    async def _read_sources(self, only: Collection[str] | None = None) -> list[ModelSource]:
        """The sources of all models. Of those in stores that are not in ``only``, nor contained in one, some may lack.

        Raises:
            ServeError: A repository cannot be read.
        """
        wanted = None if only is None else set(only)
        while True:
            if self._mirrors is not None:
                await self._mirrors.sync(wanted)
            # Not on the threads of loads, where it would wait for models that are loading.
            sources = await asyncio.to_thread(read_sources, self._repositories, self._defaults, self._named_versions)
            if self._mirrors is None:
                return sources
            sources = self._mirrors.with_problems(sources)
            if wanted is None or not (more := _members_beyond(wanted, sources)):
                return sources
            wanted |= more

    def _read_source(self, name: str) -> ModelSource | None:
        return read_source(name, self._repositories, self._defaults, self._named_versions(name))

    def _named_versions(self, name: str) -> frozenset[int]:
        """The versions of a model that calls named, or that its configuration labels. From any thread."""
        labelled = frozenset(self._file_labels.get(name, {}).values())
        rollout = self.rollout(name)
        return self._state.of(name).versions | labelled | ({rollout.candidate} if rollout else frozenset())

    async def _load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        source, failures = await self._load_once(name, config, files, None)
        if failures is None:  # It is an ensemble, some of whose members do not serve.
            try:
                closure = await self._read_closure(source)
            except ServeError:  # Its message names the folder, which clients must not learn.
                raise _load_failure(name, f"{_NOT_POLLED}: a repository cannot be read") from None
            known = self._sources | closure
            await self._apply_all(
                member for member in closure.values() if member.name != name and not self._is_served(member)
            )
            source, failures = await self._load_once(name, config, files, known)
        if source.problem:
            event = _NOT_POLLED if source.has_files else "no version is available"
            raise _load_failure(name, f"{event}: {source.problem}")
        if failures:
            raise _load_failure(name, "; ".join(failures))

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
        async with self._lock(name):
            resources = ExitStack()
            try:
                if self._mirrors is not None and not files:
                    await self._fetch(name, with_all_versions=config is not None)
                source = await asyncio.to_thread(self._find_source, resources, name, config, files)
                if known is None and self._lacks_members(source):
                    return source, None
                (source,) = reject_cycles([source], self._sources if known is None else known)
                return source, await self._apply(source)
            finally:
                await asyncio.to_thread(resources.close)

    async def _fetch(self, name: str, *, with_all_versions: bool) -> None:
        """Fetch the present files of a model from its store.

        Raises:
            ServeError: internal, as ``load``.
        """
        assert self._mirrors is not None
        try:
            await self._mirrors.sync([name], with_all_versions=with_all_versions)
        except ServeError:  # Its message names the repository, which clients must not learn.
            raise _load_failure(name, f"{_NOT_POLLED}: a repository cannot be read") from None
        for source in self._mirrors.with_problems(()):
            if source.name == name:
                raise _load_failure(name, f"{_NOT_POLLED}: {source.problem}")

    def _lacks_members(self, ensemble: ModelSource) -> bool:
        """Whether a member of an ensemble does not serve in a version that the ensemble needs."""
        for member in members_of(ensemble):
            ready = self.ready_versions(member)
            if not ready or any(version not in (LATEST, *ready) for version in required_versions(ensemble, member)):
                return True
        return False

    def _is_served(self, source: ModelSource) -> bool:
        return bool(self.ready_versions(source.name)) and self._sources.get(source.name) == source

    async def _read_closure(self, ensemble: ModelSource) -> dict[str, ModelSource]:
        """The sources of all models that an ensemble contains, fetched from stores where necessary."""
        wanted = {ensemble.name}
        while True:
            closure = await asyncio.to_thread(self._read_members, ensemble)
            more = _members_beyond(wanted, closure.values())
            if self._mirrors is None or not more:
                return closure
            await self._mirrors.sync(more)
            wanted |= more

    def _read_members(self, ensemble: ModelSource) -> dict[str, ModelSource]:
        """The sources of all models that an ensemble contains, however deep, by name. Blocks on the disk."""
        found: dict[str, ModelSource] = {ensemble.name: ensemble}
        pending = list(members_of(ensemble))
        while pending:
            name = pending.pop()
            if name not in found and (source := self._read_source(name)) is not None:
                found[name] = source
                pending += members_of(source)
        return found

    def _find_source(
        self, resources: ExitStack, name: str, config: str | None, files: Mapping[str, bytes]
    ) -> ModelSource:
        """Find the source of a model, on a thread. ``resources`` keeps a client's files until the model is loaded.

        Raises:
            ServeError: internal, as ``load``.
        """
        try:
            client = read_client_model(name, config, files, self._defaults)
            if client is not None:
                return resources.enter_context(client_source(client, self._repositories))
        except ServeError as error:
            raise _load_failure(name, f"{_NOT_POLLED}: {error.message}") from None
        try:
            source = self._read_source(name)
        except ServeError:  # Its message names the folder, which clients must not learn.
            raise _load_failure(name, f"{_NOT_POLLED}: a repository cannot be read") from None
        if source is None:
            raise _load_failure(name, f"{_NOT_POLLED}: no repository has a model of this name")
        return source

    async def _unload(self, name: str, *, with_members: bool = False) -> None:
        await self._drop_dependents(name)
        async with self._lock(name):
            source = self._sources.pop(name, None)
            self._file_labels.pop(name, None)
            self._retries.forget(name)
            self._drain(name)
            await self._drop_dependents(name)  # Those that were loaded meanwhile hold the model.
            await self._versions.wait_until_drained(name)
            if self._mirrors is not None:
                await self._mirrors.release(name)
        if with_members:
            for member in members_of(source):
                if not dependents_of(member, self._sources):
                    await self._unload(member, with_members=True)

    def _drain(self, name: str) -> None:
        """Take a model out of service on purpose."""
        self._versions.forget(record for record in self._catalog.of(name).values() if record.state is State.FAILED)
        for record in self._catalog.ready(name):
            self._versions.drain(record, UNLOADED)

    async def _drop_dependents(self, name: str) -> None:
        """Take the ensembles that contain a model out of service, and wait until they have answered their requests."""
        for ensemble in dependents_of(name, self._sources):
            await self._drop_dependents(ensemble)
            async with self._lock(ensemble):
                self._drain(ensemble)
                await self._versions.wait_until_drained(ensemble)

    async def _follow(self, name: str, applied: Collection[str] = ()) -> None:
        """Connect the ensembles that contain a model anew, after a change of the model. Called with the model's lock.

        Ensembles that went out of service with the model come back. An ensemble that the model does not fit any more
        goes out of service with the reason.

        Args:
            name: Of the model.
            applied: Ensembles that are loaded after the model anyway.
        """
        for ensemble in dependents_of(name, self._sources):
            if ensemble in applied:
                continue
            async with self._lock(ensemble):
                source = self._sources.get(ensemble)
                if source is None or name not in members_of(source):
                    continue
                for number, version in source.versions.items():
                    reason = await self._versions.load(self._versions.announce(ensemble, number, source), version)
                    before = self._catalog.of(ensemble).get(number)
                    if reason and before is not None and before.state is State.READY:
                        self._versions.drain(before, reason)
                await self._follow(ensemble, applied)

    async def _poll(self) -> None:
        found = await self._read_sources()
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
        """Apply the sources of different models side by side, but an ensemble after its members."""
        loading = {source.name: source for source in reject_cycles(sources, self._sources)}
        tasks: dict[str, asyncio.Task[None]] = {}

        async def apply(source: ModelSource) -> None:
            members = [tasks[member] for member in members_of(source) if member in tasks]
            if members:
                await asyncio.wait(members)
            async with self._lock(source.name):
                await self._apply(source, loading.keys())

        tasks.update((name, self._loop.create_task(apply(source))) for name, source in loading.items())
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()

    async def _apply(self, source: ModelSource, applied: Collection[str] = ()) -> list[str]:
        """Load and drain versions of a model until those of ``source`` serve; called with the model's lock.

        ``applied`` are ensembles that need not follow, because they are loaded after the model anyway.

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
        self._versions.forget(
            record
            for record in self._catalog.of(name).values()
            if record.version not in source.versions and record.state in (State.FAILED, State.GONE)
        )
        serving = self._catalog.ready(name)
        for record in serving:
            record.reason = ""
        changes = plan_changes({record.version: record.source for record in serving if record.source}, source.versions)
        for reason in source.without_effect if changes.load else ():
            log_event(logger, logging.WARNING, "option has no effect", model=name, reason=reason)
        self._follow_file(name)  # Before the first load of a model, so that no other version answers meanwhile.
        incoming = [self._versions.announce(name, version, source) for version in changes.load]
        failures = [
            f"version {record.version}: {reason}"
            for record in incoming
            if (reason := await self._versions.load(record, source.versions[record.version]))
        ]
        if failures:
            self._retries.note_failure(name, self._clock())
        else:
            self._retries.forget(name)
        self._follow_file(name)
        self.on_versions(name)
        if not failures:
            kept = self._named_versions(name).intersection(changes.retire)
            for version in sorted(kept):
                log_event(logger, logging.WARNING, "version is kept for its label", model=name, version=version)
            for version in set(changes.retire) - kept:
                self._versions.drain(self._catalog.of(name)[version], UNLOADED)
        if self._catalog.ready(name) != serving:
            await self._follow(name, applied)
        return failures

    def _follow_file(self, name: str) -> None:
        """Put the labels of a model's configuration into effect, as far as their versions serve."""
        before, given = self._file_labels.get(name, {}), self._sources[name].labels
        self._file_labels[name] = follow_file(before, given, self.ready_versions(name))
        self._put_labels(name)

    def _put_labels(self, name: str) -> None:
        labels = {**self._file_labels.get(name, {}), **self._state.of(name).labels}
        before = self._catalog.labels(name)
        if labels == before:
            return
        self._catalog.label(name, labels)
        moved = {label: labels.get(label) for label in {**labels, **before} if labels.get(label) != before.get(label)}
        log_event(logger, logging.INFO, "labels changed", model=name, **_texts(moved))

    def rollout(self, name: str) -> RolloutOptions | None:
        """The rollout of a model that a call started, or else that of its configuration, unless it has ended."""
        state, source = self._state.of(name), self._sources.get(name)
        if state.rollout is not None:
            return state.rollout
        given = None if source is None else source.rollout
        has_ended = given is not None and state.ended is not None and state.ended.candidate == given.candidate
        return None if has_ended else given

    async def change_state(self, name: str, state: ModelState) -> None:
        """Keep what a call changed of a model, then put its labels into effect in one step.

        Versions that are needed no more drain afterwards, and ensembles follow.

        Raises:
            ServeError: conflict, if the change cannot be kept; nothing has changed then.
        """
        await self._state.put(name, state)
        self._put_labels(name)
        self.on_versions(name)
        self._start(self._settle_labels(name))

    async def _settle_labels(self, name: str) -> None:
        """Retire the versions of a model that neither its policy nor a label needs any more."""
        async with self._lock(name):
            source = self._sources.get(name)
            if source is None:
                return
            named = self._named_versions(name)
            needed = needed_versions(source, named)
            # Otherwise an earlier version may serve in place of one that failed.
            if needed.issubset(self.ready_versions(name)):
                versions = {number: version for number, version in source.versions.items() if number in needed}
                self._sources[name] = replace(source, versions=versions)
                for record in self._catalog.ready(name):
                    if record.version not in needed | named:
                        self._versions.drain(record, UNLOADED)
            await self._follow(name)

    def _start_replacing(self, record: VersionRecord) -> None:
        self._start(self._replace(record))

    async def _replace(self, record: VersionRecord) -> None:
        async with self._lock(record.model):
            if await self._versions.replace(record):
                self._retries.note_failure(record.model, self._clock())
            else:
                await self._follow(record.model)


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


def _texts(labels: Mapping[str, int | None]) -> dict[str, str]:
    """Labels as fields of a log line."""
    return {"labels": ", ".join(f"{label}={'-' if version is None else version}" for label, version in labels.items())}


def _members_beyond(names: Collection[str], sources: Iterable[ModelSource]) -> set[str]:
    """The members of the named models that are not among the names."""
    return {member for source in sources if source.name in names for member in members_of(source)}.difference(names)


def _ignore() -> None:
    pass


def _load_failure(name: str, reason: str) -> ServeError:
    return ServeError(ErrorKind.INTERNAL, f"failed to load '{name}', {reason}")
