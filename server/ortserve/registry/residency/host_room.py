"""Room in the host's memory for loads: reserves it, and evicts the least recently used models under a budget."""

import logging
from collections.abc import Callable
from typing import Final

from ortserve.clock import Clock
from ortserve.device.accounting import format_bytes
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.catalog import Catalog, State, VersionRecord
from ortserve.registry.draining import Draining
from ortserve.registry.ensemble.served import ServedEnsemble
from ortserve.registry.load.coordination import MAX_LOADS
from ortserve.registry.repository.source import ModelSource, VersionSource
from ortserve.registry.residency.ledger import HostLedger, LoadCost, expect_cost
from ortserve.registry.residency.room import STAY_LOADS, Resident, plan_room
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.readings import MemoryUse, ResidencyCounts

logger: Final = logging.getLogger(__name__)


class NoRoomError(ServeError):
    """A load got no room. ``is_lasting`` says that it never will with this budget and these pinned models."""

    def __init__(self, message: str, *, is_lasting: bool, retry_after_s: float | None = None) -> None:
        super().__init__(ErrorKind.NOT_READY, message, retry_after_s=retry_after_s)
        self.is_lasting = is_lasting


class HostRoom:
    """Reserves memory for loads. Loop thread only."""

    def __init__(
        self,
        catalog: Catalog,
        ledger: HostLedger,
        draining: Draining,
        clock: Clock,
        counts: ResidencyCounts,
        *,
        is_changing: Callable[[str], bool] = lambda name: False,
        budget_bytes: int | None = None,
        wait_s: float = 0.0,
    ) -> None:
        """Reserve nothing yet.

        Args:
            catalog: Of the registry.
            ledger: Has the accounts of all loads.
            draining: Evicts models.
            clock: Monotonic nanoseconds.
            counts: Counts evictions and refusals.
            is_changing: Whether a model is being loaded or unloaded; such models are not evicted.
            budget_bytes: Private memory that all models may hold; None for no limit.
            wait_s: How long a load may wait for models that must stay a while.
        """
        self._catalog = catalog
        self._ledger = ledger
        self._draining = draining
        self._clock = clock
        self._counts = counts
        self._wait_ns: Final = round(wait_s * 1e9)
        self._is_changing = is_changing
        self._budget_bytes = budget_bytes
        self._costs: dict[tuple[str, int], tuple[VersionSource, LoadCost]] = {}
        """What the last load of each version took, and of which source."""

    @property
    def max_loads(self) -> int:
        """Loads side by side. Under a budget, what a load takes is measured, which others beside it would share."""
        return MAX_LOADS if self._budget_bytes is None else 1

    def memory_use(self) -> MemoryUse:
        """The host memory of all models."""
        counts = self._counts
        evictions, refusals = sum(counts.evictions.values()), sum(counts.refusals.values())
        return MemoryUse(self._ledger.total_bytes, self._budget_bytes, evictions, refusals)

    def expect(self, source: ModelSource) -> LoadCost:
        """What a load of all versions of a model will take."""
        costs = [self._expect(source.name, number, version) for number, version in source.versions.items()]
        return LoadCost(
            sum(cost.nbytes for cost in costs),
            sum(cost.load_ns for cost in costs),
            is_measured=all(cost.is_measured for cost in costs),
        )

    def reserve(self, record: VersionRecord, source: VersionSource) -> int:
        """Reserve the memory of a load, and evict models for it.

        Returns:
            0; or when to ask again, because models must stay until then (monotonic).

        Raises:
            NoRoomError: There is no room, and will be none in time.
        """
        options = source.configuration.options
        if options.ensemble is not None:
            return 0
        cost = self._expect(record.model, record.version, source)
        if self._budget_bytes is not None and (due_ns := self._make_room(record, cost.nbytes, self._budget_bytes)):
            return due_ns
        record.account = self._ledger.reserve(cost.nbytes, options.instances)
        record.metrics.memory = record.account.entries
        return 0

    async def wait_until_free(self) -> None:
        """Wait until evicted models have answered their requests and freed the memory that was reserved for others."""
        budget = self._budget_bytes
        while budget is not None and self._ledger.total_bytes > budget and await self._draining.wait_for_next():
            pass  # Versions that ensembles hold may be freed only after the load that waits here.

    def note_loaded(self, record: VersionRecord) -> None:
        """Remember what a load took, and how long the version stays at least."""
        now_ns = self._clock()
        record.used_ns = now_ns
        record.stays_until_ns = now_ns + STAY_LOADS * record.metrics.load_ns
        if record.account is not None and record.source is not None:
            nbytes = record.account.measured_bytes
            assert nbytes is not None, "its load has ended"
            cost = LoadCost(nbytes, record.metrics.load_ns)
            self._costs[record.model, record.version] = record.source, cost

    def forget(self, record: VersionRecord) -> None:
        """Forget what loads of a version took."""
        self._costs.pop((record.model, record.version), None)

    def _expect(self, name: str, version: int, source: VersionSource) -> LoadCost:
        known = self._costs.get((name, version))
        cost = known[1] if known is not None and known[0] == source else None
        file_bytes = sum(size for _, _, _, size, _ in source.fingerprints)
        return expect_cost(file_bytes, source.configuration.options.instances, cost)

    def _make_room(self, record: VersionRecord, need: int, budget: int) -> int:
        now_ns = self._clock()
        plan = plan_room(need, budget, self._ledger.staying_bytes, self._residents(record.model), now_ns)
        if plan.missing_bytes:
            self._counts.count_refusal("budget")
            raise NoRoomError(
                f"'{record.model}' needs about {format_bytes(need)}, memory_budget_bytes is {format_bytes(budget)}, "
                "of which models that cannot be evicted now hold "
                f"{format_bytes(budget + plan.missing_bytes - need)}: {format_bytes(plan.missing_bytes)} too few",
                is_lasting=need > budget,
                retry_after_s=None if need > budget else 1,
            )
        if (plan.evict or plan.wait_until_ns) and not self._catalog.is_complete:
            self._counts.count_refusal("start")
            reason = "the models that were loaded before it take the memory budget"
            raise NoRoomError(reason, is_lasting=False, retry_after_s=1)
        if plan.wait_until_ns:
            record.asked_ns = record.asked_ns or now_ns
            if plan.wait_until_ns > record.asked_ns + self._wait_ns:
                self._counts.count_refusal("stay")
                wait_s = (plan.wait_until_ns - now_ns) / 1e9
                raise NoRoomError(
                    f"no room for '{record.model}' for {wait_s:.1f} s: the models in memory were loaded a moment ago",
                    is_lasting=False,
                    retry_after_s=wait_s,
                )
            return plan.wait_until_ns
        for name in plan.evict:
            log_event(logger, logging.INFO, "model is evicted", model=name, for_model=record.model)
            self._counts.count_eviction(name)
            self._draining.evict(name)
        return 0

    def _residents(self, loading: str) -> list[Resident]:
        names = {record.model for record in self._catalog.records() if record.state is State.READY}
        return [self._resident(name, self._catalog.ready(name), loading) for name in names]

    def _resident(self, name: str, records: list[VersionRecord], loading: str) -> Resident:
        served = [record.served for record in records if record.served is not None]
        return Resident(
            name,
            sum(record.account.nbytes for record in records if record.account is not None),
            max(max(record.used_ns, record.metrics.last_done_ns) for record in records),
            max(record.stays_until_ns for record in records),
            is_kept=name == loading
            or self._is_changing(name)
            or any(one.options.is_pinned or one.has_sequences for one in served),
            is_busy=any(one.is_busy for one in served),
            members=tuple({member.name for one in served if isinstance(one, ServedEnsemble) for member in one.members}),
        )
