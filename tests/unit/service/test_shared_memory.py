"""Registered regions and their leases."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from ortserve.core.region import RegionSpan
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.shared_memory import RegionStatus, SharedMemory
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
    """Whether this process has the object open; descriptors are closed on a thread."""
    links = (os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir())
    return str(FOLDER / key[1:]) in links


def settle(regions: SharedMemory) -> None:
    """Wait for everything that was given to the threads."""
    regions.threads.shutdown()


def refusal(regions: SharedMemory, name: str = "r", key: str = "/none", offset: int = 0, size: int = 8) -> ServeError:
    with pytest.raises(ServeError) as caught:
        regions.register(name, key, offset, size)
    return caught.value


def test_registered_regions_are_described_in_their_order(regions: SharedMemory, key: str) -> None:
    regions.register("b", key, 8, 16)
    regions.register("a", key[1:], 0, 64)
    assert regions.status("") == [RegionStatus("b", key, 8, 16), RegionStatus("a", key[1:], 0, 64)]
    assert regions.status("a") == [RegionStatus("a", key[1:], 0, 64)]
    with pytest.raises(ServeError, match="Unable to find system shared memory region: 'c'") as caught:
        regions.status("c")
    assert caught.value.kind is ErrorKind.NOT_FOUND


def test_name_that_is_taken_is_refused_until_it_is_free(regions: SharedMemory, key: str) -> None:
    regions.register("r", key, 0, 8)
    error = refusal(regions, key=key)
    assert (error.kind, error.message) == (ErrorKind.ALREADY_EXISTS, "shared memory region 'r' already in manager")
    regions.unregister("r")
    regions.register("r", key, 0, 8)


def test_unregistering_closes_one_or_all_and_never_complains(regions: SharedMemory, key: str) -> None:
    for name in "abc":
        regions.register(name, key, 0, 8)
    regions.unregister("b")
    regions.unregister("b")
    assert [region.name for region in regions.status("")] == ["a", "c"]
    assert is_open(key)
    regions.unregister("")
    regions.unregister("")
    assert regions.status("") == []
    settle(regions)
    assert not is_open(key)


def test_leased_region_outlives_its_registration(regions: SharedMemory, key: str) -> None:
    regions.register("r", key, 8, 16)
    span = RegionSpan("r", 4, 2)
    first, second = regions.lease([span, span]), regions.lease([span])
    regions.unregister("r")
    regions.register("r", key, 0, 8)  # another region of that name is none of theirs
    assert first.memory(span).read(4, 2) == bytes([12, 13])
    first.release()
    assert second.memory(span).read(4, 2) == bytes([12, 13])
    second.release()
    regions.unregister("r")
    settle(regions)
    assert not is_open(key)


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (RegionSpan("r", 17, 0), "Invalid offset for shared memory region: 'r'"),
        (RegionSpan("r", 2**200, 1), "Invalid offset for shared memory region: 'r'"),
        (RegionSpan("r", 16, 1), "Invalid offset + byte size for shared memory region: 'r'"),
        (RegionSpan("r", 1, 2**200), "Invalid offset + byte size for shared memory region: 'r'"),
    ],
)
def test_span_that_its_region_does_not_hold_is_refused(
    regions: SharedMemory, key: str, span: RegionSpan, text: str
) -> None:
    regions.register("r", key, 8, 16)
    with pytest.raises(ServeError) as caught:
        regions.lease([RegionSpan("r", 0, 16), span])
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message.startswith(text)
    regions.unregister("r")
    settle(regions)
    assert not is_open(key)  # nothing was leased


def test_span_of_no_region_is_not_found(regions: SharedMemory) -> None:
    with pytest.raises(ServeError, match="Unable to find shared memory region: 'r'") as caught:
        regions.lease([RegionSpan("r", 0, 1)])
    assert caught.value.kind is ErrorKind.NOT_FOUND


def test_nothing_but_forgetting_is_allowed_where_the_operator_does_not_allow_it(key: str) -> None:
    regions = SharedMemory(is_allowed=False)
    with pytest.raises(ServeError) as leased:
        regions.lease([RegionSpan("r", 0, 1)])
    with pytest.raises(ServeError) as on_gpu:
        regions.register_cuda("r")
    for error in (refusal(regions, key=key), leased.value, on_gpu.value):
        assert error.kind is ErrorKind.UNSUPPORTED
        assert error.message.startswith("Client shared memory is disabled. Start the server with '--allow-client-shm'")
    regions.unregister("")
    regions.unregister("r")
    assert regions.status("") == []


def test_regions_on_gpus_are_refused_and_never_there(regions: SharedMemory) -> None:
    with pytest.raises(ServeError) as caught:
        regions.register_cuda("r")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == "failed to register CUDA shared memory region: 'r', GPUs not supported"
    regions.unregister_cuda("")
    regions.unregister_cuda("r")
    regions.cuda_status("")
    with pytest.raises(ServeError, match="Unable to find cuda shared memory region: 'r'") as unknown:
        regions.cuda_status("r")
    assert unknown.value.kind is ErrorKind.NOT_FOUND


@pytest.mark.parametrize("name", ["", "x" * 1025])
def test_name_has_a_length(regions: SharedMemory, key: str, name: str) -> None:
    assert refusal(regions, name, key).kind is ErrorKind.INVALID_INPUT


@pytest.mark.parametrize(("offset", "size"), [(-1, 8), (0, -1), (2**63, 0), (0, 2**64)])
def test_sizes_that_no_file_has_are_refused(regions: SharedMemory, key: str, offset: int, size: int) -> None:
    error = refusal(regions, key=key, offset=offset, size=size)
    assert error.kind is ErrorKind.INVALID_INPUT
    assert "invalid args" in error.message


def test_regions_are_bounded_so_that_descriptors_are_left_for_connections(key: str) -> None:
    regions = SharedMemory(is_allowed=True, max_regions=2)
    regions.register("a", key, 0, 8)
    regions.register("b", key, 0, 8)
    error = refusal(regions, "c", key)
    assert error.kind is ErrorKind.OVERLOADED
    assert error.message == "cannot register shared memory region 'c': expected at most 2 regions"
    regions.unregister("a")
    regions.register("c", key, 0, 8)


@pytest.mark.parametrize(("limit", "regions"), [(8, 2), (1, 1), (resource.RLIM_INFINITY, 16384)])
def test_bound_is_a_quarter_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, key: str, limit: int, regions: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    bounded = SharedMemory(is_allowed=True)
    if regions < 10:
        for number in range(regions):
            bounded.register(str(number), key, 0, 8)
        assert refusal(bounded, "one more", key).kind is ErrorKind.OVERLOADED
    else:
        bounded.register("r", key, 0, 8)
