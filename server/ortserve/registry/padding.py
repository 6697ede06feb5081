"""Checking the padding that ``model.yaml`` declares against what the model takes and gives."""

import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from ortserve.config.model import ModelOptions, PadAxis
from ortserve.core.dtypes import DataType, narrow, widen
from ortserve.core.padding import CutAxis, PaddedAxis, Padding
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import format_shape
from ortserve.errors import ServeError, invalid_input

Value: TypeAlias = bool | int | float | str


def resolve_padding(options: ModelOptions, signature: ModelSignature) -> Padding | None:
    """Say what is padded in the batches of a model; None where nothing ever is.

    Args:
        options: Of the model, with ``pad`` and ``buckets``.
        signature: Read from a session: the names of its dimensions are needed.

    Raises:
        ServeError: invalid_input, naming the key of ``model.yaml`` that does not fit the model.
    """
    if not options.pad:
        return Padding((None,) * len(signature.inputs)) if options.buckets and signature.is_batched else None
    if not signature.is_batched:
        raise _bad("pad", f"the model is not batched: {signature.unbatched_because}")
    if off_front := [spec.name for spec in (*signature.inputs, *signature.outputs) if spec.batch_axis != 0]:
        raise _bad("pad", f"expected rows on axis 0 of all inputs and outputs, not so of '{off_front[0]}'")
    for name in options.pad:
        if name not in signature.inputs_by_name:
            raise _bad(f"pad.{name}", f"expected one of the inputs {', '.join(signature.inputs_by_name)}, got '{name}'")
    axes = tuple(
        _resolve_axis(spec, options.pad[spec.name]) if spec.name in options.pad else None for spec in signature.inputs
    )
    _check_shared_dimensions(signature, axes)
    return Padding(axes, tuple(_find_cuts(signature, axes)))


def _resolve_axis(spec: TensorSpec, pad: PadAxis) -> PaddedAxis:
    key, axis = f"pad.{spec.name}", pad.axis
    if not 0 < axis < len(spec.shape):
        raise _bad(
            f"{key}.axis",
            f"expected an axis of '{spec.name}' {format_shape(spec.shape)} after axis 0, the batch's, got {axis}",
        )
    if spec.shape[axis] != -1:
        raise _bad(f"{key}.axis", f"axis {axis} of '{spec.name}' is fixed at {spec.shape[axis]}")
    if not spec.dim_names[axis]:
        raise _bad(
            f"{key}.axis", f"axis {axis} of '{spec.name}' has no name in the model, by which outputs are cut back"
        )
    value = as_element(pad.value, spec.datatype)
    if value is None:
        raise _bad(f"{key}.value", f"expected a value of {spec.datatype.value}, got {pad.value!r}")
    if spec.is_optional:
        raise _bad(key, "it is an optional input, which is not padded")
    return PaddedAxis(spec.name, axis, pad.multiple, value, spec.dim_names[axis])


def as_element(value: Value, datatype: DataType) -> Value | None:
    """The value as an element of a tensor; None where the datatype has no such value."""
    if isinstance(value, str) or datatype is DataType.BYTES:
        return value if isinstance(value, str) and datatype is DataType.BYTES else None
    if datatype is DataType.BOOL:
        return bool(value) if value in (0, 1) else None
    if isinstance(value, bool):
        return None
    if datatype is DataType.BF16:
        return _as_bfloat16(value)
    if datatype.numpy.kind == "f":
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            return None
        return None if abs(number) > float(np.finfo(datatype.numpy).max) and math.isfinite(number) else number
    bounds = np.iinfo(datatype.numpy)
    return int(value) if value == value // 1 and bounds.min <= value <= bounds.max else None


def _as_bfloat16(value: float) -> int | None:
    """Bit patterns are what BF16 tensors hold."""
    number = as_element(value, DataType.FP32)
    if number is None:
        return None
    bits = narrow(np.array(number, np.float32))
    return None if math.isinf(widen(bits)) and not math.isinf(value) else int(bits)


def _check_shared_dimensions(signature: ModelSignature, axes: tuple[PaddedAxis | None, ...]) -> None:
    """Axes that share a dimension must be padded alike, else the model would be given two lengths of it."""
    padded = {axis.dim_name: axis for axis in reversed(axes) if axis is not None}
    for spec, own in zip(signature.inputs, axes, strict=True):
        for axis, name in enumerate(spec.dim_names):
            first = padded.get(name)
            if first is None:
                continue
            shared = f"axis {axis} of '{spec.name}' is dimension '{name}', as is axis {first.axis} of '{first.input}'"
            if own is None or own.axis != axis:
                raise _bad(f"pad.{spec.name}", f"{shared}: pad both, one axis an input")
            if own.multiple != first.multiple:
                raise _bad(f"pad.{spec.name}.multiple", f"{shared}: expected {first.multiple}, got {own.multiple}")


def _find_cuts(signature: ModelSignature, axes: tuple[PaddedAxis | None, ...]) -> Iterator[CutAxis]:
    sources = {axis.dim_name: index for index, axis in enumerate(axes) if axis is not None}
    for index, spec in enumerate(signature.outputs):
        for axis, (size, name) in enumerate(zip(spec.shape, spec.dim_names, strict=True)):
            if axis == 0:
                continue
            if size == -1 and not name:
                raise _bad(
                    "pad", f"axis {axis} of output '{spec.name}' has no name in the model: it may be one to cut back"
                )
            if name in sources:
                yield CutAxis(index, spec.name, axis, sources[name])


def _bad(key: str, problem: str) -> ServeError:
    return invalid_input(f"model.yaml: {key}: {problem}")
