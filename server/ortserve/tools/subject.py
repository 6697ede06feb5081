"""Finds the model that an argument names: a file, or a model of a repository with its configuration."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ortserve.config.model import LoadOptions, ModelOptions
from ortserve.config.versions import SpecificVersions
from ortserve.core.version_names import version_of
from ortserve.errors import invalid_input
from ortserve.registry.repository.model_files import read_repositories
from ortserve.registry.repository.source import ModelSource, VersionSource, make_source, read_source

_IS_HOST_AND_PORT: Final = re.compile(r"[\w.-]*:\d+").fullmatch


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on disk.

    Attributes:
        name: Name of the model.
        path: The file to open.
        folder: Folder of the model, with the files that its configuration names; None for a single file.
        options: The configuration; the defaults for a single file.
        version: Number of the version; None for a single file.
    """

    name: str
    path: Path
    folder: Path | None = None
    options: ModelOptions = field(default_factory=ModelOptions)
    version: int | None = None

    @property
    def joint_requests(self) -> str:
        """``sequences`` or ``ragged batches``, which requests form together; empty if each is answered alone."""
        if self.options.sequences is not None:
            return "sequences"
        return "ragged batches" if self.options.is_ragged else ""


def find_model(text: str) -> Subject:
    """As ``find_version``, for tools that open the model's file.

    Raises:
        ServeError: invalid_input, as ``find_version``, and for an ensemble.
    """
    subject = find_version(text)
    if subject.options.ensemble is not None:
        members = ", ".join(dict.fromkeys(step.model for step in subject.options.ensemble.steps))
        raise invalid_input(
            f"{text}: expected a model with a file of its own, got an ensemble: use its members ({members}), 'ortserve "
            f"compare' for its outputs, or 'ortserve bench URL --model {subject.name}' on a server"
        )
    return subject


def find_version(text: str) -> Subject:
    """Find a model: ``model.onnx``, ``REPOSITORY/name`` or ``REPOSITORY/name/version``. Reads the disk.

    A model of a repository has its configuration. Without a version, the highest one of the version policy is found;
    with a version, any that exists.

    Raises:
        ServeError: invalid_input, if there is no such model, or if its configuration is wrong.
    """
    path = Path(text)
    if path.is_file():
        return Subject(path.stem, path)
    version = version_of(path.name)
    if not path.parent.is_dir() or (path.parent / f"{path.name}.onnx").is_file():
        version = None
    folder = path.parent if version else path
    source = read_source(folder.name, [folder.parent], LoadOptions()) if folder.parent.is_dir() else None
    if source is None:
        hint = "; the URL of a server begins with http:// or grpc://" if _IS_HOST_AND_PORT(text) else ""
        raise invalid_input(f"{text}: expected a model file or REPOSITORY/name[/version], found neither{hint}")
    if source.problem:
        raise invalid_input(f"{text}: {source.problem}")
    if not source.versions:
        raise invalid_input(f"{text}: expected a model with versions, got one without")
    number = max(source.versions) if version is None else version
    found = source.versions.get(number) or _other_version(source, folder, number, text)
    if found.problem:
        raise invalid_input(f"{text}: {found.problem}")
    return Subject(source.name, found.path, found.folder, found.configuration.options, number)


def _other_version(source: ModelSource, folder: Path, version: int, text: str) -> VersionSource:
    """A version that the version policy does not select."""
    (files,) = read_repositories([folder.parent], source.name)
    if version not in files.versions:
        known = ", ".join(map(str, sorted(files.versions)))
        raise invalid_input(f"{text}: expected a version out of {known}, got {version}")
    chosen = next(iter(source.versions.values())).configuration
    options = chosen.options.model_copy(update={"version_policy": SpecificVersions(specific=(version,))})
    return make_source(files, replace(chosen, options=options)).versions[version]
