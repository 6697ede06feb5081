"""Mirrors a repository in a store into a folder, which the rest of the registry reads like any repository.

A model appears in the folder in one step: its files are linked into a tree beside the folder, then a symbolic link to
the tree is renamed into the folder. Unchanged files keep their inodes, so a new version does not reload the others.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from ortserve.clock import Clock
from ortserve.config.model import LoadOptions, says_required
from ortserve.registry.repository.model_files import OPTIONS_FILE, TRITON_OPTIONS_FILE
from ortserve.registry.repository.source import ModelSource
from ortserve.registry.stores.cache import StoreCache, with_known_digests
from ortserve.registry.stores.fetch import FetchProgress, fetch_object
from ortserve.registry.stores.model_plan import (
    DIGESTS_FILE,
    first_objects,
    listed_versions,
    missing_objects,
    needed_objects,
    read_digests,
    wanted_versions,
)
from ortserve.registry.stores.objects import (
    Store,
    StoredObject,
    StoreError,
    group_by_entry,
    model_name,
    path_problem,
)
from ortserve.telemetry.logs import log_event, log_fault

logger: Final = logging.getLogger(__name__)

_MODELS_SIDE_BY_SIDE: Final = 4
_FIRST_RETRY_NS: Final = 10 * 10**9
_MAX_RETRY_NS: Final = 3600 * 10**9
"""Maximum wait between attempts at a model whose objects have not changed. The wait doubles with each failure, because
an attempt may fetch gigabytes."""

Objects: TypeAlias = Mapping[str, StoredObject]
_Signature: TypeAlias = tuple[bool, tuple[int, ...], tuple[tuple[str, int, str], ...]]


@dataclass(frozen=True, slots=True)
class _Failure:
    signature: _Signature
    problem: str
    is_required: bool
    due_ns: int
    waited_ns: int


@dataclass(slots=True)
class MirrorCounts:
    """Values for the metrics of one repository.

    Attributes:
        is_up: Whether the last listing succeeded.
        failed_lists: Number of failed listings.
        failed_models: Number of failed attempts to fetch a model.
    """

    is_up: bool = False
    failed_lists: int = 0
    failed_models: int = 0


@dataclass(slots=True)
class _State:
    """State of a mirror, changed under its lock.

    Entries are folders of models and single-file models. ``placed`` and ``failures`` are by entry.
    """

    objects: dict[str, StoredObject] = field(default_factory=dict)
    entries: Mapping[str, Objects] = field(default_factory=dict)
    placed: dict[str, _Signature] = field(default_factory=dict)
    failures: dict[str, _Failure] = field(default_factory=dict)
    is_known: bool = False
    """Whether a listing from the store or the cache exists."""


class Mirror:
    """Fetches models of one store into its folder. Any thread; ``names`` and ``sync`` block on the network."""

    def __init__(
        self,
        url: str,
        store: Store,
        cache: StoreCache,
        folder: Path,
        defaults: LoadOptions,
        files: Executor,
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
            files: Threads that fetch files, shared by all mirrors.
            clock: Monotonic nanoseconds.
            checks_etags: Whether ETags that look like MD5 digests must match the contents.
        """
        self.url: Final = url
        self.folder: Final = folder
        self.counts: Final = MirrorCounts()
        self.progress: Final = FetchProgress(url, clock)
        self._store = store
        self._cache = cache
        self._defaults = defaults
        self._files = files
        self._clock = clock
        self._checks_etags = checks_etags
        self._lock = threading.Lock()
        self._state = _State()
        self._reported = ""
        self._listed_ns = 0
        self.named_versions: Callable[[str], Collection[int]] = lambda _: ()
        """Returns versions of a model to fetch in addition, if the store has them. Called on any thread."""
        folder.mkdir()

    def names(self, max_age_s: float) -> list[str]:
        """Names of the models in the store. Lists the store again if the last listing is older than ``max_age_s``."""
        if self._clock() >= self._listed_ns + max_age_s * 1e9:
            self._listed_ns = self._clock()  # Also delays the next attempt if the listing fails.
            try:
                self._list()
            except StoreError as error:
                self._report(error)
        return [model_name(entry) for entry in self._state.entries]

    @property
    def is_known(self) -> bool:
        """Whether a listing from the store or the cache exists."""
        return self._state.is_known

    def has_any(self, names: Collection[str]) -> bool:
        """Whether the last listing has any of the named models."""
        return any(model_name(entry) in names for entry in self._state.entries)

    def problems(self) -> list[ModelSource]:
        """Sources of the models whose current files could not be fetched, with the problem. Any thread."""
        with self._lock:
            return [
                ModelSource(model_name(entry), is_required=failure.is_required, problem=failure.problem)
                for entry, failure in self._state.failures.items()
            ]

    def sync(self, names: Collection[str] | None = None, *, with_all_versions: bool = False) -> None:
        """Update models in the folder. A model that cannot be fetched keeps its current files.

        A model that is gone from the store is removed from the folder. If the store has never been listed and cannot be
        listed now, the models that are complete in the cache are used.

        Args:
            names: Names of the models to update; None for all.
            with_all_versions: Whether to fetch versions that the configuration does not choose, too.

        Raises:
            StoreError: The store cannot be listed. Then nothing has changed.
        """
        is_offline = False
        try:
            self._list()
        except StoreError as error:
            self._report(error)
            if self._state.is_known:
                raise
            self._use_last_listing(error)
            is_offline = True
        due = [
            (entry, objects)
            for entry, objects in self._state.entries.items()
            if (names is None or model_name(entry) in names)
            and self._is_due(entry, objects, with_all_versions, is_retry=names is not None)
        ]
        try:
            if len(due) == 1:
                self._try_to_place(*due[0], with_all_versions, is_offline)
            elif due:
                with ThreadPoolExecutor(_MODELS_SIDE_BY_SIDE, thread_name_prefix="store-models") as threads:
                    for entry, objects in due:
                        threads.submit(self._try_to_place, entry, objects, with_all_versions, is_offline)
        finally:
            self._store.settle()
        present = self._state.entries.keys()  # from the latest listing, which another thread may have made
        placed = {entry for entry in list(self._state.placed) if names is None or model_name(entry) in names}
        self._remove(placed - present)
        with self._lock:
            for entry in self._state.failures.keys() - present:
                self._state.failures.pop(entry, None)
        if due and not is_offline:
            others = self._cache.read_listing(self.url)  # has digests of files that other processes fetched
            self._cache.write_listing(self.url, with_known_digests(self._state.objects.values(), others).values())
        if is_offline and not self._state.placed:
            self._state = _State()
            raise StoreError("the store cannot be listed, and the cache has no complete model of this store")

    def release(self, name: str) -> None:
        """Remove an unloaded model from the folder. The cache may then evict its contents."""
        self._remove({name, f"{name}.onnx"} & self._state.placed.keys())

    def _list(self) -> None:
        known = self._state.objects or self._cache.read_listing(self.url)
        try:
            listed = with_known_digests(self._store.list(known), known)
        except StoreError:
            self.counts.is_up = False
            self.counts.failed_lists += 1
            raise
        self._listed_ns = self._clock()
        with self._lock:
            for path, one in self._state.objects.items():  # digests from fetches that have ended since
                if path in listed and one.tag == listed[path].tag and one.sha256:
                    listed[path] = one
            self._state.objects = listed
            self._state.entries = group_by_entry(listed.values())
            self._state.is_known = True
        self.counts.is_up = True
        if self._reported:
            self._reported = ""
            log_event(logger, logging.INFO, "the store can be listed again", repository=self.url)

    def _report(self, error: StoreError) -> None:
        if error.message != self._reported:  # logged once per change, not at every poll
            self._reported = error.message
            message = "the store cannot be listed; its loaded models keep serving"
            log_event(logger, logging.ERROR, message, repository=self.url, reason=error.message)

    def _use_last_listing(self, error: StoreError) -> None:
        known = self._cache.read_listing(self.url)
        if not known:
            raise error
        with self._lock:
            self._state.objects, self._state.entries = known, group_by_entry(known.values())
            self._state.is_known = True
        message = "using the models of the cache, according to the last listing of the store"
        log_event(logger, logging.WARNING, message, repository=self.url)

    def _is_due(self, entry: str, objects: Objects, with_all_versions: bool, *, is_retry: bool) -> bool:
        signature = self._sign(entry, objects, with_all_versions)
        if self._state.placed.get(entry) == signature:
            with self._lock:
                self._state.failures.pop(entry, None)  # it is about objects that the store no longer has
            return False
        failure = self._state.failures.get(entry)
        return is_retry or failure is None or failure.signature != signature or self._clock() >= failure.due_ns

    def _sign(self, entry: str, objects: Objects, with_all_versions: bool) -> _Signature:
        """The objects of an entry, and the choice of versions. A failed or placed entry is due when this changes."""
        named = tuple(sorted(self.named_versions(model_name(entry))))
        return with_all_versions, named, tuple(sorted((one.path, one.size, one.tag) for one in objects.values()))

    def _try_to_place(self, entry: str, objects: Objects, with_all_versions: bool, is_offline: bool) -> None:
        signature = self._sign(entry, objects, with_all_versions)
        tree = self._cache.new_path()
        try:
            self._place(entry, objects, tree, with_all_versions, is_offline)
        except StoreError as error:
            problem = f"its files cannot be fetched: {error.message}"
        except OSError as error:
            problem = f"its files cannot be fetched: the cache cannot be used: {error.strerror}"
        except Exception as error:  # noqa: BLE001 - a bug must not keep the other models from loading
            log_fault(logger, "the files of a model could not be fetched", error, model=model_name(entry))
            problem = "its files cannot be fetched"
        else:
            with self._lock:
                self._state.placed[entry] = signature
                self._state.failures.pop(entry, None)
            return
        is_required = any(says_required(tree / entry / name) for name in (OPTIONS_FILE, TRITON_OPTIONS_FILE))
        shutil.rmtree(tree, ignore_errors=True)
        self.counts.failed_models += 1
        with self._lock:
            before = self._state.failures.get(entry)
            is_same = before is not None and before.signature == signature
            waited_ns = before.waited_ns if before is not None and is_same else _FIRST_RETRY_NS // 2
            wait_ns = min(2 * waited_ns, _MAX_RETRY_NS)
            failure = _Failure(signature, problem, is_required, self._clock() + wait_ns, wait_ns)
            self._state.failures[entry] = failure

    def _place(self, entry: str, objects: Objects, tree: Path, with_all_versions: bool, is_offline: bool) -> None:
        for path in objects:
            if problem := path_problem(path):
                raise StoreError(problem, is_final=True)
        if entry in objects:
            self._take(objects.values(), tree, {}, is_offline)
            self._show(entry, tree / entry)
            return
        folder = tree / entry
        first = first_objects(objects)
        self._take((one for one in first if one.path == f"{entry}/{DIGESTS_FILE}"), tree, {}, is_offline)
        by_path = read_digests(folder / DIGESTS_FILE)
        digests = {f"{entry}/{path}": digest for path, digest in by_path.items()}
        self._take((one for one in first if not one.path.endswith(DIGESTS_FILE)), tree, digests, is_offline)
        listed = listed_versions(entry, objects.values())
        wanted = wanted_versions(entry, folder, listed, self._defaults, self.named_versions(model_name(entry)))
        if wanted is not None:
            versions = set(listed) if with_all_versions else wanted
            if missing := missing_objects(by_path, entry, objects, versions):
                raise StoreError(f"{DIGESTS_FILE} lists {missing}, which the store does not have", is_final=True)
            more = [one for one in needed_objects(entry, objects, listed, versions) if one not in first]
            self._take(more, tree, digests, is_offline)
        (folder / DIGESTS_FILE).unlink(missing_ok=True)
        for version in listed:  # Also creates folders of other versions, so that the configuration chooses as above.
            (folder / version).mkdir(parents=True, exist_ok=True)
        self._show(entry, folder)

    def _take(self, objects: Iterable[StoredObject], tree: Path, digests: Mapping[str, str], is_offline: bool) -> None:
        """Link objects into a tree. Objects that the cache lacks are first fetched, concurrently."""
        missing = []
        for one in objects:
            if (expected := digests.get(one.path)) and one.sha256 and one.sha256 != expected:
                one = StoredObject(one.path, one.size, one.tag)  # Fetched before the digest was written: fetch again.
            if not one.sha256 or not self._cache.link(one, tree / one.path):
                missing.append(one)
        if not missing:
            return
        if is_offline:
            raise StoreError(f"the store cannot be listed, and the cache lacks {len(missing)} of its files")
        size = sum(one.size for one in missing)
        with self._cache.room(size):
            self.progress.begin(size)
            try:
                fetches = [self._files.submit(self._fetch, one, tree, digests.get(one.path, "")) for one in missing]
                errors = [error for fetch in fetches if (error := fetch.exception()) is not None]
            finally:
                self.progress.end()
        if errors:
            raise errors[0]

    def _fetch(self, one: StoredObject, tree: Path, sha256: str) -> None:
        file = self._cache.new_path()
        try:
            digest = fetch_object(
                self._store,
                one,
                file,
                sha256=sha256 or one.sha256,
                checks_etags=self._checks_etags,
                on_bytes=self.progress.add,
            )
        except StoreError as error:
            raise StoreError(f"{one.path}: {error.message}", is_final=error.is_final) from None
        self._cache.add(file, digest, tree / one.path)
        with self._lock:
            known = self._state.objects.get(one.path)
            if known is not None and known.tag == one.tag:
                self._state.objects[one.path] = StoredObject(one.path, one.size, one.tag, digest)

    def _show(self, entry: str, placed: Path) -> None:
        """Replace an entry of the folder in one step, and remove its previous tree."""
        shown = self.folder / entry
        before = shown.resolve() if shown.is_symlink() else None
        link = self._cache.new_path()
        link.symlink_to(os.path.relpath(placed, shown.parent))
        link.replace(shown)
        if before is not None:
            shutil.rmtree(before.parent, ignore_errors=True)

    def _remove(self, entries: Collection[str]) -> None:
        for entry in entries:
            shown = self.folder / entry
            with self._lock:
                if self._state.placed.pop(entry, None) is None or not shown.is_symlink():
                    continue  # another thread has removed it
                tree = shown.resolve().parent
                shown.unlink()
            shutil.rmtree(tree, ignore_errors=True)
