"""Loads the models of the repositories at the start of the server."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from ortserve.registry.catalog import Catalog
from ortserve.registry.ensemble_sources import closure_of, lacks_members
from ortserve.registry.reconciler import Reconciler
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.residency.memory_room import MemoryRoom
from ortserve.registry.source_reader import SourceReader


class InitialLoad:
    """Loads the models in ``only``, or all models of the repositories. Loop thread only.

    Each model is loaded when its files have arrived, and an ensemble when those of all its members have. Required
    models come first, then pinned ones, each with their members: they get processors and memory first. Under a memory
    budget, a model is therefore evicted for one that comes before it and whose files arrive later. Once all have
    arrived, models that were evicted or got no room are tried again in order, so that those are in memory that would be
    if all files had been there at once.
    """

    def __init__(
        self,
        only: Collection[str] | None,
        catalog: Catalog,
        reader: SourceReader,
        reconciler: Reconciler,
        room: MemoryRoom,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """Load nothing yet. ``start`` starts a change of models, as a task that ends with the registry."""
        self._only = only
        self._catalog = catalog
        self._reader = reader
        self._reconciler = reconciler
        self._room = room
        self._start = start
        self._loads: list[asyncio.Task[None]] = []
        """The loads that began before the last files arrived."""
        self._begun: dict[str, ModelSource] = {}
        """The source of the latest load of each model. Calls may have unloaded some since, which then stay unloaded."""
        self._was_forced: set[str] = set()
        """Models whose load has begun, and would have begun even if they could be loaded on demand."""

    async def run(self, on_begun: Callable[[], None]) -> None:
        """Load the models. A failed model does not stop the others.

        ``on_begun`` is called when all loads have begun or wait for their turns, and only newer files can change
        anything.

        Raises:
            ServeError: invalid_input, if a repository cannot be read. Models may have been loaded before.
        """
        sources = await self._reader.read_all(self._only, self._load_arrived)
        self._room.start_order = start_order(sources, self._only)
        wanted = _wanted(sources, self._only)
        # Loads from before the last arrival took and refused room until now.
        needs_second_round = bool(self._loads) and self._room.has_budget
        if not needs_second_round:
            on_begun()
        await asyncio.gather(*self._loads, self._apply(wanted, is_whole=True))
        if needs_second_round:
            await self._apply(wanted, is_whole=True)
            on_begun()

    def _load_arrived(self, sources: Sequence[ModelSource]) -> None:
        """Begin to load the models that need no further files."""
        self._room.start_order = start_order(sources, self._only)
        self._loads.append(self._start(self._apply(_arrived(sources, self._only))))

    async def _apply(self, sources: Collection[ModelSource], *, is_whole: bool = False) -> None:
        """Load the models whose load has not begun, and those not in memory that an ensemble among them contains.

        If ``is_whole``, all files have arrived, and all models that were evicted or got no room are loaded, too.
        """
        by_name = {source.name: source for source in sources}
        forced = closure_of([source.name for source in sources if not source.is_on_demand], by_name)
        new = {name for name, source in by_name.items() if self._begun.get(name) != source}
        again = forced if is_whole else closure_of([name for name in forced if name in new], by_name)
        missing = {name for name in again if self._is_missing(name)}
        order = self._room.start_order
        due = [source for name, source in by_name.items() if name in new or name in missing]
        self._begun.update((source.name, source) for source in due)
        self._was_forced.update(source.name for source in due if source.name in forced)
        due.sort(key=lambda source: order.get(source.name, len(order)))
        await self._reconciler.apply_all(due, forced=forced)

    def _is_missing(self, name: str) -> bool:
        """Whether a model was evicted, got no room, or is on demand and its change has not begun: it has no records.

        A model whose change was forced has no records if it was unloaded since: an unload forgets failed and cancelled
        loads. It is not missing.
        """
        has_records = bool(self._catalog.of(name))
        return self._catalog.lacks_room(name) or not (has_records or name in self._was_forced)


def start_order(sources: Collection[ModelSource], only: Collection[str] | None = None) -> dict[str, int]:
    """The places of the models that are loaded at the start in the order in which they get memory."""
    found = {source.name: source for source in sources}
    names = closure_of(
        [name for name in (found if only is None else sorted(only)) if name in found and not found[name].is_on_demand],
        found,
    )
    required = closure_of([name for name in names if found[name].is_required], found)
    pinned = closure_of([name for name in names if found[name].is_pinned], found)
    ordered = sorted(names, key=lambda name: (name not in required, name not in pinned))
    return {name: place for place, name in enumerate(ordered)}


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
