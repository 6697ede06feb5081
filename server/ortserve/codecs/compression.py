"""Compression of bodies and messages with gzip and zlib, for REST inference and gRPC."""

import zlib
from enum import Enum
from typing import Final

from ortserve.core.large_memory import LargeMemory
from ortserve.errors import ErrorKind, ServeError, invalid_input


class Encoding(Enum):
    """A content encoding. The value is its name in HTTP; ``window_bits`` is the parameter of zlib for it."""

    GZIP = "gzip"
    DEFLATE = "deflate"
    """The zlib format (RFC 1950), as HTTP defines it, not the raw stream of RFC 1951."""

    window_bits: int

    def __init__(self, name: str) -> None:
        self.window_bits = zlib.MAX_WBITS + 16 if name == "gzip" else zlib.MAX_WBITS


_FEED_BYTES: Final = 64 * 1024
"""Bytes that zlib receives at a time. It copies the bytes that it cannot inflate yet."""

_MAGIC: Final = b"\x1f\x8b"
_MAX_MEMBERS: Final = 4096
"""Maximum number of members of a body. The shortest one has 20 bytes; making the state to inflate it takes longer."""

_LEVEL: Final = 1
"""The fastest level of zlib. Higher levels save a few percent more, and take several times as long."""

_SAMPLE_BYTES: Final = 4096
_MIN_SAVING: Final = 0.2


class Inflater:
    """Inflates one body in parts, to at most one byte beyond its limit. Any thread, one at a time.

    A body is one zlib stream, or gzip members one after another (RFC 1952), without trailing data.
    """

    def __init__(
        self,
        body: bytes | memoryview,
        encoding: Encoding,
        max_bytes: int,
        *,
        subject: str = "the request body",
        header: str = "Content-Encoding",
        option: str = "max_body_bytes",
    ) -> None:
        """``max_bytes`` is the limit that the option ``option`` sets. Errors contain all three texts."""
        self._view = memoryview(body)
        self._encoding = encoding
        self.max_bytes: Final = max_bytes
        self._option = option
        self._subject = subject
        self._header = header
        self._stream = zlib.decompressobj(encoding.window_bits)
        self._members = 1
        self._taken = 0
        self._given = 0

    @property
    def is_done(self) -> bool:
        """Whether the whole body has been read."""
        return self._stream.eof

    def read(self, size: int) -> bytes:
        """Inflate the next ``size`` bytes, or fewer at the end of a member. zlib releases the interpreter lock.

        Raises:
            ServeError: too_large beyond the limit; invalid_input if the body is malformed, truncated or has trailing
                data.
        """
        parts: list[bytes] = []
        member = self._members
        while size > 0 and not self._stream.eof and member == self._members:
            part = self._next(size)
            size -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _next(self, size: int) -> bytes:
        stream = self._stream
        fed = self._view[self._taken : self._taken + _FEED_BYTES]
        try:
            part = stream.decompress(fed, min(size, self.max_bytes - self._given + 1))
        except zlib.error as error:
            raise self._malformed(str(error)) from None
        self._given += len(part)
        if self._given > self.max_bytes:
            raise ServeError(
                ErrorKind.TOO_LARGE,
                f"{self._subject} is larger than {self._option} after {self._encoding.value} decompression: expected "
                f"at most {self.max_bytes} bytes, got more",
            )
        self._taken += len(fed) - len(stream.unused_data if stream.eof else stream.unconsumed_tail)
        if stream.eof:
            self._end_member()
        elif not part and not fed:
            raise self._malformed("it is truncated")
        return part

    def _end_member(self) -> None:
        left = len(self._view) - self._taken
        if not left:
            return
        if self._encoding is not Encoding.GZIP or bytes(self._view[self._taken : self._taken + 2]) != _MAGIC:
            raise self._malformed(f"{left} bytes follow its end")
        if self._members == _MAX_MEMBERS:
            raise self._malformed(f"expected at most {_MAX_MEMBERS} members, got more")
        self._members += 1
        self._stream = zlib.decompressobj(self._encoding.window_bits)

    def _malformed(self, reason: str) -> ServeError:
        return invalid_input(f"{self._subject} is not valid {self._encoding.value} (its {self._header}): {reason}")


def compress(body: bytes | memoryview, encoding: Encoding) -> bytes:
    """Compress a short body, about 10 ms per megabyte. Any thread; zlib releases the interpreter lock."""
    return zlib.compress(body, _LEVEL, encoding.window_bits)


def compress_long(body: bytes | memoryview, encoding: Encoding, memory: LargeMemory) -> memoryview:
    """Compress a body into ``memory``, in steps: ``zlib.compress`` joins a long result under the interpreter lock."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, encoding.window_bits)
    view = memoryview(body)
    parts = [stream.compress(view[begin : begin + _FEED_BYTES]) for begin in range(0, len(view), _FEED_BYTES)]
    return memory.join([*parts, stream.flush()])


def is_worth_compressing(body: bytes | memoryview) -> bool:
    """Whether a sample from the middle shrinks enough; measured floats and images hardly do. Takes about 50 us."""
    middle = max(0, (len(body) - _SAMPLE_BYTES) // 2)
    sample = body[middle : middle + _SAMPLE_BYTES]
    return len(zlib.compress(sample, _LEVEL)) <= len(sample) * (1 - _MIN_SAVING)
