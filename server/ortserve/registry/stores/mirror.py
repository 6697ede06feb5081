"""Mirrors a repository in a store into a folder, which the rest of the registry reads like any repository.

A mirror decides which models are due, and places several of them at a time. A placement that takes long delays neither
listings nor other placements.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.config.model import LoadOptions, says_required
from ortserve.core.thread_pool import ThreadPool
from ortserve.registry.repository.model_files import OPTIONS_FILE, TRITON_OPTIONS_FILE
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.stores.cache import StoreCache, with_known_digests
from ortserve.registry.stores.failures import Failures
from ortserve.registry.stores.fetch import FetchProgress
from ortserve.registry.stores.listing_log import ListingLog
from ortserve.registry.stores.objects import Store, StoredObject, StoreError, group_by_entry, model_name
from ortserve.registry.stores.placement import Objects, Placement, PlacementKey, Placer
from ortserve.telemetry.logs import log_event, log_fault
from ortserve.telemetry.readings import StoreReading

logger: Final = logging.getLogger(__name__)

_MODELS_SIDE_BY_SIDE: Final = 4
_LISTING_NS: Final = 5 * 10**9
"""Interval in which the listing is written while placements are under way. A process that is killed then loses the
digests of a few seconds: the next one fetches these files again."""


@dataclass(slots=True)
class _State:
    """What a mirror knows.

    Attributes:
        objects: The last listing, by path.
        entries: Its objects by entry.
        placed: The key of the placement that the folder shows, by entry.
        failures: Entries whose current files could not be placed.
        is_known: Whether a listing from the store or the cache exists.
    """

    objects: dict[str, StoredObject] = field(default_factory=dict)
    entries: Mapping[str, Objects] = field(default_factory=dict)
    placed: dict[str, PlacementKey] = field(default_factory=dict)
    failures: Failures = field(default_factory=Failures)
    is_known: bool = False


class Mirror:
    """Fetches models of one store into its folder. Any thread.

    ``refresh_names``, ``begin_sync`` and ``sync`` block on the network.
    """

    def __init__(
        self,
        url: str,
        store: Store,
        cache: StoreCache,
        folder: Path,
        defaults: LoadOptions,
        clock: Clock,
        *,
        checks_etags: bool = True,
    ) -> None:
        """Fetch nothing yet.

        Args:
            url: Address of the repository; logs show it.
            store: Store of the repository.
            cache: Cache of the server.
            folder: New folder in the cache's view; created here.
            defaults: Values of options that a model's own configuration does not set.
            clock: Monotonic nanoseconds.
            checks_etags: Whether ETags that look like MD5 digests must match the contents.
        """
        self.url: Final = url
        self.folder: Final = folder
        self._store = store
        self._cache = cache
        self._clock = clock
        self._listing = threading.Lock()
        """Held during a listing. A store may fetch much for one, which the next one then need not fetch again."""
        self._lock = threading.Lock()
        self._state = _State()
        self._is_up = False
        self._failed_lists = self._failed_models = 0
        self._progress = FetchProgress(url, clock)
        self._placing: dict[str, Placement] = {}
        """The newest placement of each entry that waits or is under way."""
        self._users = 0
        """Number of calls and placements that may read the store."""
        self._models = ThreadPool(_MODELS_SIDE_BY_SIDE, "store-models")
        self._placer = Placer(
            store, cache, folder, defaults, self._progress, checks_etags=checks_etags, on_digest=self._note_digest
        )
        self._log = ListingLog(url)
        self._listed_ns = self._written_ns = 0
        self._writing = threading.Lock()
        """Held while the listing is written, so that an earlier one never replaces a later one with more digests."""
        self._is_unwritten = False
        """Whether the listing has changed since it was last written to the cache."""
        self.named_versions: Callable[[str], Collection[int]] = lambda _: ()
        """Returns versions of a model to fetch in addition, if the store has them. Called on any thread."""
        folder.mkdir()

    def refresh_names(self, max_age_s: float) -> None:
        """List the store again if the last listing is older than ``max_age_s`` and none is under way."""
        if self._clock() < self._listed_ns + max_age_s * 1e9 or self._listing.locked():
            return
        self._listed_ns = self._clock()  # Also delays the next attempt if the listing fails.
        with suppress(StoreError):
            self._list()

    def names(self) -> list[str]:
        """Names of the models in the last listing."""
        return [model_name(entry) for entry in self._state.entries]

    @property
    def is_known(self) -> bool:
        """Whether a listing from the store or the cache exists."""
        return self._state.is_known

    def may_have(self, names: Collection[str]) -> bool:
        """Whether the last listing has any of the named models, or there is no listing yet."""
        return not self._state.is_known or any(name in names for name in self.names())

    def missing(self) -> set[str]:
        """Names of the listed models whose files are neither in the folder nor have failed to arrive. Any thread."""
        with self._lock:
            here = self._state.placed.keys() | self._state.failures.entries
            return {model_name(entry) for entry in self._state.entries.keys() - here}

    def problems(self) -> list[ModelSource]:
        """Sources of the models whose current files could not be fetched, with the problem. Any thread."""
        with self._lock:
            return self._state.failures.sources()

    def reading(self) -> StoreReading:
        """The values for the metrics. Any thread."""
        return StoreReading(self.url, self._is_up, self._progress.total_bytes, self._failed_lists, self._failed_models)

    def sync(
        self,
        names: Collection[str] | None = None,
        is_over: Callable[[], bool] = lambda: False,
        *,
        with_all_versions: bool = False,
    ) -> None:
        """Update models in the folder. Returns when their current files are there, or have failed to arrive.

        If the store has never been listed and cannot be listed now, the models that are complete in the cache are used.

        Args:
            names: Names of the models to update; None for all.
            is_over: Whether the caller has given up.
            with_all_versions: Whether to fetch versions that the configuration does not choose, too.

        Raises:
            StoreError: The store cannot be listed. Then nothing has changed.
        """
        is_offline = False
        with self._use():
            try:
                self._list()
            except StoreError as error:
                if self._state.is_known:
                    raise
                self._use_last_listing(error)
                is_offline = True
            self._begin_placements(names, with_all_versions=with_all_versions, is_offline=is_offline)
            if is_over():  # before these placements began
                self.give_up(names)
            while pending := self._pending(names):  # A newer placement may follow.
                wait(pending)
        if is_offline and not self._state.placed:
            self._state = _State()
            raise StoreError("the store cannot be listed, and the cache has no complete model of this store")

    def begin_sync(self) -> tuple[bool, list[Future[None]]]:
        """List the store, and begin to update all models in the folder. Does not wait for fetches.

        A model that cannot be fetched keeps its current files. A model that is gone from the store is removed.

        Returns:
            Whether models were removed from the folder, and the ends of the placements that this call began.

        Raises:
            StoreError: The store cannot be listed. Then nothing has changed.
        """
        with self._use():
            self._list()
            return self._begin_placements(None, with_all_versions=False, is_offline=False)

    def give_up(self, names: Collection[str] | None) -> None:
        """End the placements of models soon, None for those of all, and make no caller wait for them any more."""
        with self._lock:
            for entry, placement in self._placing.items():
                if _is_among(entry, names):
                    placement.give_up()

    def release(self, name: str) -> None:
        """Remove an unloaded model from the folder. The cache may then evict its contents."""
        self._remove({name, f"{name}.onnx"} & self._state.placed.keys())

    def close(self) -> None:
        """End the placements under way soon, and begin no further ones."""
        self.give_up(None)
        self._models.shutdown(wait=False)

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Keep what the store holds between listing and reading, until the last user has ended."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            self._end_use()

    def _end_use(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self._store.settle()

    def _list(self) -> None:
        with self._listing:
            known = self._state.objects or self._cache.read_listing(self.url)
            try:
                listed = with_known_digests(self._store.list(known), known)
            except StoreError as error:
                self._is_up = False
                self._failed_lists += 1
                self._log.failed(error)
                raise
            self._listed_ns = self._clock()
            with self._lock:
                # with digests from fetches that have ended since
                self._state.objects = with_known_digests(listed.values(), self._state.objects)
                self._state.entries = group_by_entry(self._state.objects.values())
                self._state.is_known = True
        self._is_up = True
        self._log.listed(listed)

    def _use_last_listing(self, error: StoreError) -> None:
        known = self._cache.read_listing(self.url)
        if not known:
            raise error
        with self._lock:
            self._state.objects, self._state.entries = known, group_by_entry(known.values())
            self._state.is_known = True
        message = "using the models of the cache, according to the last listing of the store"
        log_event(logger, logging.WARNING, message, repository=self.url)

    def _begin_placements(
        self, names: Collection[str] | None, *, with_all_versions: bool, is_offline: bool
    ) -> tuple[bool, list[Future[None]]]:
        """Begin the placements that are due, and remove what is gone. Returns as ``begin_sync``."""
        entries = self._state.entries
        keys = {
            entry: self._key(entry, entries[entry], with_all_versions) for entry in entries if _is_among(entry, names)
        }
        with self._lock:
            begun = [
                self._begin_placement(Placement(entry, entries[entry], key, is_offline, self._cache.new_path()))
                for entry, key in keys.items()
                if self._is_due(entry, key, is_retry=names is not None)
            ]
            present = self._state.entries.keys()  # from the latest listing, which another thread may have made
            for entry in self._placing.keys() - present:
                self._placing[entry].is_outdated = True
            self._state.failures.keep(present)
            gone = [entry for entry in self._state.placed.keys() - present if _is_among(entry, names)]
        if gone:
            self._remove(gone)
            self._is_unwritten = True  # A start without the store must not bring them back.
            self._write_listing()
        return bool(gone), begun

    def _key(self, entry: str, objects: Objects, with_all_versions: bool) -> PlacementKey:
        named = tuple(sorted(self.named_versions(model_name(entry))))
        return PlacementKey(
            with_all_versions, named, tuple(sorted((one.path, one.size, one.tag) for one in objects.values()))
        )

    def _is_due(self, entry: str, key: PlacementKey, *, is_retry: bool) -> bool:
        """Whether an entry should be placed now. The caller holds the lock."""
        if (placement := self._placing.get(entry)) is not None:
            return placement.key != key or placement.is_outdated
        if self._state.placed.get(entry) == key:
            self._state.failures.forget(entry)  # it is about objects that the store no longer has
            return False
        return is_retry or self._state.failures.is_due(entry, key, self._clock())

    def _begin_placement(self, placement: Placement) -> Future[None]:
        """Begin a placement. It follows the one of its entry that is under way. The caller holds the lock."""
        before = self._placing.get(placement.entry)
        if before is not None and before.key.objects != placement.key.objects:
            before.is_outdated = True
        self._placing[placement.entry] = placement
        self._users += 1
        self._models.submit(self._run_placement, placement, before)
        return placement.ended

    def _pending(self, names: Collection[str] | None) -> list[Future[None]]:
        """The ends of the placements of the named models that wait or are under way. Those given up are left out."""
        with self._lock:
            return [
                placement.settled
                for entry, placement in self._placing.items()
                if not placement.settled.done() and _is_among(entry, names)
            ]

    def _run_placement(self, placement: Placement, before: Placement | None) -> None:
        try:
            if before is not None:  # It holds a thread or has ended, because threads take placements in their order.
                wait([before.ended])
            self._try_to_place(placement)
        except Exception as error:  # noqa: BLE001 - a bug must not keep the other models from loading
            log_fault(logger, "a model of a store could not be placed", error, model=model_name(placement.entry))
        finally:
            with self._lock:
                if self._placing.get(placement.entry) is placement:
                    del self._placing[placement.entry]
            self._write_listing()
            self._end_use()
            placement.end()

    def _try_to_place(self, placement: Placement) -> None:
        entry = placement.entry
        try:
            self._placer.place(placement)
        except StoreError as error:
            problem = f"its files cannot be fetched: {error.message}"
        except OSError as error:
            problem = f"its files cannot be fetched: the cache cannot be used: {error.strerror}"
        except Exception as error:  # noqa: BLE001 - a bug must not keep the other models from loading
            log_fault(logger, "the files of a model could not be fetched", error, model=model_name(entry))
            problem = "its files cannot be fetched"
        else:
            with self._lock:
                self._state.placed[entry] = placement.key
                self._state.failures.forget(entry)
            self._is_unwritten = not placement.is_offline
            return
        tree = placement.tree
        is_required = any(says_required(tree / entry / name) for name in (OPTIONS_FILE, TRITON_OPTIONS_FILE))
        shutil.rmtree(tree, ignore_errors=True)
        if not placement.is_outdated:
            self._failed_models += 1
            with self._lock:
                self._state.failures.note(placement, problem, self._clock(), is_required=is_required)

    def _note_digest(self, one: StoredObject, digest: str) -> None:
        with self._lock:
            known = self._state.objects.get(one.path)
            if known is not None and known.tag == one.tag:
                self._state.objects[one.path] = StoredObject(one.path, one.size, one.tag, digest)

    def _write_listing(self) -> None:
        """Write the listing and its digests for the next start: now and then, and after the last placement."""
        with self._writing:
            with self._lock:
                is_due = not self._placing or self._clock() >= self._written_ns + _LISTING_NS
                if not self._is_unwritten or not is_due:
                    return
                self._is_unwritten, self._written_ns = False, self._clock()
                objects = list(self._state.objects.values())
            others = self._cache.read_listing(self.url)  # has digests of files that other processes fetched
            try:
                self._cache.write_listing(self.url, with_known_digests(objects, others).values())
            except StoreError as error:
                message = "the listing of the store cannot be written; the next start fetches more than it needs"
                log_event(logger, logging.WARNING, message, repository=self.url, reason=error.message)

    def _remove(self, entries: Iterable[str]) -> None:
        for entry in entries:
            with self._lock:
                self._state.placed.pop(entry, None)
            self._placer.remove(entry)


def _is_among(entry: str, names: Collection[str] | None) -> bool:
    """Whether an entry is that of one of the models. None stands for all models."""
    return names is None or model_name(entry) in names
