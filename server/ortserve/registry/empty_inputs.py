"""Requests with empty tensors: those without rows for a batched model, and those that ONNX Runtime would crash on.

ONNX Runtime 1.31.1 with the CPU provider was run on empty tensors: the backend node tests of ONNX 1.22 and the models
of ``tests/rows``, with 0 elements along one axis. Most models gave empty outputs, exported transformers failed at a
Reshape, and the operators in ``CRASHING`` ended the process.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Final

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import absent, format_shape, is_absent
from ortserve.errors import invalid_input

CRASHING: Final[Mapping[str, bool]] = {
    "AttnLSTM": True,
    "DynamicQuantizeLSTM": True,
    "Einsum": False,
    "GRU": True,
    "LSTM": True,
    "Unique": True,
}
"""Operators that end the process on an empty tensor: GRU, LSTM and Unique by ``std::terminate``, the former for 0 rows
or 0 steps, the latter where another axis than its own is empty; Einsum by a division by 0, for 0 rows. False for those
that are only known to do so where axis 0 is empty: a decoder may have an Einsum and begin with a past of length 0."""

_MOST_ELEMENTS: Final = 2**23
"""Of a made-up row of an input with free dimensions, which a request without data chooses at will: 32 MiB of FP32."""
_MOST_TEXTS: Final = 2**14
"""Likewise of texts, as ``text_weight`` has it for a run."""


def crashing_operators(operators: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Operators of a model, listed by execution provider, that crash on empty tensors; sorted."""
    return tuple(sorted({name for kinds in operators.values() for name in kinds} & CRASHING.keys()))


def check_not_empty(inputs: Arrays, signature: ModelSignature, model: str, crashing: Sequence[str]) -> None:
    """Reject inputs that one of the model's ``crashing`` operators may crash on.

    Raises:
        ServeError: invalid_input, naming the first such input and the operators.
    """
    for spec, array in zip(signature.inputs, inputs, strict=True):
        if array.size or is_absent(array):
            continue
        if found := [name for name in crashing if CRASHING[name] or not array.shape[0]]:
            raise invalid_input(
                f"input '{spec.name}' is empty for model '{model}', whose operators {', '.join(found)} may crash on "
                f"empty tensors in ONNX Runtime: expected at least 1 element, got shape {format_shape(array.shape)}"
            )


def make_up_row(inputs: Arrays, signature: ModelSignature, model: str) -> Arrays:
    """The inputs of one row in place of a request's that has none: zeros and empty texts, of the same dimensions.

    Args:
        inputs: As clients see them, in the signature's order; empty along their batch axes.
        signature: As clients see it, of a batched model.
        model: For the error.

    Raises:
        ServeError: invalid_input, for a row of too many elements.
    """
    return tuple([_one_row(spec, array, model) for spec, array in zip(signature.inputs, inputs, strict=True)])


def drop_rows(outputs: Arrays, signature: ModelSignature) -> Arrays:
    """The outputs of a batch of one made-up row without that row; those that have no rows stay as they are."""
    return tuple(
        [
            output if spec.batch_axis is None else output[:0]
            for spec, output in zip(signature.outputs, outputs, strict=True)
        ]
    )


def _one_row(spec: TensorSpec, array: np.ndarray, model: str) -> np.ndarray:
    axis = spec.batch_axis
    if is_absent(array):
        return absent(1)
    if axis is None:
        return array
    shape = (*array.shape[:axis], 1, *array.shape[axis + 1 :])
    most = _MOST_TEXTS if array.dtype.hasobject else _MOST_ELEMENTS
    if -1 in spec.row_shape and prod(shape) > most:
        raise invalid_input(
            f"input '{spec.name}' has no rows for model '{model}': expected at most {most} elements a row then, "
            f"got shape {format_shape(array.shape)}"
        )
    return np.full(shape, "", array.dtype) if array.dtype.hasobject else np.zeros(shape, array.dtype)
