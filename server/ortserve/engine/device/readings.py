"""Numbers of devices, for the metrics: read when somebody asks, on whatever thread that is."""

from collections.abc import Callable, Sequence

from ortserve.engine.device.counts import DeviceCounts, sum_counts
from ortserve.engine.device.devices import Devices, OpenDevice
from ortserve.engine.device.failures import DEVICE_ERRORS
from ortserve.engine.device.instance import DeviceInstance
from ortserve.engine.device.nvml import Nvml
from ortserve.engine.instance import Instance
from ortserve.telemetry.readings import DeviceReading, DeviceRuns


def devices_reader(devices: Devices, nvml: Nvml | None = None) -> Callable[[], list[DeviceReading]]:
    """What reads all devices that models have been loaded on; ``nvml`` is None for the machine's, asked when needed."""
    asked: list[Nvml] = [] if nvml is None else [nvml]

    def read() -> list[DeviceReading]:
        opened = devices.opened()
        if opened and not asked:
            asked.append(Nvml())
        return [_read(one, asked[0]) for one in opened]

    return read


def read_runs(instances: Sequence[Instance | DeviceInstance]) -> DeviceRuns:
    """What the instances of a model ran on devices."""
    on_device = [instance.counts for instance in instances if isinstance(instance, DeviceInstance)]
    return _runs(sum_counts(on_device)) if on_device else DeviceRuns()


def _read(opened: OpenDevice, nvml: Nvml) -> DeviceReading:
    device = opened.device
    memory: dict[str, int] = {}
    # To ask for it is a call of the runtime, which would break a capture: then it is left out of this scrape.
    if not opened.lost and opened.gate.try_enter():
        try:
            device.use()
            known = device.memory()
            memory = {"free": known.free_bytes, "total": known.total_bytes}
        except DEVICE_ERRORS:
            memory = {}
        finally:
            opened.gate.leave()
    ledger = opened.ledger
    return DeviceReading(
        device.name, memory, ledger.totals(), nvml.utilization(device.pci_bus_id), pinned=ledger.pinned()
    )


def _runs(counts: DeviceCounts) -> DeviceRuns:
    return DeviceRuns(
        {"replayed": counts.replayed, "bound": counts.bound}
        | {f"plain_{reason}": count for reason, count in counts.plain.items()},
        {"captured": counts.captured} | counts.not_captured,
        {"in": counts.copied_in_bytes, "out": counts.copied_out_bytes},
        {"in": counts.timed_in_ns / 1e9, "out": counts.timed_out_ns / 1e9},
        {"in": counts.timed_in_bytes, "out": counts.timed_out_bytes},
    )
