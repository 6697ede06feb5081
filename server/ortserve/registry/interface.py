"""What clients see of a model: its own inputs and outputs, as its configuration orders, narrows and reshapes them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ortserve.config.model import ModelOptions
from ortserve.config.tensors import TensorOptions
from ortserve.core.conversion import (
    Conversion,
    Conversions,
    FirstRow,
    MoveAxis,
    RepeatForRows,
    Reshape,
    same_elements,
)
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import format_shape
from ortserve.errors import ServeError, invalid_input

_OF_BATCHES: Final = ("max_rows", "buckets", "preferred_rows", "queue_delay_s")


@dataclass(frozen=True, slots=True)
class Interface:
    """Two signatures of the same tensors in the same order.

    Attributes:
        model: What instances are given and give.
        client: What requests bring and get.
        conversions: Between what clients see and what batches hold; None where they are the same.
        without_effect: What the configuration says in vain, and why.
    """

    model: ModelSignature
    client: ModelSignature
    conversions: Conversions | None = None
    without_effect: tuple[str, ...] = ()

    def in_vain_alone(self, options: ModelOptions) -> tuple[str, ...]:
        """What a model's own options say of batches, where each of its requests runs alone; not the server's."""
        if self.model.is_batched:
            return ()
        said = [key for key in _OF_BATCHES if key in options.model_fields_set and getattr(options, key)]
        if options.max_rows == 1:
            said = [key for key in said if key != "max_rows"]  # which is what happens
        return tuple(f"{key}: each request runs alone: {self.model.unbatched_because}" for key in said)

    def unbatched(self, because: str) -> "Interface":
        """The same, each request alone."""
        return replace(
            self,
            model=replace(self.model, unbatched_because=because),
            client=replace(self.client, unbatched_because=because),
        )


def resolve_interface(options: ModelOptions, signature: ModelSignature) -> Interface:
    """Check what the configuration says of inputs and outputs against the model, and apply it.

    Args:
        options: Of the model.
        signature: As the model itself has it.

    Raises:
        ServeError: invalid_input, naming the input or output, what the model has and what was configured.
    """
    if options.is_set_to_batch and not signature.is_batched:
        raise invalid_input(f"the configuration says that the model is batched, but {signature.unbatched_because}")
    inputs = _ordered("input", signature.inputs, options.inputs)
    outputs = _ordered("output", signature.outputs, options.outputs)
    if options.served_outputs:
        by_name = {spec.name: spec for spec in outputs}
        _check_names("output", options.served_outputs, by_name)
        outputs = [by_name[name] for name in dict.fromkeys(options.served_outputs)]
    in_vain = tuple(
        f"optional: the model cannot do without input '{spec.name}'"
        for spec in inputs
        if spec.name in options.inputs and options.inputs[spec.name].optional and not spec.is_optional
    )
    resolved_inputs = [_resolve(spec, options.inputs.get(spec.name)) for spec in inputs]
    resolved_outputs = [_resolve(spec, options.outputs.get(spec.name)) for spec in outputs]
    model, client = (
        replace(
            signature,
            inputs=tuple(specs[side] for specs in resolved_inputs),
            outputs=tuple(specs[side] for specs in resolved_outputs),
        )
        for side in (0, 1)
    )
    to_model = tuple(_to_model(own, seen, is_batched=signature.is_batched) for own, seen in resolved_inputs)
    to_client = tuple(_to_client(own, seen, is_batched=signature.is_batched) for own, seen in resolved_outputs)
    is_same = not any(conversion is not None for conversion in (*to_model, *to_client))
    return Interface(model, client, None if is_same else Conversions(to_model, to_client), in_vain)


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
            raise invalid_input(f"'{spec.name}': reshape says what the model's dimensions are, dims are missing")
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
    """The tensor with the free dimensions that the configuration fixes."""
    if spec.has_any_shape:
        return replace(spec, shape=dims, has_any_shape=False)
    own = spec.shape[spec.leading :]
    if len(dims) != len(own):
        raise _misfit(spec, dims, f"{len(own)} dimensions", f"{len(dims)} dimensions")
    if any(size not in (-1, dim) for size, dim in zip(own, dims, strict=True)):
        raise _misfit(spec, dims, "shape", "shape")
    if spec.batch_axis and dims[spec.batch_axis] != -1:
        raise invalid_input(
            f"tensor '{spec.name}': expected -1 on axis {spec.batch_axis} of dims {format_shape(dims)}, "
            "as rows are on it"
        )
    shape = (*spec.shape[: spec.leading], *dims)
    names = tuple(name if size == -1 else "" for name, size in zip(spec.dim_names, shape, strict=False))
    return replace(spec, shape=shape, dim_names=names)


def _misfit(spec: TensorSpec, dims: tuple[int, ...], own: str, configured: str) -> ServeError:
    batch = " after the batch dimension" if spec.leading else ""
    return invalid_input(
        f"tensor '{spec.name}': the model expects {own}{batch} ({format_shape(spec.shape[spec.leading :])}) but the "
        f"model configuration specifies {configured} ({format_shape(dims)})"
    )


def _to_model(own: TensorSpec, seen: TensorSpec, *, is_batched: bool) -> Conversion | None:
    """Of an input."""
    if is_batched and own.batch_axis is None:
        return RepeatForRows(_reshape(seen, own))
    if own.batch_axis:
        return MoveAxis(own.batch_axis, 0)
    return _reshape(seen, own)


def _to_client(own: TensorSpec, seen: TensorSpec, *, is_batched: bool) -> Conversion | None:
    """Of an output."""
    if is_batched and own.batch_axis is None:
        return FirstRow(_reshape(own, seen))
    if own.batch_axis:
        return MoveAxis(0, own.batch_axis)
    return _reshape(own, seen)


def _reshape(source: TensorSpec, target: TensorSpec) -> Reshape | None:
    if source.shape == target.shape:
        return None
    return Reshape(source.shape[source.leading :], target.shape[target.leading :], source.leading)
