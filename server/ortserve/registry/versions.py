"""Announces, loads, replaces and forgets versions of models. The reconciler decides which versions and when."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from ortserve.batching.run_limits import RunEvents
from ortserve.clock import Clock
from ortserve.core.batch import Runner
from ortserve.errors import DeviceLostError, ServeError
from ortserve.registry.catalog import ON_DEMAND, UNLOADED, Catalog, State, VersionRecord
from ortserve.registry.draining import Draining
from ortserve.registry.ensemble.members import MembersDisagreeError
from ortserve.registry.load.golden_check import MembersBusyError
from ortserve.registry.load.load_limits import LoadRank
from ortserve.registry.load.progress import LoadCancelledError
from ortserve.registry.repository.source import ModelSource, VersionChanges, VersionSource, plan_changes
from ortserve.registry.residency.memory_room import MemoryRoom, NoRoomError
from ortserve.registry.version_loader import FilesChangedError, VersionLoader
from ortserve.telemetry.logs import fit_fields, log_event, log_fault
from ortserve.telemetry.metrics import Metrics

logger: Final = logging.getLogger(__name__)

MAX_ABANDONED: Final = 3
"""Maximum number of abandoned instances of one model that a new load replaces, while their runs have not ended."""


class Versions:
    """Loads and replaces versions, and keeps their records in the catalog. Loop thread only."""

    def __init__(
        self,
        catalog: Catalog,
        room: MemoryRoom,
        loader: VersionLoader,
        draining: Draining,
        metrics: Metrics,
        clock: Clock,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_replace: Callable[[VersionRecord], object] = lambda record: None,
    ) -> None:
        """``on_replace`` gets each version that has abandoned an instance, and should call ``replace`` for it."""
        self._loop = asyncio.get_running_loop()
        self._catalog = catalog
        self._room = room
        self._loader = loader
        self._draining = draining
        self._metrics = metrics
        self._clock = clock
        self._on_change = on_change
        self._on_replace = on_replace
        self._loading: dict[str, set[VersionRecord]] = {}
        """Records of loads that wait or are under way, by model."""
        self._logged_no_room: set[tuple[str, int]] = set()
        """Model and number of versions whose last load got no room, which is logged once: each request may begin a load
        again."""
        self._abandoned: dict[str, list[Runner]] = {}
        """Abandoned instances by model. Adding one drops those whose runs have ended since."""
        self.lost = ""
        """The lost device and the reason; empty if no device is lost. Only a new process can use the device again."""

    def waits_for_request(self, source: ModelSource) -> bool:
        """Whether a model is not in memory, and the next request for it loads it."""
        return self._is_offered(source.name) or (source.is_on_demand and not self._catalog.ready(source.name))

    def _is_offered(self, name: str) -> bool:
        return any(one.is_on_demand for one in self._catalog.of(name).values()) and not self._catalog.ready(name)

    def plan(self, source: ModelSource) -> VersionChanges:
        """What leads from the versions of a model that serve to those of a source."""
        serving = self._catalog.ready(source.name)
        return plan_changes({record.version: record.source for record in serving if record.source}, source.versions)

    def announce(
        self, source: ModelSource, versions: Iterable[int], *, is_awaited: bool = False
    ) -> list[VersionRecord]:
        """Create the records of loads that ``load`` will run one after the other.

        The catalog shows a record at once, unless the version already serves. If ``is_awaited``, requests may wait for
        the loads.
        """
        is_awaited = is_awaited or self._is_offered(source.name)  # also for versions that were not on demand before
        records = [self._make_record(source, version, is_awaited=is_awaited) for version in versions]
        for record in records:
            record.continues = record is not records[0]
            self._loading.setdefault(source.name, set()).add(record)
        return records

    def _make_record(self, source: ModelSource, version: int, *, is_awaited: bool = False) -> VersionRecord:
        before = self._catalog.of(source.name).get(version)
        metrics = None
        if before is not None and before.is_on_demand:
            is_awaited = True
            if before.state is State.GONE:  # The next load continues the series: eviction must not reset counters.
                metrics = before.metrics
        record = VersionRecord(
            source.name,
            version,
            self._on_change,
            is_required=source.is_required,
            source=source.versions[version],
            metrics=metrics,
        )
        record.is_awaited = is_awaited
        if before is None or before.state is not State.READY:
            self._show(record)
        return record

    def offer_on_demand(self, source: ModelSource) -> None:
        """Show the versions of a model that do not serve in the catalog. The first request will load them."""
        known = self._catalog.of(source.name)
        kept = {
            number
            for number, one in known.items()
            if one.state is State.READY or (one.is_on_demand and one.source == source.versions.get(number))
        }
        self.forget(one for number, one in known.items() if number not in kept and one.state >= State.GONE)
        self._offer(source, source.versions.keys() - kept)

    def offer_new(self, source: ModelSource) -> None:
        """Show new versions of a model that is not in memory, before labels that name them take effect."""
        if self._is_offered(source.name):
            self._offer(source, source.versions.keys() - self._catalog.of(source.name).keys())

    def _offer(self, source: ModelSource, versions: Iterable[int]) -> None:
        for number in sorted(versions):
            self._make_record(source, number).advance(State.GONE, ON_DEMAND)

    async def load(self, record: VersionRecord) -> str:
        """Load the version of a record with a source, as soon as fewer loads are under way than the limit.

        A previous load of the version serves until the new one is warm, and keeps serving if the new one fails. On
        return, the record is READY, FAILED, or GONE if there was no room.

        Returns:
            Why the load failed; empty if the version serves.
        """
        source = record.source
        assert source is not None
        loading = self._loading.setdefault(record.model, set())
        loading.add(record)
        events = RunEvents(
            on_timeout=lambda: self._metrics.batch_overdue(record.model),
            on_abandoned=partial(self._on_abandoned, record),
            on_lost=partial(self._on_lost, record),
        )
        try:
            async with AsyncExitStack() as slot:
                try:
                    await self._wait_for_turn(record, source, slot)
                    began_ns = self._clock()
                    record.served = await self._loader.load(record, source, events)
                except NoRoomError as error:
                    return await self._end_without_room(record, error)
                except Exception as error:  # noqa: BLE001 - its message is no answer to a caller
                    if not record.cancelled_because and _is_followed(record, error):
                        record.cancelled_because, record.is_superseded = str(error), True
                    return await self._fail(record, error)
                self._take_over(record, self._clock() - began_ns)
                return ""
        finally:
            loading.discard(record)
            if not loading:
                self._loading.pop(record.model, None)

    async def _wait_for_turn(self, record: VersionRecord, source: VersionSource, slot: AsyncExitStack) -> None:
        """Wait for a load slot, which ``slot`` then holds, and for room in memory.

        The load gives its slot back while it waits for models that must stay a while.

        Raises:
            LoadCancelledError: The load was cancelled.
            NoRoomError: There is no room, and waiting long enough is not allowed.
        """
        rank = LoadRank.OTHER
        if record.is_awaited or record.is_required:
            rank = LoadRank.AWAITED if record.is_awaited else LoadRank.REQUIRED
        continues = record.continues and self._room.has_budget
        try:
            if record.cancelled_because:
                raise TimeoutError
            async with asyncio.timeout(None) as record.waiting:
                while True:
                    await slot.enter_async_context(self._loader.slots.take(rank, continues=continues))
                    due_ns = self._room.reserve(record, source)
                    if not due_ns:
                        break
                    await slot.aclose()
                    await asyncio.sleep((due_ns - self._clock()) / 1e9)
                await self._room.wait_until_free()
        except TimeoutError:
            raise LoadCancelledError(record.cancelled_because) from None
        finally:
            record.waiting = None

    def _take_over(self, record: VersionRecord, load_ns: int) -> None:
        """Send requests to a version that has loaded in ``load_ns``, and drain its previous load."""
        assert record.served is not None
        record.metrics.load_ns = load_ns
        record.advance(State.READY)
        self._logged_no_room.discard((record.model, record.version))
        self._room.note_loaded(record)
        self._metrics.loaded(record.model, is_ok=True)
        fields = {
            "model": record.model,
            "version": record.version,
            "seconds": round(load_ns / 1e9, 2),
            **record.served.properties,
        }
        log_event(logger, logging.INFO, "model is ready", **fit_fields(fields, logger.name, "model is ready"))
        replaced = self._show(record)
        self._catalog.route(record.model)
        if replaced is not None and replaced.state is State.READY and replaced is not record:
            self._draining.drain(replaced, UNLOADED)

    async def replace(self, record: VersionRecord) -> str:
        """Load a version again after it abandoned an instance, or an ensemble whose members have changed.

        Does nothing if the version was replaced or drained in the meantime.

        Returns:
            Why the load failed; empty if the version serves, if no load was needed, or if a change that follows
            cancelled it.
        """
        if not self._is_shown(record) or record.source is None or record.state not in (State.READY, State.FAILED):
            return ""
        successor = VersionRecord(
            record.model, record.version, self._on_change, is_required=record.is_required, source=record.source
        )
        successor.is_reconnection = record.source.configuration.options.ensemble is not None
        if record.state is not State.READY:
            self._show(successor)
        reason = await self.load(successor)
        return "" if successor.cancelled_because else reason

    def show_problem(self, source: ModelSource) -> None:
        """Show and log the problem of a model's source. Versions that serve, or were evicted, stay available."""
        name, problem = source.name, source.problem
        self._metrics.loaded(name, is_ok=False)
        serving = self._catalog.ready(name)
        for record in serving:
            record.reason = problem
        if serving:
            _log_failure("model reload failed; the previous load keeps serving", serving[-1], problem)
            return
        known = self._catalog.of(name).values()
        if (evicted := next((one for one in known if one.is_on_demand and one.metrics.load_ns), None)) is not None:
            _log_failure("model reload failed; the next request loads the version before", evicted, problem)
            return
        self.forget(known)
        record = VersionRecord(name, 0, self._on_change, is_required=source.is_required)
        self._show(record)
        record.advance(State.FAILED, problem)
        _log_failure("model cannot be served", record, problem)

    def forget(self, records: Iterable[VersionRecord]) -> None:
        """Remove records from the catalog and their series from the metrics."""
        for record in list(records):
            self._catalog.drop(record)
            self._logged_no_room.discard((record.model, record.version))
            self._room.forget(record)
            self._metrics.forget(record.model, record.shown_version)
        self._on_change()

    def is_loading(self, name: str) -> bool:
        """Whether loads of a model wait or are under way."""
        return name in self._loading

    def successor(self, record: VersionRecord) -> VersionRecord | None:
        """The load that will replace a version when it is warm; None if no such load waits or is under way."""
        loading = self._loading.get(record.model, ())
        return next((one for one in loading if one.version == record.version and one is not record), None)

    def cancel_loads(self, name: str, because: str, *, is_superseded: bool = False) -> None:
        """Cancel the loads of a model: those that wait at once, those under way at their next step.

        If ``is_superseded``, a newer load of the model follows, and requests wait for that one.
        """
        for record in self._loading.get(name, ()):
            record.cancelled_because = because
            record.is_superseded = is_superseded
            if record.progress is not None:
                record.progress.cancel(because)
            elif record.waiting is not None and not record.waiting.expired():
                record.waiting.reschedule(self._loop.time())

    def end_on_demand(self, name: str, *, only_sent: bool = False) -> None:
        """Prevent requests from loading the versions of a model that are not in memory, or those that a client sent."""
        for record in self._catalog.of(name).values():
            if record.is_on_demand and not (only_sent and record.source and not record.source.is_sent):
                record.reason, record.no_room = UNLOADED, None
                if record.state is State.GONE:
                    self._metrics.forget(name, record.shown_version)
        self._on_change()

    def drain_all(self, name: str) -> None:
        """Drain all versions of a model, and forget its failed ones."""
        self.forget(record for record in self._catalog.of(name).values() if record.state is State.FAILED)
        for record in self._catalog.ready(name):
            self._draining.drain(record, UNLOADED)

    async def _end_without_room(self, record: VersionRecord, error: NoRoomError) -> str:
        """End a load that got no room. The next request begins another load.

        The version is FAILED instead if room will never suffice, if the model is pinned, or if another record is shown.
        """
        source = record.source
        if not error.is_lasting:
            record.no_room = error
        if error.is_lasting or not self._is_shown(record) or source is None or source.configuration.options.is_pinned:
            return await self._fail(record, error)
        record.advance(State.GONE, ON_DEMAND)
        self._catalog.route(record.model)
        key = record.model, record.version
        if key not in self._logged_no_room:
            self._logged_no_room.add(key)
            log_event(logger, logging.INFO, "model is not in memory", model=record.model, reason=error.message)
        return error.message

    async def _fail(self, record: VersionRecord, error: Exception) -> str:
        if not isinstance(error, ServeError):
            log_fault(logger, "a load failed unexpectedly", error, model=record.model, version=record.shown_version)
        await self._draining.release(record)
        if isinstance(error, DeviceLostError):
            self._on_lost(record, error.message)
        reason = error.message if isinstance(error, ServeError) else "unexpected error"
        if record.is_superseded and record.is_awaited and self._is_shown(record):
            record.advance(State.GONE, ON_DEMAND)
        else:
            record.advance(State.FAILED, reason)
        self._catalog.route(record.model)
        if record.cancelled_because:
            _log_failure("load cancelled", record, reason, logging.INFO)
            return reason
        self._metrics.loaded(record.model, is_ok=False)
        shown = self._catalog.of(record.model).get(record.version, record)
        shown.reason = reason
        if shown.state is State.READY and not record.is_reconnection:
            _log_failure("model reload failed; the previous load keeps serving", record, reason)
        else:
            _log_failure("model cannot be served", record, reason)
        return reason

    def _is_shown(self, record: VersionRecord) -> bool:
        return self._catalog.of(record.model).get(record.version) is record

    def _show(self, record: VersionRecord) -> VersionRecord | None:
        self._metrics.expose(record.metrics)
        before = self._catalog.put(record)
        self._on_change()
        return before

    def _on_lost(self, record: VersionRecord, reason: str) -> None:
        """Record a lost device, and take the version out of service that needs it."""
        self.lost = self.lost or reason
        _log_failure("device is lost", record, reason)
        if record.state is State.READY:  # Otherwise its load fails, or it is draining already.
            self._draining.fail(record, reason)

    def _on_abandoned(self, record: VersionRecord, runner: Runner, reason: str, is_last: bool) -> None:
        """Request a new load of a version that abandoned an instance, because a run of the instance does not end.

        A version without other instances is FAILED until the new load serves. There is no new load if too many runs of
        the model have not ended, because each one occupies a processor and memory for the life of the process.
        """
        self._metrics.batch_overdue(record.model, is_abandoned=True)
        running = [earlier for earlier in self._abandoned.get(record.model, ()) if earlier.is_running]
        self._abandoned[record.model] = [*running, runner]
        if record.state is not State.READY:
            return
        may_replace = record.will_be_replaced = len(running) < MAX_ABANDONED
        if not may_replace:
            reason = f"{reason}; {len(running) + 1} runs of the model did not end; restart the server"
        _log_failure("instance abandoned", record, reason)
        if is_last:
            self._draining.fail(record, reason)
        else:
            record.reason = reason
        if may_replace:
            self._on_replace(record)


def _is_followed(record: VersionRecord, error: Exception) -> bool:
    """Whether another load follows one that failed with ``error``.

    The change that makes members disagree loads the ensemble again, and waiting requests load files that have changed.
    ``Dependents`` reconnects an ensemble later whose members were too busy for golden samples.
    """
    if isinstance(error, MembersBusyError):
        return record.is_reconnection
    return isinstance(error, MembersDisagreeError) or (record.is_awaited and isinstance(error, FilesChangedError))


def _log_failure(event: str, record: VersionRecord, reason: str, level: int = logging.ERROR) -> None:
    log_event(logger, level, event, model=record.model, version=record.shown_version, reason=reason)
