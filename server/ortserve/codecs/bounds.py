"""Limits of one inference message, on both protocols. Codecs count while they scan, before they create objects."""

from typing import Final

from ortserve.errors import ServeError, invalid_input

MAX_TENSORS: Final = 2048
"""Maximum number of inputs of a request, and of its outputs."""

MAX_PARAMETERS: Final = 1024
"""Maximum number of parameters of a request, and of each input and output."""

MAX_ID_LENGTH: Final = 64 * 1024
"""Maximum characters of the id of a REST request, which the answer repeats. In gRPC the id counts towards
``MAX_HEAD_BYTES``."""

MAX_HEAD_BYTES: Final = 64 * 1024
"""Maximum size of id, names, shapes and parameters of a gRPC request."""

MAX_JSON_HEAD_BYTES: Final = 1024 * 1024
"""Maximum size of names, shapes and parameters of a request in long JSON, as the process that parses it returns them.
The event loop checks them, and quotes them in errors."""

MAX_TEXTS: Final = 128 * 1024
"""Maximum number of elements of a BYTES tensor. Each becomes an object; freeing them takes 4 ms of the event loop."""

MAX_TEXT_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of one element of a BYTES tensor. Long ones are decoded in steps, but joined under the interpreter
lock."""

MIN_TEXT_BYTES: Final = 4
"""Size of an empty element of a BYTES tensor, on the wire: its length."""

INLINE_BYTES: Final = 64 * 1024
"""Maximum size of JSON, texts and typed contents that are decoded on the event loop, in at most about 1 ms."""

INLINE_FLAG_BYTES: Final = 8 * 1024 * 1024
"""Maximum size of a body with BOOL tensors whose elements the event loop checks. They become views."""

INLINE_ELEMENTS: Final = 16 * 1024
"""Maximum number of elements of an answer that are encoded on the event loop as JSON, in about 0.5 ms."""

INLINE_TEXTS: Final = 4096
"""Maximum number of texts with length prefixes that are decoded or encoded on the event loop, in 0.5 ms, or 1 ms if the
code is not compiled."""

INLINE_OUTPUTS: Final = 256
"""Maximum number of outputs of an answer that is encoded on the event loop. Each takes about 2 µs."""

INLINE_BINARY_BYTES: Final = 1024 * 1024
"""Maximum size of binary outputs and of texts that are encoded and joined on the event loop, in 0.1 to 1 ms."""

INLINE_CHARACTERS: Final = 128 * 1024
"""Maximum number of characters of texts that are encoded as JSON at a time, in 0.1 ms, or 1.3 ms if all are escaped."""

JSON_GROWTH: Final = 32
"""Bytes of memory that parsing may take per byte of JSON: orjson reserves 12, and ``[],`` becomes 64."""

TEXT_BYTES: Final = 40
"""Bytes of memory of an element of a BYTES tensor besides its ``str`` and the pointer to it: its copy in ONNX Runtime,
without the content, which is as long as in the body."""

CHARACTER_BYTES: Final = 4
"""Maximum bytes of memory per byte of a text: one emoji makes each character of its ``str`` take four."""


def too_many(what: str, most: int, got: int | str = "more") -> ServeError:
    """Return the error for a request with too many parts of one kind."""
    return invalid_input(f"request: expected at most {most} {what}, got {got}")
