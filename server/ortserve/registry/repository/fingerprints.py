"""The fingerprints of the files of a version, by which changed files are noticed. Blocks on the disk."""

import glob
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.config.session import Scalar, option_text, provider_parts
from ortserve.paths import MISSING, is_folder
from ortserve.registry.repository.model_files import ModelFiles

logger: Final = logging.getLogger(__name__)

MAX_ENTRIES: Final = 10_000
"""Maximum number of files and folders that are compared below each folder of a model, because a link may lead to a tree
of millions, and each poll reads them."""

_MEMORY_STATS: Final = "session.collect_node_memory_stats_to_file"
"""Each run rewrites the file of this option, at a path relative to the model file. The file of
``session.moe_expert_counter_state_file`` is only read, so a change of that file is a change of the model."""
_BESIDE_OPTIMIZED: Final = "session.optimized_model_external_initializers_file_name"
_CONTEXT: Final = "ep.context_enable"
_CONTEXT_FILE: Final = "ep.context_file_path"
_BESIDE_CONTEXT: Final = "ep.context_model_external_initializers_file_name"


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """Identifies the content of a file: it changes when the file is replaced or rewritten, or its permissions change.

    Two fingerprints of which one has no ``changed_ns`` are equal if the rest is.

    Attributes:
        path: Path of the file.
        inode: Number of the file in its file system.
        mode: Type and permissions.
        nbytes: Size of the file.
        modified_ns: Time of its last modification, since the epoch.
        changed_ns: Time of the last change of its content or properties, which programs cannot set. Archives may give
            all files one modification time, and a new file may get the inode of the one that it replaces. 0 for a file
            with several links, because each new link changes this time.
    """

    path: str
    inode: int
    mode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint) or self._without_change() != other._without_change():
            return False
        return self.changed_ns == other.changed_ns or not (self.changed_ns and other.changed_ns)

    def __hash__(self) -> int:
        return hash(self._without_change())

    def _without_change(self) -> tuple[str, int, int, int, int]:
        return self.path, self.inode, self.mode, self.nbytes, self.modified_ns


def take_fingerprints(files: ModelFiles, version: int, options: ModelOptions) -> tuple[Fingerprint, ...]:
    """Take the fingerprints of all files that a version may consist of, such as weights and labels.

    Left out are:

    - the file of options, which is compared by its content;
    - names that begin with a dot, such as files of editors;
    - files that were just removed, and broken links;
    - files that a load writes, because otherwise each load would look like a change.

    Raises:
        OSError: The folder cannot be read.
    """
    if files.folder is None:
        return tuple(_fingerprints([files.versions[version]]))
    left_out = _written_files(files.folder, files.versions[version], options)
    if files.options is not None:
        left_out.add(files.options)
    return tuple(_fingerprints(_files(files.folder, str(version), left_out)))


def watch_files(fingerprints: Iterable[Fingerprint]) -> Callable[[], str]:
    """Return a function that names a file that was changed or removed since this call; empty if none was."""
    return partial(changed_file, tuple(_fingerprints(Path(known.path) for known in fingerprints)))


def changed_file(fingerprints: Iterable[Fingerprint]) -> str:
    """Name a file that does not have its fingerprint any more; empty if all have.

    Only regular files count, because reading a pipe changes it.
    """
    before = [file for file in fingerprints if S_ISREG(file.mode)]
    now = set(_fingerprints(Path(file.path) for file in before))
    return next((Path(file.path).name for file in before if file not in now), "")


def _files(folder: Path, version: str, left_out: set[Path]) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry in left_out:
            continue
        if not is_folder(entry):
            yield entry
        elif entry.name == version or not (entry.name.isdigit() or _leads_above(entry, folder)):
            yield from _files_below(entry, left_out)


def _files_below(folder: Path, left_out: set[Path]) -> Iterator[Path]:
    """The files at any depth, those nearest to ``folder`` first. Ends after ``MAX_ENTRIES`` files and folders.

    Links to folders are followed, each folder once, except links to folders above.
    """
    seen: set[tuple[int, int]] = set()
    pending = deque([folder])
    count = 0
    while pending:
        parent = pending.popleft()
        status = _status(parent)
        if status is None or (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in _entries(parent):
            path = parent / entry.name
            if entry.name.startswith(".") or path in left_out:
                continue
            if count == MAX_ENTRIES:
                return
            count += 1
            if not _is_folder(entry):
                yield path
            elif not (entry.is_symlink() and _leads_above(path, folder)):
                pending.append(path)


def _leads_above(path: Path, folder: Path) -> bool:
    """Whether a path in ``folder`` leads to that folder or to one above it."""
    return folder.resolve().is_relative_to(path.resolve())


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted by name; empty for one that cannot be read, or was removed meanwhile."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _fingerprints(paths: Iterable[Path]) -> Iterator[Fingerprint]:
    for path in paths:
        if (status := _status(path)) is not None:
            changed_ns = status.st_ctime_ns if status.st_nlink == 1 else 0
            yield Fingerprint(str(path), status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, changed_ns)


def _status(path: Path) -> os.stat_result | None:
    """The status of what a path leads to; None if it leads to nothing. Raises OSError if the system cannot tell."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in MISSING:
            return None
        raise


def _written_files(folder: Path, model: Path, options: ModelOptions) -> set[Path]:
    """Files and folders in ``folder`` that a load of the file ``model`` writes, according to its options."""
    entries = options.session.entries
    named = _context_files(model, entries)
    if stats := entries.get(_MEMORY_STATS):
        named.append(str(model.parent / str(stats)))
    if (optimized := options.session.optimized_model_file) is not None:
        named += [optimized, *_beside(optimized, entries.get(_BESIDE_OPTIMIZED))]
    for wish in options.execution_providers:
        _, given = provider_parts(wish)
        named += [value for key, value in given.items() if _is_cache(key)]
    # Each name counts as spelled and as resolved, because links may lead into the folder and out of it.
    return {
        folder / path.relative_to(root)
        for name in named
        for resolve in (os.path.abspath, os.path.realpath)
        if (path := Path(resolve(Path(name).parent), Path(name).name)) != (root := Path(resolve(folder)))
        and path.is_relative_to(root)
    }


def _context_files(model: Path, entries: Mapping[str, Scalar]) -> list[str]:
    """The files of a compiled model: the model file that an execution provider writes, and files that it refers to."""
    given = str(entries.get(_CONTEXT_FILE, ""))
    if not given and option_text(entries.get(_CONTEXT, False)) != "1":
        return []
    context = Path(given) if given else model.with_name(f"{model.stem}_ctx.onnx")
    stem = glob.escape(context.stem.removesuffix("_ctx"))
    binaries = map(str, context.parent.glob(f"{stem}_*ExecutionProvider.bin"))
    return [str(context), *binaries, *_beside(str(context), entries.get(_BESIDE_CONTEXT))]


def _beside(file: str, name: Scalar | None) -> list[str]:
    return [str(Path(file).with_name(Path(str(name)).name))] if name else []


def _is_cache(option: str) -> bool:
    """Whether an option of an execution provider is the path of its cache."""
    return option.endswith(("_path", "_dir")) and ("cache" in option or "context" in option)
