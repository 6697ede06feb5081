"""What a file contains, compared with the package ``onnx``."""

import math
from collections import Counter
from pathlib import Path

import onnx
import pytest
from onnx import helper

from models import builders, patterns
from ortserve.errors import ServeError
from ortserve.tools.inspect.content import describe_content, read_file
from ortserve.tools.inspect.result import Content
from ortserve.tools.opening import open_model
from ortserve.tools.subject import find_model

CORPUS = Path(__file__).parents[3] / "rows" / "corpus"
MODELS = ["dynamo_encoder", "half_cnn", "quantized_mlp_qoperator", "sklearn_words", "torch_greedy_decoder"]


def content_of(path: Path) -> Content:
    return describe_content(path, read_file(path), open_model(find_model(str(path))).session)


def all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    inner = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return [*graph.node, *(node for one in inner for node in all_nodes(one))]


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_the_package_onnx(name: str) -> None:
    path = CORPUS / f"{name}.onnx"
    model = onnx.load(path)
    nodes = [*all_nodes(model.graph), *(node for function in model.functions for node in function.node)]

    content = content_of(path)

    expected = Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in nodes)
    assert content.operators == dict(expected)
    assert content.nodes == len(nodes)
    assert content.opsets == {one.domain or "ai.onnx": one.version for one in model.opset_import}
    assert content.producer == model.producer_name
    tensors = [*model.graph.initializer]
    for node in nodes:
        tensors += [a.t for a in node.attribute if node.op_type == "Constant" and a.HasField("t")]
        tensors += [t for a in node.attribute if a.HasField("g") for t in a.g.initializer]
    numbers = [one for one in tensors if one.data_type != onnx.TensorProto.STRING]
    sizes = [helper.tensor_dtype_to_np_dtype(one.data_type).itemsize * math.prod(one.dims) for one in numbers]
    assert content.weights_nbytes == sum(sizes)
    assert content.parameters == sum(math.prod(one.dims) for one in numbers)


def test_free_dimensions_name_the_axes_that_have_them(tmp_path: Path) -> None:
    path = patterns.flattens(tmp_path / "m.onnx")

    assert content_of(path).free_dimensions == {"batch": ["x[0]"], "rows": ["x[1]"]}


def test_initializers_of_an_old_format_are_constants_although_they_are_inputs(tmp_path: Path) -> None:
    path = patterns.dense(tmp_path / "m.onnx", is_input=True)
    assert content_of(path).initializers_as_inputs == ["w"]
    model = onnx.load(path)
    model.ir_version = 3
    model.graph.input.append(patterns.value("b", 4))
    onnx.save(model, path)

    assert content_of(path).initializers_as_inputs == []


def test_external_files_are_counted_without_being_read(tmp_path: Path) -> None:
    path = builders.external_weights(tmp_path / "m.onnx", "weights.bin")
    (tmp_path / "weights.bin").write_bytes(bytes(16))

    assert content_of(path).external_nbytes == {"weights.bin": 16}


def test_missing_external_file_is_named(tmp_path: Path) -> None:
    path = builders.external_weights(tmp_path / "m.onnx", "weights.bin")

    with pytest.raises(ServeError, match=r"expected its external data in .*weights\.bin, which does not exist"):
        read_file(path)
