"""Numbers of the machine under Triton's names: of its GPUs, as the engine hands them over, and of its processors.

Names, units and texts are those of Triton's ``metrics.cc``; what a machine does not tell has no series instead of a 0.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ortserve.telemetry.families import Declaration, Family


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at a moment; None for what it does not tell.

    Attributes:
        uuid: As NVIDIA's tools show it.
        utilization: Share of the last moments in which it computed.
        memory_total_bytes: All that it has.
        memory_used_bytes: By whatever process.
        power_watts: At this moment.
        power_limit_watts: That it is kept below.
        energy_joules: Since the server started.
    """

    uuid: str
    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class CpuReading:
    """The machine's processors and memory at a moment, with all that runs there; None for what is not known.

    Attributes:
        utilization: Share of the time of all processors in which they were busy.
        memory_total_bytes: All that there is.
        memory_used_bytes: What of it cannot be had without swapping.
    """

    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None


_GPU: Final[tuple[tuple[Declaration, Callable[[GpuReading], float | None]], ...]] = (
    (
        Declaration("nv_gpu_utilization", "gauge", ("gpu_uuid",), "GPU utilization rate [0.0 - 1.0)"),
        lambda gpu: gpu.utilization,
    ),
    (
        Declaration("nv_gpu_memory_total_bytes", "gauge", ("gpu_uuid",), "GPU total memory, in bytes"),
        lambda gpu: gpu.memory_total_bytes,
    ),
    (
        Declaration("nv_gpu_memory_used_bytes", "gauge", ("gpu_uuid",), "GPU used memory, in bytes"),
        lambda gpu: gpu.memory_used_bytes,
    ),
    (
        Declaration("nv_gpu_power_usage", "gauge", ("gpu_uuid",), "GPU power usage in watts"),
        lambda gpu: gpu.power_watts,
    ),
    (
        Declaration("nv_gpu_power_limit", "gauge", ("gpu_uuid",), "GPU power management limit in watts"),
        lambda gpu: gpu.power_limit_watts,
    ),
    (
        Declaration(
            "nv_energy_consumption",
            "counter",
            ("gpu_uuid",),
            "GPU energy consumption in joules since the server started",
        ),
        lambda gpu: gpu.energy_joules,
    ),
)

_CPU: Final[tuple[tuple[Declaration, Callable[[CpuReading], float | None]], ...]] = (
    (
        Declaration("nv_cpu_utilization", "gauge", (), "CPU utilization rate [0.0 - 1.0]"),
        lambda cpu: cpu.utilization,
    ),
    (
        Declaration("nv_cpu_memory_total_bytes", "gauge", (), "CPU total memory (RAM), in bytes"),
        lambda cpu: cpu.memory_total_bytes,
    ),
    (
        Declaration("nv_cpu_memory_used_bytes", "gauge", (), "CPU used memory (RAM), in bytes"),
        lambda cpu: cpu.memory_used_bytes,
    ),
)

MACHINE_DECLARATIONS: Final = (
    *(declaration for declaration, _ in _GPU),
    *(declaration for declaration, _ in _CPU),
)


def machine_families(gpus: Sequence[GpuReading], cpu: CpuReading) -> Iterator[Family]:
    """The families of what was read."""
    for declaration, of_gpu in _GPU:
        yield Family(declaration, {(gpu.uuid,): value for gpu in gpus if (value := of_gpu(gpu)) is not None})
    for declaration, of_cpu in _CPU:
        value = of_cpu(cpu)
        yield Family(declaration, {} if value is None else {(): value})
