"""Replaces ZipMap in models, so that class scores are a tensor with one column for each class.

ONNX Runtime returns a sequence of maps as a list of dictionaries, which it builds row by row under the interpreter
lock. So this module edits the serialized model before a session is opened. It does not change the file. ``session``
opens the result, and the loader reads the classes.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

from ortserve.model_file.editing import (
    GRAPH_NODE,
    GRAPH_OUTPUT,
    GRAPH_VALUE,
    Edits,
    write_node,
    write_tensor,
)
from ortserve.model_file.graph import FLOAT, Model, Node, names_read

Classes: TypeAlias = tuple[int | float | str, ...]
"""The keys of the maps, in the order of the columns."""

_DOMAIN: Final = "ai.onnx.ml"


@dataclass(frozen=True, slots=True)
class _ZipMap:
    """A ZipMap whose output is an output of the graph that no node reads."""

    scores: str
    output: str
    classes: Classes


def read_classes(model: Model) -> dict[str, Classes]:
    """The classes of each output that is a sequence of maps in the file and a tensor in the session."""
    return {zip_map.output: zip_map.classes for zip_map in _find(model).values()}


def score_edits(model: Model) -> Edits:
    """The edits that replace each output of ``read_classes`` with a tensor; empty if the model has no such output.

    The tensor is FP32 ``[-1, classes]`` and has the output's name. Nodes of ``ai.onnx.ml`` replace ZipMap, so that the
    same execution provider runs them. Scaler fails, as ZipMap does, if the numbers of scores and classes differ.
    FeatureVectorizer converts the scores of a single row without a batch axis to a matrix. Neither changes a score.
    """
    edits = {}
    for output, zip_map in _find(model).items():
        edits[GRAPH_NODE, output] = _nodes(zip_map)
        edits[GRAPH_OUTPUT, output] = write_tensor(GRAPH_OUTPUT, output, FLOAT, (None, len(zip_map.classes)))
        edits[GRAPH_VALUE, output] = b""
    return edits


def _find(model: Model) -> dict[str, _ZipMap]:
    """The ZipMap nodes to replace, by output."""
    outputs = {declared.name for declared in model.graph.outputs if declared.is_map_sequence}
    if not outputs:
        return {}
    found = {
        zip_map.output: zip_map
        for node in model.graph.nodes
        if (zip_map := _zip_map(node)) is not None and zip_map.output in outputs
    }
    for node in model.graph.nodes:
        for name in names_read(node):
            found.pop(name, None)
    return found


def _zip_map(node: Node) -> _ZipMap | None:
    """The node, if it is a ZipMap with classes."""
    if node.op != "ZipMap" or node.domain != _DOMAIN or not len(node.inputs) == len(node.outputs) == 1:
        return None
    classes = node.attributes.get("classlabels_strings") or node.attributes.get("classlabels_int64s")
    return _ZipMap(node.inputs[0], node.outputs[0], classes) if isinstance(classes, tuple) else None


def _nodes(zip_map: _ZipMap) -> bytes:
    count = len(zip_map.classes)
    checked = f"{zip_map.output}/checked"
    scale = {"offset": [0.0] * count, "scale": [1.0] * count}
    scaler = write_node("Scaler", _DOMAIN, [zip_map.scores], checked, attributes=scale)
    width = {"inputdimensions": [count]}
    return scaler + write_node("FeatureVectorizer", _DOMAIN, [checked], zip_map.output, attributes=width)
