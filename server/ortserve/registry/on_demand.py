"""Loads models that requests wait for, with the members of ensembles."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final

from ortserve.clock import Clock
from ortserve.errors import ErrorKind, NotInMemoryError, ServeError
from ortserve.registry.catalog import Catalog
from ortserve.registry.dependents import closure_of, members_of
from ortserve.registry.reconciler import Reconciler
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.residency.demand import Demands
from ortserve.registry.residency.ledger import LoadCost
from ortserve.registry.residency.memory_room import MemoryRoom
from ortserve.registry.serving import ServedVersion
from ortserve.telemetry.readings import ResidencyCounts

_MAX_TRIES: Final = 4
"""Maximum number of loads of an ensemble for its requests, if members are evicted before the ensemble holds them."""


class LoadsOnDemand:
    """Finds the version that answers a request, and loads its model first if it is not in memory. Loop thread only."""

    def __init__(
        self,
        catalog: Catalog,
        reconciler: Reconciler,
        room: MemoryRoom,
        sources: Mapping[str, ModelSource],
        clock: Clock,
        counts: ResidencyCounts,
        *,
        start: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        wait_s: float,
        read: Callable[[str], Awaitable[ModelSource | None]],
        follows_changes: bool,
    ) -> None:
        """Load nothing yet.

        ``sources`` has the source of the latest load of each model, and is read at each call. ``start`` runs a load in
        a task that ends with the registry. A request waits at most ``wait_s``. ``read`` reads the source of a model
        from the disk. With ``follows_changes``, loads on demand follow changes of files.
        """
        self._catalog = catalog
        self._reconciler = reconciler
        self._room = room
        self._sources = sources
        self._clock = clock
        self._read = read
        self._follows_changes = follows_changes
        self._demands = Demands(clock, counts, load=self._load, start=start, expect=self._expect, wait_s=wait_s)

    async def wait_for(
        self, name: str, version: str, received_ns: int | None = None, timeout_ns: int | None = None
    ) -> ServedVersion:
        """Find the version that answers, as ``Catalog.find`` does. A model that is not in memory is loaded first.

        The wait begins at ``received_ns`` (monotonic), or now. It ends after ``timeout_ns`` or ``wait_s``.

        Raises:
            ServeError: An error of ``Catalog.find`` or of ``Demands.wait``.
        """
        find = self._catalog.find
        try:
            return find(name, version)
        except NotInMemoryError:
            pass
        try:
            await self._demands.wait(name, self._clock() if received_ns is None else received_ns, timeout_ns)
        except ServeError:
            with suppress(ServeError):  # another version failed, or is still loading
                return find(name, version)
            raise
        return find(name, version)

    async def _load(self, name: str) -> None:
        """Load a model, with the members of an ensemble.

        Raises:
            ServeError: not_ready, if there is no room in memory or the load failed.
        """
        with self._room.loading_together(closure_of([name], self._sources)):
            await self._load_with_members(name, tries=_MAX_TRIES)

    async def _load_with_members(self, name: str, *, tries: int) -> None:
        """As ``_load``. A load for another model may evict a member before the ensemble holds it."""
        known = self._sources.get(name)
        source = await self._read_again(known)
        for member in () if source is None else self._reconciler.missing_members(source):
            if any(record.makes_requests_wait for record in self._catalog.of(member).values()):
                await asyncio.shield(self._demands.join(member).task)
                continue
            try:
                self._catalog.find(member, "")
            except ServeError as error:
                raise _not_loaded(name, error.message) from None
        async with self._reconciler.lock(name):
            if self._sources.get(name) is not known:  # read by another change, later
                source = self._sources.get(name)
            if source is None or not any(record.is_on_demand for record in self._catalog.of(name).values()):
                return
            failures = await self._reconciler.apply(source, is_forced=True, is_awaited=True)
        if any(record.is_on_demand and record.is_superseded for record in self._catalog.of(name).values()):
            await self._load_with_members(name, tries=tries)  # The newer load already waits for the model's lock.
            return
        for record in self._catalog.of(name).values():
            if record.no_room is not None:
                if tries == 1 or not self._reconciler.missing_members(source):
                    raise record.no_room
                await self._load_with_members(name, tries=tries - 1)
                return
        if failures:
            raise _not_loaded(name, "; ".join(failures))

    async def _read_again(self, known: ModelSource | None) -> ModelSource | None:
        """The source of a model that is not in memory. Its files may have been replaced since the last poll.

        Ensembles wait for the poll, which checks them together with their members. Without ``follows_changes`` the
        source stays, and the read only probes whether the folders answer.

        Raises:
            ServeError: not_ready, if the folders of the repositories do not answer: a load would wait in a slot.
        """
        if known is None or members_of(known):
            return known
        try:
            found = await self._read(known.name)
        except ServeError as error:
            raise _not_loaded(known.name, error.message) from None
        return known if not self._follows_changes or found is None or members_of(found) else found

    def _expect(self, name: str) -> LoadCost:
        return self._room.expect(self._sources[name])


def _not_loaded(name: str, reason: str) -> ServeError:
    return ServeError(ErrorKind.NOT_READY, f"failed to load '{name}', {reason}", retry_after_s=1)
