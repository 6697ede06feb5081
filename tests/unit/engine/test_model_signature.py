"""The signature of each of the tiny models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from models import builders, interfaces
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.engine.model_signature import read_signature
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ErrorKind, ServeError
from ortserve.model_file.reading import read_model
from ortserve.rows.verdict import Outcome, prove_model

FP32, INT64 = DataType.FP32, DataType.INT64
Spec = tuple[str, DataType, tuple[int, ...]]


def read(path: Path) -> ModelSignature:
    return read_signature(open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1)), read_model(path))


@pytest.mark.parametrize(
    ("build", "inputs", "outputs", "unbatched_because"),
    [
        (builders.mlp, [("x", FP32, (-1, 64))], [("y", FP32, (-1, 10))], ""),
        (builders.identity, [("x", FP32, (-1, 4))], [("y", FP32, (-1, 4))], ""),
        (builders.row_mixer, [("x", FP32, (-1, 4))], [("y", FP32, (-1, 4))], ""),
        (builders.poison, [("x", INT64, (-1, 4))], [("y", FP32, (-1, 4))], ""),
        (builders.refuses_synthetic, [("x", INT64, (-1, 4))], [("y", FP32, (-1, 4))], ""),
        (builders.heavy, [("x", FP32, (-1, 64))], [("y", FP32, (-1, 10))], ""),
        (builders.slow, [("x", FP32, (-1, 4))], [("y", FP32, (-1, 4))], ""),
        (builders.variable_length, [("x", INT64, (-1, -1))], [("y", FP32, (-1,))], ""),
        (builders.unnamed_dims, [("x", FP32, (-1, -1))], [("y", FP32, (-1, -1))], ""),
        (builders.scalar_sum, [("x", FP32, (-1,))], [("y", FP32, ())], "output 'y' has no dimensions"),
        (
            builders.fixed_batch,
            [("x", FP32, (1, 4))],
            [("y", FP32, (1, 4))],
            "the first dimension of input 'x' is fixed at 1",
        ),
        (
            builders.two_batch_names,
            [("a", FP32, (-1, 4)), ("b", FP32, (-1, 4))],
            [("y", FP32, (-1, -1))],
            "the first dimensions of input 'a' and input 'b' have different names, 'queries' and 'documents'",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_signature_describes_each_model(
    tmp_path: Path,
    build: Callable[[Path], Path],
    inputs: list[Spec],
    outputs: list[Spec],
    unbatched_because: str,
) -> None:
    signature = read(build(tmp_path / "model.onnx"))
    assert signature == ModelSignature(
        tuple(TensorSpec(*spec) for spec in inputs), tuple(TensorSpec(*spec) for spec in outputs), unbatched_because
    )
    assert signature.is_batched == (not unbatched_because)


@pytest.mark.parametrize("datatype", DataType)
def test_every_datatype_is_read(tmp_path: Path, datatype: DataType) -> None:
    signature = read(builders.identity(tmp_path / "model.onnx", datatype))
    assert [spec.datatype for spec in (*signature.inputs, *signature.outputs)] == [datatype, datatype]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (interfaces.float8_output, "output 'y' has type tensor(float8e4m3fn), which is not supported; supported are"),
        (
            interfaces.sequence_input,
            "input 'x' has type seq(tensor(float)), which is not supported",
        ),
    ],
)
def test_unserved_type_is_an_error_that_names_it(tmp_path: Path, build: Callable[[Path], Path], text: str) -> None:
    with pytest.raises(ServeError) as caught:
        read(build(tmp_path / "model.onnx"))
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("shape", "is_batched", "has_one_shape_class"),
    [
        (("batch", 4), True, True),
        ((None, 4), True, True),
        (("batch", "length"), True, False),
        ((4,), False, True),
        ((4, "length"), False, False),
    ],
)
def test_free_dimensions_beside_the_batch_make_shape_classes(
    tmp_path: Path, shape: Any, is_batched: bool, has_one_shape_class: bool
) -> None:
    signature = read(builders.identity(tmp_path / "model.onnx", DataType.FP32, shape))
    assert signature.is_batched is is_batched
    assert signature.has_one_shape_class is has_one_shape_class


def test_free_dimensions_are_known_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    tokens = read(builders.masked_tokens(path))
    assert [spec.dim_names for spec in (*tokens.inputs, *tokens.outputs)] == [("batch", "seq")] * 3 + [("batch",)]
    assert read(builders.mlp(path)).inputs[0].dim_names == ("batch", "")
    assert read(builders.unnamed_dims(path)).inputs[0].dim_names == ("", "")


def test_dispensable_tensors_of_unsupported_types_are_left_out_and_named(tmp_path: Path) -> None:
    sequence = read(interfaces.optional_sequence(tmp_path / "model.onnx"))
    assert list(sequence.inputs_by_name) == ["x"]
    assert "optional(seq(tensor(float)))" in sequence.unserved_inputs["more"]

    texts = read(interfaces.bfloat16_and_text(tmp_path / "model.onnx"))
    assert list(texts.output_index) == ["wide", "t"]
    assert "string inputs" in texts.unserved_outputs["y"]


def test_maps_are_a_tensor_with_a_column_for_each_class(tmp_path: Path) -> None:
    classifier = read(interfaces.zipmap_classifier(tmp_path / "model.onnx", ("a", "b", "c")))
    assert classifier.is_batched
    assert not classifier.unserved_outputs
    assert classifier.outputs[1] == TensorSpec("probabilities", FP32, (-1, 3))


def test_sequences_are_tensors_with_a_leading_axis_and_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    declared = read(builders.sequence_output(path))
    assert declared.outputs == (TensorSpec("y", FP32, (-1, -1, 4), is_sequence=True, batch_axis=None),)
    assert declared.outputs[0].dim_names == ("", "batch", "")
    assert declared.unbatched_because == "output 'y' is a sequence of tensors"
    any_shape = read(interfaces.split_sequence(path))
    assert any_shape.outputs[0] == TensorSpec("parts", FP32, (), is_sequence=True, has_any_shape=True, batch_axis=None)
    assert any_shape.outputs[1].shape == (-1, 4)


def test_excluded_sequence_does_not_prevent_batching(tmp_path: Path) -> None:
    path = interfaces.split_sequence(tmp_path / "model.onnx")
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    signature = read_signature(session, read_model(path), served_outputs=["y"])
    assert list(signature.output_index) == ["y"]
    assert signature.is_batched
    assert "does not name among the outputs" in signature.unserved_outputs["parts"]
    assert not read_signature(session, read_model(path), served_outputs=["y", "parts"]).is_batched


def test_sequence_beside_bfloat16_is_left_out(tmp_path: Path) -> None:
    signature = read(interfaces.bfloat16_and_sequence(tmp_path / "model.onnx"))
    assert list(signature.output_index) == ["y"]
    assert "beside BF16 outputs" in signature.unserved_outputs["parts"]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (interfaces.float8_output, "output 'y' has type tensor(float8e4m3fn), which is not supported"),
        (interfaces.sequence_input, "input 'x' has type seq(tensor(float)), which is not supported"),
    ],
)
def test_required_input_of_an_unsupported_type_fails_the_model(
    tmp_path: Path, build: Callable[[Path], Path], text: str
) -> None:
    with pytest.raises(ServeError) as caught:
        read(build(tmp_path / "model.onnx"))
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert caught.value.message.startswith(text)


def test_optional_types_and_defaults_are_optional_inputs(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    shape, names = (-1, 4), ("batch", "")
    assert read(interfaces.optional_bias(path)).inputs[1] == TensorSpec("bias", FP32, shape, names, is_optional=True)
    unbatched = read(interfaces.optional_bias(path, rows=2))
    assert unbatched.inputs[1] == TensorSpec("bias", FP32, (2, 4), is_optional=True, batch_axis=None)
    by_row = read(interfaces.default_scale(path, shape=("batch", 1)))
    assert by_row.inputs[1] == TensorSpec("scale", FP32, (-1, 1), is_optional=True)
    assert by_row.is_batched


def test_default_without_rows_leaves_the_model_batched_and_is_whole(tmp_path: Path) -> None:
    for shape, expected in (((1,), (1,)), ((), ()), (("n",), (-1,))):
        signature = read(interfaces.default_scale(tmp_path / "model.onnx", shape=shape))
        assert signature.is_batched
        assert signature.inputs[1] == TensorSpec("scale", FP32, expected, is_optional=True, batch_axis=None)


def test_tensors_of_any_shape_are_distinguished_from_scalars(tmp_path: Path) -> None:
    signature = read(interfaces.any_shape(tmp_path / "model.onnx"))
    assert [(spec.name, spec.shape, spec.has_any_shape) for spec in signature.inputs] == [
        ("x", (), True),
        ("s", (), False),
    ]
    assert signature.unbatched_because == "the model declares no shape for input 'x'"
    assert not signature.has_one_shape_class


def test_names_that_are_not_text_are_an_error(tmp_path: Path) -> None:
    path = builders.identity(tmp_path / "model.onnx")
    content = path.read_bytes()
    assert b"batch" in content
    path.write_bytes(content.replace(b"batch", b"b\xfftch"))
    session = open_session(path, "m", SessionOptions(ProviderChoice(CPU), 1))
    with pytest.raises(ServeError, match=r"names of inputs, outputs and dimensions: expected UTF-8, got 'b\\xfftch'"):
        read_signature(session, read_model(path))


def test_model_without_outputs_is_an_error(tmp_path: Path) -> None:
    model = onnx.load(builders.identity(tmp_path / "model.onnx"))
    del model.graph.output[:]
    onnx.save(model, tmp_path / "model.onnx")
    assert prove_model(read_model(tmp_path / "model.onnx")).outcome is Outcome.MIXED
    with pytest.raises(ServeError, match="expected a model with outputs, got one without"):
        read(tmp_path / "model.onnx")
