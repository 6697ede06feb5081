"""The shared memory regions that callers have registered, and the leases of requests on them."""

import asyncio
import resource
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias, TypeVar

from ortserve.core.region import RegionMemory, RegionSpan
from ortserve.core.thread_pool import ThreadPool
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.service.shared_object import SharedObject, invalid_arguments

SYSTEM_SHARED_MEMORY: Final = "system_shared_memory"
CUDA_SHARED_MEMORY: Final = "cuda_shared_memory"
"""The protocol's names for these extensions."""

OpenOnDevice: TypeAlias = Callable[[str, bytes, int, int], RegionMemory]
"""Opens memory on a GPU for a region, given the name of the region, the handle of the allocation, the number of the GPU
and the size in bytes. Blocks. Raises ServeError."""

_DISABLED: Final = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm' (option allow_client_shm) to enable."
)
_MAX_SIZE: Final = 2**63 - 1  # the maximum size of a file
_MAX_NAME: Final = 1024
_MOST_REGIONS: Final = 16_384


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """A registered region as the protocol describes it; sizes in bytes."""

    memory: ClassVar = "system"
    name: str
    key: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class CudaRegionStatus:
    """A registered region on a GPU as the protocol describes it; size in bytes."""

    memory: ClassVar = "cuda"
    name: str
    device_id: int
    byte_size: int


_Status = TypeVar("_Status", bound=RegionStatus | CudaRegionStatus)


class _Region:
    """A region's memory, open while the region is registered or leased."""

    def __init__(self, status: RegionStatus | CudaRegionStatus, memory: RegionMemory) -> None:
        self.status = status
        self.memory = memory
        self.holders = 1  # the registration


class SharedMemory:
    """Registers regions and leases them to requests. Loop thread only, except work on ``threads``.

    Registrations end with the process. Regions of both kinds share one name space.
    """

    def __init__(
        self, *, is_allowed: bool, open_on_device: OpenOnDevice | None = None, max_regions: int | None = None
    ) -> None:
        """Start without regions.

        Args:
            is_allowed: Whether callers may register regions.
            open_on_device: Opens memory on GPUs; called on ``threads``. None without GPUs.
            max_regions: Maximum number of regions. Each holds a file descriptor, so the default is a quarter of the
                descriptors that the process may open, and at most 16,384, because some calls visit all regions in one
                turn of the event loop.
        """
        self.is_allowed = is_allowed
        self._open_on_device = open_on_device
        self.threads = ThreadPool(2, "shared-memory")
        """Threads for copies that would block the loop."""
        self.max_regions: Final = max_regions or _default_max_regions()
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Let requests use ``byte_size`` bytes, from ``offset`` on, of the shared memory object ``key`` as ``name``.

        Raises:
            ServeError: unsupported, if the operator does not allow regions; already_exists, for a name in use;
                overloaded, for too many regions; invalid_input, for a name that is empty or too long, a key that is not
                the name of an object, a region of 0 bytes, and bytes beyond the end of the object; internal, if the
                object cannot be opened.
        """
        self._check_name(name)
        if not (0 <= offset <= _MAX_SIZE and 0 <= byte_size <= _MAX_SIZE):
            raise invalid_arguments(name, f"expected offset and byte_size to be sizes, got {offset} and {byte_size}")
        if byte_size == 0:
            raise invalid_arguments(name, "expected byte_size to be at least 1, got 0")
        memory = SharedObject(name, key, offset, byte_size)
        self._regions[name] = _Region(RegionStatus(name, key, offset, byte_size), memory)

    async def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Let requests use the first ``byte_size`` bytes of an allocation of another process on a GPU as ``name``.

        Args:
            name: The name that requests use.
            handle: The ``cudaIpcMemHandle_t`` of the allocation.
            device_id: The number of the GPU in this process.
            byte_size: Size of the region.

        Raises:
            ServeError: The errors of ``register``; invalid_input also without GPUs and for an invalid handle.
        """
        self._check_name(name)
        if byte_size == 0:
            raise invalid_arguments(name, "expected byte_size to be at least 1, got 0")
        if self._open_on_device is None:
            raise invalid_input(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(self.threads, self._open_on_device, name, handle, device_id, byte_size)
        try:
            memory = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_unwanted)
            raise
        region = _Region(CudaRegionStatus(name, device_id, byte_size), memory)
        try:
            self._check_name(name)  # another registration may have taken it meanwhile
        except ServeError:
            self._release([region])
            raise
        self._regions[name] = region

    def unregister(self, kind: type[RegionStatus | CudaRegionStatus], name: str) -> None:
        """Unregister a region of a kind, or all for ``""``. An unknown name is not an error.

        Requests that use the region continue.
        """
        released = [region for region in self._named(name) if isinstance(region.status, kind)]
        for region in released:
            del self._regions[region.status.name]
        self._release(released)

    def status(self, kind: type[_Status], name: str) -> list[_Status]:
        """Describe a region of a kind, or all for ``""`` in the order of registration.

        Raises:
            ServeError: not_found.
        """
        found: list[_Status] = [region.status for region in self._named(name) if isinstance(region.status, kind)]
        if name and not found:
            raise ServeError(ErrorKind.NOT_FOUND, f"Unable to find {kind.memory} shared memory region: '{name}'")
        return found

    def _named(self, name: str) -> Iterable[_Region]:
        """The region of a name, if there is one, or all for ``""``. There may be thousands."""
        if not name:
            return self._regions.values()
        region = self._regions.get(name)
        return () if region is None else (region,)

    def lease(self, spans: Iterable[RegionSpan]) -> "Leases":
        """Keep the regions of all ``spans`` open until the leases are released.

        Raises:
            ServeError: unsupported, if the operator does not allow regions; not_found, for a region that is not
                registered; invalid_input, for a span beyond the end of its region.
        """
        self._require_allowed()
        leased: dict[str, _Region] = {}
        for span in spans:
            region = self._regions.get(span.region)
            if region is None:
                raise ServeError(ErrorKind.NOT_FOUND, f"Unable to find shared memory region: '{span.region}'")
            size = region.status.byte_size
            if span.offset > size or (span.offset == size and span.byte_size):  # Triton's words, also at the end
                raise invalid_input(
                    f"Invalid offset for shared memory region: '{span.region}': "
                    f"expected an offset within its {size} bytes, got {span.offset}"
                )
            if span.offset + span.byte_size > size:
                raise invalid_input(
                    f"Invalid offset + byte size for shared memory region: '{span.region}': "
                    f"expected at most {size}, got {span.offset} + {span.byte_size}"
                )
            leased[span.region] = region
        return Leases(list(leased.values()), self._release)

    def _close_unwanted(self, opening: asyncio.Future[RegionMemory]) -> None:
        """Close memory whose registration was cancelled while it was being opened."""
        if not opening.cancelled() and opening.exception() is None:
            self.threads.submit(opening.result().close)

    def _check_name(self, name: str) -> None:
        """Raise ServeError if a region of this name may not be registered."""
        self._require_allowed()
        if not 0 < len(name) <= _MAX_NAME:
            raise invalid_input(
                f"name of a shared memory region: expected 1 to {_MAX_NAME} characters, got {len(name)}"
            )
        if name in self._regions:
            raise ServeError(ErrorKind.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        if len(self._regions) >= self.max_regions:
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"cannot register shared memory region '{name}': expected at most {self.max_regions} regions",
            )

    def _require_allowed(self) -> None:
        if not self.is_allowed:
            raise ServeError(ErrorKind.UNSUPPORTED, _DISABLED)

    def _release(self, regions: Iterable[_Region]) -> None:
        unused = []
        for region in regions:
            region.holders -= 1
            if region.holders == 0:
                unused.append(region.memory)
        if unused:
            # On a thread: closing the last descriptor of an unlinked object waits until the kernel has freed its pages.
            # One task closes all regions, of which there may be thousands.
            self.threads.submit(_close, unused)


class Leases:
    """Keeps regions open until ``release``, even if they are unregistered meanwhile. Loop thread only."""

    def __init__(self, regions: Sequence[_Region], release: Callable[[Iterable[_Region]], None]) -> None:
        self._regions = regions
        self._release = release
        for region in regions:
            region.holders += 1
        self._memory = {region.status.name: region.memory for region in regions}
        self.may_wait = any(region.memory.may_wait for region in regions)
        """Whether a copy from or to one of the regions may block."""

    def memory(self, span: RegionSpan) -> RegionMemory:
        return self._memory[span.region]

    def release(self) -> None:
        """Release the regions. Call it once; the memory may be closed afterwards."""
        self._release(self._regions)


def _close(memories: Sequence[RegionMemory]) -> None:
    for memory in memories:
        with suppress(Exception):  # a failure must not keep the others open
            memory.close()


def _default_max_regions() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_REGIONS if limit == resource.RLIM_INFINITY else max(1, min(_MOST_REGIONS, limit // 4))
