"""Each builder's model behaves as its docstring says when ONNX Runtime runs it on the CPU."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortserve  # noqa: F401  before onnxruntime: it silences onnxruntime's telemetry
from models import builders
from ortserve.core.dtypes import DataType

import onnxruntime as ort  # isort: skip
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors  # isort: skip

RNG = np.random.default_rng(0)
BFLOAT16_ELEMENT = 16  # TensorProto.BFLOAT16; onnxruntime requires the number, because numpy has no such type


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def open_session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # runs fail intentionally here, and onnxruntime would print each failure
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def signature(session: Any) -> tuple[list[tuple[str, str, list[Any]]], list[tuple[str, str, list[Any]]]]:
    inputs, outputs = session.get_inputs(), session.get_outputs()
    return [(i.name, i.type, i.shape) for i in inputs], [(o.name, o.type, o.shape) for o in outputs]


def assert_rows_run_alone_and_together_agree(session: Any, x: np.ndarray) -> None:
    (together,) = session.run(None, {"x": x})
    alone = np.concatenate([session.run(None, {"x": row[np.newaxis]})[0] for row in x])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_mlp_is_a_row_wise_softmax(path: Path) -> None:
    session = open_session(builders.mlp(path, inputs=6, hidden=8, outputs=3))
    assert signature(session) == (
        [("x", "tensor(float)", ["batch", 6])],
        [("y", "tensor(float)", ["batch", 3])],
    )
    x = RNG.standard_normal((5, 6), np.float32)
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y.sum(axis=1), np.ones(5), atol=1e-6)
    assert np.abs(y - y[0]).max() > 1e-3, "outputs depend on inputs"
    assert_rows_run_alone_and_together_agree(session, x)


def test_mlp_is_the_same_for_the_same_seed_only(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name / "model.onnx" for name in "abc")
    for file, seed in ((first, 1), (again, 1), (other, 2)):
        file.parent.mkdir()
        builders.mlp(file, seed=seed)
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


@pytest.mark.parametrize("datatype", [d for d in DataType if d not in (DataType.BF16, DataType.BYTES)])
def test_identity_returns_numbers_of_each_datatype(path: Path, datatype: DataType) -> None:
    session = open_session(builders.identity(path, datatype, ["batch", 3]))
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(datatype.numpy)
    (y,) = session.run(None, {"x": x})
    assert y.dtype == datatype.numpy
    np.testing.assert_array_equal(y, x)


def test_identity_returns_strings(path: Path) -> None:
    session = open_session(builders.identity(path, DataType.BYTES, ["batch"]))
    texts = ["", "a b", "größer", "nul\0inside"]
    (y,) = session.run(None, {"x": np.array(texts, object)})
    assert list(y) == texts


def test_identity_returns_bfloat16_bit_patterns(path: Path) -> None:
    session = open_session(builders.identity(path, DataType.BF16, ["batch", 2]))
    x = np.array([[0x3F80, 0xC000], [0x0001, 0x7F80]], np.uint16)
    y = np.zeros_like(x)
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, BFLOAT16_ELEMENT, x.shape, x.ctypes.data)
    binding.bind_output("y", "cpu", 0, BFLOAT16_ELEMENT, y.shape, y.ctypes.data)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(y, x)


def test_identity_accepts_fixed_named_and_unnamed_dimensions(path: Path) -> None:
    session = open_session(builders.identity(path, DataType.FP32, ["batch", 3, None]))
    inputs, outputs = signature(session)
    assert inputs == [("x", "tensor(float)", ["batch", 3, None])]
    assert outputs == [("y", "tensor(float)", ["batch", 3, None])]


def test_scalar_sum_has_an_output_without_axes(path: Path) -> None:
    session = open_session(builders.scalar_sum(path))
    assert signature(session) == ([("x", "tensor(float)", ["n"])], [("y", "tensor(float)", [])])
    (y,) = session.run(None, {"x": np.array([1, 2, 3], np.float32)})
    assert np.shape(y) == ()
    assert float(y) == 6.0


def test_row_mixer_rows_depend_on_each_other(path: Path) -> None:
    session = open_session(builders.row_mixer(path))
    assert signature(session) == (
        [("x", "tensor(float)", ["batch", 4])],
        [("y", "tensor(float)", ["batch", 4])],
    )
    x = np.array([[1, 1, 1, 1], [3, 3, 3, 3]], np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x[:1]})[0], np.zeros((1, 4)))
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], [[-1] * 4, [1] * 4])


def test_poison_answers_good_rows(path: Path) -> None:
    session = open_session(builders.poison(path))
    x = RNG.integers(0, 16, (6, 4))
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x / 2)


@pytest.mark.parametrize("row", [0, 2, 5])
def test_one_poisoned_row_fails_the_whole_run_and_not_the_next(path: Path, row: int) -> None:
    session = open_session(builders.poison(path))
    x = np.zeros((6, 4), np.int64)
    x[row, 3] = builders.POISON
    with pytest.raises(ort_errors.InvalidArgument, match="out of data bounds"):
        session.run(None, {"x": x})
    good = np.delete(x, row, axis=0)
    np.testing.assert_array_equal(session.run(None, {"x": good})[0], good / 2)


def test_fixed_batch_rejects_two_rows(path: Path) -> None:
    session = open_session(builders.fixed_batch(path))
    assert signature(session) == ([("x", "tensor(float)", [1, 4])], [("y", "tensor(float)", [1, 4])])
    np.testing.assert_array_equal(session.run(None, {"x": np.ones((1, 4), np.float32)})[0], np.full((1, 4), 2))
    with pytest.raises(ort_errors.InvalidArgument, match="invalid dimensions"):
        session.run(None, {"x": np.ones((2, 4), np.float32)})


def test_unnamed_dims_are_free_and_have_no_name(path: Path) -> None:
    session = open_session(builders.unnamed_dims(path))
    assert signature(session) == ([("x", "tensor(float)", [None, None])], [("y", "tensor(float)", [None, None])])
    for shape in ((1, 5), (3, 2)):
        np.testing.assert_array_equal(session.run(None, {"x": np.ones(shape, np.float32)})[0], np.full(shape, 2))


def test_two_batch_names_are_two_independent_axes(path: Path) -> None:
    session = open_session(builders.two_batch_names(path))
    assert signature(session) == (
        [("a", "tensor(float)", ["queries", 4]), ("b", "tensor(float)", ["documents", 4])],
        [("y", "tensor(float)", ["queries", "documents"])],
    )
    a, b = RNG.standard_normal((2, 4), np.float32), RNG.standard_normal((3, 4), np.float32)
    np.testing.assert_allclose(session.run(None, {"a": a, "b": b})[0], a @ b.T, atol=1e-6)


def test_variable_length_sums_rows_of_any_length(path: Path) -> None:
    session = open_session(builders.variable_length(path))
    assert signature(session) == ([("x", "tensor(int64)", ["batch", "seq"])], [("y", "tensor(float)", ["batch"])])
    for length in (1, 7):
        x = RNG.integers(-9, 9, (3, length))
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x.sum(axis=1))


def test_heavy_is_row_wise_and_not_constant(path: Path) -> None:
    session = open_session(builders.heavy(path))
    assert signature(session) == (
        [("x", "tensor(float)", ["batch", 64])],
        [("y", "tensor(float)", ["batch", 10])],
    )
    x = RNG.standard_normal((4, 64), np.float32)
    (y,) = session.run(None, {"x": x})
    assert np.abs(y - y[0]).max(axis=1)[1:].min() > 0.1, "each row gets an answer of its own"
    assert_rows_run_alone_and_together_agree(session, x)


# The lower bounds are a quarter and a tenth of the measured times; for less, one core would need 350 GFLOP/s, which is
# possible only if the work was optimised away. There is no upper bound, so that a busy machine causes no failure.
@pytest.mark.parametrize(("build", "shape"), [(builders.heavy, (32, 64)), (builders.slow, (1, 4))])
def test_work_survives_graph_optimisation(path: Path, build: Any, shape: tuple[int, int]) -> None:
    session = open_session(build(path))
    x = RNG.standard_normal(shape, np.float32)
    session.run(None, {"x": x})
    started_ns = time.perf_counter_ns()
    session.run(None, {"x": x})
    assert (time.perf_counter_ns() - started_ns) / 1e6 > 10


def test_slow_adds_the_same_vector_to_every_row(path: Path) -> None:
    session = open_session(builders.slow(path, steps=10))
    assert signature(session) == (
        [("x", "tensor(float)", ["batch", 4])],
        [("y", "tensor(float)", ["batch", 4])],
    )
    x = RNG.standard_normal((3, 4), np.float32)
    (c,) = session.run(None, {"x": np.zeros((1, 4), np.float32)})
    assert np.abs(c).min() > 0
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x + c, atol=1e-5)


def test_refuses_synthetic_accepts_real_values(path: Path) -> None:
    session = open_session(builders.refuses_synthetic(path))
    x = np.array([[2, 3, 4, 33]])
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], (x - 2) / 2)


@pytest.mark.parametrize("value", [0, 1])
def test_refuses_synthetic_fails_on_zeros_and_ones(path: Path, value: int) -> None:
    session = open_session(builders.refuses_synthetic(path))
    with pytest.raises(ort_errors.InvalidArgument, match="out of data bounds"):
        session.run(None, {"x": np.full((1, 4), value)})


def test_sequence_output_is_not_a_tensor(path: Path) -> None:
    session = open_session(builders.sequence_output(path))
    assert signature(session)[1] == [("y", "seq(tensor(float))", [])]
    x = np.ones((2, 4), np.float32)
    (y,) = session.run(None, {"x": x})
    assert isinstance(y, list)
    np.testing.assert_array_equal(y, [x, x])


def test_not_onnx_does_not_load(path: Path) -> None:
    with pytest.raises(ort_errors.InvalidProtobuf):
        open_session(builders.not_onnx(path))


def test_masked_tokens_change_each_other_unless_masked_out(path: Path) -> None:
    session = open_session(builders.masked_tokens(path))
    ids = np.array([[1, 2, 4], [8, 16, 32]])
    y, total = session.run(None, {"ids": ids, "mask": np.array([[1, 1, 0], [0, 1, 1]])})
    assert (y.dtype, total.dtype) == (np.float32, np.float32)
    assert total.tolist() == [3, 48]
    assert y.tolist() == [[-2, -1, 1], [-40, -32, -16]]
