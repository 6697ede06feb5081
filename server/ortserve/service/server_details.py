"""The state of the server for the console: versions, options, ports, keys, TLS, threads, memory, GPUs, connections."""

import os
import platform
import resource
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ortserve import __version__
from ortserve.config.options import ServerOptions
from ortserve.config.shown_values import show_value
from ortserve.engine.process_limits import cpu_budget, memory_limit
from ortserve.service.access import Group
from ortserve.service.model_details import NOT_SET, Setting
from ortserve.service.models import ModelService
from ortserve.telemetry.readings import DeviceReading, LoopReading, MemoryUse

_STATM: Final = Path("/proc/self/statm")


class ServerDetails:
    """Describes the server for the console. Loop thread only, except ``devices``."""

    def __init__(
        self,
        options: ServerOptions,
        origins: Mapping[str, str],
        models: ModelService,
        *,
        guarded: Collection[Group],
        runtime_version: str,
        stalls: Callable[[], LoopReading],
        read_devices: Callable[[], Sequence[DeviceReading]],
        read_memory: Callable[[], MemoryUse],
    ) -> None:
        """Begin to count processor time.

        Args:
            options: Options of the server.
            origins: Where each option was set; options with their default are missing.
            models: Reports whether the server is ready.
            guarded: Groups that need keys.
            runtime_version: Version of ONNX Runtime.
            stalls: Reads the stalls of the event loop.
            read_devices: Reads the state of the GPUs in use; may wait for their driver.
            read_memory: Reads the host memory that the models hold.
        """
        self._options = options
        self._origins = origins
        self._models = models
        self._guarded = guarded
        self._runtime_version = runtime_version
        self._processors = cpu_budget()
        self._memory_limit_bytes = memory_limit()
        self._stalls = stalls
        self._read_devices = read_devices
        self._read_memory = read_memory
        self._began_s = time.time()
        self._cpu = (time.monotonic(), time.process_time())
        self._utilization = 0.0
        self._ports: Mapping[str, int] = {}
        self._connections: Callable[[], Mapping[str, int]] = dict

    def listens(self, ports: Mapping[str, int], connections: Callable[[], Mapping[str, int]]) -> None:
        """Set the bound ports by protocol, and a callback that counts the open connections by protocol."""
        self._ports, self._connections = ports, connections

    def live(self) -> dict[str, Any]:
        """The values that change while the server runs. Read for each frame, in about 20 µs."""
        now = (time.monotonic(), time.process_time())
        if (passed_s := now[0] - self._cpu[0]) >= 0.5:
            self._utilization = (now[1] - self._cpu[1]) / passed_s
            self._cpu = now
        models, stalls = self._models, self._stalls()
        state = "draining" if models.is_exiting else "ready" if models.is_ready() else "not ready"
        return {
            "state": f"lost device: {models.lost}" if models.lost else state,
            "uptime_s": int(time.time() - self._began_s),
            "processors": round(self._utilization, 3),
            "memory_bytes": _resident_bytes(),
            "models_memory": asdict(self._read_memory()),
            "connections": dict(self._connections()),
            "threads": threading.active_count(),
            "loads_models": self._options.model_control_mode == "explicit",
            "stalls": stalls.stalls,
            "stalled_s": round(stalls.stalled_ns / 1e9, 3),
        }

    def describe(self) -> dict[str, Any]:
        """The whole description except the GPUs. Does not block."""
        options = self._options
        return {
            "versions": {
                "ortserve": __version__,
                "ONNX Runtime": self._runtime_version,
                "Python": platform.python_version(),
                "system": f"{platform.system()} {platform.machine()}",
            },
            "name": options.server_name,
            "model_control_mode": options.model_control_mode,
            "ports": dict(self._ports),
            "host": options.host,
            "keys": {str(group): group in self._guarded for group in Group},
            "tls": self._describe_tls(),
            "processors": self._processors,
            "memory_limit_bytes": self._memory_limit_bytes,
            "process": os.getpid(),
            "settings": [asdict(setting) for setting in self._settings()],
            "live": self.live(),
        }

    def devices(self) -> list[dict[str, Any]]:
        """The GPUs in use. Blocks on their driver."""
        return [asdict(device) for device in self._read_devices()]

    def _describe_tls(self) -> str:
        options = self._options
        if options.tls_cert_file is None:
            return "off"
        mutual = ", clients need a certificate" if options.tls_client_ca_file else ""
        metrics = ", metrics port included" if options.tls_metrics else ", without the metrics port"
        return f"from version {options.tls_min_version}{mutual}{metrics}"

    def _settings(self) -> list[Setting]:
        """The options that differ from their defaults."""
        defaults = ServerOptions()
        return [
            Setting(name, show_value(value), self._origins.get(name, NOT_SET))
            for name, value in self._options
            if value != getattr(defaults, name)
        ]


def _resident_bytes() -> int:
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
