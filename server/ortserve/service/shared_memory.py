"""The regions of shared memory that callers have registered, and who uses them at the moment."""

import asyncio
import resource
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from ortserve.core.region import RegionMemory, RegionSpan
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.service.shared_object import SharedObject, invalid_arguments

SYSTEM_SHARED_MEMORY: Final = "system_shared_memory"
CUDA_SHARED_MEMORY: Final = "cuda_shared_memory"
"""The protocol's names for these extensions."""

OpenOnDevice: TypeAlias = Callable[[str, bytes, int, int], RegionMemory]
"""Opens memory on a GPU for a region: by the region's name, the allocation's handle, the GPU's number, and the bytes
wanted. Blocks. Raises ServeError."""

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


@dataclass(frozen=True, slots=True)
class CudaRegionStatus:
    """A registered region on a GPU as the protocol describes it; size in bytes."""

    name: str
    device_id: int
    byte_size: int


_Status = TypeVar("_Status", RegionStatus, CudaRegionStatus)


class _Region:
    """A region's memory, open while the region is registered or leased."""

    def __init__(self, status: RegionStatus | CudaRegionStatus, memory: RegionMemory) -> None:
        self.status = status
        self.memory = memory
        self.holders = 1  # the registration


class SharedMemory:
    """Registers regions and leases them to requests. Loop thread only, but for what ``threads`` are given to do.

    All that is registered ends with the process: a server that starts knows no region. Names are of one space, whatever
    memory they are for.
    """

    def __init__(
        self, *, is_allowed: bool, open_on_device: OpenOnDevice | None = None, max_regions: int | None = None
    ) -> None:
        """Begin with no region.

        Args:
            is_allowed: Whether callers may register any.
            open_on_device: Called on the threads; None where there are no GPUs.
            max_regions: Each holds a file descriptor; by default a quarter of those that the process may open.
        """
        self.is_allowed = is_allowed
        self._open_on_device = open_on_device
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="shared-memory")
        """For copies that would hold the loop up; none is started before the first."""
        self._max_regions = max_regions or _quarter_of_descriptors()
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Let requests use ``byte_size`` bytes, from ``offset`` on, of the shared memory object ``key`` as ``name``.

        Raises:
            ServeError: unsupported, where the operator does not allow it; already_exists, for a name that is taken;
                overloaded; invalid_input, for a name that is empty or too long, a key that names no object, a region of
                0 bytes and bytes beyond the object's end; internal, when the object cannot be opened.
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
            name: For requests.
            handle: Of the allocation: a ``cudaIpcMemHandle_t``.
            device_id: Of the GPU, as this process counts them.
            byte_size: Of the region.

        Raises:
            ServeError: As ``register``; invalid_input, too, where there are no GPUs and for a handle of nothing.
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
            self._check_name(name)  # somebody may have taken it meanwhile
        except ServeError:
            self._release(region)
            raise
        self._regions[name] = region

    def unregister(self, name: str) -> None:
        """Forget a region, or all for ``""``. Requests that use it finish; a name that nobody knows is no error."""
        self._forget(RegionStatus, name)

    def unregister_cuda(self, name: str) -> None:
        """Forget a region on a GPU, as ``unregister`` does others."""
        self._forget(CudaRegionStatus, name)

    def status(self, name: str) -> list[RegionStatus]:
        """Describe a region, or all for ``""``, in the order of their registration.

        Raises:
            ServeError: not_found.
        """
        return self._describe(RegionStatus, name, "system")

    def cuda_status(self, name: str) -> list[CudaRegionStatus]:
        """Describe a region on a GPU, as ``status`` does others."""
        return self._describe(CudaRegionStatus, name, "cuda")

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

    def _close_unwanted(self, opening: asyncio.Future[RegionMemory]) -> None:
        """The caller left while its region was being opened."""
        if not opening.cancelled() and opening.exception() is None:
            self.threads.submit(opening.result().close)

    def _check_name(self, name: str) -> None:
        """See that a region of this name may be registered."""
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

    def _forget(self, kind: type[RegionStatus] | type[CudaRegionStatus], name: str) -> None:
        for gone in [name] if name else list(self._regions):
            region = self._regions.get(gone)
            if region is not None and isinstance(region.status, kind):
                self._release(self._regions.pop(gone))

    def _describe(self, kind: type[_Status], name: str, told_as: str) -> list[_Status]:
        found = [
            region.status
            for region in self._regions.values()
            if isinstance(region.status, kind) and name in ("", region.status.name)
        ]
        if name and not found:
            raise ServeError(ErrorKind.NOT_FOUND, f"Unable to find {told_as} shared memory region: '{name}'")
        return found

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
        self.may_wait = any(region.memory.may_wait for region in regions)
        """Whether copies from or to one of them may wait for something first."""

    def memory(self, span: RegionSpan) -> RegionMemory:
        return self._memory[span.region]

    def release(self) -> None:
        """Once only; afterwards the memory may be closed."""
        for region in self._regions:
            self._release(region)


def _quarter_of_descriptors() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 16384 if limit == resource.RLIM_INFINITY else max(1, limit // 4)
