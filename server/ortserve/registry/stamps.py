"""By what a change of a model's files is noticed: names, sizes and times, no contents. Blocks on the disk."""

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from ortserve.config.model import ModelOptions
from ortserve.config.session import Scalar, option_text, provider_parts
from ortserve.registry.repository import ModelFiles

FileStamp: TypeAlias = tuple[str, int, int, int, int]
"""A file's name, inode, mode, size and time of change: another one where it was replaced, rewritten or opened up."""

_MEMORY_STATS: Final = "session.collect_node_memory_stats_to_file"
"""Written anew by every run, to a path relative to the model's file. What ``session.moe_expert_counter_state_file``
names is read alone, so that a change of it is a change of the model."""
_BESIDE_OPTIMIZED: Final = "session.optimized_model_external_initializers_file_name"
_CONTEXT: Final = "ep.context_enable"
_CONTEXT_FILE: Final = "ep.context_file_path"
_BESIDE_CONTEXT: Final = "ep.context_model_external_initializers_file_name"


def stamp_files(files: ModelFiles, version: int, options: ModelOptions) -> tuple[FileStamp, ...]:
    """The stamps of all that a version may consist of: weights beside the model's file, labels beside the versions.

    Left out are the file of options, which is compared by what it says; names that begin with a dot, such as an
    editor's; what went meanwhile or points nowhere; and what loading itself writes, else each load would be a change.

    Raises:
        OSError: The folder cannot be read.
    """
    if files.folder is None:
        return tuple(_stamps([files.versions[version]]))
    left_out = _written_in(files.folder, files.versions[version], options)
    if files.options is not None:
        left_out.add(files.options)
    return tuple(_stamps(_files(files.folder, str(version), left_out)))


def _files(folder: Path, version: str, left_out: set[Path]) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry in left_out:
            continue
        if not entry.is_dir():
            yield entry
        elif entry.name == version or not entry.name.isdigit():
            yield from _files_below(entry, left_out)


def _files_below(folder: Path, left_out: set[Path]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):  # passes over folders that went meanwhile
        above = Path(parent)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and above / name not in left_out)
        for name in sorted(names):
            if not name.startswith(".") and above / name not in left_out:
                yield above / name


def _stamps(paths: Iterator[Path] | list[Path]) -> Iterator[FileStamp]:
    for path in paths:
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        yield str(path), status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns


def _written_in(folder: Path, model: Path, options: ModelOptions) -> set[Path]:
    """The files and folders within ``folder`` that options name as places to write to, of the file ``model`` there."""
    entries = options.session.entries
    named = _context_files(model, entries)
    if stats := entries.get(_MEMORY_STATS):
        named.append(str(model.parent / str(stats)))
    if (optimized := options.session.optimized_model_file) is not None:
        named += [optimized, *_beside(optimized, entries.get(_BESIDE_OPTIMIZED))]
    for wish in options.execution_providers:
        _, given = provider_parts(wish)
        named += [value for key, value in given.items() if _is_cache(key)]
    # As they are spelled and where they really are: links may lead into the folder, and out of it.
    return {
        folder / path.relative_to(root)
        for name in named
        for whole in (os.path.abspath, os.path.realpath)
        if (path := Path(whole(Path(name).parent), Path(name).name)) != (root := Path(whole(folder)))
        and path.is_relative_to(root)
    }


def _context_files(model: Path, entries: Mapping[str, Scalar]) -> list[str]:
    """What a provider keeps of a model that it has compiled: a model again, and beside it files that this one names."""
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
    """Whether an option of an execution provider says where it keeps what it has built."""
    return option.endswith(("_path", "_dir")) and ("cache" in option or "context" in option)
