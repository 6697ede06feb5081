"""Places one model of a store in the folder of its mirror: fetches the files that the cache lacks, and links all files.

The files are linked into a tree beside the folder, then a symbolic link to the tree is renamed into the folder.
Unchanged files keep their inodes, so a new version does not reload the others.
"""

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from ortserve.config.model import LoadOptions
from ortserve.core.thread_pool import ThreadPool
from ortserve.registry.stores.cache import StoreCache
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
from ortserve.registry.stores.objects import FILES_SIDE_BY_SIDE, Store, StoredObject, StoreError, path_problem

_FILES_OF_ONE_MODEL: Final = 6
"""Maximum number of concurrent fetches for one model, so that models with large files do not delay all others."""

Objects: TypeAlias = Mapping[str, StoredObject]


@dataclass(frozen=True, slots=True)
class PlacementKey:
    """What the files of a placement depend on. An entry that was placed, or failed, is due again when its key changes.

    Attributes:
        with_all_versions: Whether to fetch versions that the configuration does not choose, too.
        named: Versions to fetch in addition, ascending.
        objects: Path, size and tag of each object, sorted.
    """

    with_all_versions: bool
    named: tuple[int, ...]
    objects: tuple[tuple[str, int, str], ...]


@dataclass(eq=False, slots=True)
class Placement:
    """One attempt to place the current files of an entry.

    Attributes:
        entry: First part of the paths of the objects.
        objects: The objects of the entry, as listed.
        key: Identifies ``objects`` and the choice of versions.
        is_offline: Whether only files in the cache may be used.
        tree: New folder of the files in the cache's view.
        settled: Set when the attempt has ended or was given up, so that no caller waits for it any more.
        ended: Set when the attempt has ended.
        is_outdated: Whether the attempt should end early: the objects have changed, or it was given up.
    """

    entry: str
    objects: Objects
    key: PlacementKey
    is_offline: bool
    tree: Path
    settled: Future[None] = field(default_factory=Future)
    ended: Future[None] = field(default_factory=Future)
    is_outdated: bool = False

    def check(self) -> None:
        """Raises StoreError: the placement is outdated."""
        if self.is_outdated:
            raise StoreError("its files changed while they were fetched", is_final=True)

    def give_up(self) -> None:
        """Make the attempt end early, and let no caller wait for it. A store that stalls may delay its end."""
        self.is_outdated = True
        with suppress(InvalidStateError):
            self.settled.set_result(None)

    def end(self) -> None:
        """Record that the attempt has ended."""
        with suppress(InvalidStateError):  # it was given up
            self.settled.set_result(None)
        self.ended.set_result(None)

    def pause(self, seconds: float) -> None:
        """Wait before another attempt at a file. Raises as ``check``."""
        time.sleep(seconds)
        self.check()


class Placer:
    """Places models of one store in the folder of its mirror. Any thread; ``place`` blocks on the network."""

    def __init__(
        self,
        store: Store,
        cache: StoreCache,
        folder: Path,
        defaults: LoadOptions,
        progress: FetchProgress,
        *,
        checks_etags: bool,
        on_digest: Callable[[StoredObject, str], None],
    ) -> None:
        """Place nothing yet.

        Args:
            store: Store of the repository.
            cache: Cache of the server.
            folder: Folder of the mirror.
            defaults: Values of options that a model's own configuration does not set.
            progress: Counts the fetched bytes.
            checks_etags: Whether ETags that look like MD5 digests must match the contents.
            on_digest: Called with an object and the SHA-256 digest of its content. Any thread.
        """
        self._store = store
        self._cache = cache
        self._folder = folder
        self._defaults = defaults
        self._files = ThreadPool(FILES_SIDE_BY_SIDE, "store-files")
        self._progress = progress
        self._checks_etags = checks_etags
        self._on_digest = on_digest

    def place(self, placement: Placement) -> None:
        """Fetch the files of an entry that the cache lacks, and show all of them in the folder in one step.

        Raises:
            StoreError: The files cannot be fetched, or the placement is outdated. Then the folder has not changed.
            OSError: The cache cannot be used.
        """
        placement.check()
        entry, objects = placement.entry, placement.objects
        for path in objects:
            if problem := path_problem(path):
                raise StoreError(problem, is_final=True)
        if entry in objects:
            self._link(placement, objects.values(), {})
        else:
            self._link_folder(placement)
        placement.check()
        self._show(entry, placement.tree / entry)

    def remove(self, entry: str) -> None:
        """Remove an entry from the folder, if it is there."""
        shown = self._folder / entry
        with self._cache.folders_lock:
            if not shown.is_symlink():
                return
            tree = shown.resolve().parent
            shown.unlink()
        shutil.rmtree(tree, ignore_errors=True)

    def _link_folder(self, placement: Placement) -> None:
        """Link the objects of a model's folder into the tree of the placement: those of the chosen versions."""
        entry, objects, key = placement.entry, placement.objects, placement.key
        folder = placement.tree / entry
        first = first_objects(objects)
        self._link(placement, (one for one in first if one.path == f"{entry}/{DIGESTS_FILE}"), {})
        by_path = read_digests(folder / DIGESTS_FILE)
        digests = {f"{entry}/{path}": digest for path, digest in by_path.items()}
        self._link(placement, (one for one in first if not one.path.endswith(DIGESTS_FILE)), digests)
        listed = listed_versions(entry, objects.values())
        wanted = wanted_versions(entry, folder, listed, self._defaults, key.named)
        if wanted is not None:
            versions = set(listed) if key.with_all_versions else wanted
            if missing := missing_objects(by_path, entry, objects, versions):
                raise StoreError(f"{DIGESTS_FILE} lists {missing}, which the store does not have", is_final=True)
            more = [one for one in needed_objects(entry, objects, listed, versions) if one not in first]
            self._link(placement, more, digests)
        (folder / DIGESTS_FILE).unlink(missing_ok=True)
        for version in listed:  # Also creates folders of other versions, so that the configuration chooses as above.
            (folder / version).mkdir(parents=True, exist_ok=True)

    def _link(self, placement: Placement, objects: Iterable[StoredObject], digests: Mapping[str, str]) -> None:
        """Link objects into the tree. Objects that the cache lacks are first fetched.

        Args:
            placement: Placement of the objects.
            objects: What to link.
            digests: Expected digests by path. They take precedence over those of earlier fetches.
        """
        missing = []
        for one in objects:
            digest = digests.get(one.path) or one.sha256
            known = StoredObject(one.path, one.size, one.tag, digest)
            if digest and self._cache.link(known, placement.tree / one.path):
                self._on_digest(one, digest)
            else:
                missing.append(known)
        if not missing:
            return
        if placement.is_offline:
            raise StoreError(f"the store cannot be listed, and the cache lacks {len(missing)} of its files")
        size = sum(one.size for one in missing)
        with self._cache.room(size) as give_back:
            self._progress.begin(size)
            try:
                self._fetch_all(placement, missing, give_back)
            finally:
                self._progress.end()

    def _fetch_all(
        self, placement: Placement, objects: Collection[StoredObject], give_back: Callable[[Path], None]
    ) -> None:
        """Fetch objects concurrently. Raises the first error when the fetches that have begun are over.

        ``give_back`` gives back the room that is reserved for a file, before the file is added to the contents.
        """
        waiting = iter(objects)
        running: set[Future[None]] = set()
        error: BaseException | None = None
        while True:
            while error is None and len(running) < _FILES_OF_ONE_MODEL and (one := next(waiting, None)) is not None:
                running.add(self._files.submit(self._fetch, placement, one, give_back))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            error = error or next((fault for fetch in done if (fault := fetch.exception()) is not None), None)
        if error is not None:
            raise error

    def _fetch(self, placement: Placement, one: StoredObject, give_back: Callable[[Path], None]) -> None:
        """Fetch an object. Its digest, if it has one, is that of the content."""
        placement.check()
        file = self._cache.new_path()
        try:
            digest = fetch_object(
                self._store,
                one,
                file,
                checks_etags=self._checks_etags,
                on_bytes=partial(self._note_bytes, placement),
                wait=placement.pause,
            )
        except StoreError as error:
            raise StoreError(f"{one.path}: {error.message}", is_final=error.is_final) from None
        give_back(file)
        self._cache.add(file, digest, placement.tree / one.path)
        self._on_digest(one, digest)

    def _note_bytes(self, placement: Placement, count: int) -> None:
        self._progress.add(count)
        placement.check()

    def _show(self, entry: str, placed: Path) -> None:
        """Replace an entry of the folder in one step, and remove its previous tree."""
        shown = self._folder / entry
        link = self._cache.new_path()
        link.symlink_to(os.path.relpath(placed, shown.parent))
        with self._cache.folders_lock:
            before = shown.resolve() if shown.is_symlink() else None
            link.replace(shown)
        if before is not None:
            shutil.rmtree(before.parent, ignore_errors=True)
