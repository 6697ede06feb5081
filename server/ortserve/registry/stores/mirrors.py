"""The mirrors of a server, for the registry. They run on threads of their own."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from ortserve.clock import Clock
from ortserve.config.model import LoadOptions
from ortserve.config.option_groups import StoreOptions
from ortserve.config.repository_url import RepositoryUrl
from ortserve.core.thread_pool import ThreadPool
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.stores.cache import StoreCache, default_cache_dir
from ortserve.registry.stores.mirror import Mirror
from ortserve.registry.stores.objects import Store, StoreError
from ortserve.telemetry.logs import log_event, log_fault
from ortserve.telemetry.readings import StoresReading

logger: Final = logging.getLogger(__name__)

_LOADS_SIDE_BY_SIDE: Final = 16
"""Maximum number of concurrent calls of mirrors in addition to the poll of each mirror. Further calls wait."""
_ARRIVALS_INTERVAL_S: Final = 0.5
"""Interval in which the start looks for files that have arrived. It then reads all repositories."""
_NAMES_MAX_AGE_S: Final = 10.0
"""Maximum age of the names in the repository index, so that not every request for it lists the stores."""
_NAMES_WAIT_S: Final = 2.0
"""Maximum wait of the repository index for listings. After that, it shows the last listing."""

_SIZE_WAIT_S: Final = 1.0
"""Maximum wait of the metrics for the size of the cache, whose disk may hang. After that, they show the last size."""

_REMOVAL_S: Final = 5.0
"""Maximum wait for files to be removed from the cache, whose disk may hang."""

_Result = TypeVar("_Result")


class Mirrors:
    """The repositories of a server that are in stores. Loop thread only, except ``reading``."""

    def __init__(self, mirrors: Sequence[Mirror], cache: StoreCache) -> None:
        self._mirrors = mirrors
        self._cache = cache
        # Threads of their own, because on asyncio's threads other calls would wait for a slow store.
        self._threads = ThreadPool(len(mirrors) + _LOADS_SIDE_BY_SIDE, "stores")
        self._sizing_thread = ThreadPool(1, "store cache size")  # its disk may hang, and the others list the stores
        self._removing_thread = ThreadPool(1, "store cache removal")  # as above
        self._sizing_lock = threading.Lock()
        self._sizing: Future[int] | None = None
        """Reads the size of the cache for the metrics."""
        self._size_bytes = 0
        self._polls: dict[Mirror, asyncio.Task[None]] = {}
        """The mirrors whose stores are being listed for a poll."""
        self._arrived = asyncio.Event()
        self._syncs: dict[asyncio.Future[str], Collection[str] | None] = {}
        """The syncs under way: the names of each, by a future whose result, a reason, makes the sync give up."""
        self._refused: list[tuple[str | None, str]] = []
        """Refusals in effect: the model whose files are not fetched, None for all models, and the reason."""

    def set_named_versions(self, named_versions: Callable[[str], Collection[int]]) -> None:
        """Set the function that names versions of a model to fetch in addition, if they exist. Called on any thread."""
        for mirror in self._mirrors:
            mirror.named_versions = named_versions

    async def sync(self, names: Collection[str] | None = None, *, with_all_versions: bool = False) -> None:
        """Update the folders, as ``Mirror.sync`` does.

        If a store that was listed before cannot be listed, the other repositories are still updated. If other stores
        have all of ``names``, this does not wait for those whose last listing has none of them.

        Raises:
            ServeError: not_ready, if a store cannot be listed and has never been listed, or its last listing has one of
                ``names``; cancelled, if ``refuse`` ends it.
        """
        for refused, because in self._refused:
            if _concerns(refused, names):
                raise ServeError(ErrorKind.CANCELLED, because)
        given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        sync = partial(Mirror.sync, names=names, with_all_versions=with_all_versions, is_over=given_up.done)
        calls = {mirror: asyncio.ensure_future(self._run(partial(sync, mirror))) for mirror in self._mirrors}
        for call in calls.values():  # asyncio would log an error of a call that ends after this one
            call.add_done_callback(lambda late: late.cancelled() or late.exception())
        self._syncs[given_up] = names
        try:
            while pending := [mirror for mirror, call in calls.items() if not call.done()]:
                found = {name for mirror in calls.keys() - pending for name in mirror.names()}
                if names and found.issuperset(names) and not any(mirror.may_have(names) for mirror in pending):
                    break
                waiting: list[asyncio.Future[Any]] = [given_up, *(calls[mirror] for mirror in pending)]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if given_up.done():
                    raise ServeError(ErrorKind.CANCELLED, given_up.result())
        finally:
            del self._syncs[given_up]
        for mirror, call in calls.items():
            if not call.done():
                continue
            try:
                call.result()
            except StoreError as error:
                if not mirror.is_known or (names is not None and mirror.may_have(names)):
                    raise ServeError(ErrorKind.NOT_READY, f"repository {mirror.url}: {error.message}") from None

    async def arrivals(self, names: Collection[str] | None) -> AsyncGenerator[set[str], None]:
        """Update the folders, as ``sync`` does.

        Yields:
            The names of the models whose files are still missing, each time that they have changed. The first ones
            come when all stores are listed. After the last file, nothing is yielded.

        Raises:
            ServeError: As ``sync``.
        """
        before: set[str] | None = None
        sync = asyncio.ensure_future(self.sync(names))
        try:
            while not (await asyncio.wait({sync}, timeout=_ARRIVALS_INTERVAL_S))[0]:
                missing = {name for mirror in self._mirrors for name in mirror.missing()}
                if missing != before and all(mirror.is_known for mirror in self._mirrors):
                    before = missing
                    yield missing
            sync.result()
        finally:
            sync.cancel()

    def refuse(self, because: str, name: str | None = None) -> None:
        """Give up the syncs of this model alone, and refuse further ones. If ``name`` is None, give up all syncs.

        A store that stalls would otherwise delay the unload of the model, or the end of the server, by its time limit.
        """
        self._refused.append((name, because))
        for given_up, names in self._syncs.items():
            if _concerns(name, names) and not given_up.done():
                given_up.set_result(because)
        for mirror in self._mirrors:
            mirror.give_up(None if name is None else [name])

    @contextmanager
    def refusing(self, because: str, name: str) -> Iterator[None]:
        """As ``refuse``, until the context exits."""
        self.refuse(because, name)
        try:
            yield
        finally:
            self._refused.remove((name, because))

    def may_have(self, name: str) -> bool:
        """Whether the last listing of a store has a model, or a store was never listed."""
        return any(mirror.may_have([name]) for mirror in self._mirrors)

    def begin_poll(self) -> None:
        """Begin to update all folders. Stores whose listing of an earlier poll is under way are left out."""
        self._arrived.clear()
        for mirror in self._mirrors:
            if mirror not in self._polls:
                self._polls[mirror] = asyncio.create_task(self._poll(mirror))

    async def wait_for_files(self) -> None:
        """Wait until a folder has changed because of ``begin_poll``, or a model could not be fetched."""
        await self._arrived.wait()

    @property
    def folders_lock(self) -> AbstractContextManager[object]:
        """The lock without which no folder changes. Hold it to read the folders, on any thread except the loop's."""
        return self._cache.folders_lock

    async def _poll(self, mirror: Mirror) -> None:
        try:
            has_removed, placements = await self._run(mirror.begin_sync)
        except StoreError:  # it is logged, and the next poll tries again
            return
        except Exception as error:  # noqa: BLE001 - a bug must not end the polls of other stores
            log_fault(logger, "a store could not be polled", error, repository=mirror.url)
            return
        finally:
            del self._polls[mirror]
        if has_removed:
            self._arrived.set()
        for placement in placements:
            asyncio.wrap_future(placement).add_done_callback(lambda _: self._arrived.set())

    async def names(self) -> set[str]:
        """Names of the models in the stores. Listings are at most a few seconds old, unless a store is slow."""
        listing = [
            asyncio.ensure_future(self._run(partial(mirror.refresh_names, _NAMES_MAX_AGE_S)))
            for mirror in self._mirrors
        ]
        await asyncio.wait(listing, timeout=_NAMES_WAIT_S)
        return {name for mirror in self._mirrors for name in mirror.names()}

    async def release(self, name: str) -> None:
        """Release the files of an unloaded model. If the disk of the cache hangs, that may end later."""
        for mirror in self._mirrors:
            await self._on_cache(partial(mirror.release, name), "the files of a model are still being released")

    def with_problems(self, sources: Iterable[ModelSource]) -> list[ModelSource]:
        """The sources, sorted by name. A model whose current files could not be fetched has a problem as its source."""
        found = {source.name: source for source in sources}
        for mirror in self._mirrors:
            found.update((source.name, source) for source in mirror.problems())
        return [found[name] for name in sorted(found)]

    def reading(self) -> StoresReading:
        """The values for the metrics. Called on the scraping thread."""
        with self._sizing_lock:  # a disk that hangs holds up one read, not one for each scrape
            if self._sizing is not None and self._sizing.done():
                self._take_size(self._sizing, 0)  # it ended after the scrape that began it
                self._sizing = None
            if self._sizing is None:
                with suppress(RuntimeError):  # the server ends
                    self._sizing = self._sizing_thread.submit(self._cache.size_bytes)
            sizing = self._sizing
        if sizing is not None:
            self._take_size(sizing, _SIZE_WAIT_S)
        return StoresReading([mirror.reading() for mirror in self._mirrors], self._size_bytes)

    def _take_size(self, sizing: Future[int], wait_s: float) -> None:
        with suppress(TimeoutError, OSError, CancelledError):
            self._size_bytes = sizing.result(wait_s)

    async def close(self) -> None:
        """Remove the folders. Call it when no model is loaded any more."""
        for poll in self._polls.values():
            poll.cancel()
        for mirror in self._mirrors:
            mirror.close()
        await self._on_cache(self._cache.close, "the folder of this process is still being removed from the cache")
        for threads in (self._threads, self._sizing_thread, self._removing_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _on_cache(self, remove: Callable[[], object], late: str) -> None:
        """Remove files from the cache. Logs ``late`` and returns early if that takes long: its disk may hang."""
        removing = asyncio.get_running_loop().run_in_executor(self._removing_thread, remove)
        if not (await asyncio.wait({removing}, timeout=_REMOVAL_S))[0]:
            removing.cancel()  # unless it has begun: it must not remove the files of a later load
            log_event(logger, logging.WARNING, late, waited_s=_REMOVAL_S)
        elif (error := removing.exception()) is not None:
            log_fault(logger, "files could not be removed from the cache", error)

    async def _run(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _concerns(name: str | None, names: Collection[str] | None) -> bool:
    """Whether a refusal of ``name`` applies to a sync of ``names``. None stands for all models.

    A sync of several models goes on although one of them is refused.
    """
    return name is None or (names is not None and set(names) == {name})


def open_repositories(
    repositories: Iterable[Path | RepositoryUrl], options: StoreOptions, defaults: LoadOptions, clock: Clock
) -> tuple[list[Path], Mirrors | None]:
    """Open all repositories. Returns their folders in order, and the mirrors of those in stores, or None.

    Raises:
        ServeError: invalid_input, if the cache cannot be used or a client library is missing or misconfigured.
    """
    given = list(repositories)
    if not any(isinstance(repository, RepositoryUrl) for repository in given):
        return [repository for repository in given if isinstance(repository, Path)], None
    cache = StoreCache(options.store_cache_dir or default_cache_dir(), options.store_cache_bytes)
    folders: list[Path] = []
    mirrors: list[Mirror] = []
    for number, repository in enumerate(given):
        if isinstance(repository, Path):
            folders.append(repository)
            continue
        folder = cache.view / f"repository-{number}"
        store = _open_store(repository, options, cache)
        etags = options.store_check_etags
        mirrors.append(Mirror(repository.text, store, cache, folder, defaults, clock, checks_etags=etags))
        folders.append(folder)
    return folders, Mirrors(mirrors, cache)


def _open_store(url: RepositoryUrl, options: StoreOptions, cache: StoreCache) -> Store:
    try:
        if url.scheme == "hf":
            from ortserve.registry.stores.hub import HubStore

            return HubStore(url, options.store_timeout_s)
        if url.scheme in ("http", "https"):
            from ortserve.registry.stores.archive import ArchiveStore

            return ArchiveStore(url, options.store_timeout_s, cache.new_path(), options.store_cache_bytes)
        from ortserve.registry.stores.object_store import ObjectStore

        return ObjectStore(url, options.store_timeout_s)
    except ModuleNotFoundError as error:
        extra = "hub" if url.scheme == "hf" else "stores"
        raise invalid_input(
            f"repositories: '{url}' needs the package {error.name}: pip install 'ortserve[{extra}]'"
        ) from None
    except StoreError as error:
        raise invalid_input(f"repositories: '{url}': {error.message}") from None
