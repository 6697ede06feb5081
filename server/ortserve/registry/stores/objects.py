"""The interface of a store: objects with a size and a tag, and their contents. Mirrors read stores."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from ortserve.clock import monotonic_ns

MAX_OBJECTS: Final = 100_000
"""Maximum number of objects of one repository. A listing is held in memory and read at each poll."""
LISTING_TIMEOUTS: Final = 4
"""Time limit of one page of a listing, in ``store_timeout_s``. A page of 1000 objects has about half a megabyte."""
FILES_SIDE_BY_SIDE: Final = 8
"""Maximum number of concurrent fetches from one store. One connection to a store reaches about 100 MB/s."""
MAX_DEPTH: Final = 16
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 1024
_MD5: Final = re.compile("[0-9a-f]{32}")
_MIN_BYTES_PER_S: Final = 1024
"""Minimum rate of a content. It is far below that of any usable link, because up to eight fetches share one."""


class StoreError(Exception):
    """A store cannot be listed, or an object cannot be fetched.

    Attributes:
        message: The problem, without addresses and credentials, because clients see it in the repository index.
        is_final: Whether a retry within seconds cannot help.
    """

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a repository.

    Attributes:
        path: Path relative to the repository, separated by ``/``.
        size: Size in bytes.
        tag: A text that changes with the content: an ETag, a digest or the modification time.
        sha256: Digest of the content, if known from the store or an earlier fetch; otherwise empty.
    """

    path: str
    size: int
    tag: str
    sha256: str = ""

    @property
    def md5(self) -> str:
        """The tag, if it looks like an MD5 digest; otherwise empty."""
        return self.tag if _MD5.fullmatch(self.tag) else ""

    @property
    def entry(self) -> str:
        """The first part of the path: the folder of a model, or the file of a single-file model."""
        return self.path.partition("/")[0]


class Store(Protocol):
    """A repository in a store. Any thread; all calls block."""

    def list(self, known: Mapping[str, StoredObject]) -> Iterable[StoredObject]:
        """List all objects. ``known`` is the last listing, for stores that can tell whether it is still valid.

        Raises:
            StoreError: The store cannot be listed.
        """
        ...

    def read(self, found: StoredObject) -> Iterator[bytes]:
        """Read the content of an object in pieces.

        Raises:
            StoreError: The object cannot be read, or has changed since it was listed.
        """
        ...

    def settle(self) -> None:
        """Free resources that were kept between ``list`` and ``read``."""
        ...


def unless_slow(pieces: Iterator[bytes], window_s: float) -> Iterator[bytes]:
    """Pass on the pieces of a content as they arrive, unless they are too slow.

    A store that sends a byte now and then is never silent, so no time limit of its connection would end the fetch. Only
    the time of waiting for pieces counts, not the time in which the caller writes them.

    Raises:
        StoreError: Over a time of ``window_s``, less than 1 KiB per second arrived.
    """
    waited_ns = count = 0
    while True:
        asked_ns = monotonic_ns()
        piece = next(pieces, None)
        if piece is None:
            return
        waited_ns += monotonic_ns() - asked_ns
        count += len(piece)
        if waited_ns >= window_s * 1e9:
            if count < _MIN_BYTES_PER_S * window_s:
                raise StoreError(
                    f"its content is too slow: expected {_MIN_BYTES_PER_S} bytes per second over {window_s:g} s "
                    f"(store_timeout_s), got {count} bytes"
                )
            waited_ns = count = 0
        yield piece


def model_name(entry: str) -> str:
    """The name of the model in an entry of a repository: a folder, or a file ``<name>.onnx``."""
    return entry.removesuffix(".onnx")


def path_problem(path: str) -> str:
    """Why a path must not or cannot be written below a folder; empty if it can."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or not path.isprintable():
        return (
            "expected names that are not empty, '.' or '..', without '\\' and characters that cannot be printed, "
            f"got {path[:200]!r}"
        )
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return f"expected a name in UTF-8, got {path[:200]!r}"
    if len(parts) > MAX_DEPTH or max(sizes) > _MAX_NAME_BYTES or sum(sizes) > _MAX_PATH_BYTES:
        return (
            f"expected at most {MAX_DEPTH} folders, names of {_MAX_NAME_BYTES} bytes and paths of {_MAX_PATH_BYTES} "
            f"bytes, got {path[:200]!r}"
        )
    return ""


def group_by_entry(objects: Iterable[StoredObject]) -> dict[str, dict[str, StoredObject]]:
    """Group the objects of each entry that a repository may serve, by path.

    Left out are entries with names that ``path_problem`` rejects or that begin with a dot, files beside the models, and
    the empty objects that some programs write for folders that contain files.
    """
    found = {known.path: known for known in objects}
    folders = {path[: match.start()] for path in found for match in re.finditer("/", path)}
    groups: dict[str, dict[str, StoredObject]] = {}
    for path, known in found.items():
        entry = known.entry
        is_model = entry != path or entry.endswith(".onnx")
        if is_model and path not in folders and not entry.startswith(".") and not path_problem(entry):
            groups.setdefault(entry, {})[path] = known
    return groups
