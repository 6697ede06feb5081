"""The vocabulary of the server: what a tensor, a request, a model signature and a batch are.

Standard library and numpy only; every other room may import it and it imports none of them.
"""

__all__ = [
    "batch",
    "compiled",
    "conversion",
    "dtypes",
    "encoded",
    "large_memory",
    "padding",
    "promise",
    "region",
    "request",
    "signature",
    "tensor",
    "terms",
    "timing",
]
