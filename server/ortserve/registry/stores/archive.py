"""Reads a repository from a tar archive behind HTTP. The whole archive is fetched when it changes.

Only files and folders are unpacked, each file under a number in place of its name.
"""

import hashlib
import io
import shutil
import tarfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from ortserve.config.repository_url import RepositoryUrl
from ortserve.registry.stores.object_store import client_config, explain, read_object, retry_config, tag_of
from ortserve.registry.stores.objects import MAX_OBJECTS, StoredObject, StoreError

_PIECE_BYTES: Final = 1 << 20
_MAX_ARCHIVE_BYTES: Final = 1 << 40


class ArchiveStore:
    """A store whose objects are the members of an archive. Their tag is that of the archive."""

    def __init__(self, url: RepositoryUrl, timeout_s: float, unpacked: Path, max_bytes: int) -> None:
        """Connect to nothing yet.

        Args:
            url: Address of the archive.
            timeout_s: Time limit of a connection that transfers no data.
            unpacked: Folder for the members until they are read; created and removed as needed.
            max_bytes: Maximum size of all members together.
        """
        from obstore.store import HTTPStore

        config = client_config(timeout_s)
        config["allow_http"] = url.scheme == "http"
        try:
            self._store = HTTPStore.from_url(
                f"{url.scheme}://{url.host}/", client_options=config, retry_config=retry_config(timeout_s)
            )
        except Exception as error:  # noqa: BLE001
            raise explain(error) from None
        self._url = url
        self._timeout_s = timeout_s
        self._unpacked = unpacked
        self._max_bytes = max_bytes
        self._files: dict[str, Path] = {}
        self._lock = threading.Lock()

    def list(self, known: Mapping[str, StoredObject]) -> Iterable[StoredObject]:
        size, tag = self._head()
        if known and all(member.tag == tag for member in known.values()):
            return list(known.values())
        with self._lock:
            self._unpack(size, tag)
            return [StoredObject(path, file.stat().st_size, tag) for path, file in self._files.items()]

    def read(self, found: StoredObject) -> Iterator[bytes]:
        with self._lock:
            if found.path not in self._files:  # the archive is unchanged, but the cache has dropped the content
                size, tag = self._head()
                if tag != found.tag:
                    raise StoreError("it changed while it was fetched")
                self._unpack(size, tag)
            file = self._files.get(found.path)
            if file is None:
                raise StoreError("the archive no longer has this file")
            stream = file.open("rb")  # opened under the lock, because ``settle`` on another thread removes the file
        with stream:
            while piece := stream.read(_PIECE_BYTES):
                yield piece

    def settle(self) -> None:
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._files.clear()
        shutil.rmtree(self._unpacked, ignore_errors=True)

    def _head(self) -> tuple[int, str]:
        import obstore

        try:
            meta = obstore.head(self._store, self._url.path)
        except Exception as error:  # noqa: BLE001
            raise explain(error) from None
        if meta["size"] > _MAX_ARCHIVE_BYTES:
            raise StoreError(f"expected an archive of at most {_MAX_ARCHIVE_BYTES} bytes, got {meta['size']}")
        return meta["size"], tag_of(meta)

    def _unpack(self, size: int, tag: str) -> None:
        self._clear()
        self._unpacked.mkdir()
        try:
            pieces = read_object(self._store, self._url.path, size, tag, self._timeout_s)
            digest = self._take(_HashedStream(pieces))
            if self._url.sha256 not in ("", digest):
                raise StoreError(
                    f"expected an archive with the SHA-256 digest {self._url.sha256}, got {digest}", is_final=True
                )
        except BaseException:
            self._clear()
            raise

    def _take(self, stream: "_HashedStream") -> str:
        """Unpack the archive in a stream. Returns its SHA-256 digest."""
        kind = "r|gz" if self._url.path.endswith("gz") else "r|"
        try:
            with tarfile.open(mode=kind, fileobj=stream, errorlevel=1) as archive:  # type: ignore[call-overload]
                self._take_members(archive)
            while stream.read(_PIECE_BYTES):
                pass
        except (tarfile.TarError, EOFError, OSError) as error:
            raise StoreError(f"the archive cannot be read: {error}") from None
        return stream.digest.hexdigest()

    def _take_members(self, archive: tarfile.TarFile) -> None:
        """Write the files of an archive. If several files have one name, the last one counts, as for ``tar``.

        No name is used for a path here. A name that no file can have fails its model later, as in other stores.
        """
        total = 0
        for number, member in enumerate(archive):
            path = member.name.removeprefix("./").rstrip("/")
            total += member.size
            if total > self._max_bytes or number >= MAX_OBJECTS:
                raise StoreError(
                    f"expected an archive of at most {MAX_OBJECTS} files and folders and {self._max_bytes} bytes "
                    "(store_cache_bytes), got more",
                    is_final=True,
                )
            if member.isdir():
                continue
            if not member.isreg():
                raise StoreError(f"the archive has a link or device: expected files and folders, got {path[:200]!r}")
            source = archive.extractfile(member)
            assert source is not None  # it is a file
            file = self._unpacked / str(number)
            with file.open("wb") as target:
                shutil.copyfileobj(source, target, _PIECE_BYTES)
            self._files[path] = file


class _HashedStream(io.RawIOBase):
    """Reads pieces of bytes as a file, once. ``digest`` covers the bytes that were read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")
        self.digest: Final = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._left:
            piece = next(self._pieces, b"")
            self.digest.update(piece)
            self._left = memoryview(piece)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count
