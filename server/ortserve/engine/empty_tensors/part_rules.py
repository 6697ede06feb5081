"""Rules of operators that take parts of tensors, or windows of images, for ``analysis``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ortserve.engine.empty_tensors.call import LARGE, Call, with_size
from ortserve.engine.empty_tensors.known import ANYTHING, Known, Sizes
from ortserve.model_file.graph import Constant


def _gather(call: Call) -> Known:
    given, indices = call.known(0), call.known(1)
    sizes = None
    if given.sizes and indices.sizes is not None:
        axis = call.integer("axis", 0) % len(given.sizes)
        sizes = (*given.sizes[:axis], *indices.sizes, *given.sizes[axis + 1 :])
    found = Known(sizes, call.is_any_empty, given.least, given.has_no_zero)
    if indices.elements is not None and len(indices.elements) == 1:
        at = int(indices.elements[0])
        if given.elements is not None and -len(given.elements) <= at < len(given.elements):
            return found.with_elements((given.elements[at],))
        return with_size(found, given, at, call)
    return found


def _split(call: Call) -> Sequence[Known]:
    sizes, count = call.known(0).sizes, len(call.node.outputs)
    parts = call.integers("split", 1)
    axis = call.integer("axis", 0)
    least, has_no_zero = call.known(0).least, call.known(0).has_no_zero
    found = []
    for place in range(count):
        size = parts[place] if parts is not None and place < len(parts) else None
        # Equal parts of an axis that is long enough; from operator set 18 on, the last one may be smaller, or empty.
        is_full = bool(size) if parts is not None else not call.has(1) and _divides(call, sizes, axis, count)
        kept = None
        if sizes is not None and sizes:
            at = axis % len(sizes)
            whole = sizes[at]
            if not call.has(1) and parts is None and whole is not None and whole % count == 0:
                size = whole // count
            kept = (*sizes[:at], size, *sizes[at + 1 :])
        found.append(Known(kept, call.known(0).may_be_empty or not is_full, least, has_no_zero))
    return found


def _divides(call: Call, sizes: Sizes | None, axis: int, count: int) -> bool:
    if call.opset < 18 or count == 1:
        return True
    size = sizes[axis % len(sizes)] if sizes else None
    return size is not None and size % count == 0


def _slice(call: Call) -> Known:
    given = call.known(0)
    starts, ends = call.known(1), call.known(2)
    if call.opset < 10:
        starts, ends = (Known(elements=elements) for elements in (call.integers("starts", 9), call.integers("ends", 9)))
    if (part := _slice_of_sizes(call, given, starts, ends)) is not None:
        return part
    axes, steps = call.integers("axes", 3), call.integers("steps", 4)
    if axes is None and not call.has(3):
        axes = tuple(range(len(starts.elements or ends.elements or ())))
    if not axes:
        return Known(None, True, given.least, given.has_no_zero)
    sizes = list(given.sizes) if given.sizes is not None else None
    is_full = True
    for place, axis in enumerate(axes):
        step = (steps[place] if steps is not None else None) if call.has(4) else 1
        is_there = sizes is not None and -len(sizes) <= axis < len(sizes)
        size = sizes[axis] if sizes is not None and is_there else None
        start, end = (
            known.elements[place] if known.elements and place < len(known.elements) else None
            for known in (starts, ends)
        )
        length = _sliced(size, start, end, ends.least, step)
        is_full &= length is None or length > 0
        if sizes is not None and is_there:
            sizes[axis] = length or None
    kept = None if sizes is None else tuple(sizes)
    found = Known(kept, given.may_be_empty or not is_full, given.least, given.has_no_zero)
    if given.elements is not None and axes == (0,) and starts.elements and ends.elements and not call.has(4):
        return found.with_elements(given.elements[int(starts.elements[0]) : int(ends.elements[0])])
    return found


def _slice_of_sizes(call: Call, given: Known, starts: Known, ends: Known) -> Known | None:
    """A slice of the sizes of another tensor; None if it is not one, or ``given`` has a known length."""
    if given.axes_of is None or starts.elements is None or len(starts.elements) != 1 or call.has(4):
        return None
    name, first = given.axes_of
    at = int(starts.elements[0])
    part = replace(given, sizes=(None,), axes_of=(name, first + at) if at >= 0 else None)
    if ends.elements is not None and ends.elements[0] - at == 1:
        return with_size(replace(part, sizes=(1,)), given, at, call)
    return part if given.sizes in (None, (None,)) else None


def _sliced(
    size: int | None, start: Constant | None, end: Constant | None, least_end: Constant | None, step: int | None
) -> int | None:
    """The size of a part of an axis: 0 if it may be empty, None if it is unknown and not 0."""
    if step is None or start is None:
        return 0
    start = int(start)
    if size is not None and end is not None:
        return len(range(size)[start : int(end) : step])
    if step < 0:
        return None if start == -1 or start >= LARGE else 0
    least = end if end is not None else least_end
    is_to_end = least is not None and least >= LARGE
    if start == 0:
        return None if least is not None and least >= 1 else 0
    if start < 0:
        return None if is_to_end else 0
    return None if size is not None and start < size and is_to_end else 0


def _pad(call: Call) -> Known:
    pads = call.integers("pads", 1)
    is_wider = pads is not None and min(pads, default=0) >= 0
    sizes = call.known(0).sizes
    kept = None
    if is_wider and pads is not None and sizes is not None and len(pads) == 2 * len(sizes) and not call.has(3):
        kept = tuple(
            None if size is None else size + pads[axis] + pads[axis + len(sizes)] for axis, size in enumerate(sizes)
        )
    return Known(kept, call.known(0).may_be_empty or not is_wider)


def _resize(call: Call) -> Known:
    given = [known for known in call.inputs[1:] if known is not None and known.least is not None]
    factors = call.attribute("scales")
    if isinstance(factors, tuple):
        given = [Known(least=1 if min(float(one) for one in factors) >= 1 else 0)]
    is_full = bool(given) and given[-1].least is not None and given[-1].least >= 1
    return Known(None, call.known(0).may_be_empty or not is_full)


def _window(call: Call) -> Known:
    """Convolutions and poolings: their output is empty if the image is smaller than the kernel."""
    sizes = call.known(0).sizes
    weights = call.known(_WEIGHTS.get(call.node.op, len(call.node.inputs))).sizes
    given = call.attribute("kernel_shape")
    kernel: Sequence[int | float | str | None] | None = weights[2:] if weights is not None else None
    if isinstance(given, tuple):
        kernel = given
    if kernel is None or None in kernel:
        return Known(may_be_empty=True)
    count = len(kernel)

    def given_or(name: str, default: int, length: int) -> tuple[int, ...]:
        value = call.attribute(name)
        return tuple(int(one) for one in value) if isinstance(value, tuple) else (default,) * length

    pads, steps, gaps = given_or("pads", 0, 2 * count), given_or("strides", 1, count), given_or("dilations", 1, count)
    rounds_up = bool(call.integer("ceil_mode", 0))
    same = str(call.attribute("auto_pad") or "").startswith("SAME")
    spatial: list[int | None] = []
    is_full = True
    for axis in range(count):
        size = sizes[axis + 2] if sizes is not None and len(sizes) == count + 2 else None
        reach = (int(kernel[axis] or 1) - 1) * gaps[axis] + 1 - pads[axis] - pads[axis + count]
        if rounds_up:
            spatial.append(None)
        elif same:
            spatial.append(None if size is None else -(-size // steps[axis]))
        else:
            spatial.append(None if size is None else max(0, (size - reach) // steps[axis] + 1))
        if not same:
            is_full &= (1 if size is None else size) >= reach
    channels = weights[0] if weights else sizes[1] if sizes is not None and len(sizes) > 1 else None
    batch = sizes[0] if sizes else None
    return Known((batch, channels, *spatial), call.is_any_empty or not is_full)


def _global(call: Call) -> Known:
    sizes = call.known(0).sizes
    return Known(None if sizes is None else (*sizes[:2], *[1] * len(sizes[2:])), call.is_any_empty)


def _hits(call: Call) -> Known:
    """Any number of elements or rows of the first input, or of their positions."""
    sizes = call.known(0).sizes
    if call.node.op == "NonMaxSuppression":
        return Known((None, 3), may_be_empty=True)
    if call.node.op == "NonZero":
        return Known((None if sizes is None else len(sizes), None), may_be_empty=True)
    axis = call.attribute("axis")
    if not isinstance(axis, int):
        return Known((None,), may_be_empty=True)
    if sizes is None or not -len(sizes) <= axis < len(sizes):
        return ANYTHING
    return Known(tuple(None if at == axis % len(sizes) else size for at, size in enumerate(sizes)), may_be_empty=True)


def _top(call: Call) -> Known:
    least = call.known(1).least if call.has(1) else call.integer("k", 0)
    return Known(None, call.known(0).may_be_empty or least is None or least < 1)


_WEIGHTS: Final = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
PART_RULES: Final[Mapping[str, Callable[[Call], Known | Sequence[Known]]]] = {
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool", *_WEIGHTS), _window),
    **dict.fromkeys(("Compress", "NonMaxSuppression", "NonZero"), _hits),
    **dict.fromkeys(("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"), _global),
    "Gather": _gather,
    "Pad": _pad,
    "Resize": _resize,
    "Slice": _slice,
    "Split": _split,
    "TopK": _top,
    "Upsample": _resize,
}
