"""Builders of tiny ONNX models, each with one trait that a server must handle.

Every builder writes a model file to ``path``, whose folder must exist, and returns ``path``. Weights come from seeded
generators, so that a model is identical each time. Unless stated otherwise the input is ``x``, the output is ``y``, and
the axis named ``batch`` is free.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortserve.core.dtypes import DataType

OPSET: Final = 21
IR_VERSION: Final = 10
_OPSETS: Final[Mapping[str, int]] = {"": OPSET}

POISON: Final = 99
"""A value that makes a run of ``poison`` fail."""

_ELEMENT_TYPES: Final = {
    DataType.BOOL: TensorProto.BOOL,
    DataType.UINT8: TensorProto.UINT8,
    DataType.UINT16: TensorProto.UINT16,
    DataType.UINT32: TensorProto.UINT32,
    DataType.UINT64: TensorProto.UINT64,
    DataType.INT8: TensorProto.INT8,
    DataType.INT16: TensorProto.INT16,
    DataType.INT32: TensorProto.INT32,
    DataType.INT64: TensorProto.INT64,
    DataType.FP16: TensorProto.FLOAT16,
    DataType.BF16: TensorProto.BFLOAT16,
    DataType.FP32: TensorProto.FLOAT,
    DataType.FP64: TensorProto.DOUBLE,
    DataType.BYTES: TensorProto.STRING,
}


def mlp(path: Path, inputs: int = 64, hidden: int = 256, outputs: int = 10, seed: int = 0) -> Path:
    """Softmax over a dense network with one hidden layer: x FP32 [batch, inputs] → y FP32 [batch, outputs]."""
    rng = np.random.default_rng(seed)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h1"]),
        helper.make_node("Relu", ["h1"], ["h2"]),
        helper.make_node("MatMul", ["h2", "w2"], ["h3"]),
        helper.make_node("Softmax", ["h3"], ["y"], axis=1),
    ]
    weights = [_weight(rng, "w1", (inputs, hidden)), _weight(rng, "w2", (hidden, outputs))]
    return write(path, nodes, [_fp32("x", "batch", inputs)], [_fp32("y", "batch", outputs)], weights)


def random_outputs(path: Path) -> Path:
    """Noise without a seed, so that every run differs: x FP32 [batch, 4] → y FP32 [batch, 4]."""
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["noise"]), helper.make_node("Add", ["x", "noise"], ["y"])]
    return write(path, nodes, [_fp32("x", "batch", 4)], [_fp32("y", "batch", 4)])


def quantized_counts(path: Path) -> Path:
    """A linear layer after ``quantize_dynamic``, on counts: x INT64 [batch, 4] → y FP32 [batch, 3].

    All rows share one quantization scale, so the greatest count of one row determines the precision of the others.
    """
    weights = np.random.default_rng(0).integers(-50, 50, (4, 3)).astype(np.int8)
    constants = [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(np.array(0, np.int8), "w_zero")]
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("DynamicQuantizeLinear", ["f"], ["q", "s", "zero"], name="scale"),
        helper.make_node("MatMulInteger", ["q", "w", "zero", "w_zero"], ["i"]),
        helper.make_node("Cast", ["i"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["c", "s"], ["y"]),
    ]
    counts = _int64("x", "batch", 4)
    return write(path, nodes, [counts], [_fp32("y", "batch", 3)], constants)


def identity(path: Path, datatype: DataType = DataType.FP32, shape: Sequence[int | str | None] = ("batch", 4)) -> Path:
    """Returns its input unchanged, of any datatype and shape.

    A dimension is a size, the name of a free axis, or None for a free axis without a name.
    """
    node = helper.make_node("Identity", ["x"], ["y"])
    return write(path, [node], [tensor("x", datatype, *shape)], [tensor("y", datatype, *shape)])


def counting(path: Path) -> Path:
    """A small request with an answer of any size: x INT32 [1], a count n → y INT32 [n], the numbers 0 to n - 1."""
    nodes = [
        helper.make_node("Squeeze", ["x"], ["limit"]),
        helper.make_node("Range", ["start", "limit", "delta"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.array(value, np.int32), name) for name, value in (("start", 0), ("delta", 1))]
    x = tensor("x", DataType.INT32, 1)
    y = tensor("y", DataType.INT32, None)
    return write(path, nodes, [x], [y], weights)


def denoted(path: Path) -> Path:
    """Dimensions with denotations: x FP32 [batch, 3, -1] → y FP32 [batch, 3, -1], the unchanged input."""
    x = _fp32("x", "batch", 3, None)
    for dimension, denotation in zip(x.type.tensor_type.shape.dim, ("BATCH", "CHANNEL", "FEATURE"), strict=True):
        dimension.denotation = f"DATA_{denotation}"
    return write(path, [helper.make_node("Identity", ["x"], ["y"])], [x], [_fp32("y", "batch", 3, None)])


def scalar_sum(path: Path) -> Path:
    """An output without axes: x FP32 [n] → y FP32 [], the sum. The free axis of x is not a batch axis."""
    nodes = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)]
    return write(path, nodes, [_fp32("x", "n")], [_fp32("y")])


def row_mixer(path: Path, width: int | str = 4) -> Path:
    """Shapes that look batchable, but rows influence each other: x FP32 [batch, width] → y FP32 [batch, width].

    y = x - mean of x over axis 0. A text as ``width`` is the name of a free axis.
    """
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    axes = [numpy_helper.from_array(np.array([0], np.int64), "axes")]
    return write(path, nodes, [_fp32("x", "batch", width)], [_fp32("y", "batch", width)], axes)


def poison(path: Path) -> Path:
    """Rows are independent, but one bad row fails the whole run: x INT64 [batch, 4] → y FP32 [batch, 4], y = x / 2.

    Values from 0 to 15 are valid; with 16 or more in any row, such as ``POISON``, ONNX Runtime raises an error.
    """
    table = [numpy_helper.from_array(np.arange(16, dtype=np.float32) / 2, "table")]
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"])]
    return write(path, nodes, [_int64("x", "batch", 4)], [_fp32("y", "batch", 4)], table)


def recurrent(path: Path, operator: str = "LSTM") -> Path:
    """An LSTM or GRU over the steps of each row: x FP32 [batch, steps, 2] → y FP32 [batch, 3], its last state.

    ONNX Runtime 1.31.1 crashes the process if the batch or the steps are empty.
    """
    gates = {"GRU": 3, "LSTM": 4}[operator]
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal((1, gates * 3, 2), np.float32), "weights"),
        numpy_helper.from_array(rng.standard_normal((1, gates * 3, 3), np.float32), "recurrence"),
        numpy_helper.from_array(np.array([0], np.int64), "first"),
    ]
    nodes = [
        helper.make_node("Transpose", ["x"], ["steps_first"], perm=[1, 0, 2]),
        helper.make_node(operator, ["steps_first", "weights", "recurrence"], ["", "state"], hidden_size=3),
        helper.make_node("Squeeze", ["state", "first"], ["y"]),
    ]
    return write(path, nodes, [_fp32("x", "batch", "steps", 2)], [_fp32("y", "batch", 3)], weights)


def diagonal_products(path: Path) -> Path:
    """An Einsum over rows: x FP32 [batch, 2, 3], z FP32 [batch, 3, 2] → y FP32 [batch, 2, 2], their matrix products."""
    nodes = [helper.make_node("Einsum", ["x", "z"], ["y"], equation="bij,bjk->bik")]
    return write(path, nodes, [_fp32("x", "batch", 2, 3), _fp32("z", "batch", 3, 2)], [_fp32("y", "batch", 2, 2)])


def lower_case(path: Path, locale: str = "") -> Path:
    """A StringNormalizer: x BYTES [n] → y BYTES [n]; it needs a locale of the system, usually en_US.UTF-8."""
    named = {"locale": locale} if locale else {}
    node = helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER", **named)
    x, y = (tensor(name, DataType.BYTES, "n") for name in ("x", "y"))
    return write(path, [node], [x], [y])


def word_counts(path: Path, words: Sequence[str] = ("red", "green", "blue"), output: str = "counts") -> Path:
    """A TfIdfVectorizer: text BYTES [batch, 1] → counts FP32 [batch, words], 1 for the word that is the text."""
    size = len(words)
    node = helper.make_node(
        "TfIdfVectorizer",
        ["text"],
        [output],
        mode="TF",
        min_gram_length=1,
        max_gram_length=1,
        max_skip_count=0,
        ngram_counts=[0],
        ngram_indexes=range(size),
        pool_strings=list(words),
    )
    return write(path, [node], [tensor("text", DataType.BYTES, "batch", 1)], [_fp32(output, "batch", size)])


def fixed_batch(path: Path) -> Path:
    """No free axis, so nothing to batch along: x FP32 [1, 4] → y FP32 [1, 4], y = 2x."""
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    return write(path, nodes, [_fp32("x", 1, 4)], [_fp32("y", 1, 4)])


def unnamed_dims(path: Path) -> Path:
    """Free axes without names: x FP32 [?, ?] → y FP32 [?, ?], y = 2x."""
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    return write(path, nodes, [_fp32("x", None, None)], [_fp32("y", None, None)])


def two_batch_names(path: Path) -> Path:
    """Two inputs whose leading axes are not the same: a FP32 [queries, 4], b FP32 [documents, 4].

    The output is the dot product of every row of a with every row of b: y FP32 [queries, documents].
    """
    nodes = [
        helper.make_node("Transpose", ["b"], ["columns"], perm=[1, 0]),
        helper.make_node("MatMul", ["a", "columns"], ["y"]),
    ]
    inputs = [_fp32("a", "queries", 4), _fp32("b", "documents", 4)]
    return write(path, nodes, inputs, [_fp32("y", "queries", "documents")])


def variable_length(path: Path) -> Path:
    """A free axis in addition to the batch: x INT64 [batch, seq] → y FP32 [batch], the sum of each row."""
    nodes = [
        helper.make_node("Cast", ["x"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["floats", "axes"], ["y"], keepdims=0),
    ]
    axes = [numpy_helper.from_array(np.array([1], np.int64), "axes")]
    return write(path, nodes, [_int64("x", "batch", "seq")], [_fp32("y", "batch")], axes)


def masked_tokens(path: Path) -> Path:
    """A value for each token, and a mask: ids, mask INT64 [batch, seq] → y FP32 [batch, seq], total FP32 [batch].

    ``total`` is the sum of the ids whose mask is 1, and y = ids - total. Unmasked ids therefore change the answers of
    all others in their row.
    """
    nodes = [
        helper.make_node("Mul", ["ids", "mask"], ["chosen"]),
        helper.make_node("ReduceSum", ["chosen", "axes"], ["column"], keepdims=1),
        helper.make_node("Sub", ["ids", "column"], ["difference"]),
        helper.make_node("Cast", ["difference"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("Squeeze", ["column", "axes"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["total"], to=TensorProto.FLOAT),
    ]
    axes = [numpy_helper.from_array(np.array([1], np.int64), "axes")]
    inputs = [_int64("ids", "batch", "seq"), _int64("mask", "batch", "seq")]
    return write(path, nodes, inputs, [_fp32("y", "batch", "seq"), _fp32("total", "batch")], axes)


def heavy(path: Path, steps: int = 60, width: int = 1024, seed: int = 0) -> Path:
    """Enough work to fill queues: x FP32 [batch, 64] → y FP32 [batch, 10]; rows are independent.

    A dense layer of ``width`` inputs and outputs is applied ``steps`` times in a loop, so that the file contains its
    weights (4 MB by default) once. Measured with one intra-op thread on a virtual AMD EPYC core: 3 ms for one row, 40
    ms for 32; the time is proportional to ``steps``.
    """
    rng = np.random.default_rng(seed)
    nodes = [
        helper.make_node("MatMul", ["x", "w_in"], ["h0"]),
        _dense_loop("h0", "w", "h_last", rows="batch", width=width),
        helper.make_node("MatMul", ["h_last", "w_out"], ["y"]),
    ]
    weights = [
        _weight(rng, "w_in", (64, width)),
        # Half the norm, so that the loop damps rounding differences between batch sizes instead of amplifying them.
        _weight(rng, "w", (width, width), gain=0.5),
        _weight(rng, "w_out", (width, 10)),
        numpy_helper.from_array(np.array(steps, np.int64), "steps"),
    ]
    return write(path, nodes, [_fp32("x", "batch", 64)], [_fp32("y", "batch", 10)], weights)


def slow(path: Path, steps: int = 30_000) -> Path:
    """A run that is long enough to drain a server meanwhile: x FP32 [batch, 4] → y FP32 [batch, 4].

    y = x + c, where c is the result of a loop over a small dense layer. A run takes about 100 ms on a virtual AMD EPYC
    core for any number of rows, in proportion to ``steps``.
    """
    rng = np.random.default_rng(0)
    width = 240  # from 256 on, ONNX Runtime splits each product over two threads: twice the CPU time and no faster
    nodes = [
        _dense_loop("h0", "w", "h_last", rows=1, width=width),
        helper.make_node("MatMul", ["h_last", "w_out"], ["c"]),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    weights = [
        _weight(rng, "h0", (1, width)),
        _weight(rng, "w", (width, width), gain=0.5),
        _weight(rng, "w_out", (width, 4)),
        numpy_helper.from_array(np.array(steps, np.int64), "steps"),
    ]
    return write(path, nodes, [_fp32("x", "batch", 4)], [_fp32("y", "batch", 4)], weights)


def repeats(path: Path, steps: int | None = None) -> Path:
    """A loop whose number of steps is the input: x INT64 [1] → y INT64 [], the number of steps.

    With ``steps`` each request runs that many, independent of its input.
    """
    body = helper.make_graph(
        [
            helper.make_node("Add", ["h", "one"], ["h_next"]),
            helper.make_node("Identity", ["go_on"], ["go_on_next"]),
        ],
        "step",
        [
            _int64("i"),
            tensor("go_on", DataType.BOOL),
            _int64("h"),
        ],
        [tensor("go_on_next", DataType.BOOL), _int64("h_next")],
    )
    nodes = [
        helper.make_node("Squeeze", ["x"], ["steps_of_x"]),
        helper.make_node("Loop", ["steps_of_x" if steps is None else "steps", "", "zero"], ["y"], body=body),
    ]
    numbers = {"one": 1, "zero": 0} | ({} if steps is None else {"steps": steps})
    weights = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in numbers.items()]
    return write(path, nodes, [_int64("x", 1)], [_int64("y")], weights)


def multiplies(path: Path, least: int = 0) -> Path:
    """One long operator, inside which a run cannot be terminated: x INT64 [1] → y FP32 [1].

    The product of two matrices of x × x ones; y is x. An x of 2048 takes about 1 s on one thread of a virtual AMD EPYC
    core, and twice the x at least eight times as long. ``least`` is the minimum of x.
    """
    nodes = [
        helper.make_node("Max", ["x", "least"], ["n"]),
        helper.make_node("Concat", ["n", "n"], ["size"], axis=0),
        helper.make_node("Expand", ["one", "size"], ["a"]),
        helper.make_node("MatMul", ["a", "a"], ["product"]),
        helper.make_node("ReduceMax", ["product"], ["most"], keepdims=0),
        helper.make_node("Unsqueeze", ["most", "axes"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.ones((1, 1), np.float32), "one"),
        numpy_helper.from_array(np.array([0], np.int64), "axes"),
        numpy_helper.from_array(np.array([least], np.int64), "least"),
    ]
    return write(path, nodes, [_int64("x", 1)], [_fp32("y", 1)], weights)


def in_sequence(path: Path, names: Sequence[str] = ("batch", "batch")) -> Path:
    """Y = 2 x, by an operator for which the analysis of rows has no rule: x FP32 [batch, 4] → y FP32 [batch, 4].

    ``names`` are the names of the first dimensions of x and y.
    """
    nodes = [
        helper.make_node("SequenceConstruct", ["x"], ["all"]),
        helper.make_node("SequenceAt", ["all", "first"], ["x2"]),
        helper.make_node("Add", ["x", "x2"], ["y"]),
    ]
    first = numpy_helper.from_array(np.array(0, np.int64), "first")
    return write(path, nodes, [_fp32("x", names[0], 4)], [_fp32("y", names[1], 4)], [first])


def refuses_synthetic(path: Path, *, is_proven: bool = True) -> Path:
    """Runs on valid inputs, but not on generated ones: x INT64 [batch, 4] → y FP32 [batch, 4], y = (x - 2) / 2.

    Values from 2 to 33 are valid; with a 0 or a 1 ONNX Runtime raises an error. The graph proves that rows are
    independent, unless ``is_proven`` is False.
    """
    table = [
        numpy_helper.from_array(np.arange(32, dtype=np.float32) / 2, "table"),
        numpy_helper.from_array(np.array(34, np.int64), "offset"),
    ]
    nodes = [
        # Negative indices count from the end: 2..33 become -32..-1, while 0 and 1 are out of range.
        helper.make_node("Sub", ["x", "offset"], ["index"]),
        helper.make_node("Gather", ["table", "index"], ["found"]),
    ]
    if is_proven:
        nodes.append(helper.make_node("Identity", ["found"], ["y"]))
    else:
        nodes.append(helper.make_node("SequenceConstruct", ["found"], ["all"]))
        nodes.append(helper.make_node("SequenceAt", ["all", "first"], ["y"]))
        table.append(numpy_helper.from_array(np.array(0, np.int64), "first"))
    return write(path, nodes, [_int64("x", "batch", 4)], [_fp32("y", "batch", 4)], table)


def pools_images(path: Path, least: int = 32) -> Path:
    """FP32 [batch, 1, height, width] → y, means of ``least`` × ``least`` elements; rejects smaller images."""
    node = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[least, least])
    return write(path, [node], [_fp32("x", "batch", 1, "height", "width")], [_fp32("y", "batch", 1, "rows", "columns")])


def crops_images(path: Path, top: int) -> Path:
    """FP32 [batch, 1, height, width] → y, without the first ``top`` lines; the result of a smaller image is empty."""
    bounds = {"starts": top, "ends": 2**31, "axes": 2}
    given = [numpy_helper.from_array(np.array([value], np.int64), name) for name, value in bounds.items()]
    node = helper.make_node("Slice", ["x", *bounds], ["y"])
    return write(
        path, [node], [_fp32("x", "batch", 1, "height", "width")], [_fp32("y", "batch", 1, "rows", "width")], given
    )


def sequence_output(path: Path) -> Path:
    """An output that is not a tensor: x FP32 [batch, 4] → y, the sequence of x twice."""
    nodes = [helper.make_node("SequenceConstruct", ["x", "x"], ["y"])]
    output = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, ["batch", 4])
    return write(path, nodes, [_fp32("x", "batch", 4)], [output])


def external_weights(path: Path, location: str) -> Path:
    """Weights in a file beside the model, or at ``location``: x FP32 [batch, 4] → y FP32 [batch, 4], x + w.

    The file contains four FP32 values; this function does not write it.
    """
    weight = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    weight.external_data.add(key="length", value="16")
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    return write(path, nodes, [_fp32("x", "batch", 4)], [_fp32("y", "batch", 4)], [weight])


def image_classifier(path: Path) -> Path:
    """An exported classifier with a fixed batch of 1: data FP32 [1, 3, 8, 8] → scores FP32 [1, 5, 1, 1].

    The scores are the mean of the image plus 0, 1, 2, 3 and 4.
    """
    nodes = [
        helper.make_node("GlobalAveragePool", ["data"], ["channels"]),
        helper.make_node("ReduceMean", ["channels", "axes"], ["mean"], keepdims=1),
        helper.make_node("Add", ["mean", "classes"], ["scores"]),
    ]
    weights = [
        numpy_helper.from_array(np.array([1], np.int64), "axes"),
        numpy_helper.from_array(np.arange(5, dtype=np.float32).reshape(1, 5, 1, 1), "classes"),
    ]
    return write(path, nodes, [_fp32("data", 1, 3, 8, 8)], [_fp32("scores", 1, 5, 1, 1)], weights)


def two_outputs(path: Path) -> Path:
    """Two inputs and two outputs: INPUT0, INPUT1 INT32 [batch, 16] → OUTPUT0 their sum, OUTPUT1 their difference."""
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    inputs, outputs = (
        [tensor(f"{role}{n}", DataType.INT32, "batch", 16) for n in (0, 1)] for role in ("INPUT", "OUTPUT")
    )
    return write(path, nodes, inputs, outputs)


GIT_LFS_POINTER: Final = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 12345\n"
)
"""The file content in a checkout without Git LFS."""


def many_tensors(path: Path, count: int) -> Path:
    """``count`` inputs and outputs: x0 FP32 [batch, 1] → y0 FP32 [batch, 1], x1 → y1, and so on."""
    nodes = [helper.make_node("Identity", [f"x{number}"], [f"y{number}"]) for number in range(count)]
    inputs, outputs = ([_fp32(f"{letter}{number}", "batch", 1) for number in range(count)] for letter in "xy")
    return write(path, nodes, inputs, outputs)


def chain(path: Path, nodes: int, width: int) -> Path:
    """Nodes one after the other: x FP32 [batch, width] → y FP32 [batch, width], the sine of x, ``nodes`` times."""
    names = ["x", *(f"t{number}" for number in range(1, nodes)), "y"]
    sines = [helper.make_node("Sin", [a], [b]) for a, b in pairwise(names)]
    return write(path, sines, [_fp32("x", "batch", width)], [_fp32("y", "batch", width)])


def not_onnx(path: Path) -> Path:
    """Bytes that no parser accepts as a model."""
    path.write_bytes(b"\xff not a model \xff")
    return path


def _dense_loop(start: str, weight: str, end: str, *, rows: int | str, width: int) -> onnx.NodeProto:
    """Make the loop h ← tanh(h @ weight + start), from h = start, repeated as often as the tensor ``steps`` says.

    ``start`` and ``end`` name FP32 tensors [rows, width], ``weight`` a tensor [width, width]. Each step adds ``start``
    again, so that the result does not converge to a constant with many steps.
    """
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["h", weight], ["product"]),
            helper.make_node("Add", ["product", start], ["sum"]),
            helper.make_node("Tanh", ["sum"], ["h_next"]),
            helper.make_node("Identity", ["go_on"], ["go_on_next"]),
        ],
        "step",
        [
            _int64("i"),
            tensor("go_on", DataType.BOOL),
            _fp32("h", rows, width),
        ],
        [tensor("go_on_next", DataType.BOOL), _fp32("h_next", rows, width)],
    )
    return helper.make_node("Loop", ["steps", "", start], [end], body=body)


def tensor(name: str, datatype: DataType, *shape: int | str | None) -> onnx.ValueInfoProto:
    """An input or output of a graph."""
    return helper.make_tensor_value_info(name, _ELEMENT_TYPES[datatype], shape)


def _fp32(name: str, *shape: int | str | None) -> onnx.ValueInfoProto:
    return tensor(name, DataType.FP32, *shape)


def _int64(name: str, *shape: int | str | None) -> onnx.ValueInfoProto:
    return tensor(name, DataType.INT64, *shape)


def _weight(rng: np.random.Generator, name: str, shape: tuple[int, int], gain: float = 1.0) -> onnx.TensorProto:
    """Draw normal weights, scaled so that the output of a row of unit variance has the standard deviation ``gain``."""
    values = rng.standard_normal(shape, np.float32) * np.float32(gain / np.sqrt(shape[0]))
    return numpy_helper.from_array(values, name)


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    opsets: Mapping[str, int] = _OPSETS,
) -> Path:
    """Write a graph as a model."""
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, initializer=weights)
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    path.write_bytes(helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION).SerializeToString())
    return path
