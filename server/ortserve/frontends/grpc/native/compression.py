"""Compression of gRPC messages ("Message encoding" in gRPC over HTTP/2): short work on the loop, long in a thread."""

import asyncio
import zlib
from typing import Final

import grpc

from ortserve.codecs.compression import Encoding, Inflater
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.message_limits import too_large
from ortserve.frontends.grpc.native.messages import RefusedMessageError
from ortserve.frontends.grpc.native.stream import STREAM_WINDOW
from ortserve.frontends.large_body import inflate_all
from ortserve.service.gate import Hold

_KNOWN: Final = {b"gzip": Encoding.GZIP, b"deflate": Encoding.DEFLATE}

ENCODINGS: Final = b"identity,deflate,gzip"
"""What a ``grpc-accept-encoding`` of ours says."""

_LEVEL: Final = 1
"""Of tensors: higher ones take three times as long for some percent less."""

_DEFLATED_INLINE_BYTES: Final = 32 * 1024
"""Messages up to this size are compressed on the loop, in less than 1 ms."""


async def inflate(message: bytes | memoryview, encoding: bytes, hold: Hold, *, max_bytes: int) -> bytes | memoryview:
    """Undo the compression of a message, as long as ``hold`` says; what it grows by is held, too.

    Nobody is asked about what fits a stream's window, it counts alone: who takes the message asks, and refuses it as a
    request, where here its stream would end.

    Raises:
        RefusedMessageError: An encoding that is not known or not announced, bytes that are none of it, or a message
            that grows too large; it is never inflated beyond the limit.
        ServeError: overloaded.
    """
    inflater = Inflater(message, _encoding(encoding), max_bytes, subject="a message", header="grpc-encoding")
    size = 0

    def hold_part(part_bytes: int) -> None:
        nonlocal size
        size += part_bytes
        if size <= STREAM_WINDOW:
            hold.count(len(message) + size)
        else:
            hold.grow(part_bytes)

    try:
        return await inflate_all(inflater, came_bytes=len(message), hold=hold_part, memory=hold.memory)
    except ServeError as error:
        if error.kind is ErrorKind.TOO_LARGE:
            error = too_large(max_bytes, None, "decompressed message")
            raise RefusedMessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message) from None
        if error.kind is ErrorKind.INVALID_INPUT:
            raise RefusedMessageError(grpc.StatusCode.INTERNAL, error.message) from None
        raise


def _encoding(name: bytes) -> Encoding:
    if name == b"identity":
        raise RefusedMessageError(grpc.StatusCode.INTERNAL, "a message is compressed, but grpc-encoding names nothing")
    if name not in _KNOWN:
        raise RefusedMessageError(
            grpc.StatusCode.UNIMPLEMENTED,
            f"grpc-encoding: expected one of {ENCODINGS.decode()}, got {name.decode('latin-1')}",
        )
    return _KNOWN[name]


def deflate(message: bytes | memoryview, encoding: bytes) -> bytes:
    """Compress; 1 MB takes some 20 ms. Any thread."""
    return zlib.compress(message, _LEVEL, _KNOWN[encoding].window_bits)


async def compressed(message: bytes | memoryview, encoding: bytes) -> tuple[bytes | memoryview, bool]:
    """What to send for a message, and whether it is compressed: itself where that makes it no smaller."""
    if len(message) <= _DEFLATED_INLINE_BYTES:
        smaller = deflate(message, encoding)
    else:
        smaller = await asyncio.get_running_loop().run_in_executor(None, deflate, message, encoding)
    return (smaller, True) if len(smaller) < len(message) else (message, False)
