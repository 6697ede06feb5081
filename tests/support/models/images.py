"""Models that decode image files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.builders import IR_VERSION

EXTENSIONS = "com.microsoft.extensions"
"""The domain of ``DecodeImage``."""


def decoder(path: Path, operator: str = "ImageDecoder", **attributes: str) -> Path:
    """File UINT8 [n] → image UINT8 [height, width, channels]; the model has no other node or operator set."""
    domain = EXTENSIONS if operator == "DecodeImage" else ""
    node = helper.make_node(operator, ["file"], ["image"], domain=domain, **attributes)
    return save(path, [node], {domain: 1 if domain else 20})


def digit_reader(path: Path) -> Path:
    """File UINT8 [n] → pixels FP32 [1, 1, 8, 8] from 0 to 16, as the bundled classifier of digits takes them."""
    nodes = [
        helper.make_node("ImageDecoder", ["file"], ["image"], pixel_format="Grayscale"),
        helper.make_node("Transpose", ["image"], ["planes"], perm=[2, 0, 1]),
        helper.make_node("Cast", ["planes"], ["grey"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["grey", "first"], ["row"]),
        helper.make_node("Resize", ["row", "", "", "sizes"], ["small"], mode="linear", antialias=1),
        helper.make_node("Mul", ["small", "factor"], ["pixels"]),
    ]
    weights = [
        numpy_helper.from_array(np.array([0]), "first"),
        numpy_helper.from_array(np.array([1, 1, 8, 8]), "sizes"),
        numpy_helper.from_array(np.array(16 / 255, np.float32), "factor"),
    ]
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1, 1, 8, 8])
    return save(path, nodes, {"": 20}, pixels, weights)


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    opsets: dict[str, int],
    output: onnx.ValueInfoProto | None = None,
    weights: Sequence[onnx.TensorProto] = (),
) -> Path:
    """Write a model with the input ``file``, and by default with the output ``image``."""
    file = helper.make_tensor_value_info("file", TensorProto.UINT8, ["n"])
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["height", "width", None])
    graph = helper.make_graph(nodes, "images", [file], [output or image], list(weights))
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    path.write_bytes(helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION).SerializeToString())
    return path
