"""Creates the parts of the console. The server starts them, and the HTTP port serves their routes."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnxruntime

from ortserve.app.watchdog import Watchdog
from ortserve.clock import monotonic_ns
from ortserve.config.options import ServerOptions
from ortserve.device.devices import DevicesReader
from ortserve.engine.process_limits import cpu_budget, memory_limit
from ortserve.frontends.http.console_routes import encode_event
from ortserve.registry.registry import Registry
from ortserve.service.access import Access
from ortserve.service.model_details import ModelDetails
from ortserve.service.models import ModelService
from ortserve.service.observation import Observation
from ortserve.service.rollout.control import RolloutService
from ortserve.service.server_details import ServerDetails


@dataclass(frozen=True, slots=True)
class Console:
    """The parts of the console."""

    observation: Observation
    models: ModelDetails
    server: ServerDetails


def make_console(
    options: ServerOptions,
    origins: Mapping[str, str],
    registry: Registry,
    models: ModelService,
    rollouts: RolloutService,
    watchdog: Watchdog,
    access: Access,
    devices: DevicesReader,
) -> Console | None:
    """Create the parts of the console; None if the options leave it out."""
    if not options.console:
        return None
    server = ServerDetails(
        options,
        origins,
        models,
        guarded=access.guards,
        runtime_version=onnxruntime.__version__,
        processors=cpu_budget(),
        memory_limit_bytes=memory_limit(),
        stalls=watchdog.reading,
        read_devices=devices.read,
        read_memory=registry.memory_use,
    )
    observation = Observation(registry, rollouts.read_all, server.live, monotonic_ns, encode=encode_event)
    return Console(observation, ModelDetails(registry, origins), server)
