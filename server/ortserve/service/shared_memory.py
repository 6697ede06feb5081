"""The regions of shared memory that callers have registered, and who uses them at the moment."""

import resource
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ortserve.core.region import RegionMemory, RegionSpan
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.service.shared_object import SharedObject, invalid_arguments

SYSTEM_SHARED_MEMORY: Final = "system_shared_memory"
"""The protocol's name for this extension."""

_DISABLED: Final = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm' (option allow_client_shm) to enable."
)
_MAX_SIZE: Final = 2**63 - 1  # of a file
_MAX_NAME: Final = 1024


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """A registered region as the protocol describes it; sizes in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int


class _Region:
    """A region's memory, open while the region is registered or leased."""

    def __init__(self, status: RegionStatus, memory: RegionMemory) -> None:
        self.status = status
        self.memory = memory
        self.holders = 1  # the registration


class SharedMemory:
    """Registers regions and leases them to requests. Loop thread only, but for what ``threads`` are given to do.

    All that is registered ends with the process: a server that starts knows no region.
    """

    def __init__(self, *, is_allowed: bool, max_regions: int | None = None) -> None:
        """Begin with no region.

        Args:
            is_allowed: Whether callers may register any.
            max_regions: Each holds a file descriptor; by default a quarter of those that the process may open.
        """
        self.is_allowed = is_allowed
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="shared-memory")
        """For copies that would hold the loop up; none is started before the first."""
        self._max_regions = max_regions or _quarter_of_descriptors()
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Let requests use ``byte_size`` bytes, from ``offset`` on, of the shared memory object ``key`` as ``name``.

        Raises:
            ServeError: unsupported, where the operator does not allow it; already_exists, for a name that is taken;
                overloaded; invalid_input, for a name that is empty or too long, a key that names no object and bytes
                beyond the object's end; internal, when the object cannot be opened.
        """
        self._require_allowed()
        if not 0 < len(name) <= _MAX_NAME:
            raise invalid_input(
                f"the name of a shared memory region has 1 to {_MAX_NAME} characters, got one of {len(name)}"
            )
        if name in self._regions:
            raise ServeError(ErrorKind.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        if len(self._regions) >= self._max_regions:
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"cannot register shared memory region '{name}': expected at most {self._max_regions} regions",
            )
        if not (0 <= offset <= _MAX_SIZE and 0 <= byte_size <= _MAX_SIZE):
            raise invalid_arguments(name, f"expected offset and byte_size to be sizes, got {offset} and {byte_size}")
        memory = SharedObject(name, key, offset, byte_size)
        self._regions[name] = _Region(RegionStatus(name, key, offset, byte_size), memory)

    def register_cuda(self, name: str) -> None:
        """Refuse a region on a GPU.

        Raises:
            ServeError: unsupported, where the operator does not allow regions at all; else invalid_input.
        """
        self._require_allowed()
        raise invalid_input(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")

    def unregister(self, name: str) -> None:
        """Forget a region, or all for ``""``. Requests that use it finish; a name that nobody knows is no error."""
        for gone in [name] if name else list(self._regions):
            region = self._regions.pop(gone, None)
            if region is not None:
                self._release(region)

    def unregister_cuda(self, name: str) -> None:
        """Forget a region on a GPU, or all for ``""``; there is none, and that is no error."""

    def status(self, name: str) -> list[RegionStatus]:
        """Describe a region, or all for ``""``, in the order of their registration.

        Raises:
            ServeError: not_found.
        """
        if not name:
            return [region.status for region in self._regions.values()]
        region = self._regions.get(name)
        if region is None:
            raise ServeError(ErrorKind.NOT_FOUND, f"Unable to find system shared memory region: '{name}'")
        return [region.status]

    def cuda_status(self, name: str) -> None:
        """Raises ServeError: not_found, for any name; ``""`` asks for all regions on GPUs, of which there are none."""
        if name:
            raise ServeError(ErrorKind.NOT_FOUND, f"Unable to find cuda shared memory region: '{name}'")

    def lease(self, spans: Iterable[RegionSpan]) -> "Leases":
        """Keep the regions of all ``spans`` open until the leases are released.

        Raises:
            ServeError: unsupported, where the operator does not allow regions; not_found, for one that is not
                registered; invalid_input, for a span that its region does not hold.
        """
        self._require_allowed()
        leased: dict[str, _Region] = {}
        for span in spans:
            region = self._regions.get(span.region)
            if region is None:
                raise ServeError(ErrorKind.NOT_FOUND, f"Unable to find shared memory region: '{span.region}'")
            size = region.status.byte_size
            if span.offset > size:
                raise invalid_input(
                    f"Invalid offset for shared memory region: '{span.region}': "
                    f"expected at most {size}, got {span.offset}"
                )
            if span.offset + span.byte_size > size:
                raise invalid_input(
                    f"Invalid offset + byte size for shared memory region: '{span.region}': "
                    f"expected at most {size}, got {span.offset} + {span.byte_size}"
                )
            leased[span.region] = region
        return Leases(list(leased.values()), self._release)

    def _require_allowed(self) -> None:
        if not self.is_allowed:
            raise ServeError(ErrorKind.UNSUPPORTED, _DISABLED)

    def _release(self, region: _Region) -> None:
        region.holders -= 1
        if region.holders == 0:
            # On a thread: the last to close an object that was unlinked waits for all of its pages to be freed.
            self.threads.submit(region.memory.close)


class Leases:
    """Regions that stay open, unregistered or not, until ``release``. Loop thread only."""

    def __init__(self, regions: Sequence[_Region], release: Callable[[_Region], None]) -> None:
        self._regions = regions
        self._release = release
        for region in regions:
            region.holders += 1
        self._memory = {region.status.name: region.memory for region in regions}

    def memory(self, span: RegionSpan) -> RegionMemory:
        return self._memory[span.region]

    def release(self) -> None:
        """Once only; afterwards the memory may be closed."""
        for region in self._regions:
            self._release(region)


def _quarter_of_descriptors() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 16384 if limit == resource.RLIM_INFINITY else max(1, limit // 4)
