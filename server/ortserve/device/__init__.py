"""Runs models on device memory: buffers at fixed addresses, copies beside computation, replay of CUDA graphs.

``protocol`` is the interface of a device, ``cuda`` implements it for GPUs. The registry's loader creates instances
(``instance``) on the devices of the process (``devices``). ``engine`` never imports this package.
"""

__all__ = [
    "accounting",
    "binding",
    "buffers",
    "devices",
    "graph_sessions",
    "instance",
    "instance_batches",
    "nvml",
    "preparation",
    "protocol",
    "region",
]
