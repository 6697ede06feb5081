"""The cache folder of stores: contents by digest, views of them as repositories, and the last listings.

Several server processes may share a folder without waiting for each other. A content is written under another name and
then linked. Each process has its own view, whose files are hard links to contents. A content with a second link is in
use by some process and is never removed. The lock file of a view is locked as long as its process lives.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import Final

from ortserve.errors import invalid_input
from ortserve.registry.stores.objects import StoredObject, StoreError

_DIGEST: Final = re.compile("[0-9a-f]{64}")


def default_cache_dir() -> Path:
    """The default folder, in the user's folder for caches."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ortserve" / "stores"


class StoreCache:
    """One process's access to a cache folder. Any thread."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Create the folder and the view, and remove the views of processes that have ended.

        Raises:
            ServeError: invalid_input, if the folder cannot be used.
        """
        self.max_bytes = max_bytes
        self._contents, self._listings, views = (folder / name for name in ("contents", "listings", "views"))
        self._verified: set[str] = set()
        self._lock = threading.Lock()
        self.folders_lock: Final = threading.Lock()
        """Held while an entry of a folder in the view is replaced, or the folders are read. Otherwise a reader could
        see the versions of one upload with the files of the next."""
        self._promised = 0
        self._complete: set[Path] = set()
        """Fetched files whose room was given back, until they are contents."""
        self._numbers = itertools.count()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for part in (self._contents, self._listings, views):
                part.mkdir(exist_ok=True, mode=0o700)
            self._lock_file = _lock_view(views)
            _remove_abandoned(views)
            self.view: Final = self._lock_file.with_suffix("")
            self.view.mkdir()
            self._incoming = self.view / "incoming"
            self._incoming.mkdir()
        except OSError as error:
            raise invalid_input(f"store_cache_dir: '{folder}' cannot be used: {error.strerror}") from None

    def close(self) -> None:
        """Remove the view. The contents stay for the next start."""
        shutil.rmtree(self.view, ignore_errors=True)
        self._lock_file.unlink(missing_ok=True)

    def new_path(self) -> Path:
        """A new path in the view, on the file system of the contents."""
        return self._incoming / str(next(self._numbers))

    def link(self, known: StoredObject, target: Path) -> bool:
        """Link a content to ``target`` in the view. Returns False if it is missing, damaged or of another size.

        A damaged content is removed.
        """
        if not _DIGEST.fullmatch(known.sha256):  # a hub may list any text as a digest, which must not become a path
            return False
        content = self._contents / known.sha256
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(content, target)
            status = target.stat()
            has_size = status.st_size == known.size
            is_verified = has_size and known.sha256 in self._verified
            is_damaged = not is_verified and digest_of(target) != known.sha256
            if is_damaged:
                content.unlink(missing_ok=True)
            if is_damaged or not has_size:  # a list of digests names the content for an object of another size
                target.unlink()
                return False
            self._verified.add(known.sha256)
            # The access time records the last use, by which contents are evicted. The modification time must stay,
            # because it is part of the fingerprint of the model.
            os.utime(target, ns=(time.time_ns(), status.st_mtime_ns))
        except FileNotFoundError:  # another process has removed the content
            return False
        except OSError as error:
            raise StoreError(f"the cache cannot be used: {error.strerror}") from None
        return True

    def add(self, file: Path, sha256: str, target: Path) -> None:
        """Add a complete file to the contents, link the content to ``target``, and remove ``file``.

        If the contents already have it undamaged, for example because another process has added it meanwhile, that
        content stays and is linked, so that it takes the disk only once.
        """
        try:
            file.chmod(0o444)
            known = StoredObject("", file.stat().st_size, "", sha256)
            while not self.link(known, target):
                with contextlib.suppress(FileExistsError):
                    os.link(file, self._contents / sha256)  # no process removes it: ``file`` is its second link
                    self._verified.add(sha256)
        except OSError as error:
            raise StoreError(f"the cache cannot be used: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            self._complete.discard(file)

    @contextmanager
    def room(self, needed: int) -> Iterator[Callable[[Path], None]]:
        """Remove the least recently used contents until ``needed`` bytes fit, and reserve them within the context.

        Yields a function that gives back the bytes of a complete file, for which ``add`` must be called then. Any
        thread.

        Raises:
            StoreError: Contents in use leave too little room, or the disk is full.
        """
        left = needed

        def give_back(file: Path) -> None:
            nonlocal left
            nbytes = file.stat().st_size
            with self._lock:
                left -= nbytes
                self._promised -= nbytes
                self._complete.add(file)

        with self._lock:
            self._promised += needed
            try:
                self._make_room()
            except BaseException:
                self._promised -= needed
                raise
        try:
            yield give_back
        finally:
            with self._lock:
                self._promised -= left

    def _make_room(self) -> None:
        found = sorted(_read(self._contents), key=lambda status: status[1].st_atime_ns)
        excess = sum(status.st_size for _, status in found) + self._promised - self.max_bytes
        for path, status in found:
            if excess <= 0:
                break
            if status.st_nlink == 1 and self._evict(path):
                excess -= status.st_size
        if excess > 0:
            raise StoreError(f"store_cache_bytes: expected {excess} bytes more than {self.max_bytes} for files in use")
        incoming = [status for path, status in _read(self._incoming) if path not in self._complete]
        arrived = sum(status.st_size for status in incoming if S_ISREG(status.st_mode))
        if (free := shutil.disk_usage(self._contents).free) < self._promised - arrived:
            raise StoreError(f"the disk of the cache has {free} bytes free: expected {self._promised - arrived} bytes")

    def _evict(self, content: Path) -> bool:
        """Remove a content, unless another process has linked it meanwhile. Returns whether it is gone."""
        moved = self.new_path()
        try:
            content.rename(moved)  # no process can link it from now on
        except FileNotFoundError:  # another process has removed it
            return True
        if is_in_use := moved.stat().st_nlink > 1:
            with contextlib.suppress(FileExistsError):
                os.link(moved, content)
        moved.unlink()
        return not is_in_use

    def size_bytes(self) -> int:
        """Size of all contents together."""
        return sum(status.st_size for _, status in _read(self._contents))

    def read_listing(self, url: str) -> dict[str, StoredObject]:
        """Read the last listing of a repository that any process wrote, by path. Empty if there is none."""
        try:
            data = json.loads(self._listing(url).read_bytes())
            objects = [StoredObject(*fields) for fields in data["objects"]]
        except (OSError, ValueError, TypeError, KeyError):
            return {}
        return {known.path: known for known in objects}

    def write_listing(self, url: str, objects: Iterable[StoredObject]) -> None:
        """Replace the listing of a repository."""
        fields = [(known.path, known.size, known.tag, known.sha256) for known in objects]
        written = self.new_path()
        try:
            written.write_text(json.dumps({"url": url, "objects": fields}))
            written.replace(self._listing(url))
        except OSError as error:
            raise StoreError(f"the cache cannot be used: {error.strerror}") from None

    def _listing(self, url: str) -> Path:
        return self._listings / f"{hashlib.sha256(url.encode()).hexdigest()}.json"


def with_known_digests(found: Iterable[StoredObject], known: Mapping[str, StoredObject]) -> dict[str, StoredObject]:
    """The objects by path. Objects that have not changed since ``known`` have the digests from there."""
    objects: dict[str, StoredObject] = {}
    for one in found:
        before = known.get(one.path)
        is_same = before is not None and (before.size, before.tag) == (one.size, one.tag)
        digest = before.sha256 if before is not None and is_same and not one.sha256 else one.sha256
        objects[one.path] = StoredObject(one.path, one.size, one.tag, digest)
    return objects


def digest_of(path: Path) -> str:
    """The SHA-256 digest of a file."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The entries of a folder, as they are found."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _lock_view(views: Path) -> Path:
    """Create a lock file and lock it until the process ends. The descriptor stays open on purpose."""
    while True:
        descriptor, name = tempfile.mkstemp(suffix=".lock", dir=views)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), Path(name).stat()):
                return Path(name)
        os.close(descriptor)  # another process removed the file before it was locked


def _remove_abandoned(views: Path) -> None:
    for lock_file in views.glob("*.lock"):
        with contextlib.suppress(OSError), lock_file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the process of the view lives
            shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
            lock_file.unlink()
    for view in views.iterdir():  # A thread that was fetching may have written into its view while that was removed.
        if view.suffix != ".lock" and not view.with_suffix(".lock").exists():
            shutil.rmtree(view, ignore_errors=True)
