"""Readings of devices for the metrics."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from device_models import batch_of, landed, on_device
from fakes.host_device import HostDevice
from models import builders
from ortserve.device.accounting import read_runs
from ortserve.device.devices import DeviceProvider, Devices, DevicesReader, OpenDevice
from ortserve.device.nvml import Nvml
from ortserve.engine.provider_options import CPU
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.readings import DeviceReading


class FakeNvml:
    """The interface of nvidia-ml-py."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_driver: bool = True) -> None:
        self._has_driver = has_driver

    def nvmlInit(self) -> None:  # noqa: N802 - the names are NVML's
        if not self._has_driver:
            raise self.NVMLError

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:  # noqa: N802
        if bus != "0000:01:00.0":
            raise self.NVMLError
        return bus

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=25, memory=3)


def test_runs_copies_and_memory_are_in_the_metrics(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    device = HostDevice(total_bytes=10_000)
    with on_device(builders.identity(tmp_path / "m.onnx"), device, captures=True) as made:
        for rows in (1, 2, 3):
            landed(made.start(batch_of((np.ones((rows, 4), np.float32),))))
        metrics.model("m", "1").device_runs.connect(lambda: read_runs([made.instance.counts]))
        metrics.read_devices = lambda: [
            DeviceReading(
                "host:0",
                {"free": 1, "total": 2},
                made.opened.ledger.totals(),
                0.5,
                pinned=made.opened.ledger.pinned(),
            )
        ]

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"ortserve_device_{name}", labels)

        model = {"model": "m", "version": "1"}
        assert value("batches_total", **model, way="replayed") == 2
        assert value("batches_total", **model, way="plain_no_bucket") == 1
        assert value("captures_total", **model, result="captured") == 8
        assert value("copied_bytes_total", **model, direction="in") == 48
        assert value("timed_copy_bytes_total", **model, direction="in") == 16
        assert (value("timed_copy_seconds_total", **model, direction="out") or 0) > 0
        assert value("memory_bytes", device="host:0", kind="free") == 1
        assert value("ledger_bytes", device="host:0", owner="m/1", purpose="buffers") == 1024
        assert value("pinned_bytes", device="host:0", owner="m/1", purpose="staging") == 512
        assert value("ledger_bytes", device="host:0", owner="m/1", purpose="staging") is None
        assert value("utilization", device="host:0") == 0.5


def test_pinned_memory_is_read_with_the_device_memory(tmp_path: Path) -> None:
    devices = Devices({CPU: DeviceProvider(HostDevice)})
    opened = devices.open(CPU, 0)
    assert isinstance(opened, OpenDevice)
    account = opened.ledger.open("m/1")
    account.set_bytes("buffers", 1)
    account.set_pinned("staging", 2)
    (reading,) = DevicesReader(devices, Nvml(FakeNvml())).read()
    assert (reading.ledger, reading.pinned) == ({"m/1": {"buffers": 1}}, {"m/1": {"staging": 2}})


def test_devices_are_not_read_during_a_capture() -> None:
    devices = Devices({CPU: DeviceProvider(lambda number: HostDevice(number, total_bytes=100))})
    read = DevicesReader(devices, Nvml(FakeNvml())).read
    assert read() == []
    devices.open(CPU, 1)
    assert read() == [DeviceReading("host:1", {"free": 100, "total": 100})]
    with devices.capture_lock.exclusive():
        assert read() == [DeviceReading("host:1")]
    assert read()[0].memory


@pytest.mark.parametrize(
    ("library", "bus", "expected"),
    [
        (FakeNvml(), "0000:01:00.0", 0.25),
        (FakeNvml(), "0000:02:00.0", None),
        (FakeNvml(), "", None),
        (FakeNvml(has_driver=False), "0000:01:00.0", None),
    ],
)
def test_utilization_is_reported_if_it_is_known(library: Any, bus: str, expected: float | None) -> None:
    assert Nvml(library).utilization(bus) == expected
