"""Operators of onnxruntime-extensions: an ensemble that classifies texts."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from encodings_of_requests import Infer, grpc_raw, rest_binary
from models.builders import IR_VERSION, OPSET, write
from servers import SHORT_WARMUP, ServerProcess, serving

pytestmark = pytest.mark.skipif(not find_spec("onnxruntime_extensions"), reason="needs onnxruntime-extensions")
PROTOCOLS = pytest.mark.parametrize("infer", [rest_binary, grpc_raw])
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "a", "film")

# The files of the example in docs/ensembles.md.
MEMBER = """\
batched: false
session: {operator_libraries: [onnxruntime-extensions]}
"""
TEXT = """\
batched: false
inputs:
  TEXT: {datatype: BYTES, dims: [1]}
outputs:
  SCORES: {labels: [bad, good]}
ensemble:
  steps:
    - {model: tokens, inputs: {text: TEXT}, outputs: {ids: ids}}
    - {model: words, inputs: {ids: ids}, outputs: {scores: SCORES}}
"""


def tokens(path: Path) -> Path:
    """A BERT tokenizer with few words: text BYTES [1] → ids INT64 [n]."""
    node = helper.make_node(
        "BertTokenizer",
        ["text"],
        ["ids", "types", "mask"],
        domain="ai.onnx.contrib",
        vocab_file="\n".join(WORDS),
        do_lower_case=1,
    )
    text = helper.make_tensor_value_info("text", TensorProto.STRING, [1])
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    graph = helper.make_graph([node], "tokens", [text], [ids])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.contrib", 1)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString())
    return path


def words(path: Path) -> Path:
    """Ids INT64 [n] → scores FP32 [2]: the numbers of bad and of good words."""
    table = np.zeros((len(WORDS), 2), np.float32)
    table[WORDS.index("bad"), 0] = table[WORDS.index("good"), 1] = 1
    weights = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array([0], np.int64), "axes")]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("ReduceSum", ["rows", "axes"], ["scores"], keepdims=0),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    return write(path, nodes, [ids], [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [2])], weights)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("extensions")
    for build, options in ((tokens, MEMBER), (words, "")):
        (folder / build.__name__ / "1").mkdir(parents=True)
        build(folder / build.__name__ / "1" / "model.onnx")
        (folder / build.__name__ / "model.yaml").write_text(options or "batched: false\n")
    (folder / "text" / "1").mkdir(parents=True)
    (folder / "text" / "model.yaml").write_text(TEXT)
    with serving(folder, *SHORT_WARMUP) as server:
        yield server


@PROTOCOLS
def test_texts_are_classified(server: ServerProcess, infer: Infer) -> None:
    for text, scores in (("A good film", [0, 1]), ("bad BAD film", [2, 0])):
        assert infer(server, "text", {"TEXT": np.array([text], object)})["SCORES"].tolist() == scores
