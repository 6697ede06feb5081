"""A model before a session is open: its file, its options, and what its graph shows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.model_file.graph import Graph, Model, Node
from ortserve.model_file.reading import model_nbytes, read_model
from ortserve.registry.load.row_axes import RowAxes, find_row_axes
from ortserve.registry.repository.model_files import operator_libraries

_DECODE_IMAGE: Final = "DecodeImage"
"""In onnxruntime-extensions 0.15.2, libjpeg calls ``exit`` for a truncated file: one request would end the server."""
_EXTENSION_DOMAINS: Final = ("ai.onnx.contrib", "com.microsoft.extensions")


@dataclass(frozen=True, slots=True)
class AnalysedModel:
    """The input of all later steps of a load.

    Attributes:
        path: The ``.onnx`` file.
        name: For threads, accounts and log lines.
        options: Of the model.
        folder: Of the model, with the files that its options name; None for a model that is a single file.
        content: The record of the file.
        rows: Along which axes rows run together, and on what grounds.
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
        """Libraries with custom operators."""
        return operator_libraries(self.options, self.folder)


def analyse_model(path: Path, name: str, options: ModelOptions, folder: Path | None = None) -> AnalysedModel:
    """Read the file and follow rows through its graph. Blocks on the disk; takes about 70 µs per node.

    Raises:
        ServeError: invalid_input, for a ``batch_axis`` of an unknown input or output; unsupported, for an operator
            that would end the process.
    """
    content = read_model(path)
    if any(map(_ends_process, (*content.graph.nodes, *_nodes_of_functions(content)))):
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            f"operator {_DECODE_IMAGE} of onnxruntime-extensions is not supported: it ends the process when a JPEG "
            "file is truncated or malformed; expected decoded images",
        )
    return AnalysedModel(path, name, options, folder, content, find_row_axes(content, options))


def _nodes_of_functions(content: Model) -> list[Node]:
    return [node for function in content.functions.values() for node in function.nodes]


def _ends_process(node: Node) -> bool:
    """Whether the node, or one of its graphs, has an operator that ends the process."""
    if node.op == _DECODE_IMAGE and node.domain in _EXTENSION_DOMAINS:
        return True
    graphs = [value for value in node.attributes.values() if isinstance(value, Graph)]
    return any(_ends_process(inner) for graph in graphs for inner in graph.nodes)
