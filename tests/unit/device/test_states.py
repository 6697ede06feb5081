"""States of sequences that stay on a device: correct at any pace, never copied to the host, and freed."""

import asyncio
import gc
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_sequences import check_loss, one_sequence, send, serving_on, where
from fakes.host_device import HostDevice, Pace
from models import sequences
from ortserve.core.batch import Batch
from ortserve.device.instance import DeviceInstance
from ortserve.device.protocol import MemoryInfo
from ortserve.engine.output_buffers import address_of
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.load.device_batches import keep_states

pytestmark = pytest.mark.usefixtures("preloaded_commands")  # for trials of capture

PACES = [(Pace.AT_ONCE, 0), (Pace.LATE, 0), *[(Pace.ANY, seed) for seed in range(4)]]


@pytest.mark.parametrize("captures", [False, True], ids=["bound", "replayed"])
@pytest.mark.parametrize("strategy", ["oldest", "direct"])
@pytest.mark.parametrize(("pace", "seed"), PACES)
async def test_no_state_meets_another_sequence_at_any_pace(
    tmp_path: Path, pace: Pace, seed: int, strategy: str, captures: bool
) -> None:
    device = HostDevice(pace=pace, seed=seed)
    path = sequences.accumulate(tmp_path / "m.onnx")
    draw = random.Random(seed)
    # At a random pace the error of a run may reach the thread of another batch, which cannot happen on a GPU.
    rejected = 0.0 if pace is Pace.ANY else 0.1
    async with serving_on(lambda number: device, path, strategy=strategy, graph_replay=captures) as served:
        assert where(served) == "on host:0"
        for first in (1, 101):  # the second time in reused slots
            lives = [one_sequence(served, first + each, draw.randint(1, 12), draw, rejected) for each in range(20)]
            await asyncio.gather(*lives)
        assert served.sequences is not None
        assert served.sequences.is_empty
        assert served.sequences.reading().state_bytes == 0
    assert (device.allocated_bytes, device.handles) == (0, 0)


async def test_states_are_not_copied_to_or_from_the_host(tmp_path: Path) -> None:
    device = HostDevice()
    path = sequences.accumulate(tmp_path / "m.onnx")
    async with serving_on(lambda number: device, path, max_rows=1) as served:
        (instance,) = served.loaded.instances
        assert isinstance(instance, DeviceInstance)
        before = instance.counts.copied_in_bytes, instance.counts.copied_out_bytes
        await send(served, 1, 7, start=True)
        await send(served, 2, 7)
        copied_in, copied_out = instance.counts.copied_in_bytes, instance.counts.copied_out_bytes
        rows = served.loaded.signature
        of_inputs = sum(spec.datatype.numpy.itemsize for spec in rows.inputs) - 4
        of_outputs = sum(spec.datatype.numpy.itemsize * spec.shape[1] for spec in rows.outputs) - 4
        assert (copied_in - before[0], copied_out - before[1]) == (2 * of_inputs, 2 * of_outputs)
        assert served.sequences is not None
        assert instance.streams.opened.ledger.totals()["m"]["states"] > 0


class CountingDevice(HostDevice):
    """Counts the copies within the device."""

    copies = 0

    def copy_within(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copies += 1
        super().copy_within(target, source, nbytes, stream)


async def test_states_that_run_together_are_copied_together(tmp_path: Path) -> None:
    device = CountingDevice()
    path = sequences.accumulate(tmp_path / "m.onnx")
    async with serving_on(lambda number: device, path, strategy="direct", max_rows=64) as served:
        names = range(1, 65)
        await asyncio.gather(*[send(served, 1, name, start=True) for name in names])
        for step in range(2, 40):
            device.copies = 0
            totals = [outputs[0].item() for outputs in await asyncio.gather(*[send(served, 1, name) for name in names])]
            assert totals == [step] * 64
            assert device.copies <= 4, "in and out, where the slots may wrap around at the end of a block"


class DenseDevice(HostDevice):
    """Places allocations side by side, and copies only within one of them, as a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self._arena = np.zeros(2**22, np.uint8)
        self._next = 0

    def allocate(self, nbytes: int) -> int:
        block = self._arena[self._next : self._next + nbytes]
        self._next += nbytes
        self._memory[address_of(block)] = block
        return address_of(block)


async def test_no_copy_spans_two_allocations(tmp_path: Path) -> None:
    device = DenseDevice()
    path = sequences.accumulate(tmp_path / "m.onnx")
    limits = {"max_candidates": 4096}
    async with serving_on(lambda number: device, path, max_rows=64, limits=limits) as served:
        names = range(1, 1200)  # more than the slots of a block
        for step in (1, 2):
            totals = [
                outputs[0].item()
                for first in range(0, len(names), 64)
                for outputs in await asyncio.gather(
                    *[send(served, 1, name, start=step == 1) for name in names[first : first + 64]]
                )
            ]
            assert totals == [step] * len(names)


async def test_two_states_keep_their_places_and_first_values(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "first").write_bytes(np.array([5], np.int32).tobytes())
    states = [{"input": "a_in", "output": "z_out", "initial_file": "first"}, {"input": "b_in", "output": "a_out"}]
    path = sequences.two_states(tmp_path / "m.onnx")
    async with serving_on(lambda number: HostDevice(pace=Pace.LATE), path, states=states, controls={}) as served:
        assert where(served) == "on host:0"
        found = [await send(served, 0, 1, start=number == 0) for number in range(3)]
        assert [tuple(array.item() for array in outputs) for outputs in found] == [(6, 10), (7, 20), (8, 30)]


async def test_rows_without_a_request_have_states_of_zeros(tmp_path: Path) -> None:
    path = sequences.accumulate(tmp_path / "m.onnx")
    async with serving_on(lambda number: HostDevice(pace=Pace.LATE), path, strategy="direct") as served:
        await asyncio.gather(*[send(served, 1, name, start=True) for name in (1, 2, 3)])
        await asyncio.gather(send(served, 1, 1, end=True), send(served, 1, 2))
        outputs = await send(served, 1, 3)  # in the third slot: the first has no sequence, the second no request
        assert [array.item() for array in outputs[:2]] == [2, 1]


async def test_a_batch_without_buffers_leaves_its_states_on_the_device(tmp_path: Path) -> None:
    path = sequences.accumulate(tmp_path / "m.onnx")
    async with serving_on(lambda number: HostDevice(pace=Pace.LATE), path, strategy="direct", buckets=[2]) as served:
        (instance,) = served.loaded.instances
        assert isinstance(instance, DeviceInstance)
        assert instance.binding is not None
        names = (1, 2)
        for step in (1, 2, 3):
            answers = await asyncio.gather(*[send(served, name, name, start=step == 1) for name in names])
            assert [outputs[0].item() for outputs in answers] == [step, 2 * step]
            if step == 1:
                instance.binding._runs.clear()  # as if no size were prepared
        assert instance.counts.plain["no_bucket"] >= 2
        with pytest.raises(ServeError) as caught:
            await send(served, 1000, 1)
        assert caught.value.kind is ErrorKind.REJECTED_BY_MODEL
        assert (await send(served, 1, 1))[0].item() == 4


async def test_several_instances_share_the_states_of_their_device(tmp_path: Path) -> None:
    device = HostDevice(pace=Pace.ANY, seed=3)
    path = sequences.accumulate(tmp_path / "m.onnx")
    draw = random.Random(0)
    async with serving_on(lambda number: device, path, instances=3) as served:
        assert where(served) == "on host:0"
        await asyncio.gather(*[one_sequence(served, 1 + each, 10, draw) for each in range(12)])
    assert device.allocated_bytes == 0


async def test_states_stay_on_the_host_for_a_stated_reason(tmp_path: Path) -> None:
    path = sequences.accumulate(tmp_path / "m.onnx")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"device_buffers": False}, ""),
        ({"record": {"share": 0.5}}, "in host memory: record writes requests with their states"),
        ({"served_outputs": ["OUTPUT", "NEXT"]}, "in host memory: requests may ask for output 'NEXT' of a state"),
    ]
    for chosen, expected in cases:
        async with serving_on(HostDevice, path, **chosen) as served:
            assert where(served) == expected
    made = [HostDevice(0), HostDevice(1)]
    async with serving_on(lambda _: made[0], path) as one, serving_on(lambda _: made[1], path) as other:
        tensors = one.loaded.interface.sequences
        assert tensors is not None
        found = one.loaded.warm_up
        _, reason = keep_states((*one.loaded.instances, *other.loaded.instances), tensors, found, is_recorded=False)
        assert reason == "in host memory: the instances use several devices: host:0, host:1"
    async with serving_on(HostDevice, path) as one, serving_on(HostDevice, path, device_buffers=False) as other:
        found = one.loaded.warm_up
        _, reason = keep_states((*one.loaded.instances, *other.loaded.instances), tensors, found, is_recorded=False)
        assert reason == "in host memory: not all instances run on the device"


class FullDevice(HostDevice):
    """Has memory for an instance, but not for states, which have their own stream."""

    def memory(self) -> MemoryInfo:
        return MemoryInfo(0, 2**40) if len(self._streams) > 3 else super().memory()


async def test_states_without_room_stay_on_the_host_and_leave_nothing(tmp_path: Path) -> None:
    device = FullDevice()
    path = sequences.accumulate(tmp_path / "m.onnx")
    async with serving_on(lambda number: device, path) as served:
        assert where(served).startswith("in host memory: 'm' needs at least 4.0 KiB on host:0 (states 4.0 KiB)")
        assert len(device._streams) == 3
        await one_sequence(served, 1, 10, random.Random(0))
    assert (device.allocated_bytes, device.handles) == (0, 0)


async def test_a_full_device_fails_the_request_and_not_the_sequence(tmp_path: Path) -> None:
    device = HostDevice()
    path = sequences.accumulate(tmp_path / "m.onnx")
    async with serving_on(lambda number: device, path) as served:
        await send(served, 1, 1, start=True)
        device._total_bytes = device.allocated_bytes
        sent = [send(served, 0, name, start=True) for name in range(2, 2000)]  # more than the slots of a block
        with pytest.raises(ServeError, match=r"'m' needs at least 4.0 KiB on host:0 \(states 4.0 KiB\)") as caught:
            await asyncio.gather(*sent)
        assert caught.value.kind is ErrorKind.OVERLOADED
        with pytest.raises(ServeError, match="states"):
            await send(served, 2, 1)
        device._total_bytes = 2**40
        assert (await send(served, 2, 1))[0].item() == 3


async def test_a_lost_device_ends_its_sequences_and_leaves_nothing(tmp_path: Path) -> None:
    await check_loss(sequences.accumulate(tmp_path / "m.onnx"), np.array([[1]], np.int32))


async def test_batches_with_states_on_a_device_are_not_shown_to_profiles(tmp_path: Path) -> None:
    class Tap:
        def observe(self, batch: Batch, run_ns: int) -> None:
            pytest.fail("it was shown a batch")

        def end(self, reason: str) -> None:
            pytest.fail("it never began")

    path = sequences.accumulate(tmp_path / "m.onnx")
    async with serving_on(HostDevice, path) as served:
        with pytest.raises(ServeError, match="states of 'm' are on host:0: no profile can read them"):
            served.tap_batches(Tap())
        await send(served, 1, 1, start=True)


class Scarce(HostDevice):
    """A device that fails once, at one of its allocations."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self._fails_at = fails_at
        self._count = 0

    @property
    def has_failed(self) -> bool:
        return self._count > self._fails_at

    def _allocation(self) -> None:
        self._count += 1
        if self._count == self._fails_at + 1:
            raise RuntimeError("CUDA failure 2: out of memory")

    def allocate(self, nbytes: int) -> int:
        self._allocation()
        return super().allocate(nbytes)

    def allocate_host(self, nbytes: int) -> np.ndarray:
        self._allocation()
        return super().allocate_host(nbytes)

    def make_stream(self) -> int:
        self._allocation()
        return super().make_stream()

    def make_event(self, *, is_timed: bool = False) -> int:
        self._allocation()
        return super().make_event(is_timed=is_timed)


async def test_a_load_in_which_any_allocation_fails_leaves_nothing(tmp_path: Path) -> None:
    path = sequences.accumulate(tmp_path / "m.onnx")
    devices: list[Scarce] = []

    def make(number: int) -> Scarce:
        devices.append(Scarce(fails_at=len(devices)))
        return devices[-1]

    while not devices or devices[-1].has_failed:
        with suppress(ServeError):  # after a few failures the model still serves
            async with serving_on(make, path, warmup_s=0.02, max_rows=2):
                pass
        gc.collect()
        assert (devices[-1].allocated_bytes, devices[-1].handles) == (0, 0), f"allocation {len(devices)}"
    assert len(devices) > 20
