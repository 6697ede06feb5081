"""The served inputs and outputs of a model, from its session and its file."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import onnxruntime as ort

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.engine.corrections.least_axes import least_axes
from ortserve.engine.encoded_images import find_images
from ortserve.engine.runs import can_return_bfloat16
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.model_file.graph import UNREADABLE, Dims, Model
from ortserve.rows import Sizes, find_sizes

_ELEMENTS: Final = {
    "bool": DataType.BOOL,
    "uint8": DataType.UINT8,
    "uint16": DataType.UINT16,
    "uint32": DataType.UINT32,
    "uint64": DataType.UINT64,
    "int8": DataType.INT8,
    "int16": DataType.INT16,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
    "float16": DataType.FP16,
    "bfloat16": DataType.BF16,
    "float": DataType.FP32,
    "double": DataType.FP64,
    "string": DataType.BYTES,
}

_TENSOR: Final = re.compile(r"tensor\((\w+)\)")
_SEQUENCE: Final = re.compile(r"seq\(tensor\((\w+)\)\)")
_OPTIONAL_TENSOR: Final = re.compile(r"optional\(tensor\((\w+)\)\)")
_OPTIONAL: Final = "optional("


def read_signature(
    session: ort.InferenceSession,
    model: Model = UNREADABLE,
    *,
    served_outputs: Collection[str] = (),
    sizes: Callable[[], Sizes] | None = None,
) -> ModelSignature:
    """Derive the served inputs and outputs.

    A sequence of tensors becomes an output with a new leading axis and no batch axis. Other sequences, maps, and
    element types without a datatype in the protocol are left out if the model works without them: if they are inputs
    of an optional type, or outputs beside others. Initializers that are also graph inputs become optional inputs.

    Axis 0 is the batch axis if every input and output has a free first dimension and none of their names differ, apart
    from names that exporters generate. An initializer without a free first dimension has no batch axis, and neither has
    a model that decodes images. This function checks neither whether rows are independent nor whether another axis
    carries the rows.

    Args:
        session: The session of the model.
        model: The model's file, which declares shapes that the API does not return.
        served_outputs: If not empty, output sequences that it does not contain are left out.
        sizes: Returns what ``rows.find_sizes`` finds with ``keeps_targets``, if the caller uses it for more; None to
            find it here.

    Raises:
        ServeError: unsupported: the protocols cannot carry an input that the model needs, or any of its outputs;
            invalid_input: the model has no outputs, or a name is not UTF-8.
    """
    try:
        return _read_signature(session, model, served_outputs, sizes or partial(find_sizes, model, keeps_targets=True))
    except UnicodeDecodeError as error:  # ONNX Runtime's Python API gives no better error
        name = error.object.decode("utf-8", "backslashreplace")
        raise invalid_input(f"names of inputs, outputs and dimensions: expected UTF-8, got '{name:.100}'") from None


def _read_signature(
    session: ort.InferenceSession, model: Model, served_outputs: Collection[str], sizes: Callable[[], Sizes]
) -> ModelSignature:
    declared_inputs, declared_outputs, images = model.graph.inputs, model.graph.outputs, find_images(model)
    inputs, unserved_inputs = _read_inputs(session.get_inputs())
    inputs = [replace(spec, is_image=True) if spec.name in images else spec for spec in inputs]
    outputs, unserved_outputs = _read_outputs(session.get_outputs(), inputs, served_outputs)
    # The API returns the same for a tensor without axes and for one without a declared shape.
    names = {declared.name for declared in (*declared_inputs, *declared_outputs) if declared.lacks_shape}
    least = least_axes(model) if names else {}
    inputs = [
        replace(spec, least_axes=least.get(spec.name, 0)) if spec.has_any_shape else spec
        for spec in _with_any_shape(inputs, names)
    ]
    if any(-1 in spec.shape[1:] for spec in inputs):  # the first axis usually has the rows
        needed = sizes().needed
        inputs = [_with_needed_shape(spec, needed.get(spec.name, ())) for spec in inputs]
    outputs = _with_any_shape(outputs, names)
    dims = {declared.name: declared.element_dims for declared in declared_outputs}
    outputs = [_of_sequence(spec, dims.get(spec.name)) if spec.is_sequence else spec for spec in outputs]
    unbatched_because = _why_unbatched(inputs, outputs)
    defaults: list[TensorSpec] = []
    for arg in session.get_overridable_initializers():
        spec = _read_spec(arg, _TENSOR)
        if spec is None:
            unserved_inputs[arg.name] = _not_carried(arg)
        else:
            has_rows = not _why_unbatched([*inputs, spec], outputs)
            defaults.append(replace(spec, is_optional=True, batch_axis=0 if has_rows else None))
    inputs += defaults
    return ModelSignature(tuple(inputs), tuple(outputs), unbatched_because, unserved_inputs, unserved_outputs)


def _with_any_shape(specs: Sequence[TensorSpec], names: Collection[str]) -> list[TensorSpec]:
    return [replace(spec, has_any_shape=True) if spec.name in names and not spec.shape else spec for spec in specs]


def _with_needed_shape(spec: TensorSpec, needed: Sequence[int | None]) -> TensorSpec:
    if len(needed) != len(spec.shape):
        return spec
    pairs = zip(spec.shape, needed, strict=True)
    return replace(spec, needed_shape=tuple(size if size != -1 else wanted or -1 for size, wanted in pairs))


def _of_sequence(spec: TensorSpec, dims: Dims | None) -> TensorSpec:
    """The specification of a sequence with the declared shape of its stacked tensors."""
    if dims is None:
        return replace(spec, has_any_shape=True)
    shape = (-1, *(dim if isinstance(dim, int) else -1 for dim in dims))
    return replace(spec, shape=shape, dim_names=("", *(dim if isinstance(dim, str) else "" for dim in dims)))


def _read_inputs(args: Sequence[ort.NodeArg]) -> tuple[list[TensorSpec], dict[str, str]]:
    inputs: list[TensorSpec] = []
    unserved: dict[str, str] = {}
    needed: list[str] = []
    for arg in args:
        spec = _read_spec(arg, _TENSOR)
        optional = _read_spec(arg, _OPTIONAL_TENSOR)
        if spec is not None:
            inputs.append(spec)
        elif optional is not None:
            inputs.append(replace(optional, is_optional=True))
        elif arg.type.startswith(_OPTIONAL):
            unserved[arg.name] = _not_carried(arg)
        else:
            needed.append(f"input '{arg.name}' has type {arg.type}")
    if needed:
        raise _unsupported(needed)
    return inputs, unserved


def _read_outputs(
    args: Sequence[ort.NodeArg], inputs: Sequence[TensorSpec], served: Collection[str]
) -> tuple[list[TensorSpec], dict[str, str]]:
    outputs: list[TensorSpec] = []
    unserved: dict[str, str] = {}
    for arg in args:
        spec = _read_spec(arg, _TENSOR) or _read_sequence(arg)
        if spec is None:
            unserved[arg.name] = _not_carried(arg)
        elif spec.datatype is DataType.BF16 and not can_return_bfloat16(inputs):
            unserved[arg.name] = (
                f"it has type {arg.type}, which ONNX Runtime's Python API does not return for models with string inputs"
            )
        elif spec.is_sequence and served and arg.name not in served:
            unserved[arg.name] = "it is a sequence that the configuration does not name among the outputs"
        else:
            outputs.append(spec)
    if any(spec.datatype is DataType.BF16 for spec in outputs):
        why = "it is a sequence beside BF16 outputs, and ONNX Runtime's Python API does not return both in one run"
        unserved |= {spec.name: why for spec in outputs if spec.is_sequence}
        outputs = [spec for spec in outputs if not spec.is_sequence]
    if not args:  # ONNX Runtime opens such a model, but refuses to run it
        raise invalid_input("expected a model with outputs, got one without")
    if not outputs:
        raise _unsupported([f"output '{arg.name}' has type {arg.type}" for arg in args])
    return outputs, unserved


def _read_sequence(arg: ort.NodeArg) -> TensorSpec | None:
    """The specification of a sequence of tensors; None for other types and BF16, which numpy does not have."""
    spec = _read_spec(arg, _SEQUENCE)
    return None if spec is None or spec.datatype is DataType.BF16 else replace(spec, is_sequence=True)


def _read_spec(arg: ort.NodeArg, pattern: re.Pattern[str]) -> TensorSpec | None:
    """The specification; None if the type does not match, or if the protocol has no datatype for its elements."""
    match = pattern.fullmatch(arg.type)
    datatype = _ELEMENTS.get(match[1]) if match else None
    if datatype is None:
        return None
    return TensorSpec(
        arg.name,
        datatype,
        tuple(dim if isinstance(dim, int) else -1 for dim in arg.shape),
        tuple(dim if isinstance(dim, str) else "" for dim in arg.shape),
    )


def _not_carried(arg: ort.NodeArg) -> str:
    return f"it has type {arg.type}, which no datatype of the protocol holds"


def _unsupported(problems: Sequence[str]) -> ServeError:
    served = ", ".join(f"tensor({name})" for name in _ELEMENTS)
    return ServeError(ErrorKind.UNSUPPORTED, f"{', '.join(problems)}, which is not supported; supported are {served}")


def _is_generated(name: str, spec: TensorSpec) -> bool:
    """Whether an exporter gave this name to the first dimension, so that it differs for each tensor.

    PyTorch's older exporter writes ``ReluY_dim_0`` for an output ``Y`` of a Relu, and tf2onnx ``unk__7``.
    """
    return name.endswith(f"{spec.name}_dim_0") or name.startswith("unk__")


def _why_unbatched(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    if not inputs:
        return "the model has no inputs"
    names: dict[str, str] = {}
    for role, specs in (("input", inputs), ("output", outputs)):
        for spec in specs:
            if why := spec.why_no_rows(role):
                return why
            if (name := spec.dim_names[0]) and not _is_generated(name, spec):
                names.setdefault(name, f"{role} '{spec.name}'")
    if len(names) > 1:
        (one, whose), (other, others) = list(names.items())[:2]
        return f"the first dimensions of {whose} and {others} have different names, '{one}' and '{other}'"
    return ""
