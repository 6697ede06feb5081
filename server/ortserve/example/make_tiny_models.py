"""Make the two example models that need no training. Needs the package onnx.

Run as ``python -m ortserve.example.make_tiny_models``. The bytes depend on nothing but this file, so that a test can
rebuild the models and compare them with the ones in the repository.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortserve.example import repository_path

Shape: TypeAlias = Sequence[str | int | None]

OPSET: Final = 21
IR_VERSION: Final = 10


def simple_model() -> onnx.ModelProto:
    """Build the sum and the difference of two vectors.

    Names, datatypes and shapes are those of the model ``simple`` that Triton's client examples call, so that they run
    unmodified: INPUT0 and INPUT1 are INT32 [batch, 16]; OUTPUT0 = INPUT0 + INPUT1 and OUTPUT1 = INPUT0 - INPUT1.
    """
    shape: Shape = ["batch", 16]
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        "simple",
        [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name in ("INPUT0", "INPUT1")],
        [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name in ("OUTPUT0", "OUTPUT1")],
        doc_string="Sum and difference of two vectors",
    )
    return _model(graph)


def text_stats_model() -> onnx.ModelProto:
    """Build a few facts about each text of a batch: strings in, and outputs of four datatypes.

    Inputs are ``text`` BYTES [batch, 1] and ``weight`` FP32 [batch, 1]. Outputs, all [batch, 1]: ``word_count`` INT64,
    words being separated by spaces; ``is_number`` BOOL, whether the whole text is a decimal number such as ``-1.5``;
    ``score`` FP32 = word_count · weight; ``quoted`` BYTES, the text between double quotes.
    """
    shape: Shape = ["batch", 1]
    graph = helper.make_graph(
        [
            # Without a delimiter runs of spaces count once. The words themselves are of no use here: their second
            # axis is as long as the longest text of the batch.
            helper.make_node("StringSplit", ["text"], ["words", "word_count"]),
            helper.make_node("RegexFullMatch", ["text"], ["is_number"], pattern=r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)"),
            helper.make_node("Cast", ["word_count"], ["float_count"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["float_count", "weight"], ["score"]),
            helper.make_node("StringConcat", ["quote", "text"], ["opened"]),
            helper.make_node("StringConcat", ["opened", "quote"], ["quoted"]),
        ],
        "text_stats",
        [
            helper.make_tensor_value_info("text", TensorProto.STRING, shape),
            helper.make_tensor_value_info("weight", TensorProto.FLOAT, shape),
        ],
        [
            helper.make_tensor_value_info("word_count", TensorProto.INT64, shape),
            helper.make_tensor_value_info("is_number", TensorProto.BOOL, shape),
            helper.make_tensor_value_info("score", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("quoted", TensorProto.STRING, shape),
        ],
        initializer=[numpy_helper.from_array(np.array([['"']], object), "quote")],
        doc_string="Word count, is it a number, weighted word count, and the text in quotes",
    )
    return _model(graph)


def write_models(repository: Path) -> None:
    """Write both models as version 1, making the folders that are missing."""
    for model in (simple_model(), text_stats_model()):
        path = repository / model.graph.name / "1" / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model.SerializeToString(deterministic=True))


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="ortserve.example.make_tiny_models",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    write_models(repository_path())
