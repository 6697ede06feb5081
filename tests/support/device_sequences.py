"""Models with sequences on a device, served without a server process, and sequences that check their answers."""

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fakes.host_device import HostDevice, LosableDevice
from ortserve.config.model import ModelOptions
from ortserve.core.batch import Arrays
from ortserve.core.inflight import NO_TERMS, InflightRequest
from ortserve.core.sequence import SequencePart
from ortserve.core.timing import Timing
from ortserve.device.devices import DeviceProvider, DeviceRuntime, Devices
from ortserve.engine.provider_options import CPU
from ortserve.errors import ServeError
from ortserve.registry.load.assembly import Assembly
from ortserve.registry.load.loaded_model import describe_properties
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.repository.configuration import Configuration
from ortserve.registry.served_model import ServedModel
from ortserve.telemetry.metrics import Metrics

CONTROLS: dict[str, Any] = {
    "START": {"kind": "start"},
    "READY": {"kind": "ready"},
    "END": {"kind": "end"},
    "CORRID": {"kind": "id"},
}
STATES = [{"input": "STATE", "output": "NEXT"}]


@asynccontextmanager
async def serving_on(
    make: Callable[[int], HostDevice] | None,
    path: Path,
    *,
    strategy: str = "oldest",
    states: list[dict[str, Any]] = STATES,
    controls: dict[str, Any] = CONTROLS,
    limits: dict[str, Any] | None = None,
    **chosen: Any,
) -> AsyncIterator[ServedModel]:
    """Serve a model with sequences on the device that ``make`` creates; None selects the real devices."""
    runtime = DeviceRuntime(devices=None if make is None else Devices({CPU: DeviceProvider(make)}))
    sequence_options = {
        "strategy": strategy,
        "states": states,
        "controls": controls,
        "max_idle_s": 60,
        **(limits or {}),
    }
    defaults = {"batched": True, "warmup_s": 0.1, "max_rows": 8, "intra_op_threads": 1}
    options = ModelOptions.model_validate({**defaults, "sequences": sequence_options, **chosen})
    loaded = await asyncio.to_thread(load_model, path, path.stem, options, path.parent, runtime)
    assembly = Assembly(asyncio.get_running_loop(), time.monotonic_ns, processors=2)
    served = assembly.serve(loaded, Configuration(options), Metrics(CollectorRegistry()).model(path.stem, "1"))
    try:
        yield served
    finally:
        gc.collect()  # errors in reference cycles keep the frames of runs, and with them the session
        await served.close()


async def send(served: ServedModel, value: int, name: int, *, start: bool = False, end: bool = False) -> Arrays:
    return await send_array(served, np.array([[value]], np.int32), name, start=start, end=end)


async def send_array(
    served: ServedModel, array: np.ndarray, name: int, *, start: bool = False, end: bool = False
) -> Arrays:
    request = InflightRequest(Timing(time.monotonic_ns()), (array,))
    served.submit_part(request, NO_TERMS, SequencePart(name, start, end))
    return await request


def where(served: ServedModel) -> str:
    properties = describe_properties(served.loaded, served.max_rows, served.options.sequences)
    return properties.get("sequence_states", "")


async def one_sequence(
    served: ServedModel, name: int, requests: int, draw: random.Random, rejected: float = 0.0
) -> None:
    """A sequence of random values. Each answer is the sum of all values so far. The model rejects a share of them."""
    total = 0
    for number in range(requests):
        value, is_start = draw.randint(1, 999), number == 0
        if not is_start and draw.random() < rejected:
            with pytest.raises(ServeError):
                await send(served, 1000, name)
        output, seen, identity, _ = await send(served, value, name, start=is_start, end=number == requests - 1)
        assert (output.item(), seen.item(), identity.item()) == (total + value, total, name)
        total += value
        if draw.random() < 0.2:
            await asyncio.sleep(0)


async def growing_sequence(served: ServedModel, name: int, requests: int, draw: random.Random) -> None:
    """A sequence of ``models.sequences.growing``. Each answer is the number and the sum of the values so far."""
    total = 0
    for number in range(1, requests + 1):
        value = draw.randint(1, 999)
        total += value
        array = np.array([[value]], np.float32)
        outputs = await send_array(served, array, name, start=number == 1, end=number == requests)
        assert [output.item() for output in outputs] == [number, total]
        if draw.random() < 0.1:
            await asyncio.sleep(0)


async def history_sequence(served: ServedModel, name: int, requests: int, draw: random.Random) -> None:
    """A sequence of ``models.sequences.history``. Each answer is all rows so far."""
    rows = np.array([[draw.randint(1, 999) for _ in range(4)] for _ in range(requests)], np.float32)
    for number in range(1, requests + 1):
        (output,) = await send_array(served, rows[number - 1 : number], name, start=number == 1, end=number == requests)
        assert np.array_equal(output, rows[np.newaxis, :number])
        if draw.random() < 0.1:
            await asyncio.sleep(0)


async def check_loss(path: Path, array: np.ndarray, **chosen: Any) -> None:
    """Lose the device in the middle of sequences with this input.

    All sequences must end and free their device memory.
    """
    device = LosableDevice()
    async with serving_on(lambda number: device, path, **chosen) as served:
        await asyncio.gather(*[send_array(served, array, name, start=True) for name in range(1, 20)])
        device.is_lost = True
        sent = [send_array(served, array, name) for name in range(1, 20)]
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        assert all(isinstance(outcome, ServeError) for outcome in outcomes)
        assert "host:0 is lost" in str(outcomes[0])
    assert served.sequences is not None
    assert served.sequences.is_empty
    assert (device.allocated_bytes, device.handles) == (0, 0)
