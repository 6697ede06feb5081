"""Loads the models of the repositories at the start of the server."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Final

from ortserve.registry.dependents import closure_of, lacks_members
from ortserve.registry.reconciler import Reconciler
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.residency.memory_room import MemoryRoom
from ortserve.registry.source_reader import SourceReader


class InitialLoad:
    """Loads each model when its files have arrived, and ensembles when those of all members have. Loop thread only.

    Required models come first, then pinned ones, each with their members: they get processors and memory first. Under a
    memory budget no model is therefore loaded before the files of all have arrived.
    """

    def __init__(
        self,
        reader: SourceReader,
        reconciler: Reconciler,
        room: MemoryRoom,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """Load nothing yet.

        Args:
            reader: Reads the sources of the models.
            reconciler: Loads the models.
            room: Says whether a memory budget exists.
            start: Starts a change of models, as a task that ends with the registry.
        """
        self._reader: Final = reader
        self._reconciler: Final = reconciler
        self._room: Final = room
        self._start: Final = start
        self._applied: dict[str, ModelSource] = {}
        """The source of each model whose load has begun."""
        self._forced: set[str] = set()
        """Models that were loaded even if they could be loaded on demand."""

    async def load(self, only: Collection[str] | None) -> None:
        """Load the models of the repositories. A model that fails is recorded and does not stop others from loading.

        Args:
            only: Names of models; None for all.

        Raises:
            ServeError: invalid_input, if a repository cannot be read. Models may have been loaded before.
        """
        loads: list[asyncio.Task[None]] = []

        def load_arrived(sources: Sequence[ModelSource]) -> None:
            if not self._room.has_budget:
                loads.append(self._start(self._apply(_arrived(sources, only))))

        sources = await self._reader.read_all(only, load_arrived)
        await asyncio.gather(*loads, self._apply(_wanted(sources, only)))
        self._applied.clear()
        self._forced.clear()

    async def _apply(self, sources: Collection[ModelSource]) -> None:
        """Load the models whose load has not begun, and those on demand that an ensemble among them contains."""
        by_name = {source.name: source for source in sources}
        required = closure_of([source.name for source in sources if source.is_required], by_name)
        pinned = closure_of([source.name for source in sources if source.is_pinned], by_name)
        forced = closure_of([source.name for source in sources if not source.is_on_demand], by_name)
        due = [
            source
            for source in sorted(sources, key=lambda source: (source.name not in required, source.name not in pinned))
            if self._applied.get(source.name) != source
            or (source.name in forced and source.name not in self._forced and source.is_on_demand)
        ]
        self._applied |= {source.name: source for source in due}
        self._forced.update(forced)
        await self._reconciler.apply_all(due, forced=forced)


def _wanted(sources: Collection[ModelSource], only: Collection[str] | None) -> list[ModelSource]:
    """The models to load, with their members."""
    found = {source.name: source for source in sources}
    names = closure_of(found if only is None else sorted(only), found)
    return [found.get(name) or ModelSource(name, problem="it is in no repository") for name in names]


def _arrived(sources: Collection[ModelSource], only: Collection[str] | None) -> list[ModelSource]:
    """Those of ``_wanted`` that can be loaded before further files arrive. Problems may pass, so that they wait."""
    found = {source.name: source for source in sources if not source.problem}
    names = closure_of([name for name in (found if only is None else sorted(only)) if name in found], found)
    return [found[name] for name in names if not lacks_members(name, found)]
