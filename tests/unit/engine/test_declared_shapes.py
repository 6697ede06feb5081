"""What model files say of shapes, whatever else they say."""

import os
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from models import builders, interfaces
from ortserve.core.dtypes import DataType
from ortserve.engine.declared_shapes import Dimension, input_dimensions, names_without_shape, sequence_dimensions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def test_no_shape_is_told_from_no_axes(path: Path) -> None:
    assert names_without_shape(interfaces.any_shape(path)) == {"x", "y"}
    assert names_without_shape(builders.identity(path, DataType.FP32, ())) == set()


def test_optional_tensors_count_and_other_types_do_not(path: Path) -> None:
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    inputs = [
        helper.make_value_info("optional", helper.make_optional_type_proto(tensor)),
        helper.make_value_info("sequence", helper.make_sequence_type_proto(tensor)),
    ]
    graph = helper.make_graph([], "g", inputs, [])
    path.write_bytes(helper.make_model(graph, producer_name="p", model_version=2**40).SerializeToString())
    assert names_without_shape(path) == {"optional"}


@pytest.mark.parametrize("build", [builders.mlp, interfaces.zipmap_classifier, interfaces.default_scale])
def test_models_with_weights_and_declared_shapes_have_none(path: Path, build: object) -> None:
    assert callable(build)
    assert names_without_shape(build(path)) == {
        value.name
        for value in onnx.load(path).graph.output
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
    }


@pytest.mark.parametrize("content", [b"", b"\xff", b"\xff" * 40, b"ORTM not a message", b"\x3a\xff\xff\x01abc"])
def test_file_of_another_format_says_nothing(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert names_without_shape(path) == set()
    assert input_dimensions(path) == []


def test_file_that_is_not_there_says_nothing(path: Path) -> None:
    assert names_without_shape(path) == set()
    assert input_dimensions(path) == []


def test_pipe_says_nothing_and_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path)  # whose opening would wait for somebody to write
    assert names_without_shape(path) == set()
    assert input_dimensions(path) == []


def test_dimensions_are_those_of_inputs(path: Path) -> None:
    assert input_dimensions(builders.two_batch_names(path)) == [
        Dimension(axis, length=dimension.dim_value if dimension.HasField("dim_value") else -1, name=dimension.dim_param)
        for value in onnx.load(path).graph.input
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim)
    ]
    assert input_dimensions(builders.identity(path, DataType.FP32, ("rows", None, 3))) == [
        Dimension(0, -1, "rows"),
        Dimension(1, -1),
        Dimension(2, 3),
    ]


def test_denotations_are_told_of_free_dimensions_and_of_others(path: Path) -> None:
    assert input_dimensions(builders.denoted(path)) == [
        Dimension(0, -1, "batch", "DATA_BATCH"),
        Dimension(1, 3, "", "DATA_CHANNEL"),
        Dimension(2, -1, "", "DATA_FEATURE"),
    ]


def test_sequences_of_a_declared_shape_have_its_dimensions(path: Path) -> None:
    assert sequence_dimensions(interfaces.empty_sequence(path)) == {"none": [Dimension(0, 2), Dimension(1, -1, "n")]}
    assert sequence_dimensions(interfaces.split_sequence(path)) == {}
    assert sequence_dimensions(interfaces.zipmap_classifier(path)) == {}


def test_file_cut_anywhere_is_read_without_an_accident(path: Path) -> None:
    whole = interfaces.any_shape(path).read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        assert names_without_shape(path) <= {"x", "y"}
