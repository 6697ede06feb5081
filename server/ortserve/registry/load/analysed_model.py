"""Analyses a model before a session is open: its file, its options and its row axes."""

from dataclasses import dataclass
from pathlib import Path

from ortserve.config.model import ModelOptions
from ortserve.model_file.graph import Model
from ortserve.model_file.reading import model_nbytes, read_model
from ortserve.registry.load.row_axes import RowAxes, find_row_axes
from ortserve.registry.repository.model_files import operator_libraries


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
    """

    path: Path
    name: str
    options: ModelOptions
    folder: Path | None
    content: Model
    rows: RowAxes

    @property
    def nbytes(self) -> int:
        """The size of the file and its external files. Blocks on the disk."""
        return model_nbytes(self.path, self.content)

    @property
    def libraries(self) -> tuple[Path, ...]:
        """Paths of libraries with custom operators."""
        return operator_libraries(self.options, self.folder)


def analyse_model(path: Path, name: str, options: ModelOptions, folder: Path | None = None) -> AnalysedModel:
    """Read the file and follow rows through its graph. Blocks on the disk; takes about 70 µs per node.

    Raises:
        ServeError: invalid_input, for a ``batch_axis`` of an unknown input or output.
    """
    content = read_model(path)
    return AnalysedModel(path, name, options, folder, content, find_row_axes(content, options))
