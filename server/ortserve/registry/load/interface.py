"""Checks configured inputs, outputs and padding against the model, and derives what clients see and batches hold."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ortserve.config.model import ModelOptions
from ortserve.config.tensors import PadAxis, TensorOptions
from ortserve.core.conversion import Conversion, Conversions, FirstRow, MoveAxis, RepeatForRows, Reshape, same_elements
from ortserve.core.dtypes import DataType, narrow, widen
from ortserve.core.padding import CutAxis, PaddedAxis, Padding
from ortserve.core.sequence import SequenceTensors
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import fits_shape, format_shape
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.load.ragged_tensors import as_requests, resolve_ragged
from ortserve.registry.load.sequence_tensors import find_hidden, resolve_tensors


@dataclass(frozen=True, slots=True)
class Interface:
    """Two signatures of the same tensors in the same order.

    Attributes:
        model: Signature of instances. For a model with sequences, the hidden tensors follow those of clients.
        client: Signature of requests and responses.
        conversions: Conversions between the tensors of requests and of batches; None if they are the same.
        without_effect: For each option that has no effect, its name and the reason.
        sequences: The hidden tensors; None for a model without sequences.
    """

    model: ModelSignature
    client: ModelSignature
    conversions: Conversions | None = None
    without_effect: tuple[str, ...] = ()
    sequences: SequenceTensors | None = None

    def unbatched(self, because: str) -> "Interface":
        """The same interface for a model whose requests run alone."""
        return replace(
            self,
            model=replace(self.model, unbatched_because=because),
            client=replace(self.client, unbatched_because=because),
        )


def resolve_interface(options: ModelOptions, whole: ModelSignature, folder: Path | None = None) -> Interface:
    """Check the configured inputs and outputs against the model, and apply their order, dims and reshapes.

    ``whole`` is the signature of the model file, with hidden tensors. ``folder`` contains the files of first states.

    Raises:
        ServeError: invalid_input, with the name, and the values of the model and of the configuration.
    """
    hidden = find_hidden(options, whole)
    signature = whole if hidden is None else hidden.visible(whole)
    if options.is_ragged and signature.is_batched:
        signature = as_requests(options, signature)
    if options.is_set_to_batch and not signature.is_batched:
        raise invalid_input(f"the configuration says that the model is batched, but {signature.unbatched_because}")
    inputs = _ordered("input", signature.inputs, options.inputs)
    outputs = _ordered("output", signature.outputs, options.outputs)
    if options.served_outputs:
        by_name = {spec.name: spec for spec in outputs}
        _check_names("output", options.served_outputs, by_name)
        outputs = [by_name[name] for name in dict.fromkeys(options.served_outputs)]
    without_effect = tuple(
        f"optional: the model requires input '{spec.name}'"
        for spec in inputs
        if spec.name in options.inputs and options.inputs[spec.name].optional and not spec.is_optional
    )
    resolved_inputs = [_resolve(spec, options.inputs.get(spec.name)) for spec in inputs]
    resolved_outputs = [_resolve(spec, options.outputs.get(spec.name)) for spec in outputs]
    model = replace(
        signature,
        inputs=tuple(own for own, _ in resolved_inputs),
        outputs=tuple(own for own, _ in resolved_outputs),
    )
    client = replace(
        signature,
        inputs=tuple(seen for _, seen in resolved_inputs),
        outputs=tuple(seen for _, seen in resolved_outputs),
    )
    if options.is_ragged:
        model, client = resolve_ragged(options, model, whole), resolve_ragged(options, client, whole)
    to_model = tuple(_to_model(own, seen, is_batched=signature.is_batched) for own, seen in resolved_inputs)
    to_client = tuple(_to_client(own, seen, is_batched=signature.is_batched) for own, seen in resolved_outputs)
    is_same = not any(conversion is not None for conversion in (*to_model, *to_client))
    conversions = None if is_same else Conversions(to_model, to_client)
    if hidden is None:
        return Interface(model, client, conversions, without_effect)
    model = hidden.append(model)
    tensors = resolve_tensors(options, model, len(client.outputs), folder)
    return Interface(model, client, conversions, without_effect, tensors)


def _ordered(role: str, specs: Sequence[TensorSpec], declared: Mapping[str, TensorOptions]) -> list[TensorSpec]:
    by_name = {spec.name: spec for spec in specs}
    _check_names(role, declared, by_name)
    return [by_name[name] for name in [*declared, *(name for name in by_name if name not in declared)]]


def _check_names(role: str, names: Iterable[str], known: Mapping[str, TensorSpec]) -> None:
    for name in names:
        if name not in known:
            raise invalid_input(f"unexpected inference {role} '{name}', allowed {role}s are: {', '.join(known)}")


def _resolve(spec: TensorSpec, declared: TensorOptions | None) -> tuple[TensorSpec, TensorSpec]:
    """The tensor as the model has it and as clients see it."""
    if declared is None:
        return spec, spec
    if declared.datatype is not None and declared.datatype is not spec.datatype:
        raise invalid_input(
            f"'{spec.name}': the model's datatype is {spec.datatype.value}, but the model configuration specifies "
            f"{declared.datatype.value}"
        )
    if declared.dims is None:
        if declared.reshape is not None:
            raise invalid_input(
                f"'{spec.name}': expected dims to be set with reshape: dims are the client's, reshape the model's"
            )
        return spec, spec
    own_dims = declared.dims if declared.reshape is None else declared.reshape
    if not same_elements(declared.dims, own_dims):
        raise invalid_input(
            f"'{spec.name}': dims {format_shape(declared.dims)} and reshape {format_shape(own_dims)} "
            "have different numbers of elements"
        )
    own = _narrow(spec, own_dims)
    if declared.reshape is None:
        return own, own
    if spec.batch_axis:
        raise invalid_input(f"'{spec.name}': expected no reshape, as its rows are on axis {spec.batch_axis}")
    return own, replace(spec, shape=(*spec.shape[: spec.leading], *declared.dims), dim_names=())


def _narrow(spec: TensorSpec, dims: tuple[int, ...]) -> TensorSpec:
    """The tensor with its free dimensions fixed where the configuration sets sizes."""
    if spec.has_any_shape:
        return replace(spec, shape=dims, has_any_shape=False)
    own = spec.shape[spec.leading :]
    if len(dims) != len(own):
        raise _shape_error(spec, dims, f"{len(own)} dimensions", f"{len(dims)} dimensions")
    if not fits_shape(dims, own):
        raise _shape_error(spec, dims, "shape", "shape")
    if spec.batch_axis and dims[spec.batch_axis] != -1:
        raise invalid_input(
            f"tensor '{spec.name}': expected -1 on axis {spec.batch_axis} of dims {format_shape(dims)}, "
            "as rows are on it"
        )
    shape = (*spec.shape[: spec.leading], *dims)
    names = tuple(name if size == -1 else "" for name, size in zip(spec.dim_names, shape, strict=False))
    return replace(spec, shape=shape, dim_names=names)


def _shape_error(spec: TensorSpec, dims: tuple[int, ...], own: str, configured: str) -> ServeError:
    batch = " after the batch dimension" if spec.leading else ""
    return invalid_input(
        f"tensor '{spec.name}': the model expects {own}{batch} ({format_shape(spec.shape[spec.leading :])}) but the "
        f"model configuration specifies {configured} ({format_shape(dims)})"
    )


def _to_model(own: TensorSpec, seen: TensorSpec, *, is_batched: bool) -> Conversion | None:
    """The conversion of an input."""
    if is_batched and own.batch_axis is None:
        return RepeatForRows(_reshape(seen, own))
    if own.batch_axis:
        return MoveAxis(own.batch_axis, 0)
    return _reshape(seen, own)


def _to_client(own: TensorSpec, seen: TensorSpec, *, is_batched: bool) -> Conversion | None:
    """The conversion of an output."""
    if is_batched and own.batch_axis is None:
        return FirstRow(_reshape(own, seen))
    if own.batch_axis:
        return MoveAxis(0, own.batch_axis)
    return _reshape(own, seen)


def _reshape(source: TensorSpec, target: TensorSpec) -> Reshape | None:
    if source.shape == target.shape:
        return None
    return Reshape(source.shape[source.leading :], target.shape[target.leading :], source.leading)


Value: TypeAlias = bool | int | float | str


def resolve_padding(options: ModelOptions, signature: ModelSignature) -> Padding | None:
    """The padding of the batches of a model, by ``pad`` and ``buckets``; None if they are never padded.

    Raises:
        ServeError: invalid_input, naming the key of ``model.yaml`` that does not match the model.
    """
    if not options.pad:
        return Padding((None,) * len(signature.inputs)) if options.buckets and signature.is_batched else None
    if not signature.is_batched:
        raise _pad_error("pad", f"the model is not batched: {signature.unbatched_because}")
    if off_front := [spec.name for spec in (*signature.inputs, *signature.outputs) if spec.batch_axis != 0]:
        raise _pad_error(
            "pad", f"expected rows on axis 0 of all inputs and outputs, got another axis for '{off_front[0]}'"
        )
    for name in options.pad:
        if name not in signature.inputs_by_name:
            raise _pad_error(
                f"pad.{name}", f"expected one of the inputs {', '.join(signature.inputs_by_name)}, got '{name}'"
            )
    axes = tuple(
        _resolve_axis(spec, options.pad[spec.name]) if spec.name in options.pad else None for spec in signature.inputs
    )
    _check_shared_dimensions(signature, axes)
    return Padding(axes, tuple(_find_cuts(signature, axes)))


def _resolve_axis(spec: TensorSpec, pad: PadAxis) -> PaddedAxis:
    key, axis = f"pad.{spec.name}", pad.axis
    if not 0 < axis < len(spec.shape):
        raise _pad_error(
            f"{key}.axis",
            f"expected an axis of '{spec.name}' {format_shape(spec.shape)} after axis 0, the batch's, got {axis}",
        )
    if spec.shape[axis] != -1:
        raise _pad_error(f"{key}.axis", f"axis {axis} of '{spec.name}' is fixed at {spec.shape[axis]}")
    if not spec.dim_names[axis]:
        raise _pad_error(
            f"{key}.axis", f"axis {axis} of '{spec.name}' has no name in the model; outputs are cut back by the name"
        )
    value = as_element(pad.value, spec.datatype)
    if value is None:
        raise _pad_error(f"{key}.value", f"expected a value of {spec.datatype.value}, got {pad.value!r}")
    if spec.is_optional:
        raise _pad_error(key, "optional inputs are not padded")
    return PaddedAxis(spec.name, axis, pad.multiple, value, spec.dim_names[axis])


def as_element(value: Value, datatype: DataType) -> Value | None:
    """The value as an element of a tensor; None if the datatype cannot represent it."""
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
        except OverflowError:  # for an integer of hundreds of digits
            return None
        return None if abs(number) > float(np.finfo(datatype.numpy).max) and math.isfinite(number) else number
    bounds = np.iinfo(datatype.numpy)
    return int(value) if value == value // 1 and bounds.min <= value <= bounds.max else None


def _as_bfloat16(value: float) -> int | None:
    """The value as a bit pattern, which is how BF16 tensors store elements; None if it overflows."""
    number = as_element(value, DataType.FP32)
    if number is None:
        return None
    bits = narrow(np.array(number, np.float32))
    return None if math.isinf(widen(bits)) and not math.isinf(value) else int(bits)


def _check_shared_dimensions(signature: ModelSignature, axes: tuple[PaddedAxis | None, ...]) -> None:
    """Check that axes of one dimension are padded alike. Otherwise the model would receive two lengths for it."""
    padded = {axis.dim_name: axis for axis in reversed(axes) if axis is not None}
    for spec, own in zip(signature.inputs, axes, strict=True):
        for axis, name in enumerate(spec.dim_names):
            first = padded.get(name)
            if first is None:
                continue
            shared = f"axis {axis} of '{spec.name}' is dimension '{name}', as is axis {first.axis} of '{first.input}'"
            if own is None or own.axis != axis:
                raise _pad_error(f"pad.{spec.name}", f"{shared}: pad both, one axis per input")
            if own.multiple != first.multiple:
                raise _pad_error(
                    f"pad.{spec.name}.multiple", f"{shared}: expected {first.multiple}, got {own.multiple}"
                )


def _find_cuts(signature: ModelSignature, axes: tuple[PaddedAxis | None, ...]) -> Iterator[CutAxis]:
    sources = {axis.dim_name: index for index, axis in enumerate(axes) if axis is not None}
    for index, spec in enumerate(signature.outputs):
        for axis, (size, name) in enumerate(zip(spec.shape, spec.dim_names, strict=True)):
            if axis == 0:
                continue
            if size == -1 and not name:
                raise _pad_error(
                    "pad",
                    f"axis {axis} of output '{spec.name}' has no name in the model: so the server cannot tell whether "
                    "to cut it back",
                )
            if name in sources:
                yield CutAxis(index, spec.name, axis, sources[name])


def _pad_error(key: str, problem: str) -> ServeError:
    return invalid_input(f"model.yaml: {key}: {problem}")
