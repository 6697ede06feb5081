"""Rules of operators on the axes after batch and channels: convolution, pooling, resizing."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from ortserve.model_file.graph import INT32, INT64
from ortserve.rows.number import DEPENDENT, WINDOWS, Number, contains_rows, is_positive
from ortserve.rows.rules.call import (
    OTHER_AXIS,
    Call,
    NotKnownError,
    Output,
    RowsMeetError,
    Rule,
    Rules,
    check_no_stride,
    check_sizes,
    normal_axis,
)
from ortserve.rows.rules.matmul import check_one_number
from ortserve.rows.rules.movement import length_of, number_of
from ortserve.rows.symbols import FLOAT_LIMIT
from ortserve.rows.values import Value


def check_first_axis(value: Value) -> None:
    """Raise an error unless the rows of an operand, if it has rows, lie on the first axis."""
    if value.is_rows and value.axis != 0:
        raise RowsMeetError("has the rows on another axis than the first, where it combines them")


def conv(call: Call) -> Output:
    return _conv(call, call.operand(0), call.operand(1), call.operand(0).dtype)


def conv_integer(call: Call) -> Output:
    check_one_number(call, 2)
    return _conv(call, call.operand(0), call.operand(1), INT32)


def fused_conv(call: Call) -> Output:
    result = _conv(call, call.operand(0), call.operand(1), call.operand(0).dtype)
    added = call.optional(3)
    if added is not None and result.is_rows:
        if not added.is_rows or added.axis != 0 or not added.carries_like(result):
            raise RowsMeetError("adds a tensor without the same rows")
    elif added is not None and added.is_rows:
        raise RowsMeetError("adds rows to a result without rows")
    return result


def qlinear_conv(call: Call) -> Output:
    check_one_number(call, 1, 2, 6, 7)
    return _conv(call, call.operand(0), call.operand(3), call.operand(7).dtype)


def _conv(call: Call, value: Value, weights: Value, dtype: int) -> Value:
    check_first_axis(value)
    if weights.is_rows:
        raise RowsMeetError("takes its weights from the rows")
    dims, kernel = call.dims(value), call.dims(weights)
    if len(dims) < 3 or len(kernel) != len(dims):
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    is_last = call.integer("channels_last", 0) or call.op in ("NhwcConv", "NhwcFusedConv")
    if is_last:
        if call.op != "QLinearConv":
            kernel = (kernel[0], kernel[-1], *kernel[1:-1])
        sizes = call.integers("kernel_shape") or kernel[2:]
        return call.result((dims[0], *window_lengths(call, dims[1:-1], sizes), kernel[0]), value, 0, dtype)
    call.symbols.need(dims[1], call.symbols.multiply(kernel[1], call.integer("group", 1)))
    sizes = call.integers("kernel_shape") or kernel[2:]
    return call.result((dims[0], kernel[0], *window_lengths(call, dims[2:], sizes)), value, 0, dtype)


def conv_transpose(call: Call) -> Output:
    value, weights = call.operand(0), call.operand(1)
    check_first_axis(value)
    dims, kernel = call.dims(value), call.dims(weights)
    if len(dims) < 3 or len(kernel) != len(dims):
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    channels = call.symbols.multiply(kernel[1], call.integer("group", 1))
    lengths = _transposed_lengths(call, dims[2:], call.integers("kernel_shape") or kernel[2:])
    return call.result((dims[0], channels, *lengths), value, 0, value.dtype)


def _transposed_lengths(call: Call, dims: Sequence[Number], sizes: Sequence[Number]) -> list[Number]:
    rank = len(dims)
    if (given := call.integers("output_shape")) is not None:
        call.symbols.has_lost_axes = True  # ONNX Runtime 1.31.1 infers a result without the axes of these sizes
        return list(given[-rank:])
    symbols = call.symbols
    strides = call.integers("strides") or (1,) * rank
    dilations = call.integers("dilations") or (1,) * rank
    extra = call.integers("output_padding") or (0,) * rank
    pads = call.integers("pads") or (0,) * (2 * rank)
    same = call.text("auto_pad", "NOTSET").startswith("SAME")
    if same and any(extra):  # ONNX Runtime 1.31.1 adds it only to the shape that it infers at the load
        raise NotKnownError("pads the output of auto_pad")
    lengths: list[Number] = []
    for i, length in enumerate(dims):
        reach = symbols.multiply(symbols.subtract(sizes[i], 1), dilations[i])
        if same:  # nothing is cut off a result that is shorter than length * stride
            missing = symbols.minimum(symbols.sum((reach, 1 - strides[i])), 0)
            lengths.append(symbols.add(symbols.multiply(length, strides[i]), missing))
            continue
        moved = symbols.multiply(symbols.subtract(length, 1), strides[i])
        lengths.append(length_of(call, symbols.sum((moved, reach, 1 + extra[i] - pads[i] - pads[i + rank]))))
    return lengths


def window_lengths(call: Call, dims: Sequence[Number], sizes: Sequence[Number]) -> list[Number]:
    """The number of windows along each axis.

    In pooling, ONNX Runtime 1.31.1 rounds towards 0, so an axis that is shorter than its window may have a window. A
    convolution rejects such an axis. With ``auto_pad``, the padding of a pooling ignores dilations, but not in the
    shapes that ONNX Runtime infers at the load.
    """
    symbols = call.symbols
    rank = len(dims)
    if len(sizes) != rank:
        raise NotKnownError("has a window that does not fit its operand")
    strides = call.integers("strides") or (1,) * rank
    dilations = call.integers("dilations") or (1,) * rank
    pads = call.integers("pads") or (0,) * (2 * rank)
    kind = call.text("auto_pad", "NOTSET")
    rounds_up = bool(call.integer("ceil_mode", 0))
    is_pool = call.op.endswith("Pool")
    lengths: list[Number] = []
    for i, length in enumerate(dims):
        stride = Fraction(1, strides[i])
        if kind.startswith("SAME"):
            if is_pool and dilations[i] != 1:
                raise NotKnownError("pads for windows with gaps")
            if rounds_up:  # ONNX Runtime 1.32.0 infers more windows at the load if strides are longer than windows
                raise NotKnownError("rounds up the number of windows of auto_pad")
            lengths.append(symbols.ceil(symbols.multiply(length, stride)))
            continue
        before, after = (0, 0) if kind == "VALID" else (pads[i], pads[i + rank])
        padding = before + after
        reach = symbols.multiply(symbols.subtract(sizes[i], 1), dilations[i])
        if not is_pool and isinstance(reach, int) and padding <= reach:  # it rejects an empty axis, or has no windows
            length = number_of(length)
        room = symbols.subtract(symbols.add(length, padding - 1), reach)
        moves = symbols.multiply(room, stride)
        whole = symbols.truncate(moves) if is_pool else symbols.floor(moves)
        # Unknown: a last window that starts in the padding does not count, and ONNX Runtime rounds up as FP32.
        if rounds_up and (whole != moves or symbols.bounded(room, FLOAT_LIMIT) != room):
            lengths.append(symbols.opaque(WINDOWS, length, sizes[i], strides[i], dilations[i], before, after, lowest=0))
        else:
            lengths.append(length_of(call, symbols.add(whole, 1)))
    return lengths


def pool(call: Call) -> Value:
    value = call.operand(0)
    check_first_axis(value)
    dims = call.dims(value)
    if len(dims) < 3:
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    sizes = call.integers("kernel_shape") or ()
    if call.integer("channels_last", 0) or call.op == "NhwcMaxPool":
        return call.result((dims[0], *window_lengths(call, dims[1:-1], sizes), dims[-1]), value, 0, value.dtype)
    return call.result((dims[0], dims[1], *window_lengths(call, dims[2:], sizes)), value, 0, value.dtype)


def max_pool(call: Call) -> Output:
    result = pool(call)
    if call.wants(1) and result.is_rows:
        raise RowsMeetError("returns indices that count over the whole batch")
    return [result, call.result(call.dims(result), dtype=INT64)]


def qlinear_pool(call: Call) -> Output:
    check_one_number(call, 1, 2, 3, 4)
    return pool(call)


def global_pool(call: Call) -> Output:
    value = call.operand(0)
    check_first_axis(value)
    dims = call.dims(value)
    if len(dims) < 3:
        raise NotKnownError(f"has an operand of {len(dims)} dimensions")
    ones = (1,) * (len(dims) - 2)
    lengths = (dims[0], *ones, dims[-1]) if call.integer("channels_last", 0) else (*dims[:2], *ones)
    return call.result(lengths, value, 0, value.dtype)


def qlinear_global_pool(call: Call) -> Output:
    check_one_number(call, 1, 2, 3, 4)
    return global_pool(call)


def blocks(call: Call) -> Output:
    """DepthToSpace and SpaceToDepth."""
    value = call.operand(0)
    check_first_axis(value)
    dims = call.dims(value)
    size = call.integer("blocksize", 0)
    if len(dims) != 4 or size < 1:
        raise NotKnownError("has an operand that its rule does not expect")
    symbols = call.symbols
    if call.op == "SpaceToDepth":
        lengths = [symbols.multiply(dims[1], size * size), *(symbols.divide_whole(each, size) for each in dims[2:])]
    else:
        lengths = [symbols.divide_whole(dims[1], size * size), *(symbols.multiply(each, size) for each in dims[2:])]
    return call.result((dims[0], *lengths), value, 0, value.dtype)


def grid_sample(call: Call) -> Output:
    """GridSample: an image and the positions of its samples, with the rows on the first axis of both."""
    value, grid = call.operand(0), call.operand(1)
    check_first_axis(value)
    check_first_axis(grid)
    if value.is_rows != grid.is_rows or not value.carries_like(grid):
        raise RowsMeetError("takes samples at positions without the same rows")
    dims = (*call.dims(value)[:2], *call.dims(grid)[1:-1])
    return call.result(dims, value, 0, value.dtype)


def affine_grid(call: Call) -> Output:
    """AffineGrid: the positions of samples for ``GridSample``, from a matrix for each entry of the batch."""
    value, size = call.operand(0), call.numbers(1, "size")
    check_first_axis(value)
    count = call.dims(value)[0]
    if len(size) not in (4, 5) or size[0] != count:
        raise NotKnownError("may have another size than matrices")
    if value.is_rows:
        check_sizes(call)
    return call.result((count, *size[2:], len(size) - 2), value, 0, value.dtype)


def col2im(call: Call) -> Output:
    """Col2Im: the sums of overlapping blocks, whose entries lie along the second axis."""
    value, image = call.operand(0), call.numbers(1, "image")
    check_first_axis(value)
    dims = call.dims(value)
    channels = call.symbols.divide_exactly(dims[1], call.symbols.product(call.numbers(2, "block")))
    if len(dims) != 3 or channels is None:
        raise NotKnownError("has blocks that its rule does not expect")
    return call.result((dims[0], channels, *image), value, 0, value.dtype)


def deformable_conv(call: Call) -> Output:
    """DeformConv: image, weights, offsets of the samples, bias, mask."""
    value, kernel, offsets = call.operand(0), call.operand(1), call.operand(2)
    for operand in filter(None, (value, offsets, call.optional(4))):
        check_first_axis(operand)
        if operand.is_rows != value.is_rows or not operand.carries_like(value):
            raise RowsMeetError("has offsets or a mask without the same rows")
    dims = (call.dims(value)[0], call.dims(kernel)[0], *call.dims(offsets)[2:])
    return call.result(dims, value, 0, value.dtype)


def roi_align(call: Call) -> Output:
    """RoiAlign: images, boxes, and for each box the index of its image, which must be that of its own row."""
    value, boxes, indices = call.operand(0), call.operand(1), call.operand(2)
    for operand in (value, boxes, indices):
        check_first_axis(operand)
    if boxes.is_rows != indices.is_rows or not boxes.carries_like(indices):
        raise RowsMeetError("has boxes and indices of images without the same rows")
    check_no_stride([value, boxes])
    facts = indices.facts
    if not value.is_rows:
        check_no_stride([indices])
    elif not value.is_plain or facts.stride != 1 or facts.below != 1 or not facts.nonnegative:
        raise RowsMeetError("reads images of other rows")
    else:
        check_sizes(call)
    size = call.integer("output_height", 1), call.integer("output_width", 1)
    return call.result((call.dims(boxes)[0], call.dims(value)[1], *size), boxes, 0, value.dtype)


def resize(call: Call) -> Output:
    value = call.operand(0)
    rank = len(call.dims(value))
    if call.text("coordinate_transformation_mode", "half_pixel") in ("tf_crop_and_resize", "tf_half_pixel_for_nn"):
        raise NotKnownError("moves entries even if sizes do not change")
    _check_interpolation(call, value)
    is_old = call.opset < 11
    given = call.integers("axes")
    axes = tuple(range(rank)) if given is None else tuple(normal_axis(axis, rank) for axis in given)
    if not is_old and _has_elements(call, 3):
        if call.text("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise NotKnownError("chooses sizes that preserve the ratio of its axes")
        return _with_sizes(call, value, axes, call.numbers(3, "sizes"))
    return _with_scales(call, value, axes, call.numbers(1 if is_old else 2, "scales"))


def upsample(call: Call) -> Output:
    value = call.operand(0)
    _check_interpolation(call, value)
    scales = call.attributes.get("scales")
    rank = len(call.dims(value))
    if not isinstance(scales, tuple):
        return _with_scales(call, value, tuple(range(rank)), call.numbers(1, "scales"))
    known = [Fraction(scale) for scale in scales if isinstance(scale, (int, float))]
    return _with_scales(call, value, tuple(range(rank)), known)


def _check_interpolation(call: Call, value: Value) -> None:
    """Raise an error if rows may be interpolated with their neighbours.

    Even along an axis with scale 1, ONNX Runtime multiplies the neighbour by 0, which gives NaN if the neighbour is
    infinite. It interpolates along all axes, except for the first two of tensors with four or five axes.
    """
    if not value.is_rows or call.text("mode", "nearest") == "nearest":
        return
    if value.axis > 1 or len(call.dims(value)) < 4:
        raise RowsMeetError("interpolates along the axis of the rows, where an infinite row changes its neighbours")


def _has_elements(call: Call, index: int) -> bool:
    """Whether an operand is given. An empty tensor counts as omitted."""
    value = call.optional(index)
    return value is not None and value.dims != (0,)


def _with_sizes(call: Call, value: Value, axes: Sequence[int], sizes: Sequence[Number]) -> Value:
    dims = list(call.dims(value))
    for axis, size in zip(axes, sizes, strict=True):
        if value.is_rows and axis == value.axis:
            if size != dims[axis]:
                raise RowsMeetError("resizes the axis of the rows")
            check_sizes(call)
        elif contains_rows(size):
            raise RowsMeetError(OTHER_AXIS)
        else:
            dims[axis] = size
    return call.result(dims, value, value.axis, value.dtype)


def _with_scales(call: Call, value: Value, axes: Sequence[int], scales: Sequence[Number]) -> Value:
    dims = list(call.dims(value))
    symbols = call.symbols
    for axis, scale in zip(axes, scales, strict=True):
        is_rounded = isinstance(scale, Fraction) and scale.denominator not in (2, 4, 8)
        product = DEPENDENT if is_rounded else symbols.multiply(dims[axis], scale)
        is_exact = not is_rounded and symbols.bounded(product, FLOAT_LIMIT) == product
        if value.is_rows and axis == value.axis:
            if scale != 1 or not is_exact:
                raise RowsMeetError("resizes the axis of the rows")
        elif is_exact:
            dims[axis] = symbols.floor(product)
        else:  # the product is rounded, as FP32
            least = int(isinstance(scale, (int, Fraction)) and scale >= 1 and is_positive(dims[axis]))
            dims[axis] = symbols.opaque("scaled", dims[axis], scale, lowest=least)
    return call.result(dims, value, value.axis, value.dtype)


RULES: Final[Rules] = {
    ("", "Conv"): Rule(conv, parameters=(1, 2)),
    ("", "ConvTranspose"): Rule(conv_transpose, parameters=(1, 2)),
    ("", "ConvInteger"): Rule(conv_integer, parameters=(1, 2, 3)),
    ("", "QLinearConv"): Rule(qlinear_conv, parameters=(1, 2, 3, 4, 5, 6, 7, 8)),
    ("com.microsoft", "QLinearConv"): Rule(qlinear_conv, parameters=(1, 2, 3, 4, 5, 6, 7, 8)),
    **{("com.microsoft", op): Rule(fused_conv, parameters=(1, 2)) for op in ("FusedConv", "NhwcConv", "NhwcFusedConv")},
    **{("", op): Rule(pool) for op in ("AveragePool", "LpPool")},
    ("", "MaxPool"): Rule(max_pool),
    ("com.microsoft", "NhwcMaxPool"): Rule(pool),
    ("com.microsoft", "QLinearAveragePool"): Rule(qlinear_pool, parameters=(1, 2, 3, 4)),
    **{("", op): Rule(global_pool) for op in ("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool")},
    ("com.microsoft", "QLinearGlobalAveragePool"): Rule(qlinear_global_pool, parameters=(1, 2, 3, 4)),
    **{("", op): Rule(blocks) for op in ("DepthToSpace", "SpaceToDepth")},
    **{(domain, "GridSample"): Rule(grid_sample) for domain in ("", "com.microsoft")},
    ("", "AffineGrid"): Rule(affine_grid, arguments=(1,)),
    ("", "Col2Im"): Rule(col2im, arguments=(1, 2)),
    ("", "DeformConv"): Rule(deformable_conv, parameters=(1, 3)),
    ("", "RoiAlign"): Rule(roi_align, keeps_stride=True),
    ("", "Resize"): Rule(resize, arguments=(2, 3), parameters=(1,)),
    ("", "Upsample"): Rule(upsample, parameters=(1,)),
}
