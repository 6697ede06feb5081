"""The record of a model file: declared shapes, external files, and the limits of the analyses."""

import os
from mmap import mmap
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from models import builders, interfaces
from ortserve.core.dtypes import DataType
from ortserve.model_file import protobuf, reading
from ortserve.model_file.graph import UNREADABLE, Declared, Model, Skipped, names_read
from ortserve.model_file.reading import read_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def names_without_shape(path: Path) -> set[str]:
    graph = read_model(path).graph
    return {declared.name for declared in (*graph.inputs, *graph.outputs) if declared.lacks_shape}


def inputs(path: Path) -> tuple[Declared, ...]:
    return read_model(path).graph.inputs


def test_missing_shape_is_distinguished_from_no_axes(path: Path) -> None:
    assert names_without_shape(interfaces.any_shape(path)) == {"x", "y"}
    assert names_without_shape(builders.identity(path, DataType.FP32, ())) == set()


def test_optional_tensors_are_read_and_other_types_are_not(path: Path) -> None:
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    inputs = [
        helper.make_value_info("optional", helper.make_optional_type_proto(tensor)),
        helper.make_value_info("sequence", helper.make_sequence_type_proto(tensor)),
    ]
    graph = helper.make_graph([], "g", inputs, [])
    path.write_bytes(helper.make_model(graph, producer_name="p", model_version=2**40).SerializeToString())
    assert names_without_shape(path) == {"optional"}


@pytest.mark.parametrize("build", [builders.mlp, interfaces.zipmap_classifier, interfaces.default_scale])
def test_names_without_shape_are_those_of_the_onnx_graph(path: Path, build: object) -> None:
    assert callable(build)
    assert names_without_shape(build(path)) == {
        value.name
        for value in onnx.load(path).graph.output
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
    }


@pytest.mark.parametrize("content", [b"", b"\xff", b"\xff" * 40, b"ORTM not a message", b"\x3a\xff\xff\x01abc"])
def test_file_of_another_format_is_unreadable(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert read_model(path) is UNREADABLE


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("message", ["graph", "tensor", "type", "tensor type", "shape"])
def test_file_with_a_message_in_two_parts_is_unreadable(path: Path, message: str, parts: int) -> None:
    """ONNX Runtime merges the parts of a branch, for example, so that its nodes read constants of either part."""
    count = {message: parts}
    of_type = b"\x08\x01" + field(2, b"") * count.get("shape", 1)
    of_value = field(1, of_type) * count.get("tensor type", 1)
    value = field(1, b"x") + field(2, of_value) * count.get("type", 1)
    branch = field(1, b"then_branch") + field(6, b"") * count.get("graph", 1)
    constant = field(1, b"value") + field(5, b"") * count.get("tensor", 1)
    node = field(4, b"If") + field(5, branch) + field(5, constant)
    path.write_bytes(field(7, field(1, node) + field(11, value)) + field(8, b"\x10\x11"))
    assert onnx.load(path).graph.input[0].name == "x"
    assert (read_model(path) is UNREADABLE) == (parts == 2)


def test_missing_file_is_unreadable(path: Path) -> None:
    assert read_model(path) is UNREADABLE


def test_pipe_is_unreadable_and_not_awaited(path: Path) -> None:
    os.mkfifo(path)  # opening it would wait for a writer
    assert read_model(path) is UNREADABLE


def test_file_that_is_truncated_while_its_record_is_made_does_not_end_the_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a copy over it. The test truncates the file when its first bytes have been read."""
    builders.mlp(path)
    parse = reading.parse_model

    def parse_truncated(data: memoryview) -> Model:
        os.truncate(path, 0)
        return parse(data)

    monkeypatch.setattr(reading, "parse_model", parse_truncated)
    assert read_model(path).is_readable


def test_shapes_of_inputs_have_sizes_and_names(path: Path) -> None:
    expected = [
        tuple(
            dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param or None
            for dimension in value.type.tensor_type.shape.dim
        )
        for value in onnx.load(builders.two_batch_names(path)).graph.input
    ]
    assert [declared.dims for declared in inputs(path)] == expected
    (x,) = inputs(builders.identity(path, DataType.FP32, ("rows", None, 3)))
    assert x.dims == ("rows", None, 3)


def test_axes_have_denotations(path: Path) -> None:
    (x,) = inputs(builders.denoted(path))
    assert x.dims == ("batch", 3, None)
    assert x.denotations == ("DATA_BATCH", "DATA_CHANNEL", "DATA_FEATURE")


def test_sequences_have_the_declared_shape_of_their_tensors(path: Path) -> None:
    def shapes(model: Path) -> dict[str, object]:
        outputs = read_model(model).graph.outputs
        return {declared.name: declared.element_dims for declared in outputs if declared.element_dims is not None}

    assert shapes(interfaces.empty_sequence(path)) == {"none": (2, "n")}
    assert shapes(interfaces.split_sequence(path)) == {}
    assert shapes(interfaces.zipmap_classifier(path)) == {}
    assert any(declared.is_map_sequence for declared in read_model(path).graph.outputs)


def test_long_lists_of_tree_ensembles_are_skipped_and_class_labels_kept(path: Path) -> None:
    nodes = [
        helper.make_node(
            "TreeEnsembleClassifier",
            ["x"],
            ["label", "scores"],
            domain="ai.onnx.ml",
            nodes_values=[0.5] * 3,
            classlabels_int64s=[1, 2],
            post_transform="NONE",
        )
    ]
    graph = helper.make_graph(nodes, "g", [], [])
    path.write_bytes(helper.make_model(graph).SerializeToString())
    (node,) = read_model(path).graph.nodes
    assert node.attributes == {"nodes_values": Skipped(), "classlabels_int64s": (1, 2), "post_transform": "NONE"}


def test_name_that_is_not_utf8_is_escaped_and_reported(path: Path) -> None:
    model = builders.identity(path, DataType.FP32).read_bytes()
    assert not read_model(path).has_invalid_names
    path.write_bytes(model.replace(b"\x01x\x12\x01y", b"\x01\xff\x12\x01y"))
    read = read_model(path)
    assert read.has_invalid_names
    assert read.graph.nodes[0].inputs == ("\\xff",)


def test_truncated_file_is_read_without_a_crash(path: Path) -> None:
    whole = interfaces.any_shape(path).read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        assert names_without_shape(path) <= {"x", "y"}


def test_branches_may_name_their_results_like_the_node(path: Path) -> None:
    branches = "then_branch = t () => (float[n] y) { y = Relu(x) }, else_branch = e () => (float[n] y) { y = Neg(x) }"
    text = f"g (bool c, float[n] x) => (float[n] y) {{ y = If(c) <{branches}> }}"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> {text}'), path)
    (node,) = read_model(path).graph.nodes
    assert (node.op, set(names_read(node))) == ("If", {"c", "x"})


def test_elements_beside_an_external_file_are_not_those_of_the_tensor(path: Path) -> None:
    """ONNX Runtime reads the file: an axis of 1 here may be 0 there."""
    axis = onnx.numpy_helper.from_array(np.array([1]), "axis")
    (path.parent / "axis.bin").write_bytes(np.array([0]).tobytes())
    axis.external_data.append(onnx.StringStringEntryProto(key="location", value="axis.bin"))
    axis.data_location = onnx.TensorProto.EXTERNAL
    text = '<ir_version: 8, opset_import: ["": 17]> m (float[n,4] x) => (float[n,4] y) { y = CumSum (x, axis) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(axis)
    path.write_bytes(model.SerializeToString())
    assert read_model(path).graph.constants["axis"].elements is None
    (total,) = ort.InferenceSession(path).run(None, {"x": np.ones((2, 4), np.float32)})
    assert total.tolist() == [[1] * 4, [2] * 4]


@pytest.mark.parametrize(
    ("element_type", "integers"),
    [
        (TensorProto.BOOL, [2, 256, 0, -1]),
        (TensorProto.INT8, [200, -1]),
        (TensorProto.UINT8, [300, -1]),
        (TensorProto.UINT32, [(1 << 32) + 1, (1 << 32) - 1]),
        (TensorProto.UINT64, [(1 << 64) - 1, 1]),
    ],
    ids=["bool", "int8", "uint8", "uint32", "uint64"],
)
def test_elements_from_integers_beyond_their_type_are_those_of_onnx_runtime(
    path: Path, element_type: int, integers: list[int]
) -> None:
    weight = TensorProto(name="w", data_type=element_type, dims=[len(integers)])
    is_unsigned = element_type in (TensorProto.UINT32, TensorProto.UINT64)
    (weight.uint64_data if is_unsigned else weight.int32_data).extend(integers)
    nodes = [helper.make_node("Identity", ["w"], ["y"]), helper.make_node("Relu", ["x"], ["z"])]
    given, *made = (
        helper.make_tensor_value_info(name, kind, [None]) for name, kind in (("x", 1), ("y", element_type), ("z", 1))
    )
    graph = helper.make_graph(nodes, "g", [given], made, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    content, _ = ort.InferenceSession(path).run(None, {"x": np.zeros(1, np.float32)})
    assert read_model(path).graph.constants["w"].elements == tuple(content.tolist())


def test_content_of_a_file_is_unmapped_when_its_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the model refers to it, so that it is not freed later, with the interpreter lock."""
    opened: list[mmap] = []

    class Watched(mmap):
        def __init__(self, *_: int) -> None:
            opened.append(self)

    monkeypatch.setattr(protobuf, "mmap", Watched)
    assert read_model(builders.mlp(tmp_path / "model.onnx")) is not UNREADABLE
    assert [content.closed for content in opened] == [True]
