"""Limits of one inference message, on both protocols. The codecs count while they scan, before they build objects."""

from collections.abc import Sequence
from math import prod
from typing import Final

from ortserve.core.tensor import format_shape
from ortserve.errors import ServeError, invalid_input

MAX_TENSORS: Final = 2048
"""Inputs of a request, and outputs of a request."""

MAX_PARAMETERS: Final = 1024
"""Parameters of a request, and of each of its inputs and outputs."""

MAX_ID_LENGTH: Final = 64 * 1024
"""Characters of the id of a REST request, which its answer repeats. Those of gRPC are part of the head."""

MAX_HEAD_BYTES: Final = 64 * 1024
"""Names, shapes and parameters of a gRPC request, without its tensors."""

MAX_TEXTS: Final = 128 * 1024
"""Elements of one BYTES tensor. Each becomes an object; freeing this many takes 4 ms of the event loop."""

MAX_TEXT_BYTES: Final = 16 * 1024 * 1024
"""Bytes of one element of a BYTES tensor. Decoding it holds the interpreter lock for 3 ms."""

INLINE_BYTES: Final = 64 * 1024
"""Maximum size of JSON, texts and typed contents that are decoded on the event loop, in at most about 1 ms."""

INLINE_ELEMENTS: Final = 16 * 1024
"""Maximum number of elements of an answer that are encoded on the event loop as JSON or texts, in about 1 ms."""

INLINE_OUTPUTS: Final = 256
"""Maximum number of outputs of an answer that is encoded on the event loop; each takes about 2 µs."""

INLINE_BINARY_BYTES: Final = 1024 * 1024
"""Maximum size of binary outputs and of texts that are encoded and joined on the event loop, in 0.1 to 1 ms."""

JSON_GROWTH: Final = 32
"""Memory that parsing may take per byte of JSON: orjson reserves 12 bytes, and ``[],`` becomes 64."""

TEXT_BYTES: Final = 96
"""Memory of an element of a BYTES tensor besides its bytes: an object, a pointer, and ONNX Runtime's copy."""


def too_many(what: str, most: int, got: int | str = "more") -> ServeError:
    """The error for a request with too many parts of one kind."""
    return invalid_input(f"request: expected at most {most} {what}, got {got}")


MAX_DIMS: Final = 64
"""numpy's limit."""

_MAX_ELEMENTS: Final = (2**63 - 1) // 8
"""Elements of the widest datatype, so that sizes fit in 63 bits."""


def shape_fault(shape: Sequence[int]) -> str | None:
    """The end of an error message if ``shape``, without negative dimensions, exceeds a limit; otherwise None.

    Checked before an array is created. A zero does not help: numpy cannot represent the other dimensions either.
    """
    if len(shape) > MAX_DIMS:  # first, because the product of very many dimensions is slow
        return f"at most {MAX_DIMS} dimensions, got {len(shape)}"
    if prod(filter(None, shape) if 0 in shape else shape) > _MAX_ELEMENTS:
        return f"at most {_MAX_ELEMENTS} elements, got {format_shape(tuple(shape))}"
    return None
