"""The devices of this process, each with its ledger, and the execution providers whose sessions use their buffers."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from ortserve.device.accounting import Account, Ledger
from ortserve.device.capture_lock import CaptureLock
from ortserve.device.cuda import CudaDevice
from ortserve.device.nvml import Nvml
from ortserve.device.protocol import DEVICE_ERRORS, Device, device_run_error
from ortserve.engine.output_buffers import OutputBuffers
from ortserve.engine.provider_options import CUDA, TENSORRT
from ortserve.engine.runtime import Runtime
from ortserve.errors import DeviceLostError, ServeError
from ortserve.telemetry.readings import DeviceReading

UNLOADED: Final = "unloaded"
"""The owner, in the ledger, of answer memory of unloaded models that is still read or not freed yet."""

MakeDevice: TypeAlias = Callable[[int], Device]
"""Creates the device with the given number."""


@dataclass(frozen=True, slots=True)
class DeviceProvider:
    """How the sessions of an execution provider use buffers of a device.

    Attributes:
        make: Creates the provider's devices. Providers with the same ``make`` share the devices.
        stream_option: The provider's option for the compute stream; empty if there is none.
        capture_option: The provider's option for sessions that capture graphs; empty if there is none.
        no_and_yes: The values of ``capture_option`` for False and True.
        options: Further options that the sessions need.
        one_graph_per_session: Whether a session that captures holds a single graph and replays it in every run,
            whatever the run's id. Then each graph needs a session of its own, and runs without a graph need another.
    """

    make: MakeDevice
    stream_option: str = ""
    capture_option: str = ""
    no_and_yes: tuple[str, str] = ("0", "1")
    options: Mapping[str, str] = field(default_factory=dict)
    one_graph_per_session: bool = False

    def provider_options(self, stream: int, *, captures: bool) -> dict[str, str]:
        """The options of a session that ``Device.run`` runs."""
        options = dict(self.options)
        if self.stream_option:
            options[self.stream_option] = str(stream)
        if self.capture_option:
            options[self.capture_option] = self.no_and_yes[captures]
        return options


DEVICE_PROVIDERS: Final[Mapping[str, DeviceProvider]] = {
    CUDA: DeviceProvider(
        CudaDevice,
        "user_compute_stream",
        "enable_cuda_graph",
        options={"do_copy_in_default_stream": "1"},  # 0 can race (microsoft/onnxruntime#4829), without a benefit here
    ),
    # TensorRT's provider (1.31.1) does not read ``gpu_graph_id``.
    TENSORRT: DeviceProvider(
        CudaDevice, "user_compute_stream", "trt_cuda_graph_enable", ("false", "true"), one_graph_per_session=True
    ),
}
"""The execution providers with buffers on a device, by full name."""


@dataclass(slots=True, eq=False)
class OpenDevice:
    """A device with its ledger.

    Attributes:
        device: The device.
        ledger: Accounts of its memory, by owner.
        capture_lock: The process's lock for GPU work.
        lost: The reason why the device is lost; empty while it is usable. Never reset.
    """

    device: Device
    ledger: Ledger
    capture_lock: CaptureLock
    lost: str = ""
    _retired: list[OutputBuffers] = field(default_factory=list)
    _retired_lock: threading.Lock = field(default_factory=threading.Lock)
    _unloaded: Account = field(init=False)

    def __post_init__(self) -> None:
        self._unloaded = self.ledger.open(UNLOADED)

    def run_error(self, error: Exception) -> ServeError:
        """The error for callers of a run that raised one of ``DEVICE_ERRORS``. Marks the device if it is lost."""
        failure = device_run_error(error, self.device.name)
        if isinstance(failure, DeviceLostError):
            self.lost = self.lost or failure.message
        return failure

    def retire(self, buffers: OutputBuffers) -> None:
        """Take over memory of answers that may still be read; ``reclaim`` frees it later. Thread-safe."""
        with self._retired_lock:
            self._retired.append(buffers)
            self._account_retired()

    def reclaim(self) -> None:
        """Free retired memory that is no longer read.

        The calling thread holds the capture lock and has called ``Device.use``.
        """
        read: list[OutputBuffers] = []
        unread: list[OutputBuffers] = []
        with self._retired_lock:
            for buffers in self._retired:
                (unread if buffers.is_free else read).append(buffers)  # free buffers stay free: they get no new views
            self._retired = read
            self._account_retired()
        for buffers in unread:
            buffers.release(self.device.free_host)

    def _account_retired(self) -> None:
        self._unloaded.set_pinned("answers", sum(buffers.nbytes for buffers in self._retired))


class Devices:
    """Opens the device of an execution provider's sessions, or of a caller's memory. Thread-safe."""

    def __init__(self, providers: Mapping[str, DeviceProvider] | None = None) -> None:
        """Store the providers, by full name; None for ``DEVICE_PROVIDERS``. No device is opened yet."""
        self._providers: Final[Mapping[str, DeviceProvider]] = DEVICE_PROVIDERS if providers is None else providers
        self._opened: dict[tuple[MakeDevice, int], OpenDevice] = {}
        self._opening = threading.Lock()
        self.capture_lock: Final = CaptureLock()

    def has(self, provider: str) -> bool:
        """Whether sessions of an execution provider can have buffers on a device."""
        return provider in self._providers

    def provider(self, provider: str) -> DeviceProvider:
        """How sessions of an execution provider use its devices. ``has`` must be true of the provider."""
        return self._providers[provider]

    def open(self, provider: str, device_id: int) -> OpenDevice | str:
        """Open the device on which sessions of an execution provider run, by its number among the devices of its kind.

        Returns:
            The device, or the reason why the sessions cannot have buffers.
        """
        uses = self._providers.get(provider)
        if uses is None:
            return f"{provider} has none"
        with self._opening:
            opened = self._opened.get((uses.make, device_id))
            if opened is None:
                try:
                    device = uses.make(device_id)
                except ImportError as error:
                    return f"cupy cannot be used: {error}"
                except DEVICE_ERRORS as error:
                    return f"{provider} has no device {device_id}: {error}"
                opened = OpenDevice(device, Ledger(device.name, device.memory), self.capture_lock)
                self._opened[uses.make, device_id] = opened
            return opened

    def name_of(self, provider: str, device_id: int) -> str:
        """The name of a provider's device; ``cuda:`` and its id before it is opened. ``has`` must be true."""
        opened = self._opened.get((self._providers[provider].make, device_id))
        return f"cuda:{device_id}" if opened is None else opened.device.name

    def opened(self) -> list[OpenDevice]:
        """All devices that were opened."""
        return list(self._opened.values())


class DeviceRuntime(Runtime):
    """The process's ONNX Runtime together with the devices on which its sessions can have buffers."""

    def __init__(
        self, libraries: Sequence[Path] = (), *, global_threads: bool = False, devices: Devices | None = None
    ) -> None:
        """See ``Runtime`` for the other arguments; ``devices`` is None for the real devices."""
        super().__init__(libraries, global_threads=global_threads)
        self.devices: Final = devices or Devices()


class DevicesReader:
    """Reads all opened devices for the metrics, on the thread of the scrape."""

    def __init__(self, devices: Devices, nvml: Nvml | None = None) -> None:
        """Without ``nvml``, the first read that finds a device opens the machine's NVML."""
        self._devices = devices
        self._nvml = nvml

    def read(self) -> list[DeviceReading]:
        opened = self._devices.opened()
        if not opened:
            return []
        nvml = self._nvml = self._nvml or Nvml()
        return [_read(one, nvml) for one in opened]


def _read(opened: OpenDevice, nvml: Nvml) -> DeviceReading:
    device = opened.device
    memory: dict[str, int] = {}
    # Reading the memory calls the CUDA runtime, which would break a capture. So a reading during a capture omits it.
    if not opened.lost and opened.capture_lock.try_acquire_shared():
        try:
            device.use()
            known = device.memory()
            memory = {"free": known.free_bytes, "total": known.total_bytes}
        except DEVICE_ERRORS:
            memory = {}
        finally:
            opened.capture_lock.release_shared()
    ledger = opened.ledger
    return DeviceReading(
        device.name,
        memory=memory,
        ledger=ledger.totals(),
        utilization=nvml.utilization(device.pci_bus_id),
        pinned=ledger.pinned(),
    )
