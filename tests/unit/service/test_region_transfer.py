"""One request's tensors in shared memory."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from ortserve.codecs.bounds import INLINE_TEXTS
from ortserve.core.dtypes import DataType
from ortserve.core.region import RegionInput, RegionSpan, RegionUse
from ortserve.core.tensor import Tensor
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.gate import BodyGate
from ortserve.service.region_transfer import RegionTransfer
from ortserve.service.shared_memory import RegionStatus, SharedMemory
from ortserve.service.shared_object import FOLDER, SharedObject
from scarcity import no_threads

LARGE = 8 * 1024 * 1024
"""Size of a tensor that a thread copies."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A shared memory object from the view of the caller that created it."""

    path: Path

    def content(self) -> bytes:
        return self.path.read_bytes()

    def fill(self, content: bytes) -> None:
        self.path.write_bytes(content)


@pytest.fixture
def owned() -> Iterator[Owned]:
    """An object of 64 bytes, whose values are their offsets."""
    path = FOLDER / f"ortserve-test-{uuid4().hex}"
    path.write_bytes(bytes(range(64)))
    yield Owned(path)
    path.unlink()


@pytest.fixture
def regions(owned: Owned) -> SharedMemory:
    """The whole object is the region ``r``."""
    regions = SharedMemory(is_allowed=True)
    regions.register("r", owned.path.name, 0, 64)
    return regions


@pytest.fixture
def large(owned: Owned) -> SharedMemory:
    """The object has ``LARGE`` bytes and is the region ``r``."""
    owned.fill(bytes(LARGE))
    regions = SharedMemory(is_allowed=True)
    regions.register("r", owned.path.name, 0, LARGE)
    return regions


def open_files() -> set[str]:
    return {os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}


def given(byte_size: int, *, offset: int = 0, datatype: DataType = DataType.UINT8) -> RegionInput:
    count = byte_size // datatype.itemsize
    return RegionInput("x", datatype, (count,), RegionSpan("r", offset, byte_size))


async def test_inputs_are_copied_out_of_their_regions(regions: SharedMemory, owned: Owned) -> None:
    use = RegionUse([given(4, offset=8), RegionInput("y", DataType.INT16, (1, 2), RegionSpan("r", 1, 4))], {})
    with RegionTransfer(regions, use, BodyGate(1000)) as transfer:
        x, y = await transfer.read_inputs("m")
    owned.fill(bytes(64))
    assert (x.name, x.datatype, x.array.tolist()) == ("x", DataType.UINT8, [8, 9, 10, 11])
    assert (y.name, y.datatype, y.array.tolist()) == ("y", DataType.INT16, [[0x0201, 0x0403]])


async def test_span_of_an_input_must_have_the_size_of_its_tensor(regions: SharedMemory) -> None:
    use = RegionUse([RegionInput("x", DataType.INT32, (2,), RegionSpan("r", 0, 9))], {})
    with RegionTransfer(regions, use, BodyGate(1000)) as transfer, pytest.raises(ServeError) as caught:
        await transfer.read_inputs("m")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == "input byte size mismatch for input 'x' for model 'm'. Expected 8, got 9"


async def test_outputs_are_written_only_to_their_spans(regions: SharedMemory, owned: Owned) -> None:
    outputs = [
        Tensor("a", DataType.BYTES, np.array(["é", ""], dtype=object)),
        Tensor("b", DataType.UINT8, np.full(4, 255, np.uint8)),
        Tensor("c", DataType.INT16, np.array([[1, 2, 3, 4]], np.int16)[:, ::2]),
    ]
    use = RegionUse([], {"a": RegionSpan("r", 1, 12), "c": RegionSpan("r", 60, 4)})
    with RegionTransfer(regions, use, BodyGate(1000)) as transfer:
        await transfer.write_outputs(outputs)
    expected = bytearray(range(64))
    expected[1:11] = b"\x02\0\0\0\xc3\xa9\0\0\0\0"
    expected[60:64] = b"\x01\0\x03\0"
    assert owned.content() == expected


async def test_output_that_does_not_fit_leaves_all_others_unwritten(regions: SharedMemory, owned: Owned) -> None:
    outputs = [Tensor(name, DataType.UINT8, np.full(8, 255, np.uint8)) for name in "ab"]
    use = RegionUse([], {"a": RegionSpan("r", 0, 8), "b": RegionSpan("r", 8, 7)})
    with RegionTransfer(regions, use, BodyGate(1000)) as transfer, pytest.raises(ServeError) as caught:
        await transfer.write_outputs(outputs)
    assert caught.value.kind is ErrorKind.INTERNAL
    assert caught.value.message == (
        "shared memory size specified with the request for output 'b' (7 bytes) should be at least 8 bytes to hold the "
        "results"
    )
    assert owned.content() == bytes(range(64))


async def test_large_tensors_are_copied_on_a_thread_while_the_loop_goes_on(
    large: SharedMemory, owned: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_on: set[int] = set()

    def remember(read: SharedObject, offset: int, byte_size: int) -> memoryview:
        copied_on.add(threading.get_ident())
        return whole(read, offset, byte_size)

    whole = SharedObject.read
    monkeypatch.setattr(SharedObject, "read", remember)
    use = RegionUse([given(LARGE)], {"y": RegionSpan("r", 0, LARGE)})
    with RegionTransfer(large, use, BodyGate(LARGE)) as transfer:
        (x,) = await transfer.read_inputs("m")
        assert x.array.nbytes == LARGE
        assert copied_on
        assert threading.get_ident() not in copied_on
        await transfer.write_outputs([Tensor("y", DataType.UINT8, x.array + 1)])
    assert owned.content() == b"\1" * LARGE


@pytest.mark.parametrize(("text", "count"), [(b"text", INLINE_TEXTS + 1), (b"x" * 2**21, 1)])
async def test_many_and_long_texts_are_decoded_and_encoded_on_a_thread(
    owned: Owned, monkeypatch: pytest.MonkeyPatch, text: bytes, count: int
) -> None:
    """Many take about a hundred times as long as a copy of as many bytes."""
    content = (len(text).to_bytes(4, "little") + text) * count
    owned.fill(content)
    regions = SharedMemory(is_allowed=True)
    regions.register("r", owned.path.name, 0, len(content))
    worked_on: list[int] = []

    def noted(shared: SharedObject, method: Callable[..., object], *given: object) -> object:
        worked_on.append(threading.get_ident())
        return method(shared, *given)

    for name in ("read", "write"):
        monkeypatch.setattr(SharedObject, name, partialmethod(noted, getattr(SharedObject, name)))
    span = RegionSpan("r", 0, len(content))
    use = RegionUse([RegionInput("x", DataType.BYTES, (count,), span)], {"y": span})
    with RegionTransfer(regions, use, BodyGate(len(content))) as transfer:
        (x,) = await transfer.read_inputs("m")
        await transfer.write_outputs([Tensor("y", DataType.BYTES, x.array)])
    assert len(worked_on) == 2
    assert threading.get_ident() not in worked_on
    assert owned.content() == content


async def test_region_stays_open_during_the_copy_of_a_cancelled_call(
    large: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on, closed = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def read_late(read: SharedObject, offset: int, byte_size: int) -> memoryview:
        loop.call_soon_threadsafe(reading.set)
        assert go_on.wait(60)
        assert not closed.is_set()
        return whole(read, offset, byte_size)

    def close(opened: SharedObject) -> None:
        closed.set()
        close_it(opened)

    whole, close_it = SharedObject.read, SharedObject.close
    monkeypatch.setattr(SharedObject, "read", read_late)
    monkeypatch.setattr(SharedObject, "close", close)
    gate = BodyGate(LARGE)

    async def transfer() -> None:
        with RegionTransfer(large, RegionUse([given(LARGE)], {}), gate) as transfer:
            await transfer.read_inputs("m")

    caller = asyncio.create_task(transfer())
    await reading.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    large.unregister(RegionStatus, "")
    assert gate.held_bytes == LARGE
    go_on.set()
    assert await asyncio.to_thread(closed.wait, 60)
    assert gate.held_bytes == 0


async def test_failed_copy_of_a_cancelled_call_is_not_reported(
    large: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    reading, go_on = asyncio.Event(), threading.Event()

    def fail_late(*_: object) -> memoryview:
        loop.call_soon_threadsafe(reading.set)
        assert go_on.wait(60)
        raise ServeError(ErrorKind.INVALID_INPUT, "shortened")

    def close(opened: SharedObject) -> None:
        close_it(opened)
        loop.call_soon_threadsafe(closed.set)

    closed, close_it = asyncio.Event(), SharedObject.close
    monkeypatch.setattr(SharedObject, "read", fail_late)
    monkeypatch.setattr(SharedObject, "close", close)
    gate = BodyGate(LARGE)

    async def transfer() -> None:
        with RegionTransfer(large, RegionUse([given(LARGE)], {}), gate) as transfer:
            await transfer.read_inputs("m")

    caller = asyncio.create_task(transfer())
    await reading.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    large.unregister(RegionStatus, "")
    go_on.set()
    await closed.wait()
    assert gate.held_bytes == 0
    gc.collect()  # a future with an unretrieved exception is reported when it is freed
    assert complaints == []


async def test_memory_of_inputs_is_reserved(regions: SharedMemory, owned: Owned) -> None:
    gate = BodyGate(16)
    with RegionTransfer(regions, RegionUse([given(8), given(4)], {}), gate):
        assert gate.held_bytes == 12
        with pytest.raises(ServeError) as caught:
            RegionTransfer(regions, RegionUse([given(8)], {}), gate)
        assert caught.value.kind is ErrorKind.OVERLOADED
    assert gate.held_bytes == 0
    regions.unregister(RegionStatus, "r")
    regions.threads.shutdown()
    assert str(owned.path) not in open_files(), "the rejected request still leases the region"


def test_inputs_larger_than_the_limit_are_rejected_even_if_the_server_holds_nothing(regions: SharedMemory) -> None:
    with pytest.raises(ServeError, match="expected at most 16 bytes, got 17") as caught:
        RegionTransfer(regions, RegionUse([given(17)], {}), BodyGate(16))
    assert caught.value.kind is ErrorKind.TOO_LARGE


async def test_large_tensors_are_copied_and_regions_closed_while_no_thread_can_start(
    large: SharedMemory, owned: Owned
) -> None:
    use, gate = RegionUse([given(LARGE)], {"y": RegionSpan("r", 0, LARGE)}), BodyGate(LARGE)
    with no_threads():
        with RegionTransfer(large, use, gate) as transfer:
            (x,) = await transfer.read_inputs("m")
            await transfer.write_outputs([Tensor("y", DataType.UINT8, x.array + 1)])
        large.unregister(RegionStatus, "r")
    assert gate.held_bytes == 0
    assert owned.content() == b"\1" * LARGE
    large.threads.shutdown()
    assert str(owned.path) not in open_files()
