"""Checking a request against the signature of the model it is for. The texts are those that Triton's clients know."""

from ortserve.core.batch import Arrays
from ortserve.core.request import InferRequest
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import Tensor, format_shape
from ortserve.errors import ServeError, invalid_input


def check_request(request: InferRequest, signature: ModelSignature, model: str) -> tuple[Arrays, int]:
    """Check names, datatypes, shapes and rows.

    Returns:
        The input arrays in the signature's order, and the rows: the common length of axis 0, or 1 for a model without
        a batch axis.

    Raises:
        ServeError: invalid_input, naming the input or output, what was expected and what came.
    """
    for output in request.outputs:
        if output.name not in signature.output_index:
            raise invalid_input(f"unexpected inference output '{output.name}' for model '{model}'")
    given = {tensor.name: tensor for tensor in request.inputs}
    if given.keys() != signature.inputs_by_name.keys():
        raise _names_error(given, signature, model)
    arrays = []
    rows = 1
    for index, spec in enumerate(signature.inputs):
        tensor = given[spec.name]
        array = tensor.array
        shape = array.shape
        if tensor.datatype is not spec.datatype:
            raise invalid_input(
                f"inference input '{spec.name}' data-type is '{tensor.datatype.value}', "
                f"but model '{model}' expects '{spec.datatype.value}'"
            )
        if len(shape) != len(spec.shape):
            raise _shape_error(tensor, spec, signature, model)
        for size, expected in zip(shape, spec.shape, strict=True):
            if size != expected and expected != -1:
                raise _shape_error(tensor, spec, signature, model)
        if signature.is_batched:
            if index == 0:
                rows = shape[0]
                if rows == 0:
                    raise invalid_input(
                        f"input '{spec.name}' has no rows for model '{model}': expected at least 1, got 0"
                    )
            elif shape[0] != rows:
                raise invalid_input(
                    f"input '{spec.name}' batch size does not match other inputs for '{model}': "
                    f"expected {rows}, got {shape[0]}"
                )
        arrays.append(array)
    return tuple(arrays), rows


def _names_error(given: dict[str, Tensor], signature: ModelSignature, model: str) -> ServeError:
    for name in given:
        if name not in signature.inputs_by_name:
            return invalid_input(f"unexpected inference input '{name}' for model '{model}'")
    missing = [spec.name for spec in signature.inputs if spec.name not in given]
    return invalid_input(
        f"expected {len(signature.inputs)} inputs but got {len(given)} inputs for model '{model}'. "
        f"Got input(s) {list(given)}, but missing required input(s) {missing}. Please provide all required input(s)."
    )


def _shape_error(tensor: Tensor, spec: TensorSpec, signature: ModelSignature, model: str) -> ServeError:
    if signature.is_batched and not tensor.array.shape:
        return invalid_input(f"input '{spec.name}' has no shape but model requires batch dimension for '{model}'")
    return invalid_input(
        f"unexpected shape for input '{spec.name}' for model '{model}'. "
        f"Expected {format_shape(spec.shape)}, got {format_shape(tensor.array.shape)}"
    )
