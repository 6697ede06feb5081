"""This process as one that has used up its memory or its descriptors."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def little_memory(left_bytes: int) -> Iterator[None]:
    """The process may reserve so many more bytes of addresses."""
    gc.collect()  # what earlier tests left behind could be freed meanwhile
    reserved_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with _limit(resource.RLIMIT_AS, reserved_bytes + left_bytes):
        yield


@contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """The process may open no descriptor from this number on."""
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
