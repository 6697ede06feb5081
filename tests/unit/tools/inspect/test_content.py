"""The content of a file, compared with the package ``onnx``."""

import math
from collections import Counter
from pathlib import Path

import onnx
import pytest
from onnx import helper

from models import builders, patterns
from ortserve.tools.inspect.content import describe_content
from ortserve.tools.inspect.result import Content, Weights
from ortserve.tools.opening import open_model
from ortserve.tools.subject import find_model

CORPUS = Path(__file__).parents[3] / "rows" / "corpus"
MODELS = ["dynamo_encoder", "half_cnn", "quantized_mlp_qoperator", "sklearn_words", "torch_greedy_decoder"]


def content_of(path: Path) -> Content:
    return describe_content(open_model(find_model(str(path))))


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
    assert content.opsets == {one.domain or "ai.onnx": one.version for one in model.opset_import}
    assert content.producer == model.producer_name
    tensors = [*model.graph.initializer]
    for node in nodes:
        tensors += [a.t for a in node.attribute if node.op_type == "Constant" and a.HasField("t")]
        tensors += [t for a in node.attribute if a.HasField("g") for t in a.g.initializer]
    numbers = [one for one in tensors if one.data_type != onnx.TensorProto.STRING]
    sizes = [helper.tensor_dtype_to_np_dtype(one.data_type).itemsize * math.prod(one.dims) for one in numbers]
    assert sum(one.nbytes for one in content.weights) == sum(sizes)
    assert sum(one.parameters for one in content.weights if one.datatype != "string") == sum(
        math.prod(one.dims) for one in numbers
    )


def test_each_tensor_of_few_bits_takes_whole_bytes(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    weights = [helper.make_tensor(name, onnx.TensorProto.INT4, [3], [1, 2, 3]) for name in names]
    nodes = [helper.make_node("DequantizeLinear", [name, "scale"], [f"{name}_float"]) for name in names]
    nodes.append(helper.make_node("Sum", ["x", *(f"{name}_float" for name in names)], ["y"]))
    scale = helper.make_tensor("scale", onnx.TensorProto.FLOAT, [], [1.0])
    x, y = patterns.value("x", "batch", 3), patterns.value("y", "batch", 3)
    graph = helper.make_graph(nodes, "m", [x], [y], [*weights, scale])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)

    assert content_of(path).weights[0] == Weights("int4", 3, 9, sum(len(one.int32_data) for one in weights))


def test_values_of_constant_nodes_that_are_lists_are_counted(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> lists (float[b,2] x) => (float[b,2] y, int64[3] z) {
        c = Constant <value_floats = [1.0, 2.0]> ()
        z = Constant <value_ints = [1, 2, 3]> ()
        one = Constant <value_float = 1.0> ()
        sum = Add (c, one)
        y = Add (x, sum)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")

    assert content_of(tmp_path / "m.onnx").weights == [Weights("int64", 1, 3, 24), Weights("float32", 2, 3, 12)]


def test_a_file_that_only_unused_weights_refer_to_may_be_missing(tmp_path: Path) -> None:
    path = patterns.dense(tmp_path / "m.onnx")
    model = onnx.load(path)
    unused = onnx.TensorProto(name="unused", data_type=onnx.TensorProto.FLOAT, dims=[300], data_location="EXTERNAL")
    unused.external_data.add(key="location", value="gone.bin")
    model.graph.initializer.append(unused)
    path.write_bytes(model.SerializeToString())

    assert content_of(path).external_nbytes == {}


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
