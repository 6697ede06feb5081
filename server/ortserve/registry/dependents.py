"""Keeps ensembles connected to the present loads of their members."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final

from ortserve.clock import Clock
from ortserve.registry.catalog import Catalog, State
from ortserve.registry.changes import Changes, LoadRetries
from ortserve.registry.draining import Draining
from ortserve.registry.ensemble.members import is_connected
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.ensemble_sources import closure_of, members_of
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.versions import Versions

_RETRY_S: Final = 30.0
"""Wait before another reconnection of a version that was not connected, such as one whose members were too busy."""


class Dependents:
    """The ensembles that contain a model. Loop thread only.

    An ensemble holds the loads of its members, so it is reconnected after each change of a member.
    """

    def __init__(
        self,
        catalog: Catalog,
        versions: Versions,
        draining: Draining,
        sources: Mapping[str, ModelSource],
        changes: Changes,
        retries: LoadRetries,
        clock: Clock,
        start: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """``sources`` and ``start`` are those of ``Reconciler``."""
        self._loop = asyncio.get_running_loop()
        self._start = start
        self._catalog = catalog
        self._versions = versions
        self._draining = draining
        self._sources = sources
        self._changes = changes
        self._retries = retries
        self._clock = clock
        self._ensembles: dict[str, None] = {}
        """The models that have been ensembles since they were loaded: of thousands of models, few or none."""
        self._retrying: set[str] = set()
        """The ensembles whose next reconnection is scheduled."""

    def note_source(self, source: ModelSource) -> None:
        """Note that a model has a new source, which may be that of an ensemble."""
        if members_of(source):
            self._ensembles[source.name] = None

    def forget(self, name: str) -> None:
        """Forget a model that is unloaded."""
        self._ensembles.pop(name, None)

    def of(self, name: str) -> list[str]:
        """The ensembles with a model as a member, by their latest source or by what serves because that failed."""
        dependents = [
            ensemble
            for ensemble in self._ensembles
            if name in members_of(self._sources.get(ensemble))
            or any(
                isinstance(record.served, ServedEnsemble) and name in [member.name for member in record.served.members]
                for record in self._catalog.ready(ensemble)
            )
        ]
        # An ensemble that contains another one comes after it, so that both never use different loads of the model.
        return sorted(dependents, key=lambda one: len(closure_of([one], self._sources)))

    async def drop(self, name: str) -> None:
        """Take the ensembles that contain a model out of service, and wait until they have answered their requests."""
        for ensemble in self.of(name):
            await self.drop(ensemble)
            async with self._changes.lock(ensemble):
                self._versions.drain_all(ensemble)
                await self.drop(ensemble)  # Ensembles loaded in the meantime hold this one.
                await self._draining.wait(ensemble)

    async def reconnect_all(self, name: str, applied: Collection[str] = (), *, loads: bool = True) -> None:
        """Reconnect the ensembles that contain a model after a change of the model or of its labels.

        An ensemble that no longer fits the model goes out of service, with the reason.

        Args:
            name: Name of the model.
            applied: Ensembles that the caller loads after the model anyway.
            loads: Whether ensembles that went out of service with the model are loaded, or offered on demand, again.
                The caller then holds the model's lock. Without, they follow its labels even during a load of the model.
        """
        for ensemble in [one for one in self.of(name) if one not in applied]:
            async with self._changes.lock(ensemble):
                source = self._sources.get(ensemble)
                if loads and source is not None and name in members_of(source):
                    if self._versions.waits_for_request(source):
                        self._versions.offer_on_demand(source)
                    else:
                        for record in self._versions.announce(source, self._versions.plan(source).load):
                            await self._versions.load(record)
                await self.reconnect(ensemble)
                await self.reconnect_all(ensemble, applied, loads=loads)

    async def reconnect(self, name: str) -> list[str]:
        """Connect the serving versions of an ensemble to the present loads of its members. Called with its lock.

        A version that does not fit these loads goes out of service with the reason, until a retry or a change of a
        member. A version serves on if a later load failed to replace it, if some members are not reconnected yet, or if
        members are too busy for golden samples. Returns the version and the reason of each failure.
        """
        failures = []
        for record in self._catalog.ready(name):
            if not isinstance(record.served, ServedEnsemble) or is_connected(record.served, self._catalog):
                continue
            why_not_replaced = record.reason
            if reason := await self._versions.replace(record):
                self._draining.drain(record, reason)
                failures.append(load_failed(record.version, reason))
            else:
                self._catalog.of(name)[record.version].reason = why_not_replaced
                if record.state is State.READY and name not in self._retrying:
                    self._retrying.add(name)
                    self._loop.call_later(_RETRY_S, self._begin_retry, name)
        if failures:
            self._retries.note_failure(name, self._clock())
        return failures

    def _begin_retry(self, name: str) -> None:
        self._retrying.discard(name)
        if self._catalog.ready(name):  # also if the version was replaced meanwhile, and its successor not
            self._start(self._retry(name))

    async def _retry(self, name: str) -> None:
        async with self._changes.lock(name):
            await self.reconnect(name)
            await self.reconnect_all(name)


def load_failed(version: int, reason: str) -> str:
    """Describe a failed load for the caller of a load, in Triton's words."""
    return f"version {version} is at UNAVAILABLE state: {reason}"
