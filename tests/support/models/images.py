"""Models that decode image files."""

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from models.builders import IR_VERSION

EXTENSIONS = "com.microsoft.extensions"
"""The domain of ``DecodeImage``."""


def decoder(path: Path, operator: str = "ImageDecoder", **attributes: str) -> Path:
    """File UINT8 [n] → image UINT8 [height, width, channels]; the model has no other node or operator set."""
    domain = EXTENSIONS if operator == "DecodeImage" else ""
    node = helper.make_node(operator, ["file"], ["image"], domain=domain, **attributes)
    return save(path, [node], {domain: 1 if domain else 20})


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    opsets: dict[str, int],
    output: onnx.ValueInfoProto | None = None,
) -> Path:
    """Write a model with the input ``file``, and by default with the output ``image``."""
    file = helper.make_tensor_value_info("file", TensorProto.UINT8, ["n"])
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["height", "width", None])
    graph = helper.make_graph(nodes, "images", [file], [output or image])
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    path.write_bytes(helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION).SerializeToString())
    return path
