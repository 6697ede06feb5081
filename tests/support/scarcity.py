"""Makes this process run out of memory or of descriptors."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def little_memory(left_bytes: int) -> Iterator[None]:
    """Limit the address space that the process may still reserve to ``left_bytes``."""
    gc.collect()  # otherwise garbage of earlier tests could be freed meanwhile
    reserved_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with _limit(resource.RLIMIT_AS, reserved_bytes + left_bytes):
        yield


@contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """Prevent descriptors with this number or a higher one."""
    with _limit(resource.RLIMIT_NOFILE, count):
        yield


@contextmanager
def _limit(kind: int, value: int) -> Iterator[None]:
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)
