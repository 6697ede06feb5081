"""Compression of gRPC messages ("Message encoding" in gRPC over HTTP/2). Pure; any thread."""

import zlib
from typing import Final

import grpc

from ortserve.frontends.grpc.message_limits import too_large
from ortserve.frontends.grpc.native.messages import RefusedMessageError

_WINDOW_BITS: Final = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}

ENCODINGS: Final = b"identity,deflate,gzip"
"""What a ``grpc-accept-encoding`` of ours says."""

_LEVEL: Final = 1
"""Of tensors: higher ones take three times as long for some percent less."""


def deflate(message: bytes, encoding: bytes) -> bytes:
    """Compress; 1 MB takes some 20 ms."""
    deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return deflater.compress(message) + deflater.flush()


def inflate(message: bytes, encoding: bytes, max_bytes: int) -> bytes:
    """Undo the compression of a message. Any thread; 1 MB takes some milliseconds.

    Raises:
        RefusedMessageError: An encoding that is not known or not announced, bytes that are none of it, or a message
            that grows too large; it is never inflated beyond the limit.
    """
    if encoding == b"identity":
        raise RefusedMessageError(grpc.StatusCode.INTERNAL, "a message is compressed, but grpc-encoding names nothing")
    if encoding not in _WINDOW_BITS:
        raise RefusedMessageError(
            grpc.StatusCode.UNIMPLEMENTED,
            f"grpc-encoding: expected one of {ENCODINGS.decode()}, got {encoding.decode('latin-1')}",
        )
    inflater = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        inflated = inflater.decompress(message, max_bytes + 1)
    except zlib.error as error:
        raise RefusedMessageError(grpc.StatusCode.INTERNAL, f"a message is no {encoding.decode()}: {error}") from None
    if len(inflated) > max_bytes:
        raise RefusedMessageError(
            grpc.StatusCode.RESOURCE_EXHAUSTED, too_large(max_bytes, None, "decompressed message").message
        )
    if inflater.unused_data:
        raise RefusedMessageError(grpc.StatusCode.INTERNAL, f"a message is {encoding.decode()} and something more")
    if not inflater.eof:
        raise RefusedMessageError(grpc.StatusCode.INTERNAL, f"a message is {encoding.decode()} that ends too early")
    return inflated
