"""The vocabulary of the server: tensors, requests, model signatures, batches and their timing.

Imports only numpy and the standard library. Every other room may import it.
"""

__all__ = [
    "agreement",
    "batch",
    "compiled",
    "conversion",
    "dtypes",
    "helper_process",
    "inflight",
    "large_memory",
    "padding",
    "ragged",
    "region",
    "request",
    "sequence",
    "signature",
    "tensor",
    "thread_pool",
    "timing",
    "version_names",
]
