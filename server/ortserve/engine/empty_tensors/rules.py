"""How operators change the sizes of tensors, for ``analysis``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from ortserve.engine.empty_tensors.call import LARGE, Call, copy_of, with_size
from ortserve.engine.empty_tensors.known import ANYTHING, Known, SizeSum, broadcast, least_of, of_constant
from ortserve.engine.empty_tensors.part_rules import PART_RULES
from ortserve.model_file.graph import Constant, Tensor


def of_any(call: Call) -> Known:
    return Known(may_be_empty=call.is_any_empty)


def _same(call: Call) -> Known:
    """The output has the shape of the first input."""
    return Known(call.known(0).sizes, call.is_any_empty)


def _elementwise(call: Call) -> Known:
    sizes = [known.sizes if known is not None else None for known in call.inputs]
    return replace(_computed(call), sizes=broadcast(sizes), may_be_empty=call.is_any_empty)


def _computed(call: Call) -> Known:
    """What is known about the results of an operation on numbers."""
    first, second = call.known(0), call.known(1)
    match call.node.op:
        case "Add" if first.total is not None and second.total is not None:
            return Known().with_total(first.total.plus(second.total))
        case "Add" if first.least is not None and second.least is not None:
            bound = first.least + second.least
            return Known(least=bound, has_no_zero=bound > 0)
        case "Sub" if (rest := _difference(first, second)) is not None:
            return Known().with_total(rest)
        case "Mul":
            is_positive = first.least is not None and second.least is not None and min(first.least, second.least) >= 1
            return Known(least=1 if is_positive else None, has_no_zero=first.has_no_zero and second.has_no_zero)
        case "Max":
            least = max((one.least for one in call.inputs if one is not None and one.least is not None), default=None)
            return Known(least=least, has_no_zero=least is not None and least > 0)
        case "Min" | "Where":
            chosen = call.inputs[1:] if call.node.op == "Where" else call.inputs
            has_no_zero = all(one is not None and one.has_no_zero for one in chosen)
            return Known(least=least_of(chosen), has_no_zero=has_no_zero)
    return Known()


def _difference(first: Known, second: Known) -> SizeSum | None:
    return None if first.total is None or second.total is None else first.total.minus(second.total)


def _shape(call: Call) -> Known:
    given, name = call.known(0), call.node.inputs[0]
    rank = None if given.sizes is None else len(given.sizes)
    start, end = call.integer("start", 0), call.integer("end", LARGE)
    if rank is None and (start < 0 or end < 0) and end - start != 1:
        return Known((None,), least=0 if given.may_be_empty else 1, has_no_zero=not given.may_be_empty)
    chosen = range(LARGE if rank is None else rank)[start:end]
    count = None if rank is None else len(chosen)
    if given.may_be_empty or not chosen:
        return Known((count,), not chosen, least=0)
    sizes = None if given.sizes is None else tuple(given.sizes[axis] for axis in chosen)
    if sizes is not None and None not in sizes:
        return Known((len(sizes),)).with_elements(tuple(size for size in sizes if size is not None))
    found = Known((count,), least=1, has_no_zero=True, axes_of=(name, chosen.start))
    return with_size(found, found, 0, call) if len(chosen) == 1 else found


def _made(call: Call, place: int) -> Known:
    """The output has the sizes that an input contains."""
    given = call.known(place)
    sizes = tuple(int(size) for size in given.elements) if given.elements is not None else None
    return Known(sizes, not given.has_no_zero and given.elements != () and given.sizes != (0,))


def _expand(call: Call) -> Known:
    given, made = call.known(0), _made(call, 1)
    is_empty = given.may_be_empty or made.may_be_empty
    sizes = broadcast([given.sizes, made.sizes])
    return Known(sizes, is_empty, given.least, given.has_no_zero)


def _tile(call: Call) -> Known:
    given = call.known(0)
    is_empty = given.may_be_empty or _made(call, 1).may_be_empty
    return Known(None, is_empty, given.least, given.has_no_zero)


def _constant_node(call: Call) -> Known:
    for name, value in call.node.attributes.items():
        if isinstance(value, Tensor):
            return of_constant(value)
        if name == "value_int" and isinstance(value, int):
            return Known(()).with_elements((value,))
        if name == "value_ints" and isinstance(value, tuple):
            elements = tuple(one for one in value if isinstance(one, int))
            return Known((len(elements),), not elements).with_elements(elements)
    return Known(may_be_empty="value" in call.node.attributes)


def _constant_of_shape(call: Call) -> Known:
    value = call.attribute("value")
    number = value.elements[0] if isinstance(value, Tensor) and value.elements else 0
    return replace(_made(call, 0), least=number, has_no_zero=number != 0)


def _range(call: Call) -> Known:
    start, limit, step = (call.known(place) for place in range(3))
    length = _difference(limit, start)
    is_up = step.least is not None and step.least > 0
    is_full = is_up and length is not None and length.least > 0
    return Known((None,), not is_full, start.least if is_up else None)


def _reshape(call: Call) -> Known:
    given = call.integers("shape", 1)
    sizes = None if given is None else tuple(size if size > 0 else None for size in given)
    return replace(copy_of(call), sizes=sizes, may_be_empty=call.known(0).may_be_empty)


def _transpose(call: Call) -> Known:
    sizes, order = call.known(0).sizes, call.attribute("perm")
    if sizes is not None:
        chosen = order if isinstance(order, tuple) else tuple(reversed(range(len(sizes))))
        sizes = tuple(sizes[axis] for axis in chosen if isinstance(axis, int) and axis < len(sizes))
    return replace(copy_of(call), sizes=sizes)


def _squeeze(call: Call) -> Known:
    sizes, axes = call.known(0).sizes, call.integers("axes", 1)
    kept = None
    if sizes and axes:  # without axes, those of size 1 are removed, and an unknown size may be 1
        removed = {axis % len(sizes) for axis in axes}
        kept = tuple(size for axis, size in enumerate(sizes) if axis not in removed)
    return replace(copy_of(call), sizes=kept)


def _unsqueeze(call: Call) -> Known:
    sizes, axes = call.known(0).sizes, call.integers("axes", 1)
    if sizes is None or axes is None:
        return replace(copy_of(call), sizes=None)
    wide = len(sizes) + len(axes)
    rest = iter(sizes)
    added = {axis % wide for axis in axes}
    return replace(copy_of(call), sizes=tuple(1 if axis in added else next(rest, None) for axis in range(wide)))


def _concat(call: Call) -> Known:
    given = [known or ANYTHING for known in call.inputs]
    sizes = None
    axis = call.integer("axis", 0)
    if all(known.sizes for known in given):
        columns = list(zip(*(known.sizes or () for known in given), strict=False))
        axis %= max(1, len(columns))
        sizes = tuple(
            (sum(size for size in column if size is not None) if None not in column else None)
            if place == axis
            else next((size for size in column if size is not None), None)
            for place, column in enumerate(columns)
        )
    if len(given) == 1:
        return given[0]
    # One input that is not empty makes an output that is not.
    is_empty, has_no_zero = all(known.may_be_empty for known in given), all(known.has_no_zero for known in given)
    return Known(sizes, is_empty, least_of(given), has_no_zero, _joined_elements(given))


def _joined_elements(given: Sequence[Known]) -> tuple[Constant, ...] | None:
    joined: list[Constant] = []
    for known in given:
        if known.elements is None or known.sizes is None or len(known.sizes) != 1:
            return None
        joined += known.elements
    return tuple(joined)


def _identity(call: Call) -> Known:
    return call.known(0)


def _cast(call: Call) -> Known:
    """A fraction may become 0."""
    given = call.known(0)
    if given.elements is None and given.least is not None and given.least >= 1:
        return replace(given, least=1)
    is_whole = given.elements is not None and not any(type(one) is Fraction for one in given.elements)
    return given if is_whole or given.total is not None else Known(given.sizes, given.may_be_empty)


def _matmul(call: Call) -> Known:
    a, b = call.known(0).sizes, call.known(1).sizes
    sizes = None
    if a is not None and b is not None and len(a) > 1 and len(b) > 1:
        batch = broadcast([a[:-2], b[:-2]])
        sizes = None if batch is None else (*batch, a[-2], b[-1])
    return Known(sizes, call.is_any_empty)


def _gemm(call: Call) -> Known:
    a, b = (call.known(place).sizes or (None, None) for place in (0, 1))
    rows, columns = a[1 if call.integer("transA", 0) else 0], b[0 if call.integer("transB", 0) else -1]
    return Known((rows, columns), call.is_any_empty)


def _depth(call: Call) -> Known:
    least = call.known(1).least
    return Known(None, call.known(0).may_be_empty or least is None or least < 1)


def _single(call: Call) -> Known:
    is_empty = call.known(0).may_be_empty
    return Known((), least=0 if is_empty else 1, has_no_zero=not is_empty)


_WITHOUT_RULE: Final = """
    CausalConvWithState CenterCropPad Col2Im ConcatFromSequence CropAndResize DFT MaxUnpool Optional
    OptionalGetElement STFT SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceMap
    SplitToSequence StringSplit TfIdfVectorizer Tokenizer UnfoldTensor
"""
ANY_SIZE: Final = frozenset(_WITHOUT_RULE.split())
"""Operators whose outputs may have any size."""
_OF_ONE_SHAPE: Final = """
    Abs BatchNormalization Ceil Clip Cos CumSum DequantizeLinear Dropout Elu Erf Exp Floor Gelu GroupNormalization
    HardSigmoid HardSwish InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu Log LogSoftmax Mish Neg Not
    PRelu QuantizeLinear Reciprocal Relu Round Selu Sigmoid Sign Sin Softmax Softplus Softsign Sqrt Tanh
    ThresholdedRelu Trilu
"""
_ELEMENTWISE: Final = """
    Add And BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or
    Pow Sub Sum Where Xor
"""
RULES: Final[Mapping[str, Callable[[Call], Known | Sequence[Known]]]] = {
    **dict.fromkeys(_OF_ONE_SHAPE.split(), _same),
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **PART_RULES,
    "Cast": _cast,
    "Concat": _concat,
    "Constant": _constant_node,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Gemm": _gemm,
    "Identity": _identity,
    "MatMul": _matmul,
    "OneHot": _depth,
    "Range": _range,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _single,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""The rules by operator of ONNX. Outputs of other operators may be empty if an input may be."""
