"""Chooses the models to evict to make room for a load. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

STAY_LOADS: Final = 5
"""Minimum stay of a model in memory, as a multiple of the duration of its load. Even if the models in use do not fit
together, a model then answers requests for longer than it took to load."""
HOST: Final = ""
"""Key of the host's memory among those of the devices."""

_Holder = TypeVar("_Holder")


@dataclass(frozen=True, slots=True)
class Budget:
    """The need of a load, and the budget and use of the memory concerned.

    Attributes:
        option: Name of the option that sets the budget.
        device: Name of the device; empty for the host.
        need: Bytes that the load needs.
        nbytes: Size of the budget in bytes.
        used: Bytes that models hold, without draining versions.
    """

    option: str
    device: str
    need: int
    nbytes: int
    used: int

    @property
    def excess(self) -> int:
        """Bytes by which the load and the models exceed the budget; 0 or less if the load fits."""
        return self.used + self.need - self.nbytes

    @property
    def where(self) -> str:
        """The device as a part of a message; empty for the host."""
        return f" on {self.device}" if self.device else ""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory.

    Attributes:
        name: Name of the model.
        held: Bytes of all its versions, by device or ``HOST``; empty for an ensemble, because its members count.
        used_ns: When the model last answered a request, or was loaded (monotonic).
        stays_until_ns: Earliest time of an eviction (monotonic).
        is_kept: Whether the model must not be evicted now: it is changing, cannot be loaded again, or has live
            sequences.
        is_pinned: Whether the model must never be evicted.
        is_busy: Whether the model has admitted requests that are not answered yet.
        members: Models that an ensemble holds open while it is in memory.
    """

    name: str
    held: Mapping[str, int]
    used_ns: int
    stays_until_ns: int = 0
    is_kept: bool = False
    is_pinned: bool = False
    is_busy: bool = False
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """The models to evict for a load, or why none is evicted now.

    Attributes:
        evict: Models to evict, ensembles before their members; empty if no eviction is needed, or none helps now.
        missing: Bytes that are missing even if all evictable models are evicted, by memory; empty if there will be
            room.
        wait_until_ns: When enough models may be evicted (monotonic); 0 if the load need not wait.
    """

    evict: tuple[str, ...] = ()
    missing: Mapping[str, int] = field(default_factory=dict)
    wait_until_ns: int = 0


def plan_evictions(excess: Mapping[str, int], residents: Sequence[Resident], now_ns: int) -> EvictionPlan:
    """Choose the models to evict: the least recently used ones first, those with admitted requests last.

    Use of an ensemble counts as use of its members, and an ensemble is evicted before its members. No model is evicted
    whose memory is not needed beside that of the others.

    Args:
        excess: By memory, the bytes by which the load and the models together exceed the budget; 0 or less if it fits.
        residents: The models that serve.
        now_ns: Monotonic.
    """
    holders = _holders(residents)
    kept = _kept(residents)
    may_leave = [resident for resident in residents if resident.name not in kept]
    free = {memory: sum(resident.held.get(memory, 0) for resident in may_leave) for memory in excess}
    if missing := {memory: nbytes - free[memory] for memory, nbytes in excess.items() if nbytes > max(0, free[memory])}:
        return EvictionPlan(missing=missing)

    def evicted_with(resident: Resident) -> list[Resident]:
        """The model, and the ensembles that must be evicted before it."""
        return [resident, *holders.get(resident.name, ())]

    def stays_until_ns(resident: Resident) -> int:
        return max(each.stays_until_ns for each in evicted_with(resident))

    def order(resident: Resident) -> tuple[int, bool, int]:
        # First the models that have stayed long enough, then the others in the order in which they become evictable.
        group = evicted_with(resident)
        return (
            max(now_ns, stays_until_ns(resident)),
            any(each.is_busy for each in group),
            max(each.used_ns for each in group),
        )

    chosen = choose_holders(excess, sorted(may_leave, key=order), lambda resident: resident.held)
    until_ns = max(map(stays_until_ns, chosen), default=0)
    if until_ns > now_ns:
        return EvictionPlan(wait_until_ns=until_ns)
    leaving = dict.fromkeys(each.name for resident in chosen for each in evicted_with(resident))
    return EvictionPlan(tuple(sorted(leaving, key=lambda name: len(holders.get(name, ())))))


def choose_holders(
    excess: Mapping[str, int], holders: Sequence[_Holder], held: Callable[[_Holder], Mapping[str, int]]
) -> list[_Holder]:
    """Choose holders in their order until they hold the excess of each memory, then leave out the unnecessary ones.

    A holder is unnecessary if the others hold enough. If all together do not hold enough, all that hold a part are
    chosen. ``held`` returns bytes by memory.
    """
    lacking = dict(excess)

    def add(holder: _Holder, sign: int) -> None:
        for memory, nbytes in held(holder).items():
            lacking[memory] = lacking.get(memory, 0) + sign * nbytes

    chosen: list[_Holder] = []
    for holder in holders:
        if any(nbytes and lacking.get(memory, 0) > 0 for memory, nbytes in held(holder).items()):
            chosen.append(holder)
            add(holder, -1)
    for holder in reversed(chosen[:]):
        if all(lacking.get(memory, 0) + nbytes <= 0 for memory, nbytes in held(holder).items()):
            chosen.remove(holder)
            add(holder, 1)
    return chosen


def in_start_order(residents: Sequence[Resident], order: Mapping[str, int], loading: str) -> list[Resident]:
    """The residents as ``plan_evictions`` should see them at the start.

    A load then evicts only models that come after it. Use does not count: the models that come last leave first,
    whatever their time in memory. Ensembles leave with their members.

    Args:
        residents: The models that serve.
        order: Places of the models in the order in which they get memory. Others are neither evicted nor evict.
        loading: Name of the model to load.
    """
    place = order.get(loading, len(order))
    return [
        replace(
            resident,
            used_ns=-len(order) if resident.members else -order.get(resident.name, 0),
            stays_until_ns=0,
            is_kept=resident.is_kept or not (resident.members or order.get(resident.name, -1) > place),
            is_pinned=False,
            is_busy=False,
        )
        for resident in residents
    ]


def _holders(residents: Sequence[Resident]) -> dict[str, list[Resident]]:
    """For each model that ensembles contain, these ensembles, at any depth."""
    direct: dict[str, list[Resident]] = {}
    for resident in residents:
        for member in resident.members:
            direct.setdefault(member, []).append(resident)
    found: dict[str, list[Resident]] = {}
    for name in direct:
        above: dict[str, Resident] = {}
        pending = list(direct[name])
        while pending:
            holder = pending.pop()
            if holder.name not in above:
                above[holder.name] = holder
                pending += direct.get(holder.name, ())
        found[name] = list(above.values())
    return found


def _kept(residents: Sequence[Resident]) -> set[str]:
    """The models that must not be evicted: kept and pinned ones, and the members of such ensembles."""
    members = {resident.name: resident.members for resident in residents}
    kept = {resident.name for resident in residents if resident.is_kept or resident.is_pinned}
    pending = list(kept)
    while pending:
        new = set(members.get(pending.pop(), ())) - kept
        kept |= new
        pending += new
    return kept
