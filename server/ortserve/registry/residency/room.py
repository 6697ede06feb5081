"""Which models leave memory to make room for a load. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

STAY_LOADS: Final = 5
"""A model stays for this many times the time of its load at least, so that it answers requests for longer than it took
to load, even if the models in use do not fit together."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory.

    Attributes:
        name: Of the model.
        nbytes: Of all its versions; 0 for an ensemble, whose members count.
        used_ns: When it last answered a request, or was loaded (monotonic).
        stays_until_ns: It does not leave before (monotonic).
        is_kept: Whether it does not leave now: it is changing, cannot be loaded again, or has live sequences.
        is_pinned: Whether it never leaves.
        is_busy: Whether it has admitted requests.
        members: Models that it holds open while it is in memory.
        on_devices: Bytes of all its versions by device.
    """

    name: str
    nbytes: int
    used_ns: int
    stays_until_ns: int = 0
    is_kept: bool = False
    is_pinned: bool = False
    is_busy: bool = False
    members: tuple[str, ...] = ()
    on_devices: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """How a load gets room.

    Attributes:
        evict: Models to evict, ensembles before their members; empty if there is room, or there is none to make.
        missing_bytes: What is missing even if every model leaves that may; 0 if there will be room.
        wait_until_ns: When models have stayed long enough for the load to get its room; 0 if none has to be awaited.
    """

    evict: tuple[str, ...] = ()
    missing_bytes: int = 0
    wait_until_ns: int = 0


def plan_room(need: int, budget: int, used: int, residents: Sequence[Resident], now_ns: int) -> RoomPlan:
    """Choose the models that leave: the least recently used ones, those with admitted requests last.

    A member of an ensemble counts as used when the ensemble was, and leaves after it.

    Args:
        need: Bytes that the load needs.
        budget: Bytes that all models may hold.
        used: Bytes that they hold, those that load or leave included.
        residents: The models that serve.
        now_ns: Monotonic.
    """
    excess = used + need - budget
    if excess <= 0:
        return RoomPlan()
    holders = _holders(residents)
    kept = _kept(residents)
    may_leave = [one for one in residents if one.nbytes and one.name not in kept]
    missing = excess - sum(one.nbytes for one in may_leave)
    if missing > 0:
        return RoomPlan(missing_bytes=missing)

    def groups(one: Resident) -> list[Resident]:
        return [one, *holders[one.name]]

    def stays_until_ns(one: Resident) -> int:
        return max(each.stays_until_ns for each in groups(one))

    def order(one: Resident) -> tuple[int, bool, int]:
        # First those that have stayed long enough; then the others as they become free to leave.
        group = groups(one)
        return (
            max(now_ns, stays_until_ns(one)),
            any(each.is_busy for each in group),
            max(each.used_ns for each in group),
        )

    leaving: dict[str, None] = {}
    freed = until_ns = 0
    for one in sorted(may_leave, key=order):
        if freed >= excess:
            break
        leaving.update((each.name, None) for each in groups(one))
        freed += one.nbytes
        until_ns = max(until_ns, stays_until_ns(one))
    if until_ns > now_ns:
        return RoomPlan(wait_until_ns=until_ns)
    return RoomPlan(tuple(sorted(leaving, key=lambda name: len(holders[name]))))


def _holders(residents: Sequence[Resident]) -> dict[str, list[Resident]]:
    """For each model the ensembles that contain it, however deep."""
    direct: dict[str, list[Resident]] = {one.name: [] for one in residents}
    for one in residents:
        for member in one.members:
            direct.setdefault(member, []).append(one)
    found: dict[str, list[Resident]] = {}
    for name in direct:
        above: dict[str, Resident] = {}
        pending = list(direct[name])
        while pending:
            holder = pending.pop()
            if holder.name not in above:
                above[holder.name] = holder
                pending += direct[holder.name]
        found[name] = list(above.values())
    return found


def _kept(residents: Sequence[Resident]) -> set[str]:
    """The models that do not leave: those that are kept, and the members of ensembles that are kept."""
    members = {one.name: one.members for one in residents}
    kept = {one.name for one in residents if one.is_kept or one.is_pinned}
    pending = list(kept)
    while pending:
        new = set(members.get(pending.pop(), ())) - kept
        kept |= new
        pending += new
    return kept
