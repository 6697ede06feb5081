"""Operations and bytes of nodes, compared with loops that count them."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ortserve.model_file.graph import FLOAT, Node, Tensor
from ortserve.tools.profile.trace import TensorShape, TracedNode
from ortserve.tools.profile.work import find_work


def traced(op: str, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> TracedNode:
    return TracedNode((), op, op, "", _floats(inputs), _floats(outputs))


def _floats(shapes: Sequence[Sequence[int]]) -> tuple[TensorShape, ...]:
    return tuple(("float", tuple(dims)) for dims in shapes)


def operations(
    op: str, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], **attributes: int
) -> int | None:
    node = Node(op, "", op, tuple(f"i{number}" for number in range(len(inputs))), ("y",), attributes)
    return find_work(traced(op, inputs, outputs), node, {}).operations


def test_operations_of_matrix_products_are_counted() -> None:
    rows, inner, columns = 3, 5, 7
    counted = sum(2 for _ in itertools.product(range(rows), range(inner), range(columns)))

    assert operations("MatMul", [(rows, inner), (inner, columns)], [(rows, columns)]) == counted
    assert operations("MatMul", [(2, 4, rows, inner), (inner, columns)], [(2, 4, rows, columns)]) == 8 * counted
    assert operations("Gemm", [(inner, rows), (inner, columns)], [(rows, columns)], transA=1) == counted
    assert operations("Gemm", [(rows, inner), (columns, inner)], [(rows, columns)], transB=1) == counted


def test_convolution_counts_groups_and_kernels() -> None:
    batch, channels, out, group, kernel, size = 2, 6, 4, 2, 3, 8
    counted = sum(
        2
        for _ in itertools.product(
            range(batch), range(out), range(size), range(size), range(channels // group), range(kernel), range(kernel)
        )
    )
    inputs = [(batch, channels, size, size), (out, channels // group, kernel, kernel), (out,)]

    assert operations("Conv", inputs, [(batch, out, size, size)]) == counted
    quantized = [inputs[0], (), (), inputs[1], (), (), (), ()]
    assert operations("QLinearConv", quantized, [(batch, out, size, size)]) == counted


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_operations_of_recurrent_networks_are_counted(op: str, gates: int) -> None:
    length, batch, width, hidden = 5, 2, 3, 4
    step = sum(2 for _ in itertools.product(range(gates * hidden), range(width + hidden), range(batch)))
    inputs = [(length, batch, width), (1, gates * hidden, width), (1, gates * hidden, hidden)]

    assert operations(op, inputs, [(length, 1, batch, hidden)]) == length * step
    if op == "LSTM":
        inputs = [inputs[0], (1, width, gates * hidden), (1, hidden, gates * hidden)]
        assert operations("DynamicQuantizeLSTM", inputs, [(length, 1, batch, hidden)]) == length * step


def test_prepacked_weight_is_found_in_the_graph() -> None:
    node = Node("MatMul", "", "m", ("x", "w"), ("y",), {})
    constants = {"w": Tensor(FLOAT, (5, 7))}
    seen = traced("MatMul", [(3, 5)], [(3, 7)])

    assert find_work(seen, node, constants).nbytes == 4 * (15 + 35 + 21)
    assert find_work(seen, None, {}).operations == 2 * 3 * 5 * 7


def test_constant_that_is_traced_is_not_counted_twice() -> None:
    node = Node("Add", "", "a", ("x", "w"), ("y",), {})
    constants = {"w": Tensor(FLOAT, (7,))}

    assert find_work(traced("Add", [(3, 7), (7,)], [(3, 7)]), node, constants).nbytes == 4 * (21 + 7 + 21)


def test_views_move_nothing_and_lookups_read_what_they_return() -> None:
    assert find_work(traced("Reshape", [(3, 7), (2,)], [(7, 3)]), None, {}).nbytes is None
    assert find_work(traced("Gather", [(1000, 8), (2,)], [(2, 8)]), None, {}).nbytes == 4 * (16 + 16 + 2)
    assert find_work(traced("Gather", [(2, 8), (5,)], [(5, 8)]), None, {}).nbytes == 4 * (40 + 16 + 5)
    tables, ids = [(1000, 8), (512, 8), (8,), (8,)], ("int32", (1, 3))
    embedding = replace(traced("EmbedLayerNormalization", tables, [(1, 3, 8)]), inputs=(ids, *_floats(tables)))
    assert find_work(embedding, None, {}).nbytes == 4 * (24 + 3 + 24 + 24 + 8 + 8)
    assert find_work(traced("Split", [(8, 3)], [(2, 3)] * 4), None, {}).nbytes == 4 * (24 + 24)


def test_unknown_operators_have_no_figures() -> None:
    unknown = TracedNode((), "t", "TfIdfVectorizer", "", (("string", (4,)),), (("float", (9,)),))

    assert find_work(unknown, None, {}).operations is None
    assert find_work(unknown, None, {}).nbytes is None
    assert operations("Conv", [(1, 3, 8, 8)], [(1, 4, 8, 8)]) is None


def test_attention_of_onnx_has_no_projections_and_that_of_microsoft_has_three() -> None:
    batch, queries, keys, width = 2, 3, 5, 4
    scores = sum(2 for _ in itertools.product(range(batch), range(queries), range(keys), range(width)))
    apart = [(batch, queries, width), (batch, keys, width), (batch, keys, width)]
    heads = [(batch, 2, queries, width // 2), (batch, 2, keys, width // 2), (batch, 2, keys, width // 2)]
    weight = [(batch, queries, width), (width, 3 * width), (3 * width,)]

    assert operations("Attention", apart, [apart[0]]) == 2 * scores
    assert operations("Attention", heads, [heads[0]]) == 2 * scores
    assert operations("Attention", [*apart, (queries, keys), *heads[1:]], [apart[0]]) is None
    projections = 3 * sum(2 for _ in itertools.product(range(batch * queries), range(width), range(width)))
    own = sum(2 for _ in itertools.product(range(batch), range(queries), range(queries), range(width)))
    assert operations("Attention", weight, [apart[0]]) == projections + 2 * own
    past = (2, batch, 2, keys, width // 2)
    assert operations("Attention", [*weight, past], [apart[0]]) is None


def test_multi_head_attention_is_counted_without_past_keys() -> None:
    batch, queries, keys, width = 2, 3, 5, 4
    scores = sum(2 for _ in itertools.product(range(batch), range(queries), range(keys), range(width)))
    apart = [(batch, queries, width), (batch, keys, width), (batch, keys, width)]
    bias, head = (1, 2, queries, keys), (batch, 2, keys, width // 2)

    assert operations("MultiHeadAttention", apart, [apart[0]]) == 2 * scores
    assert operations("MultiHeadAttention", [*apart, bias], [apart[0]]) == 2 * scores
    assert operations("MultiHeadAttention", [*apart, head, head], [apart[0]]) is None
    assert operations("MultiHeadAttention", [apart[0], (batch, keys, 2, 2, 2)], [apart[0]]) is None
