"""Finds the files of models in a repository, and reads files that a model's configuration names. Blocks on the disk.

A model is ``<repository>/<model>/<version>/model.onnx``, with an optional ``model.yaml`` or Triton's ``config.pbtxt``
in the model's folder, or ``<repository>/<name>.onnx``, which is version 1 of ``<name>``. A repository may also be such
a file itself. No model file is opened here.
"""

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.config.session import EXTENSIONS
from ortserve.core.version_names import version_of
from ortserve.errors import invalid_input
from ortserve.paths import NO_FILE, exists, is_file, is_folder, is_model_file, is_other, read_file

MODEL_FILE: Final = "model.onnx"
OPTIONS_FILE: Final = "model.yaml"
TRITON_OPTIONS_FILE: Final = "config.pbtxt"

NO_VERSIONS: Final = "no version folder (1, 2, …)"
"""Start of the text of ``ModelFiles.problem`` for a folder without versions."""

_LIKE_OPTIONS: Final = re.compile(r"model\.ya?ml", re.IGNORECASE)
_LIKE_TRITON_OPTIONS: Final = re.compile(r"config\.(pb|pbtxt|pbtext|prototxt|textproto|txtpb)", re.IGNORECASE)
_MAX_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model.

    Attributes:
        name: Name of the folder, or of the file without its suffix.
        versions: Default model file of each version. The options may name another file instead.
        options_files: Files that configure the model. More than one is a problem.
        problem: Why the model cannot be served; empty without a known problem.
        folder: Folder of the model; None for a model that is a single file.
    """

    name: str
    versions: Mapping[int, Path] = field(default_factory=dict)
    options_files: tuple[Path, ...] = ()
    problem: str = ""
    folder: Path | None = None

    @property
    def options(self) -> Path | None:
        """The file that configures the model, or None."""
        return self.options_files[0] if self.options_files else None

    def file(self, version: int, options: ModelOptions) -> Path:
        """The file to open for a version, according to the options.

        Raises:
            ServeError: invalid_input, if the file is missing.
        """
        found = self.versions[version]
        if self.folder is None:
            if is_other(found):
                raise invalid_input(f"{found.name}: {NO_FILE}")
            return found
        file = found.with_name(options.model_file)
        if is_folder(file):  # Triton allows this for models with external weights beside the model file.
            file /= MODEL_FILE
        if is_file(file):
            return file
        name = file.relative_to(found.parent)
        if file.is_symlink() and not exists(file):
            raise invalid_input(f"version folder {version}: {name} is a link to a file that does not exist")
        if exists(file):
            raise invalid_input(f"version folder {version}: {name}: {NO_FILE}")
        present = _list_names(entry.name for entry in found.parent.iterdir())
        raise invalid_input(f"version folder {version} has no file {name}: it has {present}")


def read_repositories(roots: Sequence[Path], only: str | None = None) -> list[ModelFiles]:
    """List the models of all repositories, sorted by name, or the model ``only``, without a look at the others.

    Raises:
        ServeError: invalid_input, if a repository is neither a readable folder nor a model file.
    """
    found: dict[str, ModelFiles] = {}
    numbers: dict[str, int] = {}
    for number, root in enumerate(roots, 1):
        for model in _read_repository(root, only):
            if other := found.get(model.name):
                first = numbers[model.name]
                where = f"a folder and a file in repository {first}"
                if number != first:
                    where = f"in repository {first} and in repository {number} of those in the options"
                model = ModelFiles(
                    model.name,
                    options_files=(*other.options_files, *model.options_files),
                    problem=f"the repositories have two models of this name: {where}",
                )
            found[model.name] = model
            numbers[model.name] = number
    return [found[name] for name in sorted(found)]


def read_model_file(folder: Path | None, name: str, role: str) -> bytes:
    """Read a file that the configuration names, relative to the model's folder. Links in the folder are followed.

    Args:
        folder: Folder of the model; None for a model that is a single file.
        name: Configured name of the file.
        role: Role of the file, for errors.

    Raises:
        ServeError: invalid_input, if the file cannot be read or the name leaves the folder.
    """
    if folder is None:
        raise invalid_input(f"{role}: '{name}' needs a model in a folder of its own, got a single file")
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise invalid_input(f"{role}: expected a file in the model's folder, got '{name}'")
    try:
        return read_file(folder / path)
    except (OSError, ValueError) as error:
        raise invalid_input(f"{role}: '{name}' cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_output_labels(options: ModelOptions, folder: Path | None) -> dict[str, tuple[str, ...]]:
    """Read the configured labels by the name of the output.

    Raises:
        ServeError: invalid_input, if a file of labels cannot be read.
    """
    labels: dict[str, tuple[str, ...]] = {}
    for name, output in options.outputs.items():
        if isinstance(output.labels, str):
            role = f"labels of output '{name}'"
            try:
                text = read_model_file(folder, output.labels, role).decode()
            except UnicodeDecodeError:
                raise invalid_input(f"{role}: expected text in UTF-8, got other bytes in '{output.labels}'") from None
            labels[name] = tuple(text.splitlines())
        elif output.labels is not None:
            labels[name] = output.labels
    return labels


def operator_libraries(options: ModelOptions, folder: Path | None) -> tuple[Path, ...]:
    """The paths of the configured operator libraries. Relative names are relative to the model's folder.

    Raises:
        ServeError: invalid_input, for ``EXTENSIONS`` if the package is not installed.
    """
    return tuple(
        _extensions_library()
        if name == EXTENSIONS
        else path
        if (path := Path(name)).is_absolute() or folder is None
        else folder / name
        for name in options.session.operator_libraries
    )


def _extensions_library() -> Path:
    """The library in the package onnxruntime-extensions. The package is not imported to find it."""
    spec = find_spec("onnxruntime_extensions")
    if spec is not None and spec.origin is not None:
        for file in sorted(Path(spec.origin).parent.glob("_extensions_pydll.*")):
            if file.suffix in (".so", ".pyd"):
                return file
    raise invalid_input(
        f"session.operator_libraries: the package {EXTENSIONS} is not installed: pip install 'ortserve[extensions]'"
    )


def _read_repository(root: Path, only: str | None) -> list[ModelFiles]:
    try:
        entries = [root] if is_model_file(root) else _entries(root, only)
    except OSError as error:
        expected = "a folder of models or an .onnx file"
        raise invalid_input(f"repository {root}: expected {expected}, got: {error.strerror}") from None
    models: list[ModelFiles] = []
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            found = _read_entry(entry)
        except OSError as error:
            found = ModelFiles(_printable(entry.name), problem=f"it cannot be read: {error.strerror}")
        if found is not None and only in (None, found.name):
            models.append(found)
    return models


def _entries(root: Path, only: str | None) -> list[Path]:
    """The entries of a repository, sorted. With ``only``, those that may be the model of this name."""
    if only is None or "\\" in only:  # A backslash may be an escape of ``_printable``.
        return sorted(root.iterdir())
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)  # Raises OSError as a listing would.
    try:
        return [root / name for name in (only, f"{only}.onnx") if _is_listed(name, folder)]
    finally:
        os.close(folder)


def _is_listed(name: str, folder: int) -> bool:
    """Whether a listing of an open folder would contain a name, which may come from a client."""
    if name.startswith(".") or "/" in name or "\0" in name:
        return False
    try:
        os.lstat(name, dir_fd=folder)
    except UnicodeEncodeError:
        return False
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENAMETOOLONG)
    return True


def _read_entry(entry: Path) -> ModelFiles | None:
    is_model_folder = is_folder(entry)
    if not is_model_folder and entry.suffix != ".onnx":
        return None
    name = entry.name if is_model_folder else entry.stem
    if (printable := _printable(name)) != name:
        return ModelFiles(printable, problem="its name has characters that cannot be printed or are not UTF-8")
    return _read_model(entry) if is_model_folder else ModelFiles(name, {1: entry})


def _printable(name: str) -> str:
    """The name, with escapes for characters that cannot be printed or that stand for bytes outside UTF-8."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def _read_model(folder: Path) -> ModelFiles:
    name = folder.name
    entries = sorted(folder.iterdir())
    named = [entry for entry in entries if entry.name in (OPTIONS_FILE, TRITON_OPTIONS_FILE)]
    options_files = tuple(entry for entry in named if not is_other(entry))
    versions = {
        version: entry / MODEL_FILE for entry in entries if (version := version_of(entry.name)) and is_folder(entry)
    }
    problem = ""
    if unreadable := next((entry.name for entry in named if entry not in options_files), ""):
        problem = f"{unreadable}: {NO_FILE}"
    elif len(options_files) > 1:
        problem = f"it has both {OPTIONS_FILE} and {TRITON_OPTIONS_FILE}: expected one of them"
    elif misnamed := next((found for entry in entries if (found := _misnamed(entry))), ""):
        problem = misnamed
    elif not versions:
        present = _list_names(path.name for path in entries)
        problem = f"{NO_VERSIONS} with a file {MODEL_FILE}: it has {present}"
        if options_files:
            problem += "; an ensemble needs an empty one, which Git does not store"
        if any(_has_versions(entry) for entry in entries):
            problem = f"expected the folder of a model, got a repository, a folder of models: it has {present}"
        if exists(folder / MODEL_FILE):
            problem += (
                f"; a repository is a folder of models, but '{folder.parent.name}' seems to be a model itself"
                if version_of(name)
                else f"; move the file to {name}/1/{MODEL_FILE}"
            )
    return ModelFiles(name, versions, options_files, problem, folder)


def _has_versions(entry: Path) -> bool:
    """Whether an entry is the folder of a model with versions."""
    return is_folder(entry) and any(version_of(inner.name) and exists(inner / MODEL_FILE) for inner in entry.iterdir())


def _misnamed(entry: Path) -> str:
    """The problem of a file that looks like a configuration but has another name; empty for other files.

    If such a file were ignored, the model would not be served as its owner expects.
    """
    name = entry.name
    if version_of(name) and exists(entry / OPTIONS_FILE):
        return f"found {name}/{OPTIONS_FILE}: expected it beside the version folders"
    expected = OPTIONS_FILE if _LIKE_OPTIONS.fullmatch(name) else TRITON_OPTIONS_FILE
    is_like = _LIKE_OPTIONS.fullmatch(name) or _LIKE_TRITON_OPTIONS.fullmatch(name)
    return f"found {name}: expected {expected}" if is_like and name != expected else ""


def _list_names(names: Iterable[str]) -> str:
    """List the first visible names, for errors."""
    visible = sorted(name for name in names if not name.startswith("."))
    more = f" and {len(visible) - _MAX_LISTED} more" if len(visible) > _MAX_LISTED else ""
    return f"{', '.join(visible[:_MAX_LISTED])}{more}" if visible else "nothing"
