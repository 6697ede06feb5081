"""Analyses a model before a session is open: its file, its options and its row axes."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.errors import invalid_input
from ortserve.model_file.graph import Model
from ortserve.model_file.reading import model_nbytes, read_model
from ortserve.paths import NO_FILE, is_other, open_file
from ortserve.registry.load.row_axes import RowAxes, find_row_axes
from ortserve.registry.repository.model_files import operator_libraries
from ortserve.rows import Sizes, find_sizes

_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class AnalysedModel:
    """The input of all later steps of a load.

    Attributes:
        path: The ``.onnx`` file.
        name: Name of the model, for threads, accounts and log lines.
        options: Options of the model.
        folder: Folder of the model and the files that its options name; None for a model that is a single file.
        content: Content of the file: its graph, without large weights.
        rows: The axes along which rows run together, and the grounds for it.
        sizes: Returns what ``rows.find_sizes`` finds with ``keeps_targets``. Several steps of a load need it, or none;
            it is found once.
    """

    path: Path
    name: str
    options: ModelOptions
    folder: Path | None
    content: Model
    rows: RowAxes
    sizes: Callable[[], Sizes]

    @property
    def nbytes(self) -> int:
        """The size of the file and its external files. Blocks on the disk."""
        return model_nbytes(self.path, self.content)

    @property
    def libraries(self) -> tuple[Path, ...]:
        """Paths of libraries with custom operators."""
        return operator_libraries(self.options, self.folder)

    def check_weights(self) -> None:
        """Reject external weights that are no files, as ``find_files`` does for the model file. Blocks on the disk."""
        _reject_others(*(self.path.parent / file for file in self.content.external_files))


def find_files(path: Path, libraries: Iterable[Path], check: Callable[[], None]) -> None:
    """Wait until the system has the model file in memory, and has found the libraries. Blocks on the disk.

    Args:
        path: The ``.onnx`` file.
        libraries: Libraries with custom operators.
        check: Called for each piece of the file; what it raises ends the wait.

    Raises:
        ServeError: invalid_input, for something else than a file, which ONNX Runtime would open and might wait for.
    """
    with suppress(OSError), open_file(path) as file:  # opening the session gives the reason
        while file.read(_PIECE_BYTES):
            check()
    _reject_others(path, *libraries)


def analyse_model(path: Path, name: str, options: ModelOptions, folder: Path | None = None) -> AnalysedModel:
    """Read the file and follow rows through its graph. Blocks on the disk; takes about 70 µs per node.

    Raises:
        ServeError: invalid_input, for a ``batch_axis`` of an unknown input or output.
    """
    content = read_model(path)
    sizes = cache(partial(find_sizes, content, keeps_targets=True))
    return AnalysedModel(path, name, options, folder, content, find_row_axes(content, options), sizes)


def _reject_others(*files: Path) -> None:
    for file in files:
        with suppress(OSError):  # opening the session gives the reason
            if is_other(file):
                raise invalid_input(f"{file.name}: {NO_FILE}")
