"""Builders of models with sequences, with controls and states that the server fills."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

_HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'


def accumulate(path: Path, flag: str = "int32", correlation: str = "uint64", rows: str = "batch,") -> Path:
    """A running sum that START resets: OUTPUT = INPUT, or the last OUTPUT + INPUT. An INPUT of 1000 or more fails.

    STATE_SEEN, ID_SEEN and FLAGS_SEEN (START, READY, END) return the values that the model received. ``rows`` is empty
    for a model without a batch axis.
    """
    return _write(
        path,
        f"""accumulate (int32[{rows}1] INPUT, {flag}[{rows}1] START, {flag}[{rows}1] READY, {flag}[{rows}1] END,
            {correlation}[{rows}1] CORRID, int32[{rows}1] STATE)
        => (int32[{rows}1] OUTPUT, int32[{rows}1] STATE_SEEN, {correlation}[{rows}1] ID_SEEN, float[{rows}3] FLAGS_SEEN,
            int32[{rows}1] NEXT)
        {{
            zeros = Mul (INPUT, nothing)
            looked_up = Gather (table, INPUT)
            started = Cast <to = 6> (START)
            kept = Sub (one, started)
            old = Mul (STATE, kept)
            raised = Add (INPUT, looked_up)
            NEXT = Add (old, raised)
            OUTPUT = Identity (NEXT)
            STATE_SEEN = Add (STATE, zeros)
            ID_SEEN = Identity (CORRID)
            s = Cast <to = 1> (START)
            r = Cast <to = 1> (READY)
            e = Cast <to = 1> (END)
            FLAGS_SEEN = Concat <axis = -1> (s, r, e)
        }}""",
        table=[0] * 1000,
        one=[1],
        nothing=[0],
    )


def whole_batch(path: Path) -> Path:
    """Returns to each row the size of its batch, and READY and INPUT of all rows as digits; rows are dependent."""
    return _write(
        path,
        """whole (int32[batch,1] INPUT, int32[batch,1] READY, int32[batch,1] STATE)
        => (int32[batch,1] OUTPUT, int32[batch,1] ROWS, int32[batch,1] READY_ROWS, int32[batch,1] INPUT_ROWS,
            int32[batch,1] NEXT) {
            zeros = Mul (INPUT, nothing)
            NEXT = Add (INPUT, STATE)
            OUTPUT = Identity (NEXT)
            ones = Add (zeros, one)
            count = ReduceSum <keepdims = 1> (ones)
            ROWS = Add (zeros, count)
            counted = Cast <to = 1> (ones)
            places = CumSum (counted, axis)
            powers = Pow (ten, places)
            powers32 = Cast <to = 6> (powers)
            r = Mul (READY, powers32)
            rs = ReduceSum <keepdims = 1> (r)
            READY_ROWS = Add (zeros, rs)
            i = Mul (INPUT, powers32)
            is = ReduceSum <keepdims = 1> (i)
            INPUT_ROWS = Add (zeros, is)
        }""",
        nothing=[0],
        one=[1],
        axis=0,
        ten=[10.0],
    )


def two_states(path: Path) -> Path:
    """Two states whose names sort differently: ``a_in`` counts by 1 in ``z_out``, ``b_in`` by 10 in ``a_out``."""
    return _write(
        path,
        """two (int32[batch,1] INPUT, int32[batch,1] a_in, int32[batch,1] b_in)
        => (int32[batch,1] A, int32[batch,1] B, int32[batch,1] z_out, int32[batch,1] a_out) {
            z_out = Add (a_in, one)
            a_out = Add (b_in, ten)
            zeros = Mul (INPUT, nothing)
            A = Add (z_out, zeros)
            B = Add (a_out, zeros)
        }""",
        one=[1],
        ten=[10],
        nothing=[0],
    )


def growing(path: Path, rows: str = "batch") -> Path:
    """A state that grows by one element with each request: LENGTH and TOTAL of all values since the start.

    ``rows`` is 1 for a model without a batch axis.
    """
    return _write(
        path,
        f"""growing (float[{rows},1] INPUT, float[{rows},past] PAST)
        => (int64[{rows},1] LENGTH, float[{rows},1] TOTAL, float[{rows},present] PRESENT) {{
            PRESENT = Concat <axis = 1> (PAST, INPUT)
            TOTAL = ReduceSum <keepdims = 1> (PRESENT, axes)
            ones = Mul (PRESENT, nothing)
            same = Add (ones, one)
            length = ReduceSum <keepdims = 1> (same, axes)
            LENGTH = Cast <to = 7> (length)
        }}""",
        axes=[1],
        nothing=[0.0],
        one=[1.0],
    )


def growing_among(path: Path) -> Path:
    """Like ``growing``, with the number of rows of the batch that have READY in place of LENGTH."""
    text = """among (float[batch,1] INPUT, int32[batch,1] READY, float[batch,past] PAST)
        => (int32[batch,1] REQUESTS, float[batch,1] TOTAL, float[batch,present] PRESENT) {
            PRESENT = Concat <axis = 1> (PAST, INPUT) TOTAL = ReduceSum <keepdims = 1> (PRESENT, axes)
            count = ReduceSum <keepdims = 1> (READY) REQUESTS = Mul (READY, count)
        }"""
    return _write(path, text, axes=[1])


def history(path: Path) -> Path:
    """Returns all INPUTs since the start, using copies only; the state grows by one row of 4 with each request."""
    return _write(
        path,
        """history (float[batch,4] INPUT, float[batch,past,4] PAST)
        => (float[batch,present,4] OUTPUT, float[batch,present,4] PRESENT) {
            row = Unsqueeze (INPUT, axes)
            parts = SequenceConstruct (PAST, row)
            OUTPUT = ConcatFromSequence <axis = 1> (parts)
            PRESENT = Identity (OUTPUT)
        }""",
        axes=[1],
    )


def growing_halves(path: Path) -> Path:
    """Like ``growing``, with a BF16 state."""
    return _write(
        path,
        """halves (float[batch,1] INPUT, bfloat16[batch,past] PAST)
        => (float[batch,1] TOTAL, bfloat16[batch,present] PRESENT) {
            half = Cast <to = 16> (INPUT)
            PRESENT = Concat <axis = 1> (PAST, half)
            values = Cast <to = 1> (PRESENT)
            TOTAL = ReduceSum <keepdims = 1> (values, axes)
        }""",
        axes=[1],
    )


def growing_beside_its_input(path: Path) -> Path:
    """A state that grows by INPUT, which is also an output."""
    return _write(
        path,
        """growing (float[batch,1] INPUT, float[batch,past] PAST)
        => (float[batch,1] INPUT, float[batch,present] PRESENT) {
            PRESENT = Concat <axis = 1> (PAST, INPUT)
        }""",
    )


def totals(path: Path) -> Path:
    """TOTAL of all values since the start; a request has any number of them, the state has a constant size."""
    return _write(
        path,
        """totals (float[batch,count] INPUT, float[batch,1] STATE) => (float[batch,1] TOTAL, float[batch,1] NEXT) {
            sum = ReduceSum <keepdims = 1> (INPUT, axes)
            NEXT = Add (sum, STATE)
            TOTAL = Identity (NEXT)
        }""",
        axes=[1],
    )


def counted(path: Path) -> Path:
    """COUNT is the number of requests since the start; OUTPUT returns INPUT, of any length."""
    return _write(
        path,
        """counted (float[batch,count] INPUT, float[batch,1] STATE)
        => (float[batch,count] OUTPUT, float[batch,1] COUNT, float[batch,1] NEXT) {
            NEXT = Add (STATE, one)
            COUNT = Identity (NEXT)
            OUTPUT = Identity (INPUT)
        }""",
        one=[1.0],
    )


def turned(path: Path) -> Path:
    """A state of 2 columns, whose next state has 2 rows; only a square state is valid as a next input."""
    return _write(
        path,
        """turned (float[batch,1] INPUT, float[batch,rows,2] STATE)
        => (float[batch,1] OUTPUT, float[batch,a,b] NEXT) {
            OUTPUT = Identity (INPUT)
            NEXT = Transpose <perm = [0, 2, 1]> (STATE)
        }""",
    )


def columns(path: Path) -> Path:
    """A growing state whose rows are on axis 1."""
    return _write(
        path,
        """columns (float[batch,1] INPUT, float[past,batch] PAST)
        => (float[batch,1] OUTPUT, float[present,batch] PRESENT) {
            row = Transpose <perm = [1, 0]> (INPUT)
            PRESENT = Concat <axis = 0> (PAST, row)
            OUTPUT = Identity (INPUT)
        }""",
    )


def rotating(path: Path) -> Path:
    """Returns its state, and rotates it by one element, in a node that only the CPU provider supports."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 3]>
        rotating (float[batch,count] INPUT, float[batch,4] STATE)
        => (float[batch,4] OUTPUT, float[batch,count] ECHO, float[batch,4] NEXT) {
            OUTPUT = ai.onnx.ml.ArrayFeatureExtractor (STATE, as_it_is)
            NEXT = ai.onnx.ml.ArrayFeatureExtractor (STATE, rotated)
            ECHO = Identity (INPUT)
        }"""
    )
    for name, order in (("as_it_is", [0, 1, 2, 3]), ("rotated", [1, 2, 3, 0])):
        model.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [4], order))
    path.write_bytes(model.SerializeToString())
    return path


def random_state(path: Path) -> Path:
    """A state that differs in each run on the same inputs."""
    return _write(
        path,
        """noisy (float[batch,1] INPUT, float[batch,past] STATE) => (float[batch,1] OUTPUT, float[batch,past] NEXT) {
            OUTPUT = Identity (INPUT)
            NEXT = RandomNormalLike (STATE)
        }""",
    )


def delayed(path: Path) -> Path:
    """Returns the INPUT of the previous request, using copies only."""
    return _write(
        path,
        """delayed (float[batch,4] INPUT, float[batch,4] STATE) => (float[batch,4] OUTPUT, float[batch,4] NEXT) {
            OUTPUT = Identity (STATE)
            NEXT = Identity (INPUT)
        }""",
    )


def slow(path: Path, steps: int = 50_000) -> Path:
    """A running sum whose run takes about 0.1 s, in proportion to ``steps``; TOTAL starts at 0 with each sequence."""
    model = parser.parse_model(
        _HEAD
        + """slow (int32[batch,1] INPUT, int32[batch,1] STATE) => (int32[batch,1] TOTAL, int32[batch,1] NEXT) {
            zero_rows = Mul (INPUT, nothing)
            first = ReduceSum <keepdims = 0> (zero_rows)
            last = Loop (steps, , first) <body = step (int64 number, bool condition, int32 value)
                => (bool again, int32 following) {
                    again = Identity (condition)
                    following = Mul (value, value)
                }>
            NEXT = Add (INPUT, STATE)
            TOTAL = Add (NEXT, last)
        }"""
    )
    model.graph.initializer.append(onnx.helper.make_tensor("steps", onnx.TensorProto.INT64, [], [steps]))
    model.graph.initializer.append(_constant("nothing", [0]))
    path.write_bytes(model.SerializeToString())
    return path


def marks(path: Path) -> Path:
    """TOTAL counts the texts "x" of a sequence; a request has any number of texts."""
    return _write(
        path,
        """marks (string[batch,count] INPUT, int32[batch,1] STATE) => (int32[batch,1] TOTAL, int32[batch,1] NEXT) {
            same = Equal (INPUT, mark)
            counted = Cast <to = 6> (same)
            found = ReduceSum <keepdims = 1> (counted, axes)
            NEXT = Add (found, STATE)
            TOTAL = Identity (NEXT)
        }""",
        mark=["x"],
        axes=[1],
    )


def counting(path: Path, code: int, state: str, width: int) -> Path:
    """Returns INPUT of ``width`` columns as ECHO, and the state as SUM. Rejects an INPUT that begins with ``code``.

    With the state "fixed", SUM is the sum of all INPUTs since the start but for its first column; with "growing", the
    list of the columns that were 1. "none" is a model without SUM and state.
    """
    size, following = {"fixed": (width, width), "growing": ("past", "present"), "none": (0, 0)}[state]
    inputs, outputs = f", float[batch,{size}] STATE", f"float[batch,{following}] SUM, float[batch,{following}] NEXT, "
    body = {
        "fixed": "counted = Mul (ECHO, counts) NEXT = Add (STATE, counted) SUM = Identity (NEXT)",
        "growing": "number = MatMul (ECHO, numbers) NEXT = Concat <axis = 1> (STATE, number) SUM = Identity (NEXT)",
        "none": "",
    }[state]
    model = parser.parse_model(
        _HEAD
        + f"""counting (float[batch,{width}] INPUT{inputs if body else ""})
        => ({outputs if body else ""}float[batch,{width}] ECHO) {{
            head = Slice (INPUT, zero, one, one)
            is_bad = Equal (head, code)
            index = Cast <to = 7> (is_bad)
            nothing = Gather (table, index)
            ECHO = Add (INPUT, nothing)
            {body}
        }}"""
    )
    constants: dict[str, np.ndarray] = {"zero": np.array([0]), "one": np.array([1])}
    constants |= {"code": np.array([[code]], np.float32), "table": np.zeros(1, np.float32)}
    if state == "fixed":
        constants["counts"] = np.array([0] + [1] * (width - 1), np.float32)
    elif state == "growing":
        constants["numbers"] = np.arange(width, dtype=np.float32)[:, None]
    model.graph.initializer.extend([numpy_helper.from_array(array, name) for name, array in constants.items()])
    path.write_bytes(model.SerializeToString())
    return path


def simple_sequence(path: Path) -> Path:
    """Triton's example of the same name: OUTPUT = (INPUT + START) · READY."""
    return _write(
        path,
        """simple (int32[batch,1] INPUT, int32[batch,1] START, int32[batch,1] READY) => (int32[batch,1] OUTPUT) {
            sum = Add (INPUT, START)
            OUTPUT = Mul (sum, READY)
        }""",
    )


def simple_dyna_sequence(path: Path) -> Path:
    """Triton's example of the same name: OUTPUT = (INPUT + START + END · CORRID) · READY."""
    return _write(
        path,
        """dyna (int32[batch,1] INPUT, int32[batch,1] START, int32[batch,1] READY, int32[batch,1] END,
            uint64[batch,1] CORRID) => (int32[batch,1] OUTPUT) {
            id = Cast <to = 6> (CORRID)
            last = Mul (END, id)
            sum = Add (INPUT, START)
            all = Add (sum, last)
            OUTPUT = Mul (all, READY)
        }""",
    )


def simple_string_dyna_sequence(path: Path) -> Path:
    """Computes the same as Triton's example of this name: a running sum; END adds the number in the id."""
    return _write(
        path,
        """dyna (int32[batch,1] INPUT, int32[batch,1] START, int32[batch,1] READY, int32[batch,1] END,
            string[batch,1] CORRID, int32[batch,1] STATE) => (int32[batch,1] OUTPUT, int32[batch,1] NEXT) {
            ending = Cast <to = 9> (END)
            padded = Where (ending, CORRID, zero)
            id = Cast <to = 6> (padded)
            kept = Sub (one, START)
            old = Mul (STATE, kept)
            sum = Add (INPUT, old)
            NEXT = Identity (sum)
            all = Add (sum, id)
            OUTPUT = Mul (all, READY)
        }""",
        zero=["0"],
        one=[1],
    )


def _write(path: Path, text: str, **constants: object) -> Path:
    """Write a model of the text format, with initializers: lists of int32, float or text; a plain int has no axes."""
    model = parser.parse_model(_HEAD + text)
    for name, value in constants.items():
        model.graph.initializer.append(_constant(name, value))
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def _constant(name: str, value: object) -> onnx.TensorProto:
    if isinstance(value, int):
        return onnx.helper.make_tensor(name, onnx.TensorProto.INT32, [], [value])
    assert isinstance(value, list)
    if isinstance(value[0], str):
        return onnx.helper.make_tensor(name, onnx.TensorProto.STRING, [len(value)], [one.encode() for one in value])
    if name == "axes":
        return onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [len(value)], value)
    kind = onnx.TensorProto.FLOAT if isinstance(value[0], float) else onnx.TensorProto.INT32
    return onnx.helper.make_tensor(name, kind, [len(value)], value)
