"""What a store offers: objects with a size and a tag, and their contents. Mirrors read stores; tests replace them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

MAX_OBJECTS: Final = 100_000
"""Of one repository. A listing is kept in memory and read at each poll."""
MAX_DEPTH: Final = 16
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 1024
_MD5: Final = re.compile("[0-9a-f]{32}")


class StoreError(Exception):
    """A store cannot be listed, or an object cannot be fetched.

    Attributes:
        message: Contains neither addresses nor credentials: clients see it in the repository index.
        is_final: Whether a retry within seconds is useless.
    """

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a repository.

    Attributes:
        path: Relative to the repository, with ``/``.
        size: Bytes.
        tag: Changes with the content: an ETag, or the time of the last modification.
        sha256: Of the content, if the store or an earlier fetch knows it; otherwise empty.
    """

    path: str
    size: int
    tag: str
    sha256: str = ""

    @property
    def md5(self) -> str:
        """The MD5 digest that the tag seems to be; empty for other tags."""
        return self.tag if _MD5.fullmatch(self.tag) else ""

    @property
    def entry(self) -> str:
        """The first part of the path: the folder of a model, or the file of one."""
        return self.path.partition("/")[0]


class Store(Protocol):
    """A repository in a store. Any thread; all calls block."""

    def list(self, known: Mapping[str, StoredObject]) -> Iterable[StoredObject]:
        """All objects. ``known`` is the last listing, for stores that can tell whether it still holds.

        Raises:
            StoreError: The store cannot be listed.
        """
        ...

    def read(self, found: StoredObject) -> Iterator[bytes]:
        """The content of an object in pieces.

        Raises:
            StoreError: It cannot be read, or has changed since it was listed.
        """
        ...

    def settle(self) -> None:
        """Free what was kept between ``list`` and ``read``."""
        ...


def model_name(entry: str) -> str:
    """The name of the model that an entry of a repository is: a folder, or a file ``<name>.onnx``."""
    return entry.removesuffix(".onnx")


def path_problem(path: str) -> str:
    """Why a path cannot be written below a folder; empty if it can."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or not path.isprintable():
        return f"expected names without '..', '\\' and characters that cannot be printed, got {path[:200]!r}"
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
    """The objects of each entry that a repository may serve, by path.

    Left out are entries that no file system can have, those that begin with a dot, files beside the models, and the
    empty objects that some programs write for folders with files.
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
