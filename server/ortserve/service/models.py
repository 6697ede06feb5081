"""Health and metadata of the server and its models."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ortserve import __version__
from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.batching.statistics import Learned
from ortserve.clock import monotonic_ns
from ortserve.core.signature import TensorSpec
from ortserve.errors import NotInMemoryError, ServeError
from ortserve.registry.catalog import State, VersionRecord
from ortserve.registry.effective_config import describe_config
from ortserve.registry.registry import Registry
from ortserve.service.loop_turns import LoopTurns

EXTENSIONS: Final = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "logging",
)
"""The protocol's extensions that are always served, in Triton's order."""

_PER_TURN: Final = 50
"""Number of models that are described in one turn of the event loop, in about 2 ms."""


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Metadata of a model.

    Attributes:
        versions: The ready ones.
        properties: How the model runs, for operators.
        max_rows: Maximum number of rows that run together.
        max_queue_rows: Maximum number of rows that wait, also in a member of an ensemble.
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    properties: Mapping[str, str]
    max_rows: int
    max_queue_rows: int


class ModelService:
    """Answers health and metadata calls. Loop thread only."""

    def __init__(
        self,
        registry: Registry,
        *,
        server_name: str,
        strict_readiness: bool,
        extensions: tuple[str, ...] = EXTENSIONS,
        turns: LoopTurns | None = None,
    ) -> None:
        """``turns`` is as in ``StatisticsService``."""
        self._registry = registry
        self._extensions = extensions
        self._server_name = server_name
        self._strict_readiness = strict_readiness
        self._turns = turns or LoopTurns()
        self._epoch_ns = time.time_ns() - monotonic_ns()
        self.is_exiting = False
        """Whether the server is stopping. It still answers requests for a while."""
        self._change = asyncio.Event()
        self._are_versions_ready: bool | None = None
        """Whether no version prevents readiness; None if it was not computed since the last change."""
        registry.on_change = self._announce_change

    @property
    def lost(self) -> str:
        """The lost device and the reason; empty if no device is lost. Only a new process can use the device again."""
        return self._registry.lost

    def begin_exit(self) -> None:
        """Make the server not ready until its end."""
        self.is_exiting = True
        self._announce_change()

    def readiness_change(self) -> asyncio.Event:
        """An event that is set when readiness may have changed since this call."""
        return self._change

    def _announce_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
        self._are_versions_ready = None

    def count_models(self) -> tuple[int, int, int]:
        """The numbers of models with a ready version, of others with a failed version, and of the remaining ones."""
        states = [{version.state for version in versions} for versions in self._registry.models().values()]
        served = sum(State.READY in known for known in states)
        failed = sum(State.FAILED in known and State.READY not in known for known in states)
        return served, failed, len(states) - served - failed

    def is_live(self) -> bool:
        """Whether the process need not be replaced: it is not stopping, and no device is lost."""
        return not self.is_exiting and not self.lost

    def is_ready(self) -> bool:
        """Whether initial loading is over, the server is not stopping, and no required model has failed.

        Always False after a device was lost.
        """
        if self.is_exiting or not self._registry.is_loaded or self.lost:
            return False
        if self._are_versions_ready is None:
            self._are_versions_ready = all(map(self._may_be_ready_with, self._registry.models().values()))
        return self._are_versions_ready

    def _may_be_ready_with(self, versions: Sequence[VersionRecord]) -> bool:
        """Whether the server may be ready with the versions of a model.

        Unloaded versions, and those that requests load, do not prevent it.
        """
        wanted = [record for record in versions if not record.is_unloaded and not record.makes_requests_wait]
        serves = any(record.state is State.READY for record in wanted)
        if self._strict_readiness:
            # A version may load while another one serves.
            return all(record.state is State.READY or (serves and record.state < State.READY) for record in wanted)
        return serves or not any(record.is_required for record in wanted)

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether this version, or for ``""`` any version, of the model answers requests; False for an unknown model.

        A model that the next request loads is ready, because clients that check readiness first would never send one.
        """
        try:
            self._registry.find(name, version)
        except NotInMemoryError:
            return True
        except ServeError:
            return False
        return True

    async def prepare(
        self, name: str, version: str, received_ns: int | None = None, timeout_ns: int | None = None
    ) -> None:
        """Load a model that is not in memory, for a call that describes it. The limits are those of ``wait_for``.

        Raises:
            ServeError: The errors of ``Registry.wait_for``, but not for models that no request loads.
        """
        try:
            self._registry.find(name, version)
        except NotInMemoryError:
            await self._registry.wait_for(name, version, received_ns, timeout_ns)
        except ServeError:  # the call itself reports it
            pass

    def is_known(self, name: str) -> bool:
        """Whether a load of the model was ever requested. True for all names until initial loading is over."""
        return self._registry.knows(name) or not self._registry.is_loaded

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata(self._server_name, __version__, self._extensions)

    async def serving(self) -> AsyncIterator[ModelMetadata]:
        """Describe the models in memory that answer requests, sorted by name, some in each turn of the event loop."""
        for number, name in enumerate(sorted(self._registry.names())):
            if number % _PER_TURN == 0:
                await self._turns.next()
            try:
                metadata = self.model_metadata(name, "")
            except ServeError:
                continue
            yield metadata

    def ready_since_s(self, name: str) -> int:
        """When the version that answers requests without a version became ready, in seconds since 1970.

        Raises:
            ServeError: not_found or not_ready.
        """
        served = self._registry.find(name, "")
        ready_ns = [record.ready_ns for record in self._registry.records_of(name) if record.served is served]
        return (self._epoch_ns + max(ready_ns)) // 10**9

    def batching(self, name: str, version: str) -> Learned:
        """The measurements and decisions of a version's batcher.

        Raises:
            ServeError: not_found or not_ready.
        """
        return self._registry.find(name, version).learned()

    async def model_config(self, name: str, version: str) -> ModelConfig:
        """The effective configuration of a version; for ``""``, of the one that answers requests without a version.

        It is built on a thread, because that takes 10 ms for thousands of tensors.

        Raises:
            ServeError: not_found or not_ready.
        """
        return await asyncio.to_thread(describe_config, self._registry.find(name, version))

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        """Describe a version; for ``""``, the one that answers requests without a version.

        Raises:
            ServeError: not_found or not_ready.
        """
        served = self._registry.find(name, version)
        versions = (served.version,) if version else tuple(str(ready) for ready in self._registry.ready_versions(name))
        properties = served.properties
        if served.recording is not None:
            properties = {**properties, "recording": served.recording.describe()}
        return ModelMetadata(
            served.name,
            versions,
            served.platform,
            served.signature.inputs,
            served.signature.outputs,
            properties,
            served.max_rows,
            served.max_queue_rows,
        )
