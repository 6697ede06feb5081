"""The source of a model that a client sends: kept on disk for as long as it takes to load it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ortserve.errors import ServeError, invalid_input
from ortserve.registry.client_config import ClientModel
from ortserve.registry.repository import ModelFiles, read_repositories
from ortserve.registry.source import ModelSource, make_source


@contextmanager
def client_source(client: ClientModel, roots: Sequence[Path]) -> Iterator[ModelSource]:
    """Give what to load for as long as the context lasts. Blocks on the disk, on entering and on leaving.

    Args:
        client: With files, they are the model's; without, only its configuration is the client's.
        roots: The repositories, for a model without files.

    Raises:
        ServeError: invalid_input, when the files cannot be kept, or the model is in no repository.
    """
    if not client.files:
        yield make_source(_find(client.name, roots), client.configuration)
        return
    try:
        # Not in memory: weights beside the model's file are found by their names.
        folder = TemporaryDirectory(prefix="ortserve-load-", ignore_cleanup_errors=True)
    except OSError as error:
        raise invalid_input(f"its files cannot be kept: {error.strerror}") from None
    with folder as path:
        yield make_source(client.write(Path(path)), client.configuration)


def _find(name: str, roots: Sequence[Path]) -> ModelFiles:
    try:
        found = read_repositories(roots)
    except ServeError:  # its text names the folder, which is none of a client's business
        raise invalid_input("a repository cannot be read") from None
    files = next((files for files in found if files.name == name), None)
    if files is None:
        raise invalid_input("it is in no repository and no files were sent")
    if files.problem:
        raise invalid_input(files.problem)
    return files
