"""The source of a model: the files and configuration of the versions that should serve. Blocks on the disk.

Two sources are equal if loading the second would change nothing. Files are compared by fingerprints, not by their
contents.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ortserve.config.model import LoadOptions, ModelOptions, says_required
from ortserve.config.rollout import RolloutOptions
from ortserve.config.versions import AllVersions, LatestVersions, VersionPolicy
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.repository.configuration import Configuration, read_configuration
from ortserve.registry.repository.fingerprints import Fingerprint, take_fingerprints
from ortserve.registry.repository.model_files import ModelFiles, read_repositories
from ortserve.telemetry.logs import log_fault

logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VersionSource:
    """The files and configuration of one version.

    Attributes:
        path: The file to open.
        folder: Folder of the model and the files that its configuration names; None for a single-file model.
        configuration: The configuration of the model.
        fingerprints: Fingerprints of all files that the version may consist of.
        problem: Why there is no file to open; empty without a problem.
        is_sent: Whether a client sent the files, which are deleted after the load, so that there can be no other one.
    """

    path: Path
    folder: Path | None
    configuration: Configuration
    fingerprints: tuple[Fingerprint, ...]
    problem: str = ""
    is_sent: bool = False

    @property
    def file_bytes(self) -> int:
        """Size of all files that the version may consist of."""
        return sum(file.nbytes for file in self.fingerprints)

    def has_files_of(self, other: "VersionSource") -> bool:
        """Whether the files are those of another source, of which the configuration may differ."""
        return (self.path, self.fingerprints) == (other.path, other.fingerprints)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The versions of a model that should serve, or the problem that prevents it.

    Attributes:
        name: Name of the model.
        versions: Versions by number.
        is_required: Whether the server is ready only once the model is ready.
        problem: Why no version can be loaded; empty if versions can be loaded.
        has_files: Whether version folders exist; meaningful only with a problem.
        without_effect: For each part of the configuration that has no effect here, its path and the reason.
        labels: Configured versions by label. A change of labels does not change the versions.
        rollout: Configured rollout, or None. A change of it does not change the versions.
        is_mixed: Whether a load by a client failed for some versions, so that the versions have several configurations.
    """

    name: str
    versions: Mapping[int, VersionSource] = field(default_factory=dict)
    is_required: bool = False
    problem: str = ""
    has_files: bool = True
    without_effect: tuple[str, ...] = ()
    labels: Mapping[str, int] = field(default_factory=dict)
    rollout: RolloutOptions | None = None
    is_mixed: bool = False

    @property
    def is_pinned(self) -> bool:
        """Whether the model must stay in memory."""
        return any(version.configuration.options.is_pinned for version in self.versions.values())

    @property
    def is_on_demand(self) -> bool:
        """Whether the first request loads the model."""
        return any(version.configuration.options.is_on_demand for version in self.versions.values())

    @property
    def is_sent(self) -> bool:
        """Whether a client sent the files, which are deleted after the load."""
        return any(version.is_sent for version in self.versions.values())


@dataclass(frozen=True, slots=True)
class VersionChanges:
    """Numbers of versions, ascending. The versions in ``retire`` drain once all versions in ``load`` serve."""

    load: tuple[int, ...]
    retire: tuple[int, ...]


def plan_changes(serving: Mapping[int, VersionSource], wanted: Mapping[int, VersionSource]) -> VersionChanges:
    """Compute the loads and drains that lead from ``serving`` to ``wanted``. A version with an equal source is kept."""
    return VersionChanges(
        tuple(sorted(version for version, source in wanted.items() if serving.get(version) != source)),
        tuple(sorted(serving.keys() - wanted.keys())),
    )


def _named_by_none(_: str) -> Collection[int]:
    return ()


def read_sources(
    roots: Sequence[Path], defaults: LoadOptions, named: Callable[[str], Collection[int]] = _named_by_none
) -> list[ModelSource]:
    """Read all models of all repositories, sorted by name.

    Args:
        roots: The repositories.
        defaults: Values of options that a model's own configuration does not set.
        named: Returns further versions of a model that should serve, if they exist.

    Raises:
        ServeError: invalid_input, if a repository is not a readable folder.
    """
    return [_read_source(files, defaults, named(files.name)) for files in read_repositories(roots)]


def read_source(
    name: str, roots: Sequence[Path], defaults: LoadOptions, named: Collection[int] = ()
) -> ModelSource | None:
    """Read one model, and nothing of other models. Returns None if the model does not exist.

    Raises:
        ServeError: invalid_input, if a repository is not a readable folder.
    """
    return next((_read_source(files, defaults, named) for files in read_repositories(roots, name)), None)


def make_source(files: ModelFiles, configuration: Configuration, named: Collection[int] = ()) -> ModelSource:
    """Create the source of a model from its files and configuration.

    It includes versions that configured labels, the configured rollout or ``named`` name, if they exist.

    Raises:
        OSError: A folder cannot be read, for example because it was removed.
    """
    options = configuration.options
    versions = versions_to_serve(options, files.versions, named)
    labels, rollout = options.labels, options.rollout
    configuration = replace(configuration, options=options.model_copy(update={"labels": {}, "rollout": None}))
    return ModelSource(
        files.name,
        {version: _version_source(files, version, configuration) for version in versions},
        options.required,
        without_effect=configuration.without_effect,
        labels=labels,
        rollout=rollout,
    )


def versions_to_serve(options: ModelOptions, available: Collection[int], named: Collection[int]) -> list[int]:
    """The versions of a model that should serve, ascending: those of its policy, and named versions that exist.

    Args:
        options: Options of the model. Its labels and its rollout name versions.
        available: Existing versions of the model.
        named: Further versions that should serve, if they exist.
    """
    candidates = () if options.rollout is None else (options.rollout.candidate,)
    also = {*options.labels.values(), *candidates, *named}.intersection(available)
    return sorted({*choose_versions(options.version_policy, available), *also})


def choose_versions(policy: VersionPolicy, available: Collection[int]) -> list[int]:
    """Choose the versions to serve, ascending. Versions that the policy names are chosen even if they are missing."""
    versions = sorted(available)
    if isinstance(policy, AllVersions):
        return versions
    if isinstance(policy, LatestVersions):
        return versions[-policy.latest :]
    return sorted(set(policy.specific))


def _read_source(files: ModelFiles, defaults: LoadOptions, named: Collection[int]) -> ModelSource:
    try:
        if files.problem:
            raise invalid_input(files.problem)
        return make_source(files, read_configuration(files.name, files.options, defaults), named)
    except ServeError as error:
        problem = error.message
    except OSError as error:  # for example because the folder is being changed
        problem = f"its files cannot be read: {error.strerror}"
    except Exception as error:  # noqa: BLE001 - a bug must not keep the other models from loading
        log_fault(logger, "the configuration of a model could not be read", error, model=files.name)
        problem = "its configuration cannot be read"
    is_required = any(map(says_required, files.options_files))
    return ModelSource(files.name, is_required=is_required, problem=problem, has_files=bool(files.versions))


def _version_source(files: ModelFiles, version: int, configuration: Configuration) -> VersionSource:
    found = files.versions.get(version)
    if found is None:
        available = ", ".join(map(str, sorted(files.versions)))
        problem = f"version_policy: expected versions out of {available}, got {version}"
        return VersionSource(Path(str(version)), files.folder, configuration, (), problem)
    fingerprints = take_fingerprints(files, version, configuration.options)
    if configuration.options.ensemble is not None:
        return VersionSource(found, files.folder, configuration, fingerprints)  # there is no file to open
    try:
        path = files.file(version, configuration.options)
    except ServeError as error:
        return VersionSource(found, files.folder, configuration, fingerprints, error.message)
    return VersionSource(path, files.folder, configuration, fingerprints)
