"""Loads models that requests wait for, with the members of ensembles: one load serves all requests for a model."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ortserve.clock import Clock
from ortserve.errors import ErrorKind, NotInMemoryError, ServeError
from ortserve.registry.catalog import Catalog
from ortserve.registry.changes import Changes
from ortserve.registry.ensemble_sources import closure_of, members_of, missing_members
from ortserve.registry.reconciler import Reconciler
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.residency.memory_room import MemoryRoom
from ortserve.registry.served_version import ServedVersion
from ortserve.registry.source_reader import SourceReader
from ortserve.telemetry.readings import ResidencyCounts

MAX_WAITING: Final = 4096
"""Maximum number of requests that wait for one model. The memory of their bodies has a limit of its own."""
_MIN_RETRY_S: Final = 1.0
_MAX_TRIES: Final = 4
"""Maximum number of loads for the requests that wait, if newer files supersede them, or if members of an ensemble are
evicted before the ensemble holds them, or are being reconnected."""
_BEGIN_INTERVAL_NS: Final = 10_000_000_000
"""Minimum time between the loads of a model that requests begin without waiting: the next may get no room either."""


@dataclass(slots=True)
class Demand:
    """One load that requests wait for.

    Attributes:
        task: The load.
        ready_ns: Expected end of the load (monotonic).
        is_measured: Whether ``ready_ns`` is based on the measured time of an earlier load.
        waiting: Number of requests that wait.
    """

    task: "asyncio.Task[None]"
    ready_ns: int
    is_measured: bool
    waiting: int = 0


class LoadsOnDemand:
    """Finds the version that answers a request, and loads its model first if it is not in memory. Loop thread only.

    A load continues when no request waits any more, because the next request needs the model.
    """

    def __init__(
        self,
        catalog: Catalog,
        reconciler: Reconciler,
        changes: Changes,
        room: MemoryRoom,
        sources: Mapping[str, ModelSource],
        reader: SourceReader,
        clock: Clock,
        counts: ResidencyCounts,
        *,
        start: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        wait_s: float,
        follows_changes: bool,
    ) -> None:
        """Load nothing yet.

        ``sources`` has the source of the latest load of each model, and is read at each call. ``start`` runs a load in
        a task that ends with the registry. A request waits at most ``wait_s``. With ``follows_changes``, loads on
        demand follow changes of files.
        """
        self._catalog = catalog
        self._reconciler = reconciler
        self._changes = changes
        self._room = room
        self._sources = sources
        self._reader = reader
        self._clock = clock
        self._counts = counts
        self._start = start
        self._wait_ns: Final = round(wait_s * 1e9)
        self._follows_changes = follows_changes
        self._demands: dict[str, Demand] = {}
        self._begun_ns: dict[str, int] = {}
        """When a request that does not wait last began a load, by model (monotonic)."""

    def find_or_begin(self, name: str, version: str) -> ServedVersion:
        """Find the version that answers, as ``Catalog.find`` does, for requests that another version can answer.

        They do not wait for a model that is not in memory, but begin its load, once in ``_BEGIN_INTERVAL_NS``.

        Raises:
            ServeError: An error of ``Catalog.find``.
        """
        try:
            return self._catalog.find(name, version)
        except NotInMemoryError:
            now_ns = self._clock()
            begun_ns = self._begun_ns.get(name)
            if begun_ns is None or now_ns >= begun_ns + _BEGIN_INTERVAL_NS:
                self._begun_ns[name] = now_ns
                self.join(name)
            raise

    async def wait_for(
        self, name: str, version: str, received_ns: int | None = None, timeout_ns: int | None = None
    ) -> ServedVersion:
        """Find the version that answers, as ``Catalog.find`` does. A model that is not in memory is loaded first.

        The wait begins at ``received_ns`` (monotonic), or now. It ends after ``timeout_ns`` or ``wait_s``.

        Raises:
            ServeError: An error of ``Catalog.find`` or of ``wait``.
        """
        find = self._catalog.find
        since_ns = self._clock() if received_ns is None else received_ns
        for _ in range(_MAX_TRIES):  # The model may leave memory again before the request can use it.
            try:
                return find(name, version)
            except NotInMemoryError:
                pass
            try:
                await self.wait(name, since_ns, timeout_ns)
            except ServeError:
                with suppress(ServeError):  # another version failed, or is still loading
                    return find(name, version)
                raise
        return find(name, version)

    async def wait(self, name: str, received_ns: int, timeout_ns: int | None) -> None:
        """Wait until a model is loaded, at most until the deadline of the request, which came at ``received_ns``.

        Raises:
            ServeError: not_ready, if the model cannot be loaded in time, with the time after which to retry;
                overloaded, if too many requests wait; or the error of the load.
        """
        demand = self.join(name)
        task, outcomes, now_ns = demand.task, self._counts.requests, self._clock()
        by_ns = received_ns + (self._wait_ns if timeout_ns is None else min(timeout_ns, self._wait_ns))
        if demand.waiting >= MAX_WAITING:
            outcomes[name, "refused"] += 1
            raise ServeError(
                ErrorKind.OVERLOADED, f"{MAX_WAITING} requests, the maximum, already wait for '{name}'", retry_after_s=1
            )
        if by_ns > now_ns and not (demand.is_measured and demand.ready_ns > by_ns):
            demand.waiting += 1
            try:
                # A request that is cancelled does not cancel the load.
                await asyncio.wait({task}, timeout=(by_ns - now_ns) / 1e9)
            finally:
                demand.waiting -= 1
                self._counts.waited_ns += self._clock() - now_ns
        if not task.done():
            outcomes[name, "late"] += 1
            left_s = max(_MIN_RETRY_S, (demand.ready_ns - self._clock()) / 1e9)
            about = f"about {left_s:.0f} s from now"
            text = f"'{name}' is loaded on demand, which takes longer than the request may wait: {about}"
            raise ServeError(ErrorKind.NOT_READY, text, retry_after_s=left_s)
        if task.cancelled():
            outcomes[name, "failed"] += 1
            raise ServeError(ErrorKind.NOT_READY, f"the load of '{name}' was cancelled", retry_after_s=1)
        error = task.exception()
        outcomes[name, "loaded" if error is None else "failed"] += 1
        if isinstance(error, ServeError):  # a new error for each caller, because each adds its own traceback
            raise ServeError(error.kind, error.message, retry_after_s=error.retry_after_s)
        if error is not None:
            raise error

    def join(self, name: str) -> Demand:
        """Return the load of a model that is under way, or begin one."""
        demand = self._demands.get(name)
        if demand is None:
            cost = self._room.expect(self._sources[name])
            ready_ns = self._clock() + cost.load_ns
            demand = self._demands[name] = Demand(self._start(self._load(name)), ready_ns, cost.is_measured)
            demand.task.add_done_callback(lambda _: self._demands.pop(name))
        return demand

    async def _load(self, name: str) -> None:
        """Load a model, and first the members of an ensemble.

        The load is tried again if newer files supersede it, or if a load for another model evicts a member before the
        ensemble holds it.

        Raises:
            ServeError: not_ready, if there is no room in memory or the load failed.
        """
        tries = 0
        with self._room.loading_together(closure_of([name], self._sources)):
            while True:
                await self._changes.wait_for_locks([name])  # a load by a client that fails takes its source back
                known = self._sources.get(name)
                source = await self._read_again(known)
                if source is not None:
                    await self._wait_for_members(source)
                async with self._changes.lock(name):
                    if self._sources.get(name) is not known:  # read by another change, later
                        source = self._sources.get(name)
                    if source is None or not any(one.is_on_demand for one in self._catalog.of(name).values()):
                        return
                    failures = await self._reconciler.apply(source, is_forced=True, is_awaited=True)
                records = self._catalog.of(name).values()
                tries += 1
                if any(record.is_on_demand and record.is_superseded for record in records):
                    if tries == _MAX_TRIES:
                        raise _not_loaded(name, f"newer changes superseded {tries} loads", 1)
                    # A newer load already waits for the model's lock, or members of an ensemble are being reconnected.
                    await self._changes.wait_for_locks(closure_of([name], self._sources)[1:])
                    continue
                no_room = next((record.no_room for record in records if record.no_room is not None), None)
                if no_room is None:
                    break
                if tries == _MAX_TRIES or not members_of(source):  # Members may be back already.
                    raise no_room
        if failures:
            raise _not_loaded(name, "; ".join(failures), 1 if self._follows_changes else None)

    async def _wait_for_members(self, ensemble: ModelSource) -> None:
        """Load the members that are not in memory. Raises ServeError: not_ready, if another one does not serve."""
        for member in missing_members(ensemble, self._catalog.serves):
            if any(record.makes_requests_wait for record in self._catalog.of(member).values()):
                try:
                    await asyncio.shield(self.join(member).task)
                except ServeError:
                    if member in missing_members(ensemble, self._catalog.serves):  # not if another version failed
                        raise
                continue
            try:
                self._catalog.find(member, "")
            except ServeError as error:
                raise _not_loaded(ensemble.name, error.message, error.retry_after_s) from None

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
            found = await self._reader.read(known.name)
        except ServeError as error:
            raise _not_loaded(known.name, error.message, 1) from None
        return known if not self._follows_changes or found is None or members_of(found) else found


def _not_loaded(name: str, reason: str, retry_after_s: float | None) -> ServeError:
    return ServeError(ErrorKind.NOT_READY, f"load failed for model '{name}': {reason}", retry_after_s=retry_after_s)
