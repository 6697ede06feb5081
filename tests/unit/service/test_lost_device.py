"""What becomes of a server whose device is lost: it refuses, is not ready, and not live, so that it is replaced."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from models import builders
from ortserve.config.model import LoadOptions
from ortserve.core.timing import Timing
from ortserve.engine.device.devices import Devices
from ortserve.engine.device.host import HostDevice
from ortserve.engine.device.protocol import BoundRun
from ortserve.engine.provider_options import CPU
from ortserve.engine.runtime import Runtime
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.lifecycle import State
from ortserve.registry.registry import Registry
from ortserve.registry.served import ServedModel
from ortserve.service.models import ModelService
from ortserve.telemetry.metrics import Metrics


class Breakable(HostDevice):
    """A device that is lost when it is told to."""

    is_broken = False

    def run(self, bound: BoundRun, stream: int) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA failure 719: unspecified launch failure")
        super().run(bound, stream)


async def ask(served: ServedModel) -> None:
    x = np.ones((1, 4), np.float32)
    terms = served.terms(time.monotonic_ns(), timeout_ns=None, priority=0, queue_timeout_ns=None)
    (y,) = await served.submit((x,), 1, Timing(time.monotonic_ns()), terms).outputs
    assert np.array_equal(y, x)


async def test_a_server_whose_device_is_lost_is_neither_ready_nor_live(tmp_path: Path) -> None:
    for name in ("one", "two"):
        builders.identity(tmp_path / f"{name}.onnx")
    device = Breakable()
    runtime = Runtime(devices=Devices({CPU: lambda number: device}))
    defaults = LoadOptions(warmup_s=0.2, max_rows=2)
    registry = Registry([tmp_path], defaults, Metrics(CollectorRegistry()), time.monotonic_ns, runtime)
    models = ModelService(registry, server_name="s", strict_readiness=False)
    await registry.load_all()
    served = [registry.find(name, "") for name in ("one", "two")]
    await asyncio.gather(*map(ask, served))
    assert (models.is_live(), models.is_ready()) == (True, True)

    device.is_broken = True
    with pytest.raises(ServeError, match="host:0 is lost: CUDA failure 719") as failed:
        await ask(served[0])
    assert failed.value.kind is ErrorKind.NOT_READY
    assert (models.is_live(), models.is_ready()) == (False, False)
    (record,) = registry.models()["one"]
    assert (record.state, record.reason) == (State.FAILED, registry.lost)
    with pytest.raises(ServeError, match="FAILED") as refused:
        registry.find("one", "")
    assert refused.value.kind is ErrorKind.NOT_READY

    device.is_broken = False  # it would seem to work again, but a context that was lost is not to be trusted
    with pytest.raises(ServeError, match="host:0 is lost"):
        await ask(served[1])
    await registry.close()
    assert device.allocated_bytes == 0
