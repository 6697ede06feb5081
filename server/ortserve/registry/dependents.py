"""Which ensembles depend on which models, by their sources, and how they follow changes of these models."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from ortserve.config.ensemble import LATEST
from ortserve.registry.catalog import Catalog, State
from ortserve.registry.draining import Draining
from ortserve.registry.ensemble.plan import circular, find_cycle, member_names
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.versions import Versions


class Dependents:
    """The ensembles of a registry that contain other models. Loop thread only."""

    def __init__(
        self,
        catalog: Catalog,
        versions: Versions,
        draining: Draining,
        sources: Mapping[str, ModelSource],
        lock: Callable[[str], asyncio.Lock],
        stays_out: Callable[[ModelSource], bool],
    ) -> None:
        """Change nothing yet.

        Args:
            catalog: Of the registry.
            versions: Loads.
            draining: Drains.
            sources: Of the latest load of each model. Read at each call.
            lock: Of the changes of a model.
            stays_out: Whether a model is not in memory, and the next request for it loads it.
        """
        self._catalog = catalog
        self._versions = versions
        self._draining = draining
        self._sources = sources
        self._lock = lock
        self._stays_out = stays_out

    def missing_members(self, ensemble: ModelSource) -> list[str]:
        """The members of an ensemble that do not serve in the versions that it needs."""
        missing: list[str] = []
        for member in members_of(ensemble):
            ready = [record.version for record in self._catalog.ready(member)]
            if not ready or any(version not in (LATEST, *ready) for version in required_versions(ensemble, member)):
                missing.append(member)
        return missing

    async def drop(self, name: str) -> None:
        """Take the ensembles that contain a model out of service, and wait until they have answered their requests."""
        for ensemble in dependents_of(name, self._sources):
            await self.drop(ensemble)
            async with self._lock(ensemble):
                self._versions.drain_all(ensemble)
                await self._draining.wait(ensemble)

    async def follow(self, name: str, applied: Collection[str] = ()) -> None:
        """Connect the ensembles that contain a model anew, after a change of the model. Called with the model's lock.

        Ensembles that went out of service with the model come back; those on demand are offered again. An ensemble that
        the model does not fit any more goes out of service with the reason.

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
                stays_out = self._stays_out(source)
                if stays_out:
                    self._versions.offer(source)
                for number, version in source.versions.items() if not stays_out else ():
                    reason = await self._versions.load(self._versions.announce(ensemble, number, source), version)
                    before = self._catalog.of(ensemble).get(number)
                    if reason and before is not None and before.state is State.READY:
                        self._draining.drain(before, reason)
                await self.follow(ensemble, applied)


def members_of(source: ModelSource | None) -> tuple[str, ...]:
    """The models of an ensemble; empty for other models, and for a source that cannot be loaded."""
    if source is None:
        return ()
    version = next(iter(source.versions.values()), None)
    return () if version is None else member_names(version.configuration.options)


def required_versions(source: ModelSource, member: str) -> list[int]:
    """The versions of a member that an ensemble names. ``LATEST`` stands for any."""
    found: set[int] = set()
    for version in source.versions.values():
        ensemble = version.configuration.options.ensemble
        assert ensemble is not None
        found |= {step.version for step in ensemble.steps if step.model == member}
    return sorted(found or {LATEST})


def dependents_of(name: str, sources: Mapping[str, ModelSource]) -> list[str]:
    """The ensembles with the model ``name`` as a member."""
    return [ensemble for ensemble, source in sources.items() if name in members_of(source)]


def reject_cycles(sources: Iterable[ModelSource], known: Mapping[str, ModelSource]) -> list[ModelSource]:
    """The sources, with those of ensembles that contain themselves replaced by their problem.

    Args:
        sources: To load.
        known: Other models.
    """
    loading = list(sources)
    members = {name: members_of(source) for name, source in known.items()}
    members |= {source.name: members_of(source) for source in loading}
    return [
        replace(source, versions={}, problem=circular(cycle)) if (cycle := find_cycle(source.name, members)) else source
        for source in loading
    ]
