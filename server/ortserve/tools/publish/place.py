"""The model of a repository that gets a new version: its folder, its configuration, and the files of a version."""

from dataclasses import dataclass
from pathlib import Path

from ortserve.config.model import LoadOptions, ModelOptions
from ortserve.core.version_names import version_of
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.repository.configuration import read_configuration
from ortserve.registry.repository.fingerprints import take_fingerprints
from ortserve.registry.repository.model_files import NO_VERSIONS, ModelFiles, read_repositories
from ortserve.registry.repository.provenance import PROVENANCE_FILE
from ortserve.registry.repository.source import choose_versions
from ortserve.tools.provenance import external_files
from ortserve.tools.subject import Subject


@dataclass(frozen=True, slots=True)
class Place:
    """A model of a repository, which need not exist yet.

    Attributes:
        folder: Folder of the model.
        files: Files of the model; None if it is new.
        options: Configuration of the model; the defaults if it has none.
    """

    folder: Path
    files: ModelFiles | None
    options: ModelOptions

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.folder.name

    @property
    def beside(self) -> Path:
        """A path beside the folder to create, which is the folder of a version or of a new model."""
        return self.folder if self.files is None else self.folder / "1"

    def newest(self) -> Subject | None:
        """The highest version that is served and has its file; None without one."""
        if self.files is None:
            return None
        for number in reversed(choose_versions(self.options.version_policy, self.files.versions)):
            try:
                path = self.files.file(number, self.options)
            except (KeyError, ServeError):
                continue
            return Subject(self.name, path, self.folder, self.options, number)
        return None

    def companions(self) -> tuple[Path, list[Path]]:
        """The model file of a version and its companions, relative to the folder of the version.

        Companions are files of the newest version, such as labels, without its model, the model's external data, its
        provenance, and files that the server writes.
        """
        newest = self.newest()
        if newest is None or self.files is None or newest.version is None:
            return Path(self.options.model_file), []
        folder = self.folder / str(newest.version)
        own = {newest.path, *external_files(newest.path), folder / PROVENANCE_FILE}
        paths = (Path(file.path) for file in take_fingerprints(self.files, newest.version, self.options))
        return newest.path.relative_to(folder), [
            path.relative_to(folder) for path in paths if path.is_relative_to(folder) and path not in own
        ]


def find_place(target: str) -> Place:
    """Find ``REPOSITORY/name``, or prepare for a new model of this name.

    Raises:
        ServeError: invalid_input: there is no such repository, the model is a single file, or its configuration is
            wrong, so that no version of it can be served.
    """
    folder = Path(target).absolute()
    repository, name = folder.parent, folder.name
    if not repository.is_dir():
        raise invalid_input(
            f"{target}: expected REPOSITORY/name with an existing repository, but {repository} does not exist"
        )
    if not name or name.startswith(".") or not name.isprintable() or name.endswith(".onnx") or "\\" in name:
        raise invalid_input(f"{target}: expected the name of a model after the repository, got '{name}'")
    files = next(iter(read_repositories([repository], name)), None)
    if version_of(name) and read_repositories([repository.parent], repository.name):
        raise invalid_input(f"{target}: expected REPOSITORY/name without a version, which publish chooses")
    if (repository / f"{name}.onnx").is_file():
        moved = f"mkdir -p {name}/1 && mv {name}.onnx {name}/1/model.onnx"
        raise invalid_input(
            f"{target}: '{name}' is the single file {name}.onnx, which cannot have a second version: move it first, in "
            f"the repository: {moved}"
        )
    if files is None:
        return Place(folder, None, ModelOptions())
    if files.problem and not files.problem.startswith(NO_VERSIONS):
        raise invalid_input(f"{target}: {files.problem}")
    try:
        options = read_configuration(name, files.options, LoadOptions()).options
    except ServeError as error:
        raise ServeError(error.kind, f"{target}: {error.message}") from None
    return Place(folder, files, options)
