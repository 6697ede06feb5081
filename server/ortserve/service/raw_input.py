"""Raw binary requests: a body that is nothing but the bytes of a model's only input."""

from math import prod

from ortserve.codecs.binary_tensor import decode_binary_tensor, decode_element, object_array
from ortserve.codecs.bounds import INLINE_BYTES, MAX_TEXT_BYTES
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import Tensor, format_shape
from ortserve.errors import ErrorKind, ServeError, invalid_input


def read_raw_input(data: bytes | memoryview, signature: ModelSignature, model: str) -> Tensor:
    """Make the only input of a model from its bytes.

    Name and datatype are the signature's, and so is the shape: one row, where rows are batched, and one free dimension
    as long as ``data`` makes it. BYTES are one string, ``data`` itself, without the length prefix of its binary form.

    Returns:
        A tensor that is a read-only view on ``data`` (BYTES excepted).

    Raises:
        ServeError: invalid_input, when the model has several inputs, or when ``data`` cannot have that shape.
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


def is_long_text(data: bytes | memoryview, signature: ModelSignature) -> bool:
    """Whether ``data`` is one string for the model, and so long that ``read_raw_input`` is to be called on a thread."""
    return len(data) > INLINE_BYTES and any(spec.datatype is DataType.BYTES for spec in signature.inputs)


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
