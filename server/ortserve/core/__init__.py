"""The vocabulary of the server: what a tensor, a request, a model signature and a batch are.

Standard library and numpy only; every other room may import it and it imports none of them.
"""

__all__ = [
    "absent",
    "activity",
    "batch",
    "bfloat16",
    "closeness",
    "compiled",
    "conversion",
    "dtypes",
    "encoded",
    "inflight",
    "large_memory",
    "load",
    "padding",
    "region",
    "request",
    "sequences",
    "shape_class",
    "signature",
    "tensor",
    "terms",
    "timing",
]
