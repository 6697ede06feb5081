"""The files that a model's configuration names: they lie in the model's folder, and nowhere else."""

from pathlib import Path

from ortserve.config.model import ModelOptions
from ortserve.errors import invalid_input


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
