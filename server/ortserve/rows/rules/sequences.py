"""Rules of layers over a sequence: attention, with the rows on the first axis, and recurrent layers."""

from collections.abc import Sequence
from typing import Final

from ortserve.model_file.graph import INT32
from ortserve.rows.number import Number
from ortserve.rows.rules.call import Call, NotKnownError, Output, RandomError, RowsMeetError, Rule, Rules
from ortserve.rows.rules.matmul import check_columns, check_one_number
from ortserve.rows.values import Value

_OTHER_ROWS: Final = "has operands without the same rows along their batch axes"


def _check_rows(call: Call, like: Value, index: int, axis: int = 0) -> None:
    """Raise an error unless an operand, if given, carries the rows along ``axis`` exactly if ``like`` has rows."""
    value = call.optional(index)
    if value is None:
        return
    if value.is_rows != like.is_rows or (value.is_rows and (value.axis != axis or not value.is_plain)):
        raise RowsMeetError(_OTHER_ROWS)


def _check_first(value: Value) -> None:
    if value.is_rows and (value.axis != 0 or not value.is_plain):
        raise RowsMeetError("attends from one row to others")


def _check_bias(call: Call, like: Value, index: int) -> None:
    """Raise an error unless a mask or bias of four axes or fewer has the rows or length 1 on the first of four."""
    value = call.optional(index)
    if value is None:
        return
    dims = call.dims(value)
    if len(dims) > 4:
        raise NotKnownError("has a mask with more axes than its rule expects")
    if value.is_rows:
        if not like.is_rows or len(dims) != 4 or value.axis != 0 or not value.is_plain:
            raise RowsMeetError(_OTHER_ROWS)
    elif like.is_rows and len(dims) == 4 and dims[0] != 1:
        raise RowsMeetError("pairs each row by its index with an entry of a mask without rows")


def _check_mask(call: Call, like: Value, index: int) -> None:
    """Raise an error unless a mask of com.microsoft has the rows on axis 0. A vector may hold several lengths a row."""
    value = call.optional(index)
    if value is None:
        return
    if not value.is_rows and like.is_rows:
        dims = call.dims(value)
        if len(dims) != 2 or dims[0] != 1:
            raise RowsMeetError("has a mask whose entries are not those of the rows")
        raise NotKnownError("has a mask without rows")
    _check_rows(call, like, index)


def _check_present(call: Call, *past: int) -> None:
    """Raise if an operator has a past without outputs for the present, where ONNX Runtime 1.32.0 reads other memory.

    On the CPU, ``engine.corrections.operator_checks`` adds these outputs, but not in bodies of functions or before
    operator set 9. A proof does not know which provider runs the model.
    """
    if any(map(call.has, past)) and not (call.wants(1) and call.wants(2)):
        raise RandomError("has a past without outputs for the present, and may then read other content of the memory")


def attention(call: Call) -> Output:
    """``Attention`` of com.microsoft: input, weights, bias, mask, past, attention bias, length of the past."""
    return _packed_attention(call, mask=3, past=4, bias=5)


def qattention(call: Call) -> Output:
    """``QAttention``: input, weight, bias, input scale, weight scale, mask, two zero points, past."""
    check_one_number(call, 3, 6)
    check_columns(call, call.operand(1), 4, 7)
    return _packed_attention(call, mask=5, past=8, bias=9)


def _packed_attention(call: Call, mask: int, past: int, bias: int) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    if len(dims) != 3:
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    if call.integer("past_present_share_buffer", 0):
        raise NotKnownError("writes into the buffer of its past")
    _check_first(value)
    _check_mask(call, value, mask)
    _check_rows(call, value, past, 1)
    _check_bias(call, value, bias)
    symbols = call.symbols
    hidden: Number
    if (sizes := call.integers("qkv_hidden_sizes")) is not None:
        if call.wants(1) and len(set(sizes)) > 1:
            raise RowsMeetError("writes keys that are wider than values into the present of other rows")
        hidden = sizes[-1]
    else:
        hidden = symbols.divide_whole(call.dims(call.operand(1))[-1], 3)
    heads = call.integer("num_heads", 1)
    total = dims[1] if not call.has(past) else symbols.add(dims[1], call.dims(call.operand(past))[3])
    present = (2, dims[0], heads, total, symbols.divide_whole(hidden, heads))
    return [
        call.result((dims[0], dims[1], hidden), value, 0, call.operand(0).dtype),
        call.result(present, value, 1, value.dtype),
    ]


def multi_head(call: Call) -> Output:
    """Operands: query, key, value, bias, key padding mask, attention bias, past key, past value."""
    query = call.operand(0)
    dims = call.dims(query)
    if call.has(8) or call.has(9):
        raise NotKnownError("writes into the buffer of its past")
    _check_first(query)
    _check_present(call, 6, 7)
    for index in (1, 2, 6, 7):
        _check_rows(call, query, index)
    _check_mask(call, query, 4)
    _check_bias(call, query, 5)
    symbols = call.symbols
    heads = call.integer("num_heads", 1)
    if len(dims) == 3 and call.has(2):
        width = call.dims(call.operand(2))
        if len(width) == 3:
            hidden = width[2]
            length = width[1]
        elif len(width) == 4:
            hidden = symbols.multiply(width[1], width[3])
            length = width[2]
        else:
            raise NotKnownError("has operands of ranks that its rule does not expect")
        total = length if not call.has(6) else symbols.add(length, call.dims(call.operand(6))[2])
    else:
        hidden, total = symbols.fresh(1), symbols.fresh(1)
    present = (dims[0], heads, total)
    return [
        call.result((dims[0], dims[1], hidden), query, 0, query.dtype),
        *(
            call.result((*present, symbols.divide_whole(width, heads)), query, 0, query.dtype)
            for width in (dims[2] if len(dims) == 3 else hidden, hidden)
        ),
    ]


def group_query(call: Call) -> Output:
    """Operands: query, key, value, past key, past value, lengths, total length, two tables, positions, attention bias,
    sink.
    """
    query = call.operand(0)
    dims = call.dims(query)
    if len(dims) != 3:
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    _check_first(query)
    _check_present(call, 3, 4)
    for index in (1, 2, 3, 4, 5, 9):
        _check_rows(call, query, index)
    if call.has(16) or call.integer("sliding_window_cache", 0):
        raise RandomError("leaves unused rows unwritten, which then hold earlier content of the memory")
    if query.is_rows and call.has(9) and call.integer("do_rotary", 0):
        raise RowsMeetError("rotates the first prompts of all rows by the positions of the first row")
    _check_bias(call, query, 10)
    symbols = call.symbols
    heads, shared = call.integer("num_heads", 1), call.integer("kv_num_heads", 1)
    width = dims[2] if call.has(1) else symbols.divide_whole(symbols.multiply(dims[2], heads), heads + 2 * shared)
    present = (dims[0], shared, symbols.fresh(1), symbols.divide_whole(width, heads))
    return [
        call.result((dims[0], dims[1], width), query, 0, query.dtype),
        *[call.result(present, query, 0, query.dtype)] * 2,
    ]


def onnx_attention(call: Call) -> Output:
    """``Attention`` of ONNX: Q, K, V, mask, past key, past value, lengths without padding."""
    query, value = call.operand(0), call.operand(2)
    dims, width = call.dims(query), call.dims(value)
    _check_first(query)
    for index in (1, 2, 4, 5, 6):
        _check_rows(call, query, index)
    _check_bias(call, query, 3)
    symbols = call.symbols
    heads, shared = call.integer("q_num_heads", 0), call.integer("kv_num_heads", 0)
    if len(dims) == 4 and len(width) == 4:
        shape: Sequence[Number] = (*dims[:3], width[3])
        present: Sequence[Number] = (dims[0], width[1], symbols.fresh(1), width[3])
    elif len(dims) == 3 and len(width) == 3 and heads and shared:
        per_head = symbols.divide_whole(width[2], shared)
        shape = (dims[0], dims[1], symbols.multiply(per_head, heads))
        present = (dims[0], shared, symbols.fresh(1), per_head)
    else:
        raise NotKnownError("has operands of ranks that its rule does not expect")
    scores = (dims[0], symbols.fresh(1), symbols.fresh(1), symbols.fresh(1))
    key = call.dims(call.operand(1))
    keys = (*present[:3], key[3] if len(key) == 4 else symbols.divide_whole(key[2], shared))
    return [
        call.result(shape, query, 0, query.dtype),
        call.result(keys, query, 0, query.dtype),
        call.result(present, query, 0, query.dtype),
        call.result(scores, query, 0, query.dtype),
    ]


def linear_attention(call: Call) -> Output:
    """``LinearAttention``: query, key, value, state, decay, update rate."""
    query = call.operand(0)
    dims, key, value = (call.dims(call.operand(index)) for index in range(3))
    heads, shared = call.integer("q_num_heads", 0), call.integer("kv_num_heads", 0)
    if not len(dims) == len(key) == len(value) == 3 or heads < 1 or shared < 1 or call.integer("state_window", 0):
        raise NotKnownError("has operands that its rule does not expect")
    _check_first(query)
    for index in range(1, 6):
        _check_rows(call, query, index)
    symbols = call.symbols
    width, per_head = (symbols.divide_whole(size, shared) for size in (key[2], value[2]))
    state = call.operand(3).dtype if call.has(3) else query.dtype
    return [
        call.result((*dims[:2], symbols.multiply(per_head, max(heads, shared))), query, 0, query.dtype),
        call.result((dims[0], shared, width, per_head), query, 0, state),
    ]


_OF_CONVOLVED_STATES: Final = (
    "channels_last",
    "state_window",
    "state_update_capacity",
    "state_length",
    "input_channels",
)


def causal_convolution(call: Call) -> Output:
    """``CausalConvWithState``: input, kernel, bias, state."""
    value = call.operand(0)
    dims = call.dims(value)
    if len(dims) != 3 or call.integer("ndim", 1) != 1 or any(call.integer(name, 0) for name in _OF_CONVOLVED_STATES):
        raise NotKnownError("has operands that its rule does not expect")
    _check_first(value)
    _check_rows(call, value, 3)
    state = (*dims[:2], call.dims(call.operand(3))[2] if call.has(3) else call.symbols.fresh(0))
    return [call.same_shape(value), call.result(state, value, 0, value.dtype)]


def embed(call: Call) -> Output:
    """``EmbedLayerNormalization``: ids, segments, three tables, gamma, beta, mask, positions."""
    ids = call.operand(0)
    dims = call.dims(ids)
    if len(dims) != 2:
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    _check_first(ids)
    for index in (1, 7):
        _check_rows(call, ids, index)
    positions = call.optional(8)
    if positions is not None and not positions.is_rows and call.dims(positions)[0] != 1:
        raise RowsMeetError("pairs each row by its index with positions without rows")
    if positions is not None and positions.is_rows:
        _check_rows(call, ids, 8)
    tables = call.operand(2)
    shape = (*dims, call.dims(tables)[1])
    return [
        call.result(shape, ids, 0, tables.dtype),
        call.result((dims[0],), ids, 0, INT32),
        call.result(shape, ids, 0, tables.dtype),
    ]


def rotary(call: Call) -> Output:
    """``RotaryEmbedding`` of com.microsoft: input, position ids, two tables."""
    value, positions = call.operand(0), call.operand(1)
    _check_first(value)
    _check_even(call, value)
    if positions.is_rows or (value.is_rows and call.dims(positions) not in ((), (1,))):
        _check_rows(call, value, 1)
        if len(call.dims(positions)) != 2:
            raise RowsMeetError("uses the position of the first row for all rows")
    return call.same_shape(value)


def onnx_rotary(call: Call) -> Output:
    """``RotaryEmbedding`` of ONNX: X, two tables, position ids. Without ids, the tables have an axis for the rows."""
    value = call.operand(0)
    _check_first(value)
    _check_even(call, value)
    if call.has(3):
        _check_rows(call, value, 3)
        if not (call.is_free(1) and call.is_free(2)):
            raise RowsMeetError("takes its tables from the rows")
    else:
        for index in (1, 2):
            _check_rows(call, value, index)
    return call.same_shape(value)


def _check_even(call: Call, value: Value) -> None:
    """Raise unless ``RotaryEmbedding`` certainly rotates pairs of entries.

    ONNX Runtime 1.31.1 does not write the last entry of an odd number: it is what the memory held before.
    """
    dims, heads = call.dims(value), call.integer("num_heads", 0)
    width: Number = call.integer("rotary_embedding_dim", 0)
    if not width and len(dims) == 3 and not heads:  # then the tables say how wide a head is
        return
    if not width:
        width = call.symbols.divide_whole(dims[-1], heads) if len(dims) == 3 else dims[-1]
    if not isinstance(width, int) or width % 2:
        raise RandomError("may rotate an odd number of entries, one of which then holds earlier content of the memory")


_DIRECTIONS: Final = {"forward": 1, "reverse": 1, "bidirectional": 2}


def recurrent(call: Call) -> Output:
    value = call.operand(0)
    dims = call.dims(value)
    if len(dims) != 3:
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    layout = call.integer("layout", 0)
    batch = 0 if layout else 1
    _check_batch_axis(value, batch)
    directions = _DIRECTIONS.get(call.text("direction", "forward").lower())
    if directions is None:
        raise NotKnownError("has a direction that is not known")
    lengths = call.optional(4)
    states = [state for state in (call.optional(5), call.optional(6)) if state is not None]
    for state, axis in [(lengths, 0)] + [(state, batch) for state in states]:
        if state is not None:
            _check_same_rows(value, state, axis)
    hidden = call.integer("hidden_size", 0)
    time = dims[1 if layout else 0]
    if layout:
        return [
            call.result((dims[0], time, directions, hidden), value, 0, value.dtype),
            *[call.result((dims[0], directions, hidden), value, 0, value.dtype)] * 2,
        ]
    return [
        call.result((time, directions, dims[1], hidden), value, 2, value.dtype),
        *[call.result((directions, dims[1], hidden), value, 1, value.dtype)] * 2,
    ]


def _check_batch_axis(value: Value, batch: int) -> None:
    if value.is_rows and value.axis != batch:
        raise RowsMeetError("treats the rows as time or features")


def _check_same_rows(value: Value, state: Value, axis: int) -> None:
    """Raise an error unless lengths or an initial state carry the same rows as the input."""
    if value.is_rows != state.is_rows or (value.is_rows and (state.axis != axis or not state.carries_like(value))):
        raise RowsMeetError("has lengths or an initial state without the same rows")


RULES: Final[Rules] = {
    ("com.microsoft", "Attention"): Rule(attention, parameters=(1, 2, 6)),
    ("com.microsoft", "QAttention"): Rule(qattention, parameters=(1, 2, 3, 4, 6, 7)),
    ("com.microsoft", "MultiHeadAttention"): Rule(multi_head, parameters=(3,)),
    ("com.microsoft", "GroupQueryAttention"): Rule(group_query, parameters=(6, 7, 8, 11, 12, 13, 14, 15)),
    ("", "Attention"): Rule(onnx_attention),
    **{(domain, "LinearAttention"): Rule(linear_attention) for domain in ("", "com.microsoft")},
    **{
        (domain, "CausalConvWithState"): Rule(causal_convolution, parameters=(1, 2)) for domain in ("", "com.microsoft")
    },
    ("com.microsoft", "EmbedLayerNormalization"): Rule(embed, parameters=(2, 3, 4, 5, 6)),
    ("com.microsoft", "RotaryEmbedding"): Rule(rotary, parameters=(2, 3)),
    ("", "RotaryEmbedding"): Rule(onnx_rotary),
    **{("", op): Rule(recurrent, parameters=(1, 2, 3, 7)) for op in ("GRU", "LSTM", "RNN")},
}
