"""Runs on memory of a device: buffers at fixed addresses, copies beside computing, replay of captured CUDA graphs.

``protocol`` is all that is asked of a device; ``cuda`` is the one that needs a GPU and the only door of cupy, ``host``
is the same on host memory, which is how everything else here is tested. Who calls: the registry's loader, by
``devices`` (what the process has of devices) and ``instance`` (a model's worker).
"""

__all__ = [
    "device_region",
    "devices",
    "failures",
    "gate",
    "instance",
    "lane",
    "nvml",
    "preparation",
    "readings",
    "replay",
    "sessions",
    "use",
]
