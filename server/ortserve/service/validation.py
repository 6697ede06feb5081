"""Checking a request against the signature of the model it is for. The texts are those that Triton's clients know."""

from collections.abc import Sequence

from ortserve.core.batch import Arrays
from ortserve.core.request import InferRequest
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import Tensor, absent, format_shape
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.service.classification import check_classifiable
from ortserve.service.raw_input import read_raw_input


def check_request(request: InferRequest, signature: ModelSignature, model: str) -> tuple[Arrays, int]:
    """Check names, datatypes, shapes and rows.

    Returns:
        The input arrays in the signature's order, absent ones in the place of optional inputs that were left out, and
        the rows: the common length of the batch axes, which may be 0, or 1 for a model without.

    Raises:
        ServeError: invalid_input, naming the input or output, what was expected and what came; unsupported for what
            the model has, but no request can bring or ask for.
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
    for spec in signature.inputs if is_complete else [spec for spec in signature.inputs if spec.name in given]:
        tensor = given[spec.name]
        array = tensor.array
        shape = array.shape
        if tensor.datatype is not spec.datatype:
            raise invalid_input(
                f"inference input '{spec.name}' data-type is '{tensor.datatype.value}', "
                f"but model '{model}' expects '{spec.datatype.value}'"
            )
        if len(shape) != len(spec.shape) and not spec.has_any_shape:
            raise _shape_error(tensor, spec, signature, model)
        for size, expected in zip(shape, spec.shape, strict=False):  # of as many axes, where any are declared
            if size != expected and expected != -1:
                raise _shape_error(tensor, spec, signature, model)
        axis = spec.batch_axis
        if axis is not None:
            if is_first:
                is_first = False
                rows = shape[axis]
            elif shape[axis] != rows:
                raise invalid_input(
                    f"input '{spec.name}' batch size does not match other inputs for '{model}': "
                    f"expected {rows}, got {shape[axis]}"
                )
        arrays.append(array)
    if is_complete:
        return tuple(arrays), rows
    present = iter(arrays)
    return tuple([next(present) if spec.name in given else absent(rows) for spec in signature.inputs]), rows


def _may_do_without(given: dict[str, Tensor], signature: ModelSignature) -> bool:
    """Whether all that is missing is optional, and nothing is unknown. A batch needs some input to count rows by."""
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
            f"model '{model}' needs at least one of its inputs {names} to tell how many rows there are"
        )
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
