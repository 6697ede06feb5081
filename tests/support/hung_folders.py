"""A folder on a real file system that does not answer, as NFS without its server."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from apart import UnavailableError

_DETACH: Final = 2
"""MNT_DETACH of ``umount2``."""


@contextmanager
def hung(folder: Path) -> Iterator[None]:
    """Make each access to a folder wait, until the context exits. Its content then comes back.

    A FUSE file system without a program behind it is mounted over the folder. Accesses that wait fail at the end.

    Raises:
        UnavailableError: The kernel has no FUSE, or does not permit this process to mount.
    """
    system = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        raise UnavailableError(f"/dev/fuse cannot be opened: {error.strerror}") from None
    try:
        options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        if system.mount(b"hung", os.fsencode(folder), b"fuse", 0, options.encode()):
            raise UnavailableError(f"FUSE cannot be mounted: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            system.umount2(os.fsencode(folder), _DETACH)
    finally:
        os.close(device)  # ends all accesses that wait
