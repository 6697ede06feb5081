"""Runs on bound buffers give the answers of plain runs, and never write memory while it is read."""

import random
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from interpreted import interpreted_only
from models import builders
from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.dtypes import DataType
from ortserve.core.padding import PaddedAxis, Padding, StagedElements
from ortserve.engine import staging
from ortserve.engine.child_process import call_in_child
from ortserve.engine.host_binding import LENT_BYTES, HostBinding
from ortserve.engine.instance import Instance
from ortserve.engine.model_signature import read_signature
from ortserve.engine.output_buffers import MAX_SET_BYTES, MAX_SETS, OutputPool
from ortserve.engine.process_memory import read_held_memory
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ServeError
from scarcity import little_memory


@dataclass
class Opened:
    """An instance, and a plain run of the same model."""

    instance: Instance
    session: onnxruntime.InferenceSession

    @property
    def pool(self) -> OutputPool | None:
        binding = self.instance._binding
        return None if binding is None else binding.pool

    @property
    def sets(self) -> int:
        return len(self.pool.sets) if self.pool else 0

    def plainly(self, *inputs: np.ndarray) -> list[np.ndarray]:
        names = [arg.name for arg in self.session.get_inputs()]
        answers: list[np.ndarray] = self.session.run(None, dict(zip(names, inputs, strict=True)))
        return answers

    def run(self, *parts: np.ndarray, bucket: int = 0) -> Arrays:
        return self.instance.run(batch_of(*parts, bucket=bucket)).outputs

    def poison_what_is_free(self) -> None:
        """Overwrite all memory that a run might write now."""
        for buffers in self.pool.sets if self.pool else ():
            if buffers.is_free:
                buffers._block.fill(0xFF)


Open = Callable[..., Opened]


def open_at(path: Path, padding: Padding | None = None) -> Opened:
    session = open_session(path, "m/1", SessionOptions(ProviderChoice(CPU), 1))
    signature = read_signature(session)
    return Opened(
        Instance(session, signature, name="m/1", intra_op_threads=1, clock=time.monotonic_ns, padding=padding), session
    )


@pytest.fixture
def open_model() -> Iterator[Open]:
    opened: list[Opened] = []

    def open_one(path: Path, padding: Padding | None = None) -> Opened:
        opened.append(open_at(path, padding))
        return opened[-1]

    yield open_one
    for one in opened:
        one.instance.close()


def batch_of(*parts: np.ndarray, bucket: int = 0) -> Batch:
    rows = sum(map(len, parts))
    return Batch((parts,), rows, bucket or rows)


def rows_of(number: int, rows: int = 1, width: int = 4) -> np.ndarray:
    return np.full((rows, width), number, np.float32)


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray] | None = None,
) -> Path:
    initializers = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", builders.OPSET)], ir_version=builders.IR_VERSION
    )
    path.write_bytes(model.SerializeToString())
    return path


def fp32(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def input_as_output(path: Path) -> Path:
    """Y = -x, and x itself."""
    return write(
        path, [helper.make_node("Neg", ["x"], ["y"])], [fp32("x", "b", 4)], [fp32("y", "b", 4), fp32("x", "b", 4)]
    )


def constant_rows(path: Path) -> Path:
    """Y has two rows for any number of input rows, against the model's declaration."""
    nodes = [helper.make_node("ReduceSum", ["x"], ["s"], keepdims=1), helper.make_node("Add", ["c", "s"], ["y"])]
    return write(path, nodes, [fp32("x", "b", 4)], [fp32("y", "b", 4)], {"c": np.zeros((2, 4), np.float32)})


def data_dependent_length(path: Path) -> Path:
    """X FP32 [batch, 4] → y FP32 [batch, n], n the largest element: the data determine the shape of the output."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["n"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["n", "zero"], ["n1"]),
        helper.make_node("Concat", ["one", "n1"], ["shape"], axis=0),
        helper.make_node("ReduceSum", ["x", "one"], ["sum"], keepdims=1),
        helper.make_node("Expand", ["sum", "shape"], ["y"]),
    ]
    constants = {"zero": np.array([0]), "one": np.array([1])}
    return write(path, nodes, [fp32("x", "batch", 4)], [fp32("y", "batch", "n")], constants)


def drawn(path: Path) -> Path:
    """Y = x + a random number that differs in each run."""
    nodes = [helper.make_node("RandomUniformLike", ["x"], ["r"]), helper.make_node("Add", ["x", "r"], ["y"])]
    return write(path, nodes, [fp32("x", "batch", 4)], [fp32("y", "batch", 4)])


@pytest.mark.parametrize("bucket", [0, 16])
def test_bound_runs_equal_plain_runs_for_any_number_of_rows(tmp_path: Path, open_model: Open, bucket: int) -> None:
    model = open_model(builders.mlp(tmp_path / "model.onnx"))
    draw = np.random.default_rng(0)
    model.run(*[draw.standard_normal((1, 64), np.float32)] * 16)
    assert model.sets == 1
    for rows in [*range(1, 17), *range(16, 0, -1)]:
        parts = [draw.standard_normal((1, 64), np.float32) for _ in range(rows)]
        for given in (parts, [np.concatenate(parts)]):
            (output,) = model.run(*given, bucket=bucket)
            (expected,) = model.plainly(np.concatenate(parts))
            assert output.shape == expected.shape
            np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
            del output
    assert model.sets == 1


@pytest.mark.parametrize(
    "datatype", [one for one in DataType if one not in (DataType.BYTES, DataType.BF16)], ids=lambda one: one.value
)
def test_every_datatype_is_returned_bit_for_bit(tmp_path: Path, open_model: Open, datatype: DataType) -> None:
    model = open_model(builders.identity(tmp_path / "model.onnx", datatype))
    draw = np.random.default_rng(0)
    for rows in (4, 3, 1):
        bits = draw.integers(0, 2 if datatype is DataType.BOOL else 256, (rows, 4 * datatype.itemsize), np.uint8)
        sent = bits.view(datatype.numpy)
        (output,) = model.run(*np.split(sent, rows))
        assert model.sets
        assert output.dtype == sent.dtype
        assert output.tobytes() == sent.tobytes()


def test_buffers_grow_with_the_batches_and_old_answers_stay(tmp_path: Path, open_model: Open) -> None:
    model = open_model(builders.identity(tmp_path / "model.onnx"))
    kept = [(rows, model.run(rows_of(rows, rows))[0]) for rows in (1, 2, 3, 5, 9, 4, 17, 1)]
    for rows, output in kept:
        np.testing.assert_array_equal(output, rows_of(rows, rows))
    assert model.pool is not None
    assert model.pool.rows == 32


def test_long_runs_are_not_tried_with_binding_again(tmp_path: Path) -> None:
    session = open_session(builders.identity(tmp_path / "model.onnx"), "m/1", SessionOptions(ProviderChoice(CPU), 1))
    binding = HostBinding(session, read_signature(session), time.monotonic_ns, onnxruntime.RunOptions())
    rows = rows_of(1, 2)
    binding.observe(batch_of(rows), [rows], 20_000_001)
    assert binding.pool is None
    binding.observe(batch_of(rows), [rows], 20_000_000)
    assert binding.pool is not None


@pytest.mark.parametrize("build", [input_as_output, drawn, constant_rows], ids=lambda build: build.__name__)
def test_model_that_does_not_fill_bound_buffers_runs_plainly(
    tmp_path: Path, open_model: Open, build: Callable[[Path], Path]
) -> None:
    model = open_model(build(tmp_path / "model.onnx"))
    for number in (1, 2, 3):
        rows = rows_of(number, 2)
        outputs = model.run(rows)
        if build is drawn:
            assert ((outputs[0] >= rows) & (outputs[0] < rows + 1)).all()
        else:
            for output, expected in zip(outputs, model.plainly(rows), strict=True):
                np.testing.assert_array_equal(output, expected)
        outputs = model.run(rows_of(number, 1), rows_of(number, 2))
        assert model.pool is None


def test_data_dependent_shape_found_late_fails_no_request(tmp_path: Path, open_model: Open) -> None:
    model = open_model(data_dependent_length(tmp_path / "model.onnx"))
    for number in (3, 3, 2, 5, 3):
        (output,) = model.run(rows_of(number, 2))
        np.testing.assert_array_equal(output, np.full((2, number), 4 * number))
    assert model.pool is None


def test_failed_batch_has_the_error_of_a_plain_run_and_the_next_is_bound(tmp_path: Path, open_model: Open) -> None:
    model = open_model(builders.poison(tmp_path / "model.onnx"))
    good, bad = np.ones((1, 4), np.int64), np.full((1, 4), builders.POISON)
    texts = []
    for _ in range(2):  # before and after the binding
        with pytest.raises(ServeError) as caught:
            model.run(bad)
        texts.append(str(caught.value))
        (output,) = model.run(good)
        assert output.tolist() == [[0.5] * 4]
    assert texts[0] == texts[1]
    assert "INVALID_ARGUMENT" in texts[0]
    assert model.sets == 1


UNFIT = [
    pytest.param(lambda path: builders.identity(path, DataType.BYTES, ("batch",)), id="texts"),
    pytest.param(lambda path: builders.variable_length(path), id="free axis"),
    pytest.param(lambda path: builders.fixed_batch(path), id="no batch axis"),
    pytest.param(lambda path: builders.scalar_sum(path), id="scalar output"),
    pytest.param(lambda path: builders.identity(path, shape=("batch", 0)), id="no elements"),
]


@pytest.mark.parametrize("build", UNFIT)
def test_other_free_shapes_prevent_binding(tmp_path: Path, open_model: Open, build: Callable[[Path], Path]) -> None:
    assert open_model(build(tmp_path / "model.onnx")).instance._binding is None


def test_padded_axis_prevents_binding(tmp_path: Path, open_model: Open) -> None:
    padding = Padding((PaddedAxis("x", 1, 8, 0, "seq"),))
    assert open_model(builders.variable_length(tmp_path / "model.onnx"), padding).instance._binding is None


def test_large_output_is_not_bound_but_smaller_batches_are(tmp_path: Path, open_model: Open) -> None:
    model = open_model(builders.identity(tmp_path / "model.onnx", shape=("batch", MAX_SET_BYTES // 16)))
    draw = np.random.default_rng(0)
    for rows, bound_rows in ((8, None), (4, 4), (8, 4), (3, 4)):
        sent = draw.standard_normal((rows, MAX_SET_BYTES // 16), np.float32)
        np.testing.assert_array_equal(model.run(sent)[0], sent)
        assert (model.pool and model.pool.rows) == bound_rows


def test_unbatched_model_answers_several_rows_at_once(tmp_path: Path, open_model: Open) -> None:
    # The same holds for models whose rows were found dependent after they were opened.
    model = open_model(builders.row_mixer(tmp_path / "model.onnx"))
    draw = np.random.default_rng(0)
    for rows in (1, 5, 1, 3, 5):
        sent = draw.standard_normal((rows, 4), np.float32)
        (output,) = model.instance.run(Batch(((sent,),), 1, 1)).outputs
        np.testing.assert_allclose(output, sent - sent.mean(axis=0, keepdims=True), atol=1e-6)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy into a bound buffer."""
    seen: list[int] = []

    def counting(arrays: Arrays, out: np.ndarray, rows: int) -> None:
        seen.append(sum(array.nbytes for array in arrays))
        staging.stage_rows(arrays, out, rows)

    monkeypatch.setattr("ortserve.engine.host_binding.stage_rows", counting)
    return seen


@interpreted_only
def test_only_large_aligned_arrays_that_fill_their_bucket_are_not_copied(
    tmp_path: Path, open_model: Open, copies: list[int]
) -> None:
    width = LENT_BYTES // 4
    model = open_model(builders.identity(tmp_path / "model.onnx", shape=("batch", width)))
    draw = np.random.default_rng(0)
    model.run(draw.standard_normal((4, width), np.float32))

    def copied(*parts: np.ndarray, bucket: int = 0) -> int:
        copies.clear()
        np.testing.assert_array_equal(model.run(*parts, bucket=bucket)[0], np.concatenate(parts))
        return sum(copies)

    one = draw.standard_normal((1, width), np.float32)
    assert copied(one) == 0
    read_only = np.frombuffer(one.tobytes(), np.float32).reshape(1, width)
    assert copied(read_only) == 0
    odd = np.frombuffer(b"x" + one.tobytes(), np.float32, offset=1).reshape(1, width)
    assert copied(odd) == LENT_BYTES
    assert copied(np.repeat(one, 4, axis=0)[::2]) == 2 * LENT_BYTES
    assert copied(one, one) == 2 * LENT_BYTES
    assert copied(one, bucket=2) == LENT_BYTES


@interpreted_only
def test_small_request_is_copied_though_it_fills_its_bucket(
    tmp_path: Path, open_model: Open, copies: list[int]
) -> None:
    model = open_model(builders.identity(tmp_path / "model.onnx"))
    model.run(rows_of(0))
    copies.clear()
    model.run(rows_of(1))
    assert copies == [16]


@pytest.mark.parametrize("fails", [False, True])
def test_array_that_was_not_copied_is_not_kept_either(tmp_path: Path, open_model: Open, fails: bool) -> None:
    width = LENT_BYTES // 4
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        helper.make_node("Gather", ["t", "i"], ["y"]),
    ]
    table = {"t": np.arange(4, dtype=np.float32)}
    path = write(tmp_path / "model.onnx", nodes, [fp32("x", "b", width)], [fp32("y", "b", width)], table)
    model = open_model(path)
    model.run(rows_of(1, 1, width))
    sent = rows_of(9 if fails else 2, 1, width)
    freed = weakref.ref(sent)
    if fails:
        with pytest.raises(ServeError, match="out of data bounds"):
            model.run(sent)
    else:
        assert (model.run(sent)[0] == 2).all()
    del sent
    assert freed() is None
    assert (model.run(rows_of(3, 1, width))[0] == 3).all()
    assert model.sets == 1


def test_elements_are_counted_as_without_binding(tmp_path: Path, open_model: Open) -> None:
    model = open_model(builders.identity(tmp_path / "model.onnx"), Padding((None,)))
    for _ in range(2):  # plain, then bound
        model.run(rows_of(1), rows_of(2, 2), bucket=8)
    assert model.sets == 1
    assert model.instance.staged_elements == StagedElements(2 * 8 * 4, 2 * 5 * 4)


def test_runs_succeed_while_all_buffers_are_leased(tmp_path: Path, open_model: Open) -> None:
    model = open_model(builders.identity(tmp_path / "model.onnx"))
    kept = [model.run(rows_of(number, 2)) for number in range(MAX_SETS + 5)]
    assert model.sets == MAX_SETS
    for number, (output,) in enumerate(kept):
        np.testing.assert_array_equal(output, rows_of(number, 2))
    del output
    kept.clear()
    assert model.pool is not None
    lease = model.run(rows_of(7, 2))
    assert [buffers.is_free for buffers in model.pool.sets] == [False] + [True] * (MAX_SETS - 1)
    np.testing.assert_array_equal(lease[0], rows_of(7, 2))


Reader: TypeAlias = tuple[np.ndarray, np.ndarray | memoryview]
"""The expected values of a reader, and its view."""


def check(readers: Iterable[Reader]) -> None:
    for right, seen in readers:
        got = np.frombuffer(seen, np.float32).reshape(right.shape) if isinstance(seen, memoryview) else seen
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_kept_answers_never_show_another_batch(tmp_path: Path, open_model: Open, seed: int) -> None:
    """Requests hold their rows, views of them, or unsent bytes; all free memory is overwritten at each step."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    model = open_model(builders.mlp(tmp_path / "model.onnx"))
    readers: list[Reader] = []
    bound = 0
    for _ in range(150):
        sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 5))]
        parts = [numbers.standard_normal((rows, 64), np.float32) for rows in sizes]
        bucket = sum(sizes) + draw.choice([0, 0, 1, 4])
        (output,) = model.run(*parts, bucket=bucket)
        (expected,) = model.plainly(np.concatenate(parts))
        bound += model.pool is not None and any(not one.is_free for one in model.pool.sets)
        first = 0
        for size in sizes:
            mine, right = output[first : first + size], expected[first : first + size]
            first += size
            how = draw.choice(["left", "rows", "rows", "view", "bytes"])
            if how == "rows":
                readers.append((right, mine))
            elif how == "view":
                readers.append((right[:, ::3], mine[:, ::3]))
            elif how == "bytes":
                readers.append((right, mine.reshape(-1).view(np.uint8).data))
        del output, mine
        draw.shuffle(readers)
        del readers[draw.choice([0, 3, 10, 30]) :]
        model.poison_what_is_free()
        check(readers)
    assert bound
    readers.clear()
    assert model.pool is not None
    assert all(buffers.is_free for buffers in model.pool.sets)


def run_many_batches(path: Path, width: int) -> tuple[int, int]:
    """The private memory that 1000 runs add after 50 others, and the number of sets of buffers."""
    model = open_at(path)
    sent = [rows_of(number, 1, width) for number in range(4)]
    kept: list[BatchResult] = []

    def run(times: int) -> int:
        for number in range(times):
            kept.append(model.instance.run(batch_of(*sent[: 1 + number % 4])))
            del kept[:-3]
        return read_held_memory().private

    warm = run(50)
    return run(1000) - warm, model.sets


@pytest.mark.usefixtures("importable")
def test_memory_is_flat_over_many_batches(tmp_path: Path) -> None:
    """In a new process, where no garbage of earlier tests is freed meanwhile."""
    width = 64 * 1024  # 1 MB in four rows
    path = builders.identity(tmp_path / "model.onnx", shape=("batch", width))
    grown, sets = call_in_child(60, run_many_batches, path, width)
    assert grown < 8 * 2**20
    assert sets == 3 + 1


def test_batch_is_answered_although_no_memory_is_left_for_buffers(open_model: Open, tmp_path: Path) -> None:
    width = 2**26  # rows of 256 MB; the heap may have smaller free blocks, left by other tests
    nodes = [helper.make_node("Gather", ["x", "first"], ["y"], axis=1)]
    inputs, outputs, constants = [fp32("x", "b", width)], [fp32("y", "b", 1)], {"first": np.zeros(1, np.int64)}
    opened = open_model(write(tmp_path / "m.onnx", nodes, inputs, outputs, constants))
    rows = rows_of(7, width=width)
    with little_memory(2**23):
        (output,) = opened.run(rows)
    assert output.tolist() == [[7]]
    assert opened.pool is None
    assert opened.run(rows)[0].tolist() == [[7]]
    assert opened.pool is not None
