"""States on a device that grow, or that belong to models without buffers: never on the host, correct at any pace."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_sequences import check_loss, growing_sequence, send_array, serving_on, where
from fakes.host_device import HostDevice, Pace
from models import sequences
from ortserve.core.batch import Arrays
from ortserve.device.accounting import Ledger
from ortserve.device.instance import DeviceInstance
from ortserve.device.states import DeviceStates
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.served_model import ServedModel

PACES = [(Pace.AT_ONCE, 0), (Pace.LATE, 0), *[(Pace.ANY, seed) for seed in range(4)]]
GROWS: dict[str, Any] = {"states": [{"input": "PAST", "output": "PRESENT", "initial_dims": [0]}], "controls": {}}
STATE: dict[str, Any] = {"states": [{"input": "STATE", "output": "NEXT"}], "controls": {}}
PAD = {"INPUT": {"axis": 1, "multiple": 4, "value": 0}}


class CountingDevice(HostDevice):
    """Counts the copies within the device, and the bytes of those to and from the host."""

    copies = 0
    host_bytes = 0
    sent: tuple[np.ndarray, ...] = ()

    def copy_within(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copies += 1
        super().copy_within(target, source, nbytes, stream)

    def copy_in(self, address: int, source: np.ndarray, stream: int) -> None:
        self.host_bytes += source.nbytes
        self.sent = (*self.sent, source)
        super().copy_in(address, source, stream)

    def copy_out(self, target: np.ndarray, address: int, stream: int) -> None:
        self.host_bytes += target.nbytes
        super().copy_out(target, address, stream)


def one(value: float) -> np.ndarray:
    return np.array([[value]], np.float32)


async def add(served: ServedModel, value: float, name: int, *, start: bool = False, end: bool = False) -> list[float]:
    return [output.item() for output in await send_array(served, one(value), name, start=start, end=end)]


@pytest.mark.parametrize("strategy", ["oldest", "direct"])
@pytest.mark.parametrize(("pace", "seed"), PACES)
async def test_growing_states_are_right_at_any_pace(tmp_path: Path, pace: Pace, seed: int, strategy: str) -> None:
    device = HostDevice(pace=pace, seed=seed)
    path = sequences.growing(tmp_path / "m.onnx")
    draw = random.Random(seed)
    async with serving_on(lambda number: device, path, strategy=strategy, **GROWS) as served:
        assert where(served) == "on host:0"
        for first in (1, 101):  # the second time in reused memory
            lives = [growing_sequence(served, first + each, draw.randint(1, 40), draw) for each in range(20)]
            await asyncio.gather(*lives)
        assert served.sequences is not None
        assert served.sequences.is_empty
        assert served.sequences.reading().state_bytes == 0
    assert (device.allocated_bytes, device.handles) == (0, 0)


@pytest.mark.parametrize("strategy", ["oldest", "direct"])
async def test_growing_states_of_one_size_share_batches(tmp_path: Path, strategy: str) -> None:
    device = HostDevice(pace=Pace.LATE)
    path = sequences.growing(tmp_path / "m.onnx")
    async with serving_on(lambda number: device, path, strategy=strategy, buckets=[4, 8], **GROWS) as served:
        (instance,) = served.loaded.instances
        assert isinstance(instance, DeviceInstance)
        before = instance.counts.plain.get("unbound", 0)
        for step in range(1, 40):
            answers = await asyncio.gather(*[add(served, name, name, start=step == 1) for name in range(1, 7)])
            assert answers == [[step, step * name] for name in range(1, 7)]
        # An empty state runs alone, and so does the first row of each new shape.
        assert instance.counts.plain["unbound"] - before < 39 * 3 + 6


async def test_no_state_passes_through_the_host(tmp_path: Path) -> None:
    device = CountingDevice()
    path = sequences.growing(tmp_path / "m.onnx")
    async with serving_on(lambda number: device, path, **GROWS) as served:
        device.host_bytes = 0
        for step in range(20):
            device.copies = 0
            assert await add(served, 1, 1, start=step == 0) == [step + 1, step + 1]
            assert device.copies == 1, "the next state to its slot; the one before is bound there"
        assert device.host_bytes == 0
        assert served.sequences is not None
        assert served.sequences.reading().state_bytes == 20 * 4 + 72  # counted like the host's, with the reference


async def test_rows_without_a_request_have_states_of_zeros(tmp_path: Path) -> None:
    device = CountingDevice(pace=Pace.LATE)
    path = sequences.growing(tmp_path / "m.onnx")
    async with serving_on(lambda number: device, path, strategy="direct", **GROWS) as served:
        for step in (1, 2):
            await asyncio.gather(*[add(served, 1, name, start=step == 1) for name in (1, 2, 3)])
        await add(served, 1, 1, end=True)
        before = len(device.sent)
        assert await add(served, 1, 3) == [3, 3]  # in the third slot, because the others have no request
        assert [array.view(np.float32).tolist() for array in device.sent[before:]] == [[0, 0]] * 2


async def test_rows_that_pad_a_batch_hold_no_request_and_the_first_states(tmp_path: Path) -> None:
    path = sequences.growing_among(tmp_path / "m.onnx")
    options = {**GROWS, "controls": {"READY": {"kind": "ready"}}, "buckets": [4], "batched": True, "row_checks": False}
    async with serving_on(lambda number: HostDevice(), path, strategy="direct", **options) as served:
        for step in range(1, 4):
            answers = await asyncio.gather(*[add(served, name, name, start=step == 1) for name in (1, 2, 3)])
            among = 3 if step > 1 else 1  # an empty state runs alone
            assert answers == [[among, step * name] for name in (1, 2, 3)]


async def test_memory_of_a_growing_state_stays_in_proportion(tmp_path: Path) -> None:
    device = HostDevice()
    path = sequences.history(tmp_path / "m.onnx")
    grows = [{"input": "PAST", "output": "PRESENT", "initial_dims": [2**18, 4]}]  # 4 MiB, which are 4 blocks
    async with serving_on(lambda number: device, path, states=grows, controls={}) as served:
        (instance,) = served.loaded.instances
        assert isinstance(instance, DeviceInstance)
        row = np.ones((1, 4), np.float32)
        most = 0
        for name in range(1, 9):
            for step in range(3):
                await send_array(served, row, name, start=step == 0, end=step == 2)
                most = max(most, instance.streams.opened.ledger.totals()["m"]["states"])
        # The first state and the zeros; for one sequence a state and the next one; and as many free bytes.
        assert most <= 2 * (4 * 5 * 2**20) + 2**20
        assert device.allocated_bytes == instance.streams.opened.ledger.totals()["m"]["states"]
    assert device.allocated_bytes == 0


async def test_memory_of_earlier_sizes_is_freed(tmp_path: Path) -> None:
    device = HostDevice()
    path = sequences.growing(tmp_path / "m.onnx")
    async with serving_on(lambda number: device, path, **GROWS) as served:
        (instance,) = served.loaded.instances
        assert isinstance(instance, DeviceInstance)
        for step in range(1000):
            assert await add(served, 1, 1, start=step == 0) == [step + 1, step + 1]
        # One block for each size in use, including the first states, and as many free bytes.
        assert instance.streams.opened.ledger.totals()["m"]["states"] < 4 * 2**20


def test_a_full_device_gives_memory_of_other_sizes_to_a_state(tmp_path: Path) -> None:
    device = HostDevice()
    account = Ledger(device.name, device.memory).open("m")
    states = DeviceStates(device, account, (np.zeros((1, 2**18), np.float32),), is_fixed=False)
    assert device.allocated_bytes == 2 * 2**20
    kept = [states.take(2**20, (2**18,)) for _ in range(2)]
    kept.append(states.take(2**21, (2**19,)))
    del kept[0]
    device._total_bytes = device.allocated_bytes
    kept.append(states.take(1000, (250,)))
    assert device.allocated_bytes == account.entries()["states"] == 6 * 2**20
    states.close()
    assert (device.allocated_bytes, device.handles) == (0, 0)


async def test_a_full_device_fails_the_request_and_not_the_sequence(tmp_path: Path) -> None:
    device = HostDevice()
    path = sequences.history(tmp_path / "m.onnx")
    grows = [{"input": "PAST", "output": "PRESENT", "initial_dims": [2**18, 4]}]
    async with serving_on(lambda number: device, path, states=grows, controls={}) as served:
        row = np.ones((1, 4), np.float32)
        await send_array(served, row, 1, start=True)
        device._total_bytes = device.allocated_bytes
        with pytest.raises(ServeError, match=r"'m' needs at least 5.0 MiB on host:0 \(states 5.0 MiB\)") as caught:
            await send_array(served, row, 1)
        assert caught.value.kind is ErrorKind.OVERLOADED
        device._total_bytes = 2**40
        (output,) = await send_array(served, row, 1)
        assert output.shape == (1, 2**18 + 2, 4)


async def test_a_state_beyond_its_limit_ends_the_sequence(tmp_path: Path) -> None:
    path = sequences.growing(tmp_path / "m.onnx")
    async with serving_on(HostDevice, path, limits={"max_state_bytes": 72 + 5 * 4}, **GROWS) as served:
        for step in range(6):
            await add(served, 1, 1, start=step == 0)
        with pytest.raises(ServeError, match="must specify the START flag"):
            await add(served, 1, 1)


async def test_a_lost_device_ends_its_sequences_and_leaves_nothing(tmp_path: Path) -> None:
    await check_loss(sequences.growing(tmp_path / "m.onnx"), one(1), **GROWS)


async def test_several_instances_share_growing_states(tmp_path: Path) -> None:
    device = HostDevice(pace=Pace.ANY, seed=3)
    path = sequences.growing(tmp_path / "m.onnx")
    draw = random.Random(0)
    async with serving_on(lambda number: device, path, instances=3, **GROWS) as served:
        await asyncio.gather(*[growing_sequence(served, 1 + each, 20, draw) for each in range(12)])
    assert (device.allocated_bytes, device.handles) == (0, 0)


async def test_a_model_without_a_batch_axis_keeps_its_states_on_the_device(tmp_path: Path) -> None:
    device = CountingDevice(pace=Pace.LATE)
    path = sequences.growing(tmp_path / "m.onnx", rows="1")
    chosen: dict[str, Any] = {"batched": None, "states": [{"input": "PAST", "output": "PRESENT"}], "controls": {}}
    async with serving_on(lambda number: device, path, **chosen) as served:
        assert where(served) == "on host:0"
        device.host_bytes = 0
        for step in range(5):
            assert await add(served, 3, 1, start=step == 0) == [step + 2, 3 * (step + 1)]
        assert device.host_bytes == 0


async def test_states_of_one_size_of_a_model_with_free_shapes_stay_on_the_device(tmp_path: Path) -> None:
    device = CountingDevice(pace=Pace.LATE)
    path = sequences.totals(tmp_path / "m.onnx")
    async with serving_on(lambda number: device, path, **STATE) as served:
        assert where(served) == "on host:0"
        device.host_bytes = 0
        for step in range(1, 6):
            sent = [send_array(served, np.ones((1, step), np.float32), name, start=step == 1) for name in range(1, 5)]
            assert [total.item() for (total,) in await asyncio.gather(*sent)] == [step * (step + 1) / 2] * 4
        assert device.host_bytes == 0


async def test_states_of_bfloat16_grow_on_the_device(tmp_path: Path) -> None:
    path = sequences.growing_halves(tmp_path / "m.onnx")
    async with serving_on(HostDevice, path, **GROWS) as served:
        assert where(served) == "on host:0"
        for step in range(1, 9):
            answers = await asyncio.gather(*[add(served, name, name, start=step == 1) for name in (1, 2, 3)])
            assert answers == [[step], [2 * step], [3 * step]]


async def test_an_output_that_is_an_input_stays_as_it_was(tmp_path: Path) -> None:
    path = sequences.growing_beside_its_input(tmp_path / "m.onnx")
    async with serving_on(HostDevice, path, **GROWS) as served:
        assert where(served) == "on host:0"
        answers: dict[int, Arrays] = {}
        for step in range(1, 5):
            names = [10 * step + each for each in range(3)]
            sent = [send_array(served, one(name), name, start=True) for name in names]
            answers.update(zip(names, await asyncio.gather(*sent), strict=True))
        assert {name: outputs[0].item() for name, outputs in answers.items()} == {name: name for name in answers}


@pytest.mark.parametrize("is_on_device", [False, True])
async def test_an_output_that_is_no_next_state_fails_as_on_the_host(tmp_path: Path, is_on_device: bool) -> None:
    path = sequences.turned(tmp_path / "m.onnx")
    states = [{"input": "STATE", "output": "NEXT", "initial_dims": [3, 2]}]
    chosen: dict[str, Any] = {"states": states, "controls": {}, "device_buffers": is_on_device}
    async with serving_on(HostDevice, path, **chosen) as served:
        assert where(served) == ("on host:0" if is_on_device else "")
        expected = r"output 'NEXT' cannot be the next state: input 'STATE' expects \[1,-1,2\], got \[1,2,3\]"
        with pytest.raises(ServeError, match=expected) as caught:
            await add(served, 1, 1, start=True)
        assert caught.value.kind is ErrorKind.INTERNAL


@pytest.mark.parametrize(
    ("build", "chosen", "reason"),
    [
        (sequences.marks, STATE, "strings stay on the host"),
        (sequences.columns, GROWS | {"batched": None}, "rows are not on axis 0 of 'PAST'"),
        (sequences.growing, GROWS | {"warmup_s": 0}, "the model was not warmed up"),
        (sequences.random_state, STATE, "output 'NEXT' of 1 rows differs with states on the device"),
        (sequences.totals, STATE | {"pad": PAD}, "requests of different shapes share batches"),
    ],
    ids=["strings", "columns", "cold", "noise", "padded"],
)
async def test_states_stay_on_the_host_for_a_stated_reason(
    tmp_path: Path, build: Any, chosen: dict[str, Any], reason: str
) -> None:
    device = HostDevice()
    async with serving_on(lambda number: device, build(tmp_path / "m.onnx"), **chosen) as served:
        assert where(served) == f"in host memory: {reason}"
        assert device.allocated_bytes == 0
