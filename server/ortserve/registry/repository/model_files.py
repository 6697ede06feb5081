"""What lies in a model repository on disk.

``<repository>/<model>/<version>/model.onnx`` with an optional ``model.yaml`` or Triton's ``config.pbtxt`` in the
model's folder, or simply ``<repository>/<name>.onnx`` as version 1 of ``<name>``. Reads names only, never a model.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.errors import invalid_input
from ortserve.registry.configuration.configuration import OPTIONS_FILE, TRITON_OPTIONS_FILE

MODEL_FILE: Final = "model.onnx"

VERSION: Final = re.compile("[1-9][0-9]*")
"""The name of a version's folder: not 01, which would be 1 once more."""

_MEANT_OPTIONS: Final = re.compile(r"model\.ya?ml", re.IGNORECASE)
_MEANT_TRITON_OPTIONS: Final = re.compile(r"config\.(pb|pbtxt|pbtext|prototxt|textproto|txtpb)", re.IGNORECASE)
_MOST_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as found.

    Attributes:
        name: That of the folder, or of the file without its suffix.
        versions: The file of each, which is there unless the options name another one.
        options_files: Those that say how it is served. More than one are a problem.
        problem: Why it cannot be.
        folder: Where its other files are; None for a file by itself.
    """

    name: str
    versions: Mapping[int, Path] = field(default_factory=dict)
    options_files: tuple[Path, ...] = ()
    problem: str = ""
    folder: Path | None = None

    @property
    def options(self) -> Path | None:
        """The file that says how it is served; None without one."""
        return self.options_files[0] if self.options_files else None

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
            there = _listed(entry.name for entry in found.parent.iterdir())
            raise invalid_input(f"version folder {version} has no file {options.model_file}: it has {there}")
        return file


def read_repositories(roots: Sequence[Path]) -> list[ModelFiles]:
    """List the models of all repositories by name.

    Raises:
        ServeError: invalid_input, when a repository is not a readable folder.
    """
    found: dict[str, ModelFiles] = {}
    for root in roots:
        for model in _read_repository(root):
            if other := found.get(model.name):
                model = ModelFiles(
                    model.name,
                    options_files=(*other.options_files, *model.options_files),
                    problem="there are two models of this name in the repositories",
                )
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
        try:
            found = _read_entry(entry)
        except OSError as error:
            found = ModelFiles(_readable(entry.name), problem=f"it cannot be read: {error.strerror}")
        if found is not None:
            models.append(found)
    return models


def _read_entry(entry: Path) -> ModelFiles | None:
    is_folder = entry.is_dir()
    if not is_folder and entry.suffix != ".onnx":
        return None
    name = entry.name if is_folder else entry.stem
    if (readable := _readable(name)) != name:
        return ModelFiles(readable, problem="its name has letters that cannot be printed, or that are not UTF-8")
    return _read_model(entry) if is_folder else ModelFiles(name, {1: entry})


def _readable(name: str) -> str:
    """A name that can be told of, and asked for: letters that cannot be printed, or stand for bytes, are spelled."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def _read_model(folder: Path) -> ModelFiles:
    name = folder.name
    entries = sorted(folder.iterdir())
    said = tuple(entry for entry in entries if entry.name in (OPTIONS_FILE, TRITON_OPTIONS_FILE))
    versions = {
        int(entry.name): entry / MODEL_FILE for entry in entries if VERSION.fullmatch(entry.name) and entry.is_dir()
    }
    problem = ""
    if len(said) > 1:
        problem = f"it has both {OPTIONS_FILE} and {TRITON_OPTIONS_FILE}: say it all in one of them"
    elif misnamed := next((found for entry in entries if (found := _misnamed(entry))), ""):
        problem = misnamed
    elif not versions:
        problem = (
            f"no version folder (1, 2, …) with a file {MODEL_FILE}: it has {_listed(path.name for path in entries)}"
        )
        if VERSION.fullmatch(name) and (folder / MODEL_FILE).exists():
            problem += f"; a repository is a folder of models, which '{folder.parent.name}' seems to be one of"
    return ModelFiles(name, versions, said, problem, folder)


def _misnamed(entry: Path) -> str:
    """What to do with a file that nothing reads, though it is meant to say how the model is served; empty for others.

    To be passed over in silence would be to serve a model otherwise than its owner believes.
    """
    name = entry.name
    if VERSION.fullmatch(name) and (entry / OPTIONS_FILE).exists():
        return f"found {name}/{OPTIONS_FILE}: expected it beside the version folders"
    meant = OPTIONS_FILE if _MEANT_OPTIONS.fullmatch(name) else TRITON_OPTIONS_FILE
    is_meant = _MEANT_OPTIONS.fullmatch(name) or _MEANT_TRITON_OPTIONS.fullmatch(name)
    return f"found {name}: expected {meant}" if is_meant and name != meant else ""


def _listed(names: Iterable[str]) -> str:
    """What lies in a folder, for who expected something else there."""
    some = sorted(name for name in names if not name.startswith("."))
    more = f" and {len(some) - _MOST_LISTED} more" if len(some) > _MOST_LISTED else ""
    return f"{', '.join(some[:_MOST_LISTED])}{more}" if some else "nothing"


def read_model_file(folder: Path | None, name: str, what: str) -> bytes:
    """Read a file of the model's folder. Blocks on it.

    Args:
        folder: Of the model; None for one that is a single file.
        name: As the configuration says it, relative to the folder.
        what: It is, for the error.

    Raises:
        ServeError: invalid_input, when it cannot be read, or is not in the folder.
    """
    return _read(_find(folder, name, what), name, what)


def read_labels(options: ModelOptions, folder: Path | None) -> dict[str, tuple[str, ...]]:
    """The labels of each output that has some.

    Raises:
        ServeError: invalid_input, when a file of labels cannot be read.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, output in options.outputs.items():
        if isinstance(output.labels, str):
            what = f"labels of output '{name}'"
            try:
                text = read_model_file(folder, output.labels, what).decode()
            except UnicodeDecodeError:
                raise invalid_input(f"{what}: expected a text in UTF-8, got another in '{output.labels}'") from None
            found[name] = tuple(text.splitlines())
        elif output.labels is not None:
            found[name] = output.labels
    return found


def operator_libraries(options: ModelOptions, folder: Path | None) -> tuple[Path, ...]:
    """Where the libraries of a model's own operators are; one of a relative path is in the model's folder."""
    return tuple(
        path if (path := Path(name)).is_absolute() or folder is None else folder / name
        for name in options.session.operator_libraries
    )


def _find(folder: Path | None, name: str, what: str) -> Path:
    if folder is None:
        raise invalid_input(f"{what}: expected a model in a folder of its own, that would hold '{name}'")
    root = folder.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise invalid_input(f"{what}: expected a file in the model's folder, got '{name}'")
    return path


def _read(path: Path, name: str, what: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise invalid_input(f"{what}: '{name}' cannot be read: {getattr(error, 'strerror', None) or error}") from None
