"""What a model is loaded from: its files as they lie there now, and its configuration. Blocks on the disk."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ortserve.config.model import LoadOptions, says_required
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.configuration import Configuration, read_configuration
from ortserve.registry.repository import ModelFiles, read_repositories
from ortserve.registry.stamps import FileStamp, stamp_files
from ortserve.registry.versions import choose_versions

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
