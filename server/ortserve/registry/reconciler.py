"""Reconciles models with their sources: loads and drains versions until exactly those of the source serve."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from ortserve.clock import Clock
from ortserve.registry.catalog import UNLOADED, Catalog, State, VersionRecord
from ortserve.registry.changes import Changes, LoadRetries
from ortserve.registry.dependents import Dependents, load_failed
from ortserve.registry.draining import Draining
from ortserve.registry.ensemble_sources import closure_of, reject_cycles
from ortserve.registry.labels import Labels, needed_versions
from ortserve.registry.repository.configuration import log_without_effect
from ortserve.registry.repository.source import ModelSource, VersionSource
from ortserve.registry.versions import Versions
from ortserve.telemetry.logs import log_event

logger: Final = logging.getLogger(__name__)


class Reconciler:
    """Changes models, one change of a model at a time. Loop thread only.

    Members are loaded before the ensembles that contain them. An ensemble holds the loads of its members, so it is
    reconnected after each change of a member.
    """

    def __init__(
        self,
        catalog: Catalog,
        versions: Versions,
        draining: Draining,
        labels: Labels,
        sources: dict[str, ModelSource],
        changes: Changes,
        clock: Clock,
        on_model_change: Callable[[str], None],
        start: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """Change nothing yet.

        ``sources`` has the source of the latest load of each model, as in ``Registry``. Only this class writes to it.
        ``on_model_change`` is called with a model whose versions, configuration, labels or rollout may have changed.
        ``start`` runs a later change in a task that ends with the registry.
        """
        self._loop = asyncio.get_running_loop()
        self._catalog = catalog
        self._versions = versions
        self._draining = draining
        self._labels = labels
        self._sources = sources
        self._changes = changes
        self._clock = clock
        self._on_model_change = on_model_change
        self._retries = LoadRetries()
        self.dependents: Final = Dependents(catalog, versions, draining, sources, changes, self._retries, clock, start)
        self._last_serving: dict[str, dict[int, VersionSource]] = {}
        """The versions of each model that served after its latest change. The model may be evicted since."""
        self._drained_early: dict[str, dict[int, VersionSource]] = {}
        """The versions of each model that were drained for others and could not be loaded again before the change that
        follows. That change loads them if it fails, too."""

    def is_due(self, source: ModelSource) -> bool:
        """Whether a model has changed since its latest change began, or has failed and should be tried again."""
        if (coming := self._changes.source(source.name)) is not None:
            return coming != source
        return self._sources.get(source.name) != source or self._retries.is_due(source.name, self._clock())

    def renew_fingerprints(self, found: Iterable[ModelSource]) -> None:
        """Keep the latest fingerprints of unchanged files: those before and after another link would differ."""
        for source in found:
            if self._sources.get(source.name) != source:
                continue
            self._sources[source.name] = source
            for record in self._catalog.of(source.name).values():
                current = source.versions.get(record.version)
                if current is not None and record.source == current:
                    record.source = current

    async def apply_all(self, sources: Iterable[ModelSource], *, forced: Collection[str]) -> None:
        """Apply the sources of different models concurrently, and those of ensembles after their members.

        Models in ``forced`` are loaded even if they could be loaded on demand.
        """
        known = self._sources | self._changes.sources
        sources = reject_cycles(sources, known)
        known |= {source.name: source for source in sources}
        applied = {source.name for source in sources}

        async def apply(source: ModelSource) -> None:
            # Changes of all members, at any depth: also of those whose source is unchanged, and newer changes.
            _, *members = closure_of([source.name], known)
            await self._changes.wait(members)
            async with self._changes.lock(source.name):
                # If it is not the newest any more, a newer change follows, or the model was unloaded.
                if self._changes.is_newest(source.name, asyncio.current_task()):
                    await self.apply(source, applied, is_forced=source.name in forced)

        tasks = [self._loop.create_task(apply(source)) for source in sources]
        for source, task in zip(sources, tasks, strict=True):
            self._changes.begin(source, task)
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def apply(
        self,
        source: ModelSource,
        applied: Collection[str] = (),
        *,
        is_forced: bool = False,
        is_awaited: bool = False,
        is_by_client: bool = False,
    ) -> list[str]:
        """Load and drain versions of a model until those of ``source`` serve. The caller holds the model's lock.

        Args:
            source: Source of the model.
            applied: Ensembles that need no reconnection, because the caller loads them after the model anyway.
            is_forced: Whether to load the model even if it could be loaded on demand.
            is_awaited: Whether requests may wait for the load.
            is_by_client: Whether a client sent the configuration. After a failure, labels and the source before stay,
                except versions that the load has replaced.

        Returns:
            The version and the reason of each failed load. If any load failed, the previous loads of these versions
            keep serving, and so do versions that ``source`` lacks.
        """
        name = source.name
        before, self._sources[name] = self._sources.get(name), source
        was_offered = before is not None and self._versions.waits_for_request(before)
        labels, serving = self._catalog.labels(name), self._catalog.ready(name)
        self.dependents.note_source(source)
        if source.problem:
            await self._show_problem(source, is_forced=is_forced, is_awaited=is_awaited)
            if is_by_client and before is not None:
                self._keep_source(before, source, was_offered=was_offered)
            await self.dependents.reconnect(name)
            return [source.problem]
        await self._apply_labels_before_loads(source, applied, is_by_client=is_by_client)
        if not is_forced and self._versions.waits_for_request(source):
            self._versions.offer_on_demand(source)
            self._retries.forget(name)
            self._on_model_change(name)
            return []
        failures = await self._change_versions(
            source, before, was_offered=was_offered, is_awaited=is_awaited, is_by_client=is_by_client
        )
        # Changes of its members did not reconnect an ensemble in ``applied``: its versions may use earlier loads.
        failures += await self.dependents.reconnect(name)
        if ready := self._catalog.ready(name):
            self._last_serving[name] = {record.version: record.source for record in ready if record.source}
        if ready != serving or self._catalog.labels(name) != labels:
            await self.dependents.reconnect_all(name, applied)
        return failures

    async def _show_problem(self, source: ModelSource, *, is_forced: bool, is_awaited: bool) -> None:
        """Show why a source cannot be loaded. If the model should be in memory, what served before is loaded again."""
        if is_forced:
            drained, serving = self._drained_early.pop(source.name, {}), self._catalog.ready(source.name)
            await self._restore(source, drained, was_in_memory=bool(serving), is_awaited=is_awaited)
        self._versions.show_problem(source)
        self._retries.forget(source.name)

    async def _apply_labels_before_loads(
        self, source: ModelSource, applied: Collection[str], *, is_by_client: bool
    ) -> None:
        """Put labels into effect before the loads, during which no other version may answer.

        The configuration of a client changes labels only after its load.
        """
        name = source.name
        labels = self._catalog.labels(name)
        if is_by_client:
            self._labels.apply(name)
        else:
            self._versions.offer_new(source)
            self._labels.apply_configured(name)
        if self._catalog.labels(name) != labels:
            await self.dependents.reconnect_all(name, applied, loads=False)

    async def _change_versions(
        self,
        source: ModelSource,
        before: ModelSource | None,
        *,
        was_offered: bool,
        is_awaited: bool,
        is_by_client: bool,
    ) -> list[str]:
        """Load the versions of a source that do not serve yet, and drain those that it lacks if no load fails.

        Returns the version and the reason of each failure.
        """
        name = source.name
        if self._versions.waits_for_request(source):
            await self._draining.wait(name)  # The new load continues the metric series of the evicted version.
        ended = [
            record
            for record in self._catalog.of(name).values()
            if record.version not in source.versions and record.state in (State.FAILED, State.GONE)
        ]
        # Requests for versions on demand wait for the end of a load by a client: if it fails, they are loaded.
        offered = [record for record in ended if record.is_on_demand and is_by_client]
        self._versions.forget(record for record in ended if record not in offered)
        serving = self._catalog.ready(name)
        changes = self._versions.plan(source)
        retiring = set(changes.retire) - self._labels.named_versions(name)
        for record in serving:
            record.reason, record.is_retiring = "", record.version in retiring
        failures = await self._load_versions(source, changes.load, serving, is_awaited=is_awaited)
        if not (is_by_client and failures):
            self._labels.apply_configured(name)
            await self._end_offers(source, offered)
        elif before is not None:
            self._keep_source(before, source, was_offered=was_offered)
        self._on_model_change(name)
        if not failures:
            self._retire(name, changes.retire)
            self._retire_unneeded(source)  # The source was read while labels of an earlier file were in effect.
        return failures

    async def _end_offers(self, source: ModelSource, offered: Collection[VersionRecord]) -> None:
        """Load the versions on demand that a client's files lack, but labels name, and forget the others.

        In memory, they would serve on.
        """
        named = self._labels.named_versions(source.name)
        kept = {record.version: record.source for record in offered if record.version in named and record.source}
        if kept:
            await self._restore(source, kept, was_in_memory=True, is_awaited=True)
        self._versions.forget(one for one in offered if self._catalog.of(source.name).get(one.version) is one)

    def _keep_source(self, before: ModelSource, source: ModelSource, *, was_offered: bool) -> None:
        """Keep the source before a load by a client that has failed, with the versions of the load that serve.

        If the model was on demand, its other versions are on demand again.
        """
        name = before.name
        serving = {record.version: record.source for record in self._catalog.ready(name) if record.source}
        is_partial = any(serving.get(number) == version for number, version in source.versions.items())
        kept = self._sources[name] = self._labels.mix(before, serving) if is_partial else before
        if was_offered:
            self._versions.offer_on_demand(kept)
        elif serving:
            known = self._catalog.of(name).values()
            self._versions.forget(
                record for record in known if record.state >= State.GONE and record.version not in kept.versions
            )

    async def _load_versions(
        self, source: ModelSource, versions: Collection[int], serving: Collection[VersionRecord], *, is_awaited: bool
    ) -> list[str]:
        """Load versions of a model, or those that served before if they fail. Returns version and reason of failures.

        If requests wait for the load, a version that failed before is not loaded again until its retry is due.
        Versions in ``serving`` that the source lacks may be drained to make room. After a failure they are loaded
        again, unless the model is unloaded.
        """
        name = source.name
        if versions:
            log_without_effect(name, source.without_effect)
        failed = self._known_failures(source) if is_awaited else {}
        incoming = self._versions.announce(source, sorted({*versions} - failed.keys()), is_awaited=is_awaited)
        self._on_model_change(name)  # A rollout that the source lacks must not last until the loads have ended.
        failures = [load_failed(version, reason) for version, reason in failed.items()] + [
            load_failed(record.version, reason) for record in incoming if (reason := await self._versions.load(record))
        ]
        # The next request loads a version that got no room, unless a version that the source lacks answers it.
        has_old = any(record.version not in source.versions for record in self._catalog.ready(name))
        if any(record.state is State.FAILED for record in incoming) or (failures and has_old):
            self._retries.note_failure(name, self._clock())
        elif not failures:
            self._retries.forget(name)
        for record in serving:
            record.is_retiring = False  # Otherwise a later load of another version could drain one that serves on.
        is_unloading = any(record.cancelled_because and not record.is_superseded for record in incoming)
        drained = self._drained_early.pop(name, {})
        if failures and not is_unloading:
            drained |= {record.version: record.source for record in serving if record.is_unloaded and record.source}
            await self._restore(source, drained, was_in_memory=bool(serving), is_awaited=is_awaited)
        return failures

    def _known_failures(self, source: ModelSource) -> dict[int, str]:
        """The reasons of versions whose last load failed, until the next retry is due."""
        if self._retries.is_due(source.name, self._clock()):
            return {}
        return {
            record.version: record.reason
            for record in self._catalog.of(source.name).values()
            if record.state is State.FAILED and record.source == source.versions.get(record.version)
        }

    async def _restore(
        self, source: ModelSource, drained: Mapping[int, VersionSource], *, was_in_memory: bool, is_awaited: bool
    ) -> None:
        """Load the versions again that were ``drained`` for a change to ``source``, which has failed.

        If the model was not in memory, all that served before are loaded: they would serve on if they had stayed in
        memory. A version whose files were removed or have changed is left out.
        """
        name = source.name
        versions = drained if was_in_memory else {**self._last_serving.get(name, {}), **drained}
        known = self._catalog.of(name).values()
        reasons = {record.version: record.reason for record in known if record.state is State.FAILED}
        due = [
            number
            for number, version in sorted(versions.items())
            if (wanted := source.versions.get(number)) is None
            or (number in reasons and wanted != version and (wanted.is_sent or wanted.has_files_of(version)))
        ]
        for record in self._versions.announce(replace(source, versions=versions), due, is_awaited=is_awaited):
            await self._versions.load(record)
            number = record.version
            if record.is_superseded and record.state is not State.READY:
                self._drained_early.setdefault(name, {})[number] = versions[number]
            if record.state is State.FAILED and number not in source.versions:
                self._versions.forget([record])
            elif record.state in (State.READY, State.FAILED):
                record.reason = reasons.get(number, record.reason)
                if record.state is State.FAILED:
                    record.source = source.versions[number]

    async def settle_labels(self, name: str) -> None:
        """Let the ensembles follow the labels of a model, and drain the versions that nothing needs any more."""
        await self.dependents.reconnect_all(name, loads=False)  # A load may hold the lock for minutes.
        async with self._changes.lock(name):
            if (source := self._sources.get(name)) is None:
                return
            if not source.problem:  # Otherwise the versions that it needs are not known.
                self._retire_unneeded(source)
            await self.dependents.reconnect_all(name)

    def _retire(self, name: str, versions: Collection[int]) -> None:
        """Drain versions of a model that its source lacks, unless labels name them."""
        kept = self._labels.named_versions(name).intersection(versions)
        for version in sorted(kept):
            log_event(logger, logging.WARNING, "version is kept for its label", model=name, version=version)
        for version in set(versions) - kept:
            record = self._catalog.of(name)[version]
            if record.state is State.READY:
                self._draining.drain(record, UNLOADED)
            elif not record.is_unloaded:  # It failed during the loads; forget it, so that nothing loads it again.
                self._versions.forget([record])

    def _retire_unneeded(self, source: ModelSource) -> None:
        """Drain the versions of a model that neither its policy nor a label needs, once those that they need serve."""
        name = source.name
        named = self._labels.named_versions(name)
        needed = needed_versions(source, named)
        serving = {record.version: record.source for record in self._catalog.ready(name)}
        # Otherwise an earlier version, or an earlier load of the same version, may serve in place of one that failed.
        if all(version in serving and serving[version] == source.versions[version] for version in needed):
            versions = {number: version for number, version in source.versions.items() if number in needed}
            self._sources[name] = replace(source, versions=versions)
            for record in self._catalog.ready(name):
                if record.version not in needed | named:
                    self._draining.drain(record, UNLOADED)

    async def load_again(self, record: VersionRecord) -> None:
        """Load a version again that has abandoned an instance."""
        async with self._changes.lock(record.model):
            if await self._versions.replace(record):
                record.will_be_replaced = False  # Nothing follows now, whatever ends the version later.
                self._retries.note_failure(record.model, self._clock())
            else:
                await self.dependents.reconnect_all(record.model)
            self._on_model_change(record.model)

    async def remove(self, name: str) -> ModelSource | None:
        """Take a model out of service and forget its source. Returns the source. The caller holds the model's lock."""
        source = self._sources.pop(name, None)
        self.dependents.forget(name)
        self._retries.forget(name)
        self._last_serving.pop(name, None)
        self._drained_early.pop(name, None)
        self._versions.end_on_demand(name)
        self._versions.drain_all(name)
        self._labels.forget(name)  # Not before, because another version than ``stable`` would answer.
        self._on_model_change(name)
        await self.dependents.drop(name)  # Ensembles loaded in the meantime hold the model.
        await self._draining.wait(name)
        return source
