"""What lies in a model repository on disk.

``<repository>/<model>/<version>/model.onnx`` with an optional ``<repository>/<model>/model.yaml``, or simply
``<repository>/<name>.onnx`` as version 1 of ``<name>``. Reads names only, never a model.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ortserve.errors import invalid_input

MODEL_FILE: Final = "model.onnx"
OPTIONS_FILE: Final = "model.yaml"
TRITON_OPTIONS_FILE: Final = "config.pbtxt"

_VERSION: Final = re.compile("[1-9][0-9]*")  # not 01, which would be 1 once more


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as found: the files of its versions and of its options; ``problem`` says why it cannot be served."""

    name: str
    versions: Mapping[int, Path] = field(default_factory=dict)
    options: Path | None = None
    problem: str = ""


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
    if (folder / TRITON_OPTIONS_FILE).exists():
        return ModelFiles(name, problem=f"{TRITON_OPTIONS_FILE} is not read by this server; say it in {OPTIONS_FILE}")
    versions: dict[int, Path] = {}
    for entry in folder.iterdir():
        if not (entry.is_dir() and _VERSION.fullmatch(entry.name)):
            continue
        file = entry / MODEL_FILE
        if not file.is_file():
            return ModelFiles(name, problem=f"version folder {entry.name} has no file {MODEL_FILE}")
        versions[int(entry.name)] = file
    if not versions:
        return ModelFiles(name, problem=f"no version folder (1, 2, …) with a file {MODEL_FILE}")
    options = folder / OPTIONS_FILE
    return ModelFiles(name, versions, options if options.exists() else None)
