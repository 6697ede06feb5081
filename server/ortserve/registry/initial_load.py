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


async def load_initially(
    only: Collection[str] | None,
    catalog: Catalog,
    reader: SourceReader,
    reconciler: Reconciler,
    room: MemoryRoom,
    start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    on_begun: Callable[[], None],
) -> None:
    """Load the models in ``only``, or all models of the repositories. A failed model does not stop the others.

    Each model is loaded when its files have arrived, and an ensemble when those of all its members have. Required
    models come first, then pinned ones, each with their members: they get processors and memory first. Under a memory
    budget, a model is therefore evicted for one that comes before it and whose files arrive later. Once all have
    arrived, models that were evicted or got no room are tried again in order, so that those are in memory that would be
    if all files had been there at once. ``start`` starts a change of models, as a task that ends with the registry.
    ``on_begun`` is called when all loads have begun or wait for their turns, and only newer files can change anything.

    Raises:
        ServeError: invalid_input, if a repository cannot be read. Models may have been loaded before.
    """
    loads: list[asyncio.Task[None]] = []
    begun: dict[str, ModelSource] = {}  # By model: calls may have unloaded some since, which then stay unloaded.
    was_forced: set[str] = set()

    def load_arrived(sources: Sequence[ModelSource]) -> None:
        room.start_order = start_order(sources, only)
        loads.append(start(apply(_arrived(sources, only))))

    async def apply(sources: Collection[ModelSource], *, is_whole: bool = False) -> None:
        """Load the models whose load has not begun, and those not in memory that an ensemble among them contains.

        If ``is_whole``, all files have arrived, and all models that were evicted or got no room are loaded, too.
        """
        by_name = {source.name: source for source in sources}
        forced = closure_of([source.name for source in sources if not source.is_on_demand], by_name)
        new = {name for name, source in by_name.items() if begun.get(name) != source}
        again = forced if is_whole else closure_of([name for name in forced if name in new], by_name)
        # A model on demand has no records until its change begins. A model whose change was forced has none if it was
        # unloaded since: an unload forgets failed and cancelled loads.
        missing = {name for name in again if catalog.lacks_room(name) or not (catalog.of(name) or name in was_forced)}
        order = room.start_order
        due = [source for name, source in by_name.items() if name in new or name in missing]
        begun.update((source.name, source) for source in due)
        was_forced.update(source.name for source in due if source.name in forced)
        due.sort(key=lambda source: order.get(source.name, len(order)))
        await reconciler.apply_all(due, forced=forced)

    sources = await reader.read_all(only, load_arrived)
    room.start_order = start_order(sources, only)
    wanted = _wanted(sources, only)
    is_twofold = bool(loads) and room.has_budget  # Loads from before the last arrival took and refused room until now.
    if not is_twofold:
        on_begun()
    await asyncio.gather(*loads, apply(wanted, is_whole=True))
    if is_twofold:
        await apply(wanted, is_whole=True)
        on_begun()


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
