"""What lies in a model repository on disk.

``<repository>/<model>/<version>/model.onnx`` with an optional ``model.yaml`` or Triton's ``config.pbtxt`` in the
model's folder, or simply ``<repository>/<name>.onnx`` as version 1 of ``<name>``. Reads names only, never a model.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.errors import invalid_input
from ortserve.registry.configuration import OPTIONS_FILE, TRITON_OPTIONS_FILE

MODEL_FILE: Final = "model.onnx"

VERSION: Final = re.compile("[1-9][0-9]*")
"""The name of a version's folder: not 01, which would be 1 once more."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as found.

    Attributes:
        name: That of the folder, or of the file without its suffix.
        versions: The file of each, which is there unless the options name another one.
        options: The file that says how it is served.
        problem: Why it cannot be.
        folder: Where its other files are; None for a file by itself.
    """

    name: str
    versions: Mapping[int, Path] = field(default_factory=dict)
    options: Path | None = None
    problem: str = ""
    folder: Path | None = None

    def file(self, version: int, options: ModelOptions) -> Path:
        """The file of a version to open, by what the options say.

        Raises:
            ServeError: invalid_input, when it is not there.
        """
        found = self.versions[version]
        if self.folder is None:
            return found
        file = found.with_name(options.model_file)
        if file.is_dir():  # as Triton takes it, for models whose weights lie beside them
            file /= MODEL_FILE
        if not file.is_file():
            raise invalid_input(f"version folder {version} has no file {options.model_file}")
        return file


def read_repositories(roots: Sequence[Path]) -> list[ModelFiles]:
    """List the models of all repositories by name.

    Raises:
        ServeError: invalid_input, when a repository is not a readable folder.
    """
    found: dict[str, ModelFiles] = {}
    for root in roots:
        for model in _read_repository(root):
            if model.name in found:
                model = ModelFiles(model.name, problem="there are two models of this name in the repositories")
            found[model.name] = model
    return [found[name] for name in sorted(found)]


def _read_repository(root: Path) -> list[ModelFiles]:
    try:
        entries = sorted(root.iterdir())
    except OSError as error:
        raise invalid_input(f"repository {root}: expected a folder of models, got: {error.strerror}") from None
    models: list[ModelFiles] = []
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            try:
                models.append(_read_model(entry))
            except OSError as error:
                models.append(ModelFiles(entry.name, problem=f"its folder cannot be read: {error.strerror}"))
        elif entry.suffix == ".onnx":
            models.append(ModelFiles(entry.stem, {1: entry}))
    return models


def _read_model(folder: Path) -> ModelFiles:
    name = folder.name
    said = [folder / file for file in (OPTIONS_FILE, TRITON_OPTIONS_FILE) if (folder / file).exists()]
    if len(said) > 1:
        return ModelFiles(
            name, problem=f"it has both {OPTIONS_FILE} and {TRITON_OPTIONS_FILE}: say it all in one of them"
        )
    versions: dict[int, Path] = {}
    for entry in folder.iterdir():
        if not (entry.is_dir() and VERSION.fullmatch(entry.name)):
            continue
        file = entry / MODEL_FILE
        if not said and not (file.is_file() or (file / MODEL_FILE).is_file()):
            return ModelFiles(name, problem=f"version folder {entry.name} has no file {MODEL_FILE}")
        versions[int(entry.name)] = file
    if not versions:
        return ModelFiles(name, problem=f"no version folder (1, 2, …) with a file {MODEL_FILE}")
    return ModelFiles(name, versions, said[0] if said else None, folder=folder)
