"""The descriptor pool that the generated modules here register in.

protobuf's default pool knows a message name once in a process. Ours are named as the protocol names them, and so are
those of every client library for it: in one pool, whichever is imported second fails with "duplicate symbol
'inference.ModelInferRequest'". A pool of our own keeps server and client apart, as a process that does both needs.
"""

from google.protobuf import descriptor_pool

_POOL = descriptor_pool.DescriptorPool()


def Default() -> descriptor_pool.DescriptorPool:  # noqa: N802
    """Return the one pool of these messages; named as the function that generated code calls."""
    return _POOL
