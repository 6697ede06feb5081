"""Validates requests against the signature of their model, and reads their parameters and raw inputs.

The error texts are those of Triton, which its clients know.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from ortserve.codecs.binary_tensor import decode_binary_tensor, decode_element, object_array
from ortserve.codecs.bounds import CHARACTER_BYTES, INLINE_BYTES, INLINE_FLAG_BYTES, MAX_TEXT_BYTES
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import Scheduling
from ortserve.core.request import InferRequest, Parameter
from ortserve.core.sequence import SequenceId, SequencePart
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import Tensor, absent, format_shape
from ortserve.errors import ErrorKind, SequenceError, ServeError, invalid_input
from ortserve.registry.request_shapes import shape_error, unequal_rows_error
from ortserve.service.classification import check_classifiable

_OMITTED: Final = absent(0)
"""Stands for an omitted input until the number of rows is known."""


def check_request(request: InferRequest, signature: ModelSignature, model: str) -> tuple[Arrays, int]:
    """Check names, datatypes, shapes and rows.

    Returns:
        The input arrays in the order of the signature, with placeholders for omitted optional inputs, and the rows: the
        common length of the batch axes, which may be 0, or 1 for a model without a batch axis.

    Raises:
        ServeError: invalid_input, with the input or output, the expectation and the value; unsupported for an input or
            output of the model that is not served.
    """
    for output in request.outputs:
        if output.name not in signature.output_index:
            raise _output_error(output.name, signature, model)
        if output.classes:
            check_classifiable(signature.outputs[signature.output_index[output.name]], model)
    inputs = request.inputs if request.raw_input is None else [read_raw_input(request.raw_input, signature, model)]
    given = {tensor.name: tensor for tensor in inputs}
    is_complete = given.keys() == signature.inputs_by_name.keys()
    if not is_complete and not _may_do_without(given, signature):
        raise _names_error(given, signature, model)
    arrays = []
    rows = 1
    is_first = True
    for spec in signature.inputs:
        tensor = given.get(spec.name)
        if tensor is None:
            arrays.append(_OMITTED)
            continue
        array = tensor.array
        shape = array.shape
        if tensor.datatype is not spec.datatype:
            raise invalid_input(
                f"inference input '{spec.name}' data-type is '{tensor.datatype.value}', "
                f"but model '{model}' expects '{spec.datatype.value}'"
            )
        if (len(shape) != len(spec.shape) and not spec.has_any_shape) or len(shape) < spec.least_axes:
            raise shape_error(shape, spec, signature, model)
        for size, expected in zip(shape, spec.shape, strict=False):  # equal lengths, unless no shape is declared
            if size != expected and expected != -1:
                raise shape_error(shape, spec, signature, model)
        axis = spec.batch_axis
        if axis is not None:
            if is_first:
                is_first = False
                rows = shape[axis]
            elif shape[axis] != rows:
                raise unequal_rows_error(spec.name, model, rows, shape[axis])
        arrays.append(array)
    if not is_complete:
        arrays = [absent(rows) if array is _OMITTED else array for array in arrays]
    return tuple(arrays), rows


def _may_do_without(given: dict[str, Tensor], signature: ModelSignature) -> bool:
    """Whether all missing inputs are optional and no input is unknown. A batch needs an input that defines its rows."""
    return (
        signature.has_optional_inputs
        and given.keys() <= signature.inputs_by_name.keys()
        and all(spec.is_optional or spec.name in given for spec in signature.inputs)
        and (not signature.is_batched or any(signature.inputs_by_name[name].batch_axis is not None for name in given))
    )


def _output_error(name: str, signature: ModelSignature, model: str) -> ServeError:
    if name in signature.unserved_outputs:
        return ServeError(
            ErrorKind.UNSUPPORTED,
            f"inference output '{name}' of model '{model}' is not served: {signature.unserved_outputs[name]}",
        )
    known = [spec.name for spec in signature.outputs]
    return invalid_input(f"unexpected inference output '{name}' for model '{model}', expected {_listed(known)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _names_error(given: dict[str, Tensor], signature: ModelSignature, model: str) -> ServeError:
    for name in given:
        if name in signature.unserved_inputs:
            return ServeError(
                ErrorKind.UNSUPPORTED,
                f"inference input '{name}' of model '{model}' is not served: {signature.unserved_inputs[name]}",
            )
        if name not in signature.inputs_by_name:
            known = list(signature.inputs_by_name)
            return invalid_input(f"unexpected inference input '{name}' for model '{model}', expected {_listed(known)}")
    missing = [spec.name for spec in signature.inputs if spec.name not in given and not spec.is_optional]
    if not missing:
        names = _listed([spec.name for spec in signature.inputs if spec.batch_axis is not None])
        return invalid_input(
            f"model '{model}' needs at least one of its inputs {names} to determine the number of rows"
        )
    return invalid_input(
        f"expected {len(signature.inputs)} inputs but got {len(given)} inputs for model '{model}'. "
        f"Got input(s) {list(given)}, but missing required input(s) {missing}. Please provide all required input(s)."
    )


def read_scheduling(parameters: Mapping[str, Parameter]) -> Scheduling:
    """Read the parameters that affect the place of a request in the queue.

    Raises:
        ServeError: invalid_input for a value of the wrong type.
    """
    return Scheduling(_unsigned(parameters, "priority"), _unsigned(parameters, "timeout") * 1000 or None)


_MAX_ID_BYTES: Final = 128
_ID_BITS: Final = 64


def read_sequence_part(parameters: Mapping[str, Parameter], protocol: str) -> SequencePart:
    """Read the sequence parameters of a request. Models without sequences ignore their values, but not wrong types.

    Args:
        parameters: Parameters of the request.
        protocol: Protocol of the request. With ``grpc``, which lacks unsigned integers of 64 bits, a negative id stands
            for the unsigned integer with the same bits.

    Raises:
        ServeError: invalid_input for a value of the wrong type, unsupported for a text of more than 128 bytes.
    """
    is_start = _flag(parameters, "sequence_start")
    is_end = _flag(parameters, "sequence_end")
    return SequencePart(_sequence_id(parameters.get("sequence_id", 0), protocol == "grpc"), is_start, is_end)


def _flag(parameters: Mapping[str, Parameter], name: str) -> bool:
    flag = parameters.get(name, False)
    if type(flag) is not bool:
        raise _unparsable(name, "attempt to access JSON non-boolean as boolean")
    return flag


def _sequence_id(value: Parameter, has_sign: bool) -> SequenceId:
    if type(value) is str:
        if len(value.encode(errors="replace")) > _MAX_ID_BYTES:
            raise SequenceError(
                ErrorKind.UNSUPPORTED, f"string correlation ID cannot be longer than {_MAX_ID_BYTES} characters"
            )
        return value.partition("\0")[0]
    if type(value) is not int or value >= 1 << _ID_BITS or (value < 0 and not has_sign):
        raise _unparsable("sequence_id", "attempt to access JSON non-string as string")
    return value % (1 << _ID_BITS)


def _unparsable(name: str, problem: str) -> ServeError:
    return SequenceError(ErrorKind.INVALID_INPUT, f"Unable to parse '{name}': {problem}")


def _unsigned(parameters: Mapping[str, Parameter], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or value < 0:
        raise invalid_input(f"parameter '{name}': expected an unsigned integer, got {value!r}")
    return value


def read_raw_input(data: bytes | memoryview, signature: ModelSignature, model: str) -> Tensor:
    """Decode the only input of a model from a raw request, whose body consists of the bytes of this input.

    Name, datatype and shape are those of the signature: one row if rows are batched, and at most one free dimension,
    which the length of ``data`` determines. For BYTES, ``data`` is a single string without a length prefix.

    Returns:
        A tensor that is a read-only view of ``data``, except for BYTES.

    Raises:
        ServeError: invalid_input, if the model has several inputs or ``data`` does not fit the shape; too_large, for
            too long a string.
    """
    if len(signature.inputs) != 1:
        raise invalid_input(
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(signature.inputs)} inputs in '{model}' model configuration"
        )
    spec = signature.inputs[0]
    shape = spec.shape
    if spec.batch_axis is not None:
        shape = (*shape[: spec.batch_axis], 1, *shape[spec.batch_axis + 1 :])
    if spec.datatype is DataType.BYTES:
        if any(size != 1 for size in shape):
            raise invalid_input(
                f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1], "
                f"got {format_shape(spec.shape)} for '{model}'"
            )
        if len(data) > MAX_TEXT_BYTES:
            raise ServeError(
                ErrorKind.TOO_LARGE,
                f"raw input '{spec.name}': expected at most {MAX_TEXT_BYTES} bytes of text, got {len(data)}",
            )
        return Tensor(spec.name, spec.datatype, object_array([decode_element(data, 0, spec.name)], shape))
    if -1 in shape:
        shape = _with_free_dimension(shape, len(data), spec, model)
    return Tensor(spec.name, spec.datatype, decode_binary_tensor(data, spec.datatype, shape, spec.name, model))


def long_raw_growth(data: bytes | memoryview, signature: ModelSignature) -> int | None:
    """Memory that ``read_raw_input`` takes if it must be called on a thread; otherwise None."""
    datatypes = [spec.datatype for spec in signature.inputs]
    if len(data) > INLINE_BYTES and DataType.BYTES in datatypes:
        return (1 + CHARACTER_BYTES) * len(data)
    return 0 if len(data) > INLINE_FLAG_BYTES and DataType.BOOL in datatypes else None


def _with_free_dimension(shape: tuple[int, ...], size: int, spec: TensorSpec, model: str) -> tuple[int, ...]:
    if shape.count(-1) > 1:
        raise invalid_input(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            f"variable-sized dimension: {format_shape(spec.shape)}"
        )
    step = prod(dim for dim in shape if dim != -1) * spec.datatype.itemsize
    if step == 0 or size % step:
        raise invalid_input(
            f"input byte size mismatch for input '{spec.name}' for model '{model}'. "
            f"Expected a multiple of {step} for the shape {format_shape(spec.shape)}, got {size}"
        )
    return tuple(size // step if dim == -1 else dim for dim in shape)
