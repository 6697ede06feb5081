"""What a model is loaded from: its files as they lie there now, and its configuration. Blocks on the disk."""

import glob
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from ortserve.config.model import AllVersions, LatestVersions, LoadOptions, ModelOptions, VersionPolicy, says_required
from ortserve.config.session import Scalar, option_text, provider_parts
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.configuration.configuration import Configuration, read_configuration
from ortserve.registry.repository.model_files import ModelFiles, read_repositories

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


def choose_versions(policy: VersionPolicy, available: Collection[int]) -> list[int]:
    """The versions to serve, ascending; those that the policy names, also where they are not available."""
    versions = sorted(available)
    if isinstance(policy, AllVersions):
        return versions
    if isinstance(policy, LatestVersions):
        return versions[-policy.latest :]
    return sorted(set(policy.specific))


logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VersionSource:
    """What one version is loaded from. Two are equal exactly where loading the second would change nothing.

    ``path`` is the file to open, ``problem`` why there is none, ``folder`` the model's with the files that its
    configuration names, None where it is a file by itself.
    """

    path: Path
    folder: Path | None
    configuration: Configuration
    stamps: tuple[FileStamp, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The versions of a model that should serve, or in words why none can.

    ``has_files`` says, where there is a problem, that version folders are there and the problem is another.
    """

    name: str
    versions: Mapping[int, VersionSource] = field(default_factory=dict)
    is_required: bool = False
    problem: str = ""
    has_files: bool = True
    without_effect: tuple[str, ...] = ()


def read_sources(roots: Sequence[Path], defaults: LoadOptions) -> list[ModelSource]:
    """All models of all repositories by name. ``defaults`` hold for what a model's own options leave open.

    Raises:
        ServeError: invalid_input, when a repository is not a readable folder.
    """
    return [_read_source(files, defaults) for files in read_repositories(roots)]


def read_source(name: str, roots: Sequence[Path], defaults: LoadOptions) -> ModelSource | None:
    """The one model of this name, None where there is none; no other's configuration is read.

    Raises:
        ServeError: invalid_input, when a repository is not a readable folder.
    """
    found = next((files for files in read_repositories(roots) if files.name == name), None)
    return None if found is None else _read_source(found, defaults)


def make_source(files: ModelFiles, configuration: Configuration) -> ModelSource:
    """The source of a model whose files and configuration are known. Raises OSError: a file went meanwhile."""
    options = configuration.options
    versions = choose_versions(options.version_policy, files.versions)
    return ModelSource(
        files.name,
        {version: _version_source(files, version, configuration) for version in versions},
        options.required,
        without_effect=configuration.without_effect,
    )


def _read_source(files: ModelFiles, defaults: LoadOptions) -> ModelSource:
    try:
        if files.problem:
            raise invalid_input(files.problem)
        return make_source(files, read_configuration(files.name, files.options, defaults))
    except ServeError as error:
        problem = error.message
    except OSError as error:  # somebody changes the folder meanwhile
        problem = f"its files cannot be read: {error.strerror}"
    except Exception as error:  # else a fault of ours, or of a parser, would keep every other model from loading
        logger.error("configuration of '%s' cannot be read", files.name, exc_info=error)
        problem = "its configuration cannot be read"
    is_required = any(map(says_required, files.options_files))
    return ModelSource(files.name, is_required=is_required, problem=problem, has_files=bool(files.versions))


def _version_source(files: ModelFiles, version: int, configuration: Configuration) -> VersionSource:
    found = files.versions.get(version)
    if found is None:
        there = ", ".join(map(str, sorted(files.versions)))
        problem = f"version_policy: expected versions out of {there}, got {version}"
        return VersionSource(Path(str(version)), files.folder, configuration, (), problem)
    stamps = stamp_files(files, version, configuration.options)
    try:
        path = files.file(version, configuration.options)
    except ServeError as error:
        return VersionSource(found, files.folder, configuration, stamps, error.message)
    return VersionSource(path, files.folder, configuration, stamps)


@dataclass(frozen=True, slots=True)
class Swap:
    """Version numbers, ascending. ``retire`` are to go once all of ``load`` serve, and not before."""

    load: tuple[int, ...]
    retire: tuple[int, ...]


def plan_swap(serving: Mapping[int, VersionSource], wanted: Mapping[int, VersionSource]) -> Swap:
    """Say what leads from ``serving`` to ``wanted``; a version that would be loaded from the same again is kept."""
    return Swap(
        tuple(sorted(version for version, source in wanted.items() if serving.get(version) != source)),
        tuple(sorted(serving.keys() - wanted.keys())),
    )
