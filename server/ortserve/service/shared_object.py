"""A caller's POSIX shared memory object: opened by name, read and written through its descriptor, never mapped.

The caller may shorten the object at any time. An access to removed pages of a mapping ends the process with SIGBUS,
even right after a check of the size; ``pread`` and ``pwrite`` report an error instead. They also copy, which validation
needs: otherwise the caller could change a tensor between its check and its use. Copies from and to a mapping would be
faster.
"""

import os
import stat
from pathlib import Path
from typing import Final

import numpy as np

from ortserve.core.region import RegionMemory
from ortserve.errors import ErrorKind, ServeError, invalid_input

FOLDER: Final = Path("/dev/shm")  # noqa: S108  # where Linux keeps the objects of shm_open
RESERVED_PREFIX: Final = "triton_python_backend_shm_region_"
"""Prefix of names that Triton forbids clients to use."""


class SharedObject(RegionMemory):
    """Bytes ``offset`` to ``offset + byte_size`` of an object. The open descriptor keeps the object if it is unlinked.

    ``region`` is the name of the region in messages.
    """

    may_wait = False

    def __init__(self, region: str, key: str, offset: int, byte_size: int) -> None:
        """Open the object that ``key`` names, with or without a leading slash.

        Raises:
            ServeError: invalid_input, for a key that cannot be the name of an object, and for bytes beyond the end of
                the object; internal, if it cannot be opened.
        """
        self._region = region
        self._offset = offset
        self._descriptor = _open(region, key)
        size = self._size()
        if offset + byte_size > size:
            os.close(self._descriptor)
            raise invalid_arguments(
                region, f"expected offset + byte_size within the {size} bytes of '{key}', got {offset} + {byte_size}"
            )

    def read(self, offset: int, byte_size: int) -> memoryview:
        start = self._offset + offset
        self._require(start + byte_size)  # before memory is allocated
        copy = np.empty(byte_size, np.uint8).data  # a bytearray would be zeroed first
        rest = copy
        while rest:
            count = os.preadv(self._descriptor, [rest], start)
            if count == 0:
                self._require(start + len(rest))
            start += count
            rest = rest[count:]
        return copy

    def write(self, offset: int, data: bytes | memoryview) -> None:
        start = self._offset + offset
        rest = memoryview(data)
        self._require(start + len(rest))  # a write beyond the end would extend the object
        try:
            while rest:
                count = os.pwrite(self._descriptor, rest, start)
                start += count
                rest = rest[count:]
        except OSError as error:  # such as no memory for pages that were never written
            raise ServeError(
                ErrorKind.INTERNAL, f"cannot write to shared memory region '{self._region}': {error.strerror}"
            ) from error

    def close(self) -> None:
        os.close(self._descriptor)

    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def _require(self, end: int) -> None:
        size = self._size()
        if end > size:
            raise invalid_input(
                f"Invalid offset + byte size for shared memory region: '{self._region}': its object was shortened to "
                f"{size} bytes, expected at least {end}"
            )


def invalid_arguments(region: str, reason: str) -> ServeError:
    """The error of a registration with invalid arguments, with the text of Triton."""
    return invalid_input(f"failed to register shared memory region '{region}': invalid args: {reason}")


def _open(region: str, key: str) -> int:
    name = key.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise invalid_arguments(region, f"expected as key the name of a shared memory object, got {key!r}")
    if name.startswith(RESERVED_PREFIX):
        raise invalid_arguments(region, f"keys that start with '{RESERVED_PREFIX}' are reserved, got '{key}'")
    try:
        # The flags of shm_open, and NONBLOCK, so that a pipe of that name is rejected instead of waited for.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(FOLDER / name, flags)
    except (OSError, UnicodeEncodeError):
        raise _cannot_open(key) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _cannot_open(key)
    return descriptor


def _cannot_open(key: str) -> ServeError:
    return ServeError(ErrorKind.INTERNAL, f"Unable to open shared memory region: '{key}'")
