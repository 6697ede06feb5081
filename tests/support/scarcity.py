"""Makes this process run out of memory, descriptors, threads or disk space."""

import gc
import resource
import threading
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
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Limit the size of files, so that writes fail as on a full disk."""
    with _limit(resource.RLIMIT_FSIZE, nbytes):
        yield


def with_files_of_at_most(nbytes: int) -> str:
    """A Python program that runs ``ortserve`` with its arguments in a process with this limit."""
    limit = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({nbytes}, {nbytes}))"
    return f"from ortserve.cli.main import main; {limit}; sys.exit(main(sys.argv[1:]))"


@contextmanager
def _limit(kind: int, value: int) -> Iterator[None]:
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)


@contextmanager
def no_threads(*, but: int = 0) -> Iterator[None]:
    """Prevent that threads start, except for ``but``: their stacks take more address space than is left."""
    size = threading.stack_size(2**30)
    try:
        with little_memory(but * 2**30 + 2**28):
            yield
    finally:
        threading.stack_size(size)
