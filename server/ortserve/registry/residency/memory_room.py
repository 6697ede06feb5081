"""Reserves memory for loads on the host and on each GPU, and evicts models to stay within a budget."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.config.session import provider_parts
from ortserve.device.accounting import format_bytes, sum_bytes
from ortserve.device.devices import Devices
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import full_name
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.catalog import UNLOADED, Catalog, State, VersionRecord
from ortserve.registry.draining import Draining
from ortserve.registry.ensemble.plan import member_names
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.load.load_limits import MAX_LOADS
from ortserve.registry.repository.source import ModelSource, VersionSource
from ortserve.registry.residency.eviction import (
    HOST,
    STAY_LOADS,
    Budget,
    Resident,
    choose_holders,
    in_start_order,
    plan_evictions,
)
from ortserve.registry.residency.ledger import HostLedger, LoadCost, expect_cost
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.readings import MemoryUse, ResidencyCounts

logger: Final = logging.getLogger(__name__)


class NoRoomError(ServeError):
    """A load got no room in memory. If ``is_lasting``, it never will with this budget and these pinned models."""

    def __init__(self, message: str, *, is_lasting: bool, retry_after_s: float | None = None) -> None:
        super().__init__(ErrorKind.NOT_READY, message, retry_after_s=retry_after_s)
        self.is_lasting = is_lasting


class MemoryRoom:
    """Reserves memory for loads. Loop thread only."""

    def __init__(
        self,
        catalog: Catalog,
        ledger: HostLedger,
        draining: Draining,
        clock: Clock,
        counts: ResidencyCounts,
        *,
        must_stay: Callable[[str], bool] = lambda name: False,
        budget_bytes: int | None = None,
        gpu_budget_bytes: int | None = None,
        devices: Devices | None = None,
        wait_s: float = 0.0,
    ) -> None:
        """Reserve nothing yet.

        ``budget_bytes`` limits the private host memory of all models together, and ``gpu_budget_bytes`` their memory on
        each GPU. ``must_stay`` tells whether a model must not be evicted now. A load waits at most ``wait_s`` for
        models that must stay in memory for a while.
        """
        self._catalog = catalog
        self._ledger = ledger
        self._draining = draining
        self._clock = clock
        self._counts = counts
        self._wait_ns: Final = round(wait_s * 1e9)
        self._must_stay = must_stay
        self._budget_bytes = budget_bytes
        self._gpu_budget_bytes = gpu_budget_bytes
        self._devices: Final = devices or Devices({})
        self._loading_on_devices: Mapping[str, int] = {}
        """Expected memory of the load under way, by device. Under a budget, only one load is under way at a time."""
        self._costs: dict[tuple[str, int], tuple[VersionSource, LoadCost]] = {}
        """Source and cost of the last load, by model and version."""
        self._together: list[Collection[str]] = []
        """Ensembles that are being loaded, each with its members."""
        self.start_order: Mapping[str, int] = {}
        """Places of models in the order in which they get memory at the start."""

    @property
    def has_budget(self) -> bool:
        """Whether the memory of all models together is limited on the host or on GPUs."""
        return self._budget_bytes is not None or self._gpu_budget_bytes is not None

    @property
    def max_loads(self) -> int:
        """Maximum number of concurrent loads. It is 1 under a budget, where the memory of each load must be exact."""
        return 1 if self.has_budget else MAX_LOADS

    def memory_use(self) -> MemoryUse:
        """The host memory of all models."""
        counts = self._counts
        evictions, refusals = sum(counts.evictions.values()), sum(counts.refusals.values())
        return MemoryUse(self._ledger.total_bytes, self._budget_bytes, evictions, refusals)

    def expect(self, source: ModelSource) -> LoadCost:
        """The expected cost of loading all versions of a model. Memory on devices is left out."""
        costs = [self._expect(source.name, number, version) for number, version in source.versions.items()]
        return LoadCost(
            sum(cost.nbytes for cost in costs),
            sum(cost.load_ns for cost in costs),
            is_measured=all(cost.is_measured for cost in costs),
        )

    @contextmanager
    def loading_together(self, *ensembles: Collection[str]) -> Iterator[None]:
        """Evict no member of these ensembles for another one of its members, unless they do not fit together."""
        self._together += ensembles
        try:
            yield
        finally:
            for models in ensembles:
                self._together.remove(models)

    def reserve(self, record: VersionRecord, source: VersionSource) -> int:
        """Reserve memory for a load, and evict models if necessary.

        Returns:
            0 if the memory is reserved. Otherwise when to call again (monotonic), because models must stay until then.

        Raises:
            NoRoomError: There is no room now, nor within the time that the load may wait.
        """
        options = source.configuration.options
        self._loading_on_devices = {}
        if options.ensemble is not None:
            if self.has_budget:
                self._check_members(record.model, options)
            return 0
        cost = self._expect(record.model, record.version, source)
        if self.has_budget and (due_ns := self._make_room(record, options, cost)):
            return due_ns
        self._loading_on_devices = cost.on_devices
        record.account = self._ledger.reserve(cost.nbytes, options.instances)
        record.metrics.memory = record.account.entries
        return 0

    async def wait_until_free(self) -> None:
        """Wait until evicted models have answered their requests and freed the memory that is reserved for the load."""
        while self._is_exceeded() and await self._draining.wait_for_next():
            pass  # Does not wait for versions that ensembles hold: they may be freed only after this load.

    def note_loaded(self, record: VersionRecord) -> None:
        """Record the cost of a load, and the time for which the version must stay in memory."""
        now_ns = self._clock()
        record.ready_ns = now_ns
        record.stays_until_ns = now_ns + STAY_LOADS * record.metrics.load_ns
        if record.account is not None and record.source is not None:
            nbytes = record.account.measured_bytes
            assert nbytes is not None, "its load has ended"
            assert record.served is not None
            cost = LoadCost(nbytes, record.metrics.load_ns, record.served.device_bytes())
            self._costs[record.model, record.version] = record.source, cost

    def forget(self, record: VersionRecord) -> None:
        """Forget the cost of loads of a version."""
        self._costs.pop((record.model, record.version), None)

    def _expect(self, name: str, version: int, source: VersionSource) -> LoadCost:
        known = self._costs.get((name, version))
        cost = known[1] if known is not None and known[0] == source else None
        options = source.configuration.options
        return expect_cost(source.file_bytes, options.instances, self._devices_of(options), cost)

    def _devices_of(self, options: ModelOptions) -> list[str]:
        """Device name of each instance on the first configured execution provider; empty for the host."""
        name, settings = provider_parts(next(iter(options.execution_providers), CPU))
        provider = full_name(name)
        if not self._devices.has(provider):
            return []
        numbers = options.gpus or (int(settings.get("device_id", 0)),)
        return [self._devices.name_of(provider, numbers[number % len(numbers)]) for number in range(options.instances)]

    def _budgets(self, cost: LoadCost, residents: Sequence[Resident]) -> Iterator[Budget]:
        """The budgets that apply to a load of this cost."""
        if self._budget_bytes is not None:
            yield Budget("memory_budget_bytes", HOST, cost.nbytes, self._budget_bytes, self._ledger.staying_bytes)
        if self._gpu_budget_bytes is not None:
            for device, need in cost.on_devices.items():
                used = sum(resident.held.get(device, 0) for resident in residents)
                yield Budget("gpu_memory_budget_bytes", device, need, self._gpu_budget_bytes, used)

    def _is_exceeded(self) -> bool:
        """Whether draining models still hold memory that is reserved for the load under way."""
        if self._budget_bytes is not None and self._ledger.total_bytes > self._budget_bytes:
            return True
        held = {opened.device.name: opened.ledger.total_bytes() for opened in self._devices.opened()}
        budget = self._gpu_budget_bytes
        return budget is not None and any(
            need + held.get(device, 0) > budget for device, need in self._loading_on_devices.items()
        )

    def _make_room(self, record: VersionRecord, options: ModelOptions, cost: LoadCost) -> int:
        """Evict models until a load fits every budget.

        Returns:
            0 if the load fits. Otherwise when to try again (monotonic).

        Raises:
            NoRoomError: There is no room now, nor within the time that the load may wait.
        """
        needs_gpu = self._gpu_budget_bytes is not None and bool(cost.on_devices)
        if not needs_gpu and all(budget.excess <= 0 for budget in self._budgets(cost, ())):
            return 0  # The host has room, and no model need be looked at: there may be thousands.
        now_ns = self._clock()
        residents = self._keep_members(record, self._residents(record.model))
        if not self._catalog.is_complete:
            residents = in_start_order(residents, self.start_order, record.model)
        budgets = {budget.device: budget for budget in self._budgets(cost, residents)}
        excess = {memory: budget.excess for memory, budget in budgets.items()}
        plan = plan_evictions(excess, residents, now_ns)
        # Versions that the next ones replace anyway leave if nothing else makes room.
        retirable = self._draining.find_retirable(record.model)
        retiring = choose_holders(plan.missing, retirable, lambda version: self._held([version]))
        if retiring:
            freed = self._held(retiring)
            left = {memory: nbytes - freed.get(memory, 0) for memory, nbytes in excess.items()}
            plan = plan_evictions(left, residents, now_ns)
        if plan.missing:
            memory, missing = next(iter(plan.missing.items()))
            raise self._refuse(record.model, options, budgets[memory], missing)
        if plan.wait_until_ns:
            self._check_wait(record, plan.wait_until_ns, now_ns)
            return plan.wait_until_ns
        for version in retiring:
            message = "version leaves for the next ones"
            log_event(logger, logging.INFO, message, model=record.model, version=version.version)
            self._draining.drain(version, UNLOADED)
        for name in plan.evict:
            log_event(logger, logging.INFO, "model is evicted", model=name, for_model=record.model)
            self._counts.evictions[name] += 1
            self._draining.evict(name)
        return 0

    def _refuse(self, model: str, options: ModelOptions, budget: Budget, missing: int) -> NoRoomError:
        """Count a load that lacks ``missing`` bytes of a budget, and return its error."""
        fits_alone = budget.need <= budget.nbytes
        if fits_alone and not self._catalog.is_complete and not options.is_pinned:
            self._counts.refusals["start"] += 1
            reason = "the models that were loaded before it use up the memory budget"
            return NoRoomError(reason, is_lasting=False, retry_after_s=1)
        self._counts.refusals["budget"] += 1
        return NoRoomError(
            f"'{model}' needs about {format_bytes(budget.need)}{budget.where}, "
            f"{budget.option} is {format_bytes(budget.nbytes)}, of which models that cannot be evicted now hold "
            f"{format_bytes(budget.nbytes + missing - budget.need)}: {format_bytes(missing)} too few",
            is_lasting=not fits_alone,
            retry_after_s=1 if fits_alone else None,
        )

    def _check_wait(self, record: VersionRecord, until_ns: int, now_ns: int) -> None:
        """Check that a load may wait until ``until_ns`` (monotonic). Its wait began at the first call.

        Raises:
            NoRoomError: The wait would be too long, which is counted.
        """
        record.waits_since_ns = record.waits_since_ns or now_ns
        if until_ns <= record.waits_since_ns + self._wait_ns:
            return
        self._counts.refusals["stay"] += 1
        wait_s = (until_ns - now_ns) / 1e9
        raise NoRoomError(
            f"no room for '{record.model}' for {wait_s:.1f} s: the models in memory were loaded a moment ago",
            is_lasting=False,
            retry_after_s=wait_s,
        )

    def _check_members(self, ensemble: str, options: ModelOptions) -> None:
        """Check that the members of an ensemble fit in memory together, if the cost of each was measured.

        Otherwise each load of a member would evict another one, and requests for the ensemble would cause endless
        loads.

        Raises:
            NoRoomError: The members and the pinned models exceed a budget.
        """
        names = self._all_members(options)
        total = self._expect_together(names)
        if not total.is_measured:
            return
        for budget, held, missing in self._missing_together(total, names, self._residents(ensemble)):
            self._counts.refusals["budget"] += 1
            raise NoRoomError(
                f"the members of '{ensemble}' need about {format_bytes(budget.need)} together{budget.where}, "
                f"{budget.option} is {format_bytes(budget.nbytes)}, of which pinned models hold "
                f"{format_bytes(held)}: {format_bytes(missing)} too few",
                is_lasting=True,
            )

    def _keep_members(self, loading: VersionRecord, residents: list[Resident]) -> list[Resident]:
        """Keep the members of ensembles that are being loaded with a version, unless they do not fit together.

        Those that do not fit evict each other until each has been measured: ``_check_members`` then refuses them. A
        reload, which needs room for both loads of its model, may evict them.
        """
        if any(record.version == loading.version for record in self._catalog.ready(loading.model)):
            return residents
        kept: set[str] = set()
        for names in self._together:
            total = self._expect_together(names)
            if loading.model in names and not any(self._missing_together(total, names, residents)):
                kept.update(names)
        return [
            replace(resident, is_kept=True) if resident.name in kept and not resident.members else resident
            for resident in residents
        ]

    def _expect_together(self, names: Collection[str]) -> LoadCost:
        """What the known versions of models take together, unless they failed or ended. Ensembles take nothing."""
        costs = [
            self._expect(record.model, record.version, record.source)
            for name in names
            for record in self._catalog.of(name).values()
            if record.source is not None
            and record.state is not State.FAILED
            and not record.is_unloaded
            and not member_names(_options(record.source))
        ]
        return LoadCost(
            sum(cost.nbytes for cost in costs),
            0,
            sum_bytes(cost.on_devices for cost in costs),
            is_measured=all(cost.is_measured for cost in costs),
        )

    def _missing_together(
        self, total: LoadCost, names: Collection[str], residents: Sequence[Resident]
    ) -> Iterator[tuple[Budget, int, int]]:
        """The budgets that models exceed together with the pinned ones, what these hold, and what is missing."""
        pinned = [resident for resident in residents if resident.is_pinned and resident.name not in names]
        for budget in self._budgets(total, residents):
            held = sum(resident.held.get(budget.device, 0) for resident in pinned)
            if (missing := budget.need + held - budget.nbytes) > 0:
                yield budget, held, missing

    def _all_members(self, options: ModelOptions) -> set[str]:
        """The members of an ensemble at any depth."""
        found: set[str] = set()
        pending = [options]
        while pending:
            new = set(member_names(pending.pop())) - found
            found |= new
            pending += [
                _options(record.source) for name in new for record in self._catalog.of(name).values() if record.source
            ]
        return found

    def _residents(self, loading: str) -> list[Resident]:
        return [self._resident(name, self._catalog.ready(name), loading) for name in self._catalog.serving()]

    def _resident(self, name: str, records: list[VersionRecord], loading: str) -> Resident:
        served = [record.served for record in records if record.served is not None]
        return Resident(
            name,
            self._held(records),
            max([max(record.ready_ns, record.metrics.last_done_ns) for record in records]),
            max([record.stays_until_ns for record in records]),
            is_kept=name == loading or self._must_stay(name) or any(version.has_sequences for version in served),
            is_pinned=any(version.options.is_pinned for version in served),
            is_busy=any(version.is_busy for version in served),
            members=tuple(
                {member.name for version in served if isinstance(version, ServedEnsemble) for member in version.members}
            ),
        )

    def _held(self, records: Iterable[VersionRecord]) -> dict[str, int]:
        """Bytes that versions hold in the memory with a budget, by device or ``HOST``."""
        parts: list[Mapping[str, int]] = [{HOST: record.account.nbytes} for record in records if record.account]
        if self._gpu_budget_bytes is not None:
            parts += [record.served.device_bytes() for record in records if record.served is not None]
        return sum_bytes(parts)


def _options(source: VersionSource) -> ModelOptions:
    return source.configuration.options
