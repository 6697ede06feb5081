"""How busy GPUs are, by NVIDIA's management library, where the package nvidia-ml-py is installed."""

from typing import Any


def open_library(library: Any = None) -> Any:
    """The package's module, ready to be asked, or ``library`` in its place; None without it or without a driver."""
    if library is None:
        try:
            import pynvml
        except ImportError:
            return None
        library = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


class Nvml:
    """Asks about devices by their PCI bus id, since its numbers are not CUDA's. From any thread; never raises.

    Its calls are none of the CUDA runtime's, and so disturb no capture.
    """

    def __init__(self, library: Any = None) -> None:
        """``library`` is None for the package's; without it, or without a driver, nothing is known."""
        self._library = open_library(library)

    def utilization(self, pci_bus_id: str) -> float | None:
        """Share of the last moments, up to a second, in which kernels ran; None where it is not known."""
        library = self._library
        if library is None or not pci_bus_id:
            return None
        try:
            handle = library.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            return float(library.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except library.NVMLError:
            return None
