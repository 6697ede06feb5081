"""Build the response to a request from the outputs of its model.

This includes the classification extension: an output's largest elements as texts, ``value:index`` or
``value:index:label``.
"""

from collections.abc import Sequence
from math import prod
from typing import Final, TypeVar

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.encoded import AnswerEncoder
from ortserve.core.request import InferRequest, InferResponse
from ortserve.core.signature import TensorSpec
from ortserve.core.tensor import Tensor, why_not_stacked
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.serving import ServedVersion

Answer = TypeVar("Answer")

_NOTHING_PLACED: Final = ()

MAX_ELEMENTS: Final = 1_000_000
"""Maximum number of elements of an output that is classified."""

_UNORDERED: Final = frozenset({DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES})
"""Datatypes that the extension does not classify."""

_SHORT_WORK: Final = 25_000
_TEXT_WORK: Final = 40  # number of elements that are searched in the time in which one is formatted
_ROW_WORK: Final = 150  # the same for the numpy calls of a row; NaN in a row triples their number


def build_response(request: InferRequest, served: ServedVersion, outputs: Arrays) -> InferResponse:
    """Choose the requested outputs and classify those for which classes are requested. Any thread.

    Args:
        request: A request that is valid for the model.
        served: The version that ran.
        outputs: Its outputs in the order of the signature, as clients see them.

    Raises:
        ServeError: unsupported, for an output that is a sequence of tensors of different shapes; invalid_input, for an
            output that is too large to classify.
    """
    signature = served.signature
    if request.outputs:
        tensors = []
        for output in request.outputs:
            index = signature.output_index[output.name]
            spec = signature.outputs[index]
            tensor = Tensor(spec.name, spec.datatype, outputs[index])
            tensors.append(_classified(tensor, spec, output.classes, served) if output.classes else tensor)
    else:
        tensors = [
            Tensor(spec.name, spec.datatype, array) for spec, array in zip(signature.outputs, outputs, strict=True)
        ]
    if signature.has_sequences:
        for tensor in tensors:
            _check_stacked(tensor.name, tensor.array, served)
    placed = request.regions.outputs if request.regions is not None else _NOTHING_PLACED
    return InferResponse(served.name, served.version, request.id, tensors, placed)


def classifies_long(request: InferRequest, served: ServedVersion, outputs: Arrays) -> bool:
    """Whether ``build_response`` takes too long for the event loop because it classifies outputs."""
    for output in request.outputs:
        if output.classes:
            index = served.signature.output_index[output.name]
            has_rows = served.signature.outputs[index].batch_axis == 0
            if not is_short(outputs[index], output.classes, is_batched=has_rows):
                return True
    return False


def classify_and_encode(
    request: InferRequest, served: ServedVersion, outputs: Arrays, encoder: AnswerEncoder[Answer]
) -> Answer:
    """Build and encode the response. Raises the errors of ``build_response`` and of the encoder. Any thread."""
    return encoder.encode(request, build_response(request, served, outputs))


def _classified(tensor: Tensor, spec: TensorSpec, classes: int, served: ServedVersion) -> Tensor:
    if spec.is_sequence:
        _check_stacked(spec.name, tensor.array, served)
    return classify(tensor, classes, served.labels.get(spec.name, ()), is_batched=spec.batch_axis == 0)


def _check_stacked(name: str, array: np.ndarray, served: ServedVersion) -> None:
    """Raises ServeError: unsupported, if an output is a sequence of tensors of different shapes."""
    if why := why_not_stacked(array):
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            f"inference output '{name}' of model '{served.name}' is a sequence that cannot be returned as one tensor: "
            f"{why}; other outputs can be requested by name",
        )


def check_classifiable(output: TensorSpec, model: str) -> None:
    """Raises ServeError: invalid_input, for an output of an unsupported datatype, or with rows not on axis 0."""
    if output.datatype in _UNORDERED:
        raise invalid_input(
            f"class result not available for output '{output.name}' of model '{model}' "
            f"due to unsupported type '{output.datatype.value}'"
        )
    if output.batch_axis:
        raise invalid_input(
            f"class result not available for output '{output.name}' of model '{model}': expected rows on axis 0, got "
            f"rows on axis {output.batch_axis}"
        )


def is_short(array: np.ndarray, classes: int, *, is_batched: bool) -> bool:
    """Whether ``classify`` takes less than about 1 ms, or 2 ms with NaN, and may run on the event loop."""
    rows = len(array) if is_batched else 1
    return array.size + rows * (_ROW_WORK + _TEXT_WORK * min(classes, array.size)) <= _SHORT_WORK


def classify(output: Tensor, classes: int, labels: Sequence[str], *, is_batched: bool) -> Tensor:
    """Select the largest elements, of each row if rows are batched, otherwise of the whole tensor. Any thread.

    Args:
        output: An output that ``check_classifiable`` accepts. NaN counts as less than any number.
        classes: Number of elements to select, at least 1; reduced to the number that exist.
        labels: Labels by index in the row. Empty and missing labels are omitted.
        is_batched: Whether axis 0 is the batch axis.

    Returns:
        A BYTES tensor of shape ``(rows, k)``, or ``(k,)``; largest first, equal elements by their index.

    Raises:
        ServeError: invalid_input for more than ``MAX_ELEMENTS`` elements.
    """
    array = output.array
    if array.size > MAX_ELEMENTS:
        raise invalid_input(
            f"output '{output.name}' cannot be classified: expected at most {MAX_ELEMENTS} elements, got {array.size}"
        )
    rows = array.reshape(len(array) if is_batched else 1, prod(array.shape[1:] if is_batched else array.shape))
    count = min(classes, rows.shape[1])
    texts = np.empty((len(rows), count), object)
    for place, row in zip(texts, rows, strict=True):
        place[:] = _format_largest(row, count, labels)
    return Tensor(output.name, DataType.BYTES, texts if is_batched else texts[0])


def _format_largest(row: np.ndarray, count: int, labels: Sequence[str]) -> list[str]:
    indices = _largest(row, count).tolist()
    values = row[indices].tolist()
    form = "%f:%d" if row.dtype.kind == "f" else "%d:%d"
    texts = [form % pair for pair in zip(values, indices, strict=True)]
    if labels:
        texts = [
            f"{text}:{labels[index]}" if index < len(labels) and labels[index] else text
            for text, index in zip(texts, indices, strict=True)
        ]
    return texts


def _largest(row: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` largest elements, in descending order; equal elements in the order of their indices.

    NaN comes last.
    """
    if row.dtype.kind == "f" and np.isnan(row).any():
        numbers = np.flatnonzero(~np.isnan(row))
        largest = numbers[_largest(row[numbers], min(count, len(numbers)))]
        return np.concatenate((largest, np.flatnonzero(np.isnan(row))[: count - len(largest)]))
    if count < row.size:
        least = np.partition(row, row.size - count)[row.size - count]
        above = np.flatnonzero(row > least)
        equal = np.flatnonzero(row == least)[: count - len(above)]
        chosen = np.sort(np.concatenate((above, equal)))
    else:
        chosen = np.arange(row.size)
    # Sorted ascending from the back and reversed, so that equal elements keep the order of their indices.
    from_back = chosen[::-1]
    return from_back[np.argsort(row[from_back], kind="stable")][::-1]
