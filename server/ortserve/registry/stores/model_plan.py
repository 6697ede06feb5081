"""Chooses the objects of a model that a load needs: its configuration, the versions to serve, and other files."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from ortserve.config.model import LoadOptions
from ortserve.core.version_names import version_of
from ortserve.errors import ServeError
from ortserve.paths import is_file, read_file
from ortserve.registry.repository.configuration import read_configuration
from ortserve.registry.repository.model_files import OPTIONS_FILE, TRITON_OPTIONS_FILE
from ortserve.registry.repository.source import versions_to_serve
from ortserve.registry.stores.objects import StoredObject, StoreError

DIGESTS_FILE: Final = "SHA256SUMS"
"""File with the digests of a model, in the format of ``sha256sum``. Paths are relative to the model's folder. The file
is not part of the model."""
MAX_DIGESTS_BYTES: Final = 16 << 20
MAX_OPTIONS_BYTES: Final = 16 << 20
_DIGEST_LINE: Final = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")


def first_objects(objects: Mapping[str, StoredObject]) -> list[StoredObject]:
    """The objects in a model's folder that determine which others are needed.

    Raises:
        StoreError: An object is too large.
    """
    found = []
    for known in objects.values():
        name = known.path.partition("/")[2]
        if name in (OPTIONS_FILE, TRITON_OPTIONS_FILE, DIGESTS_FILE):
            limit = MAX_DIGESTS_BYTES if name == DIGESTS_FILE else MAX_OPTIONS_BYTES
            if known.size > limit:
                raise StoreError(f"{name}: expected at most {limit} bytes, got {known.size}")
            found.append(known)
    return found


def listed_versions(entry: str, objects: Iterable[StoredObject]) -> dict[str, int]:
    """The version folders of a model, with their numbers. An empty object with such a name is an empty folder."""
    found: dict[str, int] = {}
    for known in objects:
        name, _, rest = known.path.removeprefix(f"{entry}/").partition("/")
        if (version := version_of(name)) and (rest or not known.size):
            found[name] = version
    return found


def wanted_versions(
    entry: str, folder: Path, listed: Mapping[str, int], defaults: LoadOptions, named: Collection[int] = ()
) -> set[str] | None:
    """The version folders to serve, according to the configuration in ``folder`` and to ``named``.

    Returns:
        None for an invalid configuration, which needs no versions. The reader of the repository reports it.
    """
    options = [file for name in (OPTIONS_FILE, TRITON_OPTIONS_FILE) if is_file(file := folder / name)]
    if len(options) > 1:
        return None
    try:
        configuration = read_configuration(entry, options[0] if options else None, defaults)
    except ServeError:
        return None
    chosen = versions_to_serve(configuration.options, listed.values(), named)
    return {name for name, number in listed.items() if number in chosen}


def needed_objects(
    entry: str, objects: Mapping[str, StoredObject], listed: Mapping[str, int], wanted: set[str]
) -> list[StoredObject]:
    """The objects of the wanted versions, and objects outside version folders."""
    left_out = listed.keys() - wanted
    empty_folders = {f"{entry}/{name}" for name in listed}
    return [
        known for path, known in objects.items() if path.split("/")[1] not in left_out and path not in empty_folders
    ]


def read_digests(file: Path) -> dict[str, str]:
    """Read the digests in a ``SHA256SUMS``, by path. Returns nothing if the file does not exist.

    Raises:
        StoreError: The file is malformed.
    """
    try:
        lines = read_file(file).decode().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError):
        raise StoreError(f"{DIGESTS_FILE}: expected text in UTF-8, got other bytes") from None
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        found = _DIGEST_LINE.fullmatch(line)
        if found is None:
            raise StoreError(
                f"{DIGESTS_FILE}: expected lines such as 'DIGEST  1/model.onnx', got another form in line {number}"
            )
        digests[found[2]] = found[1]
    return digests


def missing_objects(digests: Iterable[str], entry: str, objects: Mapping[str, StoredObject], wanted: set[str]) -> str:
    """A file that ``SHA256SUMS`` lists and a load needs, but the store lacks; empty if no file is missing.

    This is the only sign of a version whose upload has not ended, because object stores upload each object separately.
    """
    listed = listed_versions(entry, [StoredObject(f"{entry}/{path}", 0, "") for path in digests])
    for path in digests:
        version = path.partition("/")[0]
        if f"{entry}/{path}" not in objects and (version not in listed or version in wanted):
            return path
    return ""
