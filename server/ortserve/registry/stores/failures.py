"""The models of a store whose current files could not be fetched, and when to try again."""

from collections.abc import Collection, Set
from dataclasses import dataclass
from typing import Final

from ortserve.registry.repository.source import ModelSource
from ortserve.registry.stores.objects import model_name
from ortserve.registry.stores.placement import Placement, PlacementKey

_FIRST_RETRY_NS: Final = 10 * 10**9
_MAX_RETRY_NS: Final = 3600 * 10**9
"""Maximum wait between attempts at a model whose objects have not changed. The wait doubles with each failure, because
an attempt may fetch gigabytes."""


@dataclass(frozen=True, slots=True)
class _Failure:
    key: PlacementKey
    problem: str
    is_required: bool
    due_ns: int
    waited_ns: int


class Failures:
    """The last failed placement of each entry. The caller holds a lock."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    @property
    def entries(self) -> Set[str]:
        """The entries whose last placement failed."""
        return self._failures.keys()

    def note(self, placement: Placement, problem: str, now_ns: int, *, is_required: bool) -> None:
        """Record a failed placement, and schedule the next attempt."""
        before = self._failures.get(placement.entry)
        is_same = before is not None and before.key == placement.key
        waited_ns = before.waited_ns if before is not None and is_same else _FIRST_RETRY_NS // 2
        wait_ns = min(2 * waited_ns, _MAX_RETRY_NS)
        self._failures[placement.entry] = _Failure(placement.key, problem, is_required, now_ns + wait_ns, wait_ns)

    def forget(self, entry: str) -> None:
        """Forget the failure of an entry, if there is one."""
        self._failures.pop(entry, None)

    def keep(self, entries: Collection[str]) -> None:
        """Forget the failures of all other entries."""
        self._failures = {entry: failure for entry, failure in self._failures.items() if entry in entries}

    def is_due(self, entry: str, key: PlacementKey, now_ns: int) -> bool:
        """Whether an entry that has not been placed should be tried now."""
        failure = self._failures.get(entry)
        return failure is None or failure.key != key or now_ns >= failure.due_ns

    def sources(self) -> list[ModelSource]:
        """A source for each entry, with the problem."""
        return [
            ModelSource(model_name(entry), is_required=failure.is_required, problem=failure.problem)
            for entry, failure in self._failures.items()
        ]
