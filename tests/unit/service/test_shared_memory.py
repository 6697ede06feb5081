"""Registered regions and their leases."""

import asyncio
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ortserve.core.region import RegionMemory, RegionSpan
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.shared_memory import CudaRegionStatus, RegionStatus, SharedMemory
from ortserve.service.shared_object import FOLDER


@pytest.fixture
def key() -> Iterator[str]:
    """The key of an object of 64 bytes."""
    path = FOLDER / f"ortserve-test-{uuid4().hex}"
    path.write_bytes(bytes(range(64)))
    yield f"/{path.name}"
    path.unlink()


@pytest.fixture
def regions() -> SharedMemory:
    return SharedMemory(is_allowed=True)


def is_open(key: str) -> bool:
    """Whether this process has the object open; a thread closes descriptors."""
    links = (os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir())
    return str(FOLDER / key[1:]) in links


def settle(regions: SharedMemory) -> None:
    """Wait for all work of the threads."""
    regions.threads.shutdown()


def refusal(regions: SharedMemory, name: str = "r", key: str = "/none", offset: int = 0, size: int = 8) -> ServeError:
    with pytest.raises(ServeError) as caught:
        regions.register(name, key, offset, size)
    return caught.value


def test_registered_regions_are_described_in_the_order_of_registration(regions: SharedMemory, key: str) -> None:
    regions.register("b", key, 8, 16)
    regions.register("a", key[1:], 0, 64)
    assert regions.status(RegionStatus, "") == [RegionStatus("b", key, 8, 16), RegionStatus("a", key[1:], 0, 64)]
    assert regions.status(RegionStatus, "a") == [RegionStatus("a", key[1:], 0, 64)]
    with pytest.raises(ServeError, match="Unable to find system shared memory region: 'c'") as caught:
        regions.status(RegionStatus, "c")
    assert caught.value.kind is ErrorKind.NOT_FOUND


class CountedName(str):
    """A name that counts comparisons with others."""

    __slots__ = ()
    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return super().__eq__(other)


def test_region_is_found_without_a_look_at_the_others(regions: SharedMemory, key: str) -> None:
    """A look at 100,000 regions takes 35 ms of the event loop."""
    for number in range(50):
        regions.register(CountedName(number), key, 0, 8)
    CountedName.comparisons = 0
    assert regions.status(RegionStatus, "49") == [RegionStatus("49", key, 0, 8)]
    assert CountedName.comparisons < 10


def test_name_in_use_is_rejected_until_it_is_free(regions: SharedMemory, key: str) -> None:
    regions.register("r", key, 0, 8)
    error = refusal(regions, key=key)
    assert (error.kind, error.message) == (ErrorKind.ALREADY_EXISTS, "shared memory region 'r' already in manager")
    regions.unregister(RegionStatus, "r")
    regions.register("r", key, 0, 8)


def test_unregistering_closes_one_region_or_all_and_never_fails(regions: SharedMemory, key: str) -> None:
    for name in "abc":
        regions.register(name, key, 0, 8)
    regions.unregister(RegionStatus, "b")
    regions.unregister(RegionStatus, "b")
    assert [region.name for region in regions.status(RegionStatus, "")] == ["a", "c"]
    assert is_open(key)
    regions.unregister(RegionStatus, "")
    regions.unregister(RegionStatus, "")
    assert regions.status(RegionStatus, "") == []
    settle(regions)
    assert not is_open(key)


def test_unregistering_all_regions_is_one_task_of_the_threads(
    regions: SharedMemory, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        regions.register(f"r{number}", key, 0, 8)
    submit, tasks = regions.threads.submit, 0

    def count_tasks(*work: Any) -> Any:
        nonlocal tasks
        tasks += 1
        return submit(*work)

    monkeypatch.setattr(regions.threads, "submit", count_tasks)
    regions.unregister(RegionStatus, "")
    assert tasks == 1
    settle(regions)
    assert regions.status(RegionStatus, "") == []
    assert not is_open(key)


def test_leased_region_outlives_its_registration(regions: SharedMemory, key: str) -> None:
    regions.register("r", key, 8, 16)
    span = RegionSpan("r", 4, 2)
    first, second = regions.lease([span, span]), regions.lease([span])
    regions.unregister(RegionStatus, "r")
    regions.register("r", key, 0, 8)  # the leases do not refer to the new region
    assert first.memory(span).read(4, 2) == bytes([12, 13])
    first.release()
    assert second.memory(span).read(4, 2) == bytes([12, 13])
    second.release()
    regions.unregister(RegionStatus, "r")
    settle(regions)
    assert not is_open(key)


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (RegionSpan("r", 17, 0), "Invalid offset for shared memory region: 'r'"),
        (RegionSpan("r", 2**200, 1), "Invalid offset for shared memory region: 'r'"),
        (RegionSpan("r", 16, 1), "Invalid offset for shared memory region: 'r'"),
        (RegionSpan("r", 15, 2), "Invalid offset + byte size for shared memory region: 'r'"),
        (RegionSpan("r", 1, 2**200), "Invalid offset + byte size for shared memory region: 'r'"),
    ],
)
def test_span_beyond_the_end_of_its_region_is_rejected(
    regions: SharedMemory, key: str, span: RegionSpan, text: str
) -> None:
    regions.register("r", key, 8, 16)
    with pytest.raises(ServeError) as caught:
        regions.lease([RegionSpan("r", 0, 16), span])
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message.startswith(text)
    regions.unregister(RegionStatus, "r")
    settle(regions)
    assert not is_open(key)  # there was no lease


def test_span_of_an_unknown_region_is_not_found(regions: SharedMemory) -> None:
    with pytest.raises(ServeError, match="Unable to find shared memory region: 'r'") as caught:
        regions.lease([RegionSpan("r", 0, 1)])
    assert caught.value.kind is ErrorKind.NOT_FOUND


async def test_only_unregistering_works_if_the_operator_does_not_allow_regions(key: str) -> None:
    regions = SharedMemory(is_allowed=False)
    with pytest.raises(ServeError) as leased:
        regions.lease([RegionSpan("r", 0, 1)])
    with pytest.raises(ServeError) as on_gpu:
        await regions.register_cuda("r", b"", 0, 1)
    for error in (refusal(regions, key=key), leased.value, on_gpu.value):
        assert error.kind is ErrorKind.UNSUPPORTED
        assert error.message.startswith("Client shared memory is disabled. Start the server with '--allow-client-shm'")
    regions.unregister(RegionStatus, "")
    regions.unregister(RegionStatus, "r")
    assert regions.status(RegionStatus, "") == []


async def test_regions_on_gpus_are_rejected_without_gpus(regions: SharedMemory) -> None:
    with pytest.raises(ServeError) as caught:
        await regions.register_cuda("r", bytes(64), 0, 8)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == "failed to register CUDA shared memory region: 'r', GPUs not supported"
    regions.unregister(CudaRegionStatus, "")
    regions.unregister(CudaRegionStatus, "r")
    assert regions.status(CudaRegionStatus, "") == []
    with pytest.raises(ServeError, match="Unable to find cuda shared memory region: 'r'") as unknown:
        regions.status(CudaRegionStatus, "r")
    assert unknown.value.kind is ErrorKind.NOT_FOUND


@pytest.mark.parametrize("name", ["", "x" * 1025])
def test_name_of_an_invalid_length_is_rejected(regions: SharedMemory, key: str, name: str) -> None:
    assert refusal(regions, name, key).kind is ErrorKind.INVALID_INPUT


@pytest.mark.parametrize(("offset", "size"), [(-1, 8), (0, -1), (2**63, 0), (0, 2**64), (0, 0)])
def test_invalid_sizes_are_rejected(regions: SharedMemory, key: str, offset: int, size: int) -> None:
    error = refusal(regions, key=key, offset=offset, size=size)
    assert error.kind is ErrorKind.INVALID_INPUT
    assert "invalid args" in error.message


def test_number_of_regions_is_limited_to_leave_descriptors_for_connections(key: str) -> None:
    regions = SharedMemory(is_allowed=True, max_regions=2)
    regions.register("a", key, 0, 8)
    regions.register("b", key, 0, 8)
    error = refusal(regions, "c", key)
    assert error.kind is ErrorKind.OVERLOADED
    assert error.message == "cannot register shared memory region 'c': expected at most 2 regions"
    regions.unregister(RegionStatus, "a")
    regions.register("c", key, 0, 8)


@pytest.mark.parametrize(("limit", "regions"), [(8, 2), (1, 1), (1_048_576, 16_384), (resource.RLIM_INFINITY, 16_384)])
def test_default_limit_is_a_quarter_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, limit: int, regions: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert SharedMemory(is_allowed=True).max_regions == regions


class OnGpu(RegionMemory):
    """GPU memory, simulated in host memory."""

    may_wait = True

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        self.is_open = True

    def read(self, offset: int, byte_size: int) -> memoryview:
        return memoryview(bytes(self.content[offset : offset + byte_size]))

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self.content[offset : offset + len(data)] = data

    def close(self) -> None:
        self.is_open = False


class Gpus:
    """Opens memory of 16 bytes once ``may_open`` is set."""

    def __init__(self) -> None:
        self.may_open = threading.Event()
        self.may_open.set()
        self.opened: list[OnGpu] = []
        self.asked: list[tuple[str, bytes, int, int]] = []

    def open(self, name: str, handle: bytes, device_id: int, byte_size: int) -> OnGpu:
        self.asked.append((name, handle, device_id, byte_size))
        assert self.may_open.wait(30)
        self.opened.append(OnGpu(bytes(range(16))))
        return self.opened[-1]


async def test_regions_on_gpus_share_only_the_name_space_with_others(key: str) -> None:
    gpus = Gpus()
    regions = SharedMemory(is_allowed=True, open_on_device=gpus.open)
    regions.register("host", key, 0, 8)
    await regions.register_cuda("gpu", b"handle", 1, 16)
    assert gpus.asked == [("gpu", b"handle", 1, 16)]
    assert (
        regions.status(CudaRegionStatus, "")
        == regions.status(CudaRegionStatus, "gpu")
        == [CudaRegionStatus("gpu", 1, 16)]
    )
    assert regions.status(RegionStatus, "") == [RegionStatus("host", key, 0, 8)]
    with pytest.raises(ServeError, match="Unable to find system shared memory region: 'gpu'"):
        regions.status(RegionStatus, "gpu")
    with pytest.raises(ServeError, match="Unable to find cuda shared memory region: 'host'"):
        regions.status(CudaRegionStatus, "host")
    for name in ("host", "gpu"):
        with pytest.raises(ServeError, match=f"region '{name}' already in manager"):
            await regions.register_cuda(name, b"handle", 1, 16)
    assert refusal(regions, "gpu", key).kind is ErrorKind.ALREADY_EXISTS
    regions.unregister(RegionStatus, "gpu")
    regions.unregister(RegionStatus, "")
    assert regions.status(RegionStatus, "") == []
    assert regions.status(CudaRegionStatus, "")

    span = RegionSpan("gpu", 4, 2)
    leases = regions.lease([span])
    regions.unregister(CudaRegionStatus, "")
    assert regions.status(CudaRegionStatus, "") == []
    assert leases.may_wait
    assert leases.memory(span).read(4, 2) == bytes([4, 5])
    leases.release()
    settle(regions)
    assert [memory.is_open for memory in gpus.opened] == [False]


async def test_region_of_0_bytes_on_a_gpu_is_rejected_unopened() -> None:
    gpus = Gpus()
    regions = SharedMemory(is_allowed=True, open_on_device=gpus.open)
    with pytest.raises(ServeError, match="invalid args: expected byte_size to be at least 1, got 0"):
        await regions.register_cuda("gpu", b"handle", 0, 0)
    assert gpus.asked == []


async def test_memory_is_closed_if_its_name_was_taken_while_it_was_opened(key: str) -> None:
    gpus = Gpus()
    gpus.may_open.clear()
    regions = SharedMemory(is_allowed=True, open_on_device=gpus.open)
    registering = asyncio.ensure_future(regions.register_cuda("r", b"", 0, 8))
    await asyncio.sleep(0)
    regions.register("r", key, 0, 8)
    gpus.may_open.set()
    with pytest.raises(ServeError, match="region 'r' already in manager"):
        await registering
    settle(regions)
    assert [memory.is_open for memory in gpus.opened] == [False]
    assert regions.status(CudaRegionStatus, "") == []


async def test_memory_is_closed_if_its_registration_was_cancelled_while_it_was_opened() -> None:
    gpus = Gpus()
    gpus.may_open.clear()
    regions = SharedMemory(is_allowed=True, open_on_device=gpus.open)
    registering = asyncio.ensure_future(regions.register_cuda("r", b"", 0, 8))
    await asyncio.sleep(0)
    registering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await registering
    gpus.may_open.set()
    for _ in range(1000):
        if gpus.opened and not gpus.opened[0].is_open:
            break
        await asyncio.sleep(0.01)
    assert [memory.is_open for memory in gpus.opened] == [False]
    assert regions.status(CudaRegionStatus, "") == []
