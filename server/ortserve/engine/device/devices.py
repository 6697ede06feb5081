"""The devices of this process: one of each, with its accounts, and the gate that all work on GPUs goes through."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ortserve.engine.device.failures import DEVICE_ERRORS, run_failure
from ortserve.engine.device.gate import CaptureGate
from ortserve.engine.device.ledger import Account, Ledger
from ortserve.engine.device.protocol import Device
from ortserve.engine.device.use import DEVICE_USES, DeviceUse, MakeDevice
from ortserve.engine.output_buffers import OutputBuffers
from ortserve.errors import DeviceLostError, ServeError

UNLOADED: Final = "unloaded"
"""Who has, in the accounts, the memory of answers whose model is gone, and which are read, or not freed yet."""


@dataclass(slots=True, eq=False)
class OpenDevice:
    """A device with what belongs to it.

    Attributes:
        device: Itself.
        ledger: What of its memory is whose.
        gate: All work of the process on any GPU goes through it.
        lost: Why it is lost, empty while it is not. Once set it stays.
    """

    device: Device
    ledger: Ledger
    gate: CaptureGate
    lost: str = ""
    _retired: list[OutputBuffers] = field(default_factory=list)
    _retired_lock: threading.Lock = field(default_factory=threading.Lock)
    _unloaded: Account = field(init=False)

    def __post_init__(self) -> None:
        self._unloaded = self.ledger.open(UNLOADED)

    def failure(self, error: Exception) -> ServeError:
        """What became of a run on it that raised one of ``DEVICE_ERRORS``: a lost device is so for all who use it."""
        failure = run_failure(error, self.device.name)
        if isinstance(failure, DeviceLostError):
            self.lost = self.lost or failure.message
        return failure

    def retire(self, buffers: OutputBuffers) -> None:
        """Take over memory of answers that may still be read; it is freed once they are not. From any thread."""
        with self._retired_lock:
            self._retired.append(buffers)
            self._note_retired()

    def reclaim(self) -> None:
        """Free what was retired and is read by nobody any more. Inside the gate, on a thread that uses the device."""
        read: list[OutputBuffers] = []
        unread: list[OutputBuffers] = []
        with self._retired_lock:
            for buffers in self._retired:
                (unread if buffers.is_free else read).append(buffers)  # free ones stay so: nobody asks them for rows
            self._retired = read
            self._note_retired()
        for buffers in unread:
            buffers.release(self.device.free_host)

    def _note_retired(self) -> None:
        self._unloaded.enter_pinned("answers", sum(buffers.nbytes for buffers in self._retired))


class Devices:
    """Finds the device of a model's execution provider, or of a caller's memory. From any thread."""

    def __init__(self, uses: Mapping[str, DeviceUse] | None = None) -> None:
        """``uses`` are by execution provider, in full; None for the real ones."""
        self._uses: Final[Mapping[str, DeviceUse]] = DEVICE_USES if uses is None else uses
        self._opened: dict[tuple[MakeDevice, int], OpenDevice] = {}
        self._opening = threading.Lock()
        self.gate: Final = CaptureGate()

    def has(self, provider: str) -> bool:
        """Whether sessions of an execution provider may have buffers on a device, as far as its name tells."""
        return provider in self._uses

    def use_of(self, provider: str) -> DeviceUse:
        """How sessions of an execution provider that ``has`` devices use them."""
        return self._uses[provider]

    def open(self, provider: str, device_id: int) -> OpenDevice | str:
        """The device that an execution provider's sessions with this number run on, or why there are no buffers on it.

        Args:
            provider: In full.
            device_id: Among the devices of its kind.
        """
        use = self._uses.get(provider)
        if use is None:
            return f"{provider} has none"
        with self._opening:
            opened = self._opened.get((use.make, device_id))
            if opened is None:
                try:
                    device = use.make(device_id)
                except ImportError as error:
                    return f"cupy cannot be used: {error}"
                except DEVICE_ERRORS as error:
                    return f"{provider} has no device {device_id}: {error}"
                opened = OpenDevice(device, Ledger(device.name, device.memory), self.gate)
                self._opened[use.make, device_id] = opened
            return opened

    def opened(self) -> list[OpenDevice]:
        """All that were opened."""
        return list(self._opened.values())
