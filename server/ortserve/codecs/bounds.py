"""Limits of one inference message, on both protocols. The codecs count while they scan, before they build objects."""

from collections.abc import Sequence
from math import prod
from typing import Final

from ortserve.core.tensor import format_shape
from ortserve.errors import ServeError, invalid_input

MAX_TENSORS: Final = 2048
"""Inputs of a request, and as many outputs."""

MAX_PARAMETERS: Final = 1024
"""Parameters of a request, and of each of its inputs and outputs."""

MAX_HEAD_BYTES: Final = 64 * 1024
"""Names, shapes and parameters of a gRPC request, without its tensors."""

MAX_TEXTS: Final = 128 * 1024
"""Elements of one BYTES tensor. Each becomes an object, and freeing so many takes the event loop 4 ms."""

MAX_TEXT_BYTES: Final = 16 * 1024 * 1024
"""Of one element of a BYTES tensor. Decoding takes 3 ms, and the interpreter lock is held meanwhile."""

INLINE_BYTES: Final = 64 * 1024
"""JSON, texts and typed contents of at most this size are read on the event loop: in about 1 ms, mostly less."""

INLINE_ELEMENTS: Final = 16 * 1024
"""Elements of an answer that are written on the event loop, as JSON or as texts: in about 1 ms."""

INLINE_BINARY_BYTES: Final = 1024 * 1024
"""Bytes of binary outputs that are put together on the event loop: in 0.1 to 1 ms."""

JSON_GROWTH: Final = 32
"""Bytes of memory that reading one byte of JSON may take: orjson reserves 12, and ``[],`` becomes 64."""

TEXT_BYTES: Final = 96
"""Memory that an element of a BYTES tensor takes beside its bytes: an object, a pointer, and ONNX Runtime's copy."""


def too_many(what: str, most: int, got: int | str = "more") -> ServeError:
    """The error for a request with more parts of a kind than are allowed."""
    return invalid_input(f"request: expected at most {most} {what}, got {got}")


MAX_DIMS: Final = 64
"""numpy's own bound."""

_MAX_ELEMENTS: Final = (2**63 - 1) // 8
"""Of the widest datatype, so that byte counts fit 63 bits."""


def shape_fault(shape: Sequence[int]) -> str | None:
    """Say what is wrong with the size of ``shape``, whose dimensions are not negative, for the end of a message.

    Zeros do not make a shape small: numpy cannot hold the other dimensions either.
    """
    if len(shape) > MAX_DIMS:  # first: the product of very many takes very long
        return f"at most {MAX_DIMS} dimensions, got {len(shape)}"
    if prod(filter(None, shape) if 0 in shape else shape) > _MAX_ELEMENTS:
        return f"at most {_MAX_ELEMENTS} elements, got {format_shape(tuple(shape))}"
    return None
