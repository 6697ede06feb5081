"""What to load, keep and retire, so that what serves becomes what should: a pure decision."""

from collections.abc import Mapping
from dataclasses import dataclass

from ortserve.registry.source import VersionSource


@dataclass(frozen=True, slots=True)
class Swap:
    """Version numbers, ascending. ``retire`` are to go once all of ``load`` serve, and not before."""

    load: tuple[int, ...]
    retire: tuple[int, ...]


def plan_swap(serving: Mapping[int, VersionSource], wanted: Mapping[int, VersionSource]) -> Swap:
    """Say what leads from ``serving`` to ``wanted``; a version that would be loaded from the same again is kept."""
    return Swap(
        tuple(sorted(version for version, source in wanted.items() if serving.get(version) != source)),
        tuple(sorted(serving.keys() - wanted.keys())),
    )
