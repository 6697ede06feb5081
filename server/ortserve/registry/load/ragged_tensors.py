"""Checks the options of a ragged model against its graph, and derives its signatures. Texts of errors are Triton's."""

from dataclasses import replace

from ortserve.config.model import ModelOptions
from ortserve.core.dtypes import DataType
from ortserve.core.ragged import ITEM_SHAPE, BatchInput, RaggedTensors
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import format_shape
from ortserve.errors import ServeError, invalid_input


def as_requests(options: ModelOptions, signature: ModelSignature) -> ModelSignature:
    """The signature of requests to a ragged model: with their shapes, without the inputs that the server derives.

    ``signature`` is that of the model itself, with rows on axis 0 of all tensors.

    Raises:
        ServeError: invalid_input, for unknown names, and for tensors of the model that do not match the options.
    """
    inputs = signature.inputs_by_name
    for name, derived in options.batch_inputs.items():
        if name not in inputs:
            raise invalid_input(f"batch input '{name}': unknown target input name '{name}'")
        _check_source(f"batch input '{name}'", derived.source, options, signature)
        _check_derived(inputs[name], derived.kind, derived.datatype)
    seen = {
        spec.name: _of_requests(spec, options) for spec in signature.inputs if spec.name not in options.batch_inputs
    }
    outputs = {spec.name: spec for spec in signature.outputs}
    for name, source in options.batch_outputs.items():
        if name not in outputs:
            raise invalid_input(f"unknown target output name '{name}'")
        _check_source(f"batch output '{name}'", source, options, signature)
        if len(outputs[name].shape) != 1 or outputs[name].is_sequence:
            raise _shape_error(f"output '{name}' of batch_outputs", outputs[name])
        outputs[name] = replace(outputs[name], shape=seen[source].shape, dim_names=())
    return replace(signature, inputs=tuple(seen.values()), outputs=tuple(outputs.values()))


def resolve_ragged(options: ModelOptions, signature: ModelSignature, whole: ModelSignature) -> ModelSignature:
    """Add the description of ragged batches to the signature of requests, in its final order.

    ``whole`` is the signature of the model itself.
    """
    index = {spec.name: place for place, spec in enumerate(signature.inputs)}
    derived = tuple(
        BatchInput(name, whole.inputs_by_name[name].datatype, declared.kind, index[declared.source])
        for name, declared in options.batch_inputs.items()
    )
    joined = frozenset(index[name] for name, declared in options.inputs.items() if declared.ragged)
    names = tuple(spec.name for spec in signature.outputs)
    scattered = {
        place: index[options.batch_outputs[name]] for place, name in enumerate(names) if name in options.batch_outputs
    }
    return replace(signature, ragged=RaggedTensors(joined, derived, scattered, names))


def _of_requests(spec: TensorSpec, options: ModelOptions) -> TensorSpec:
    declared = options.inputs.get(spec.name)
    if declared is None or not declared.ragged:
        return spec
    if spec.shape != (-1,) or spec.is_optional:
        raise _shape_error(f"ragged input '{spec.name}'", spec)
    dims = (-1,) if declared.dims is None else declared.dims
    return replace(spec, shape=(-1, *dims), dim_names=())


def _check_source(what: str, source: str, options: ModelOptions, signature: ModelSignature) -> None:
    spec = signature.inputs_by_name.get(source)
    if spec is None or source in options.batch_inputs:
        raise invalid_input(f"{what}: unknown source input name '{source}'")
    if spec.is_optional:
        raise invalid_input(f"{what}: expected a source that requests cannot omit, and '{source}' is optional")


def _check_derived(spec: TensorSpec, kind: str, datatype: str | None) -> None:
    if spec.datatype not in (DataType.INT32, DataType.FP32):
        raise invalid_input(
            f"batch input '{spec.name}': batch input data type must be TYPE_INT32 or TYPE_FP32, and the model's is "
            f"{spec.datatype.value}"
        )
    if datatype not in (None, spec.datatype.value):
        raise invalid_input(
            f"batch input '{spec.name}': the model's datatype is {spec.datatype.value}, but the model configuration "
            f"specifies {datatype}"
        )
    if not spec.has_any_shape and len(spec.shape) != (2 if kind == ITEM_SHAPE else 1):
        axes = "two axes" if kind == ITEM_SHAPE else "one axis"
        raise invalid_input(
            f"batch input '{spec.name}': expected {axes} in the model for kind {kind}, got {format_shape(spec.shape)}"
        )


def _shape_error(what: str, spec: TensorSpec) -> ServeError:
    return invalid_input(
        f"configuration expects model provides shape [-1] for {what}, model provides {format_shape(spec.shape)}"
    )
