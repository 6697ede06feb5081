"""What there is to know about the server and its models: health and metadata."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ortserve import __version__
from ortserve._pb.model_config_pb2 import ModelConfig
from ortserve.batching.statistics import Learned
from ortserve.core.signature import TensorSpec
from ortserve.errors import ServeError
from ortserve.registry.catalog import State, VersionRecord
from ortserve.registry.effective_config import describe_config
from ortserve.registry.registry import Registry

PLATFORM: Final = "onnxruntime_onnx"
EXTENSIONS: Final = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "logging",
)
"""Of the protocol, those that are always served, in the order that Triton tells them."""


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """``versions`` are the ready ones; ``properties`` tell operators how the model is run and why."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    properties: Mapping[str, str]


class ModelService:
    """Answers health and metadata calls. Loop thread only."""

    def __init__(
        self,
        registry: Registry,
        *,
        server_name: str,
        strict_readiness: bool,
        extensions: tuple[str, ...] = EXTENSIONS,
    ) -> None:
        self._registry = registry
        self._extensions = extensions
        self._server_name = server_name
        self._strict_readiness = strict_readiness
        self._is_exiting = False
        self._news = asyncio.Event()
        registry.on_change = self._tell_news

    @property
    def is_exiting(self) -> bool:
        """Whether the server was told to stop; requests are still answered for a while."""
        return self._is_exiting

    @property
    def lost(self) -> str:
        """Which device is lost, and why, so that only a new process is of use; empty while none is."""
        return self._registry.lost

    def begin_exit(self) -> None:
        """Turn readiness off for good."""
        self._is_exiting = True
        self._tell_news()

    def readiness_news(self) -> asyncio.Event:
        """An event that is set when readiness may have changed since this call."""
        return self._news

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def tally(self) -> tuple[int, int]:
        """How many models have a version that is ready, and how many have none but one that failed."""
        states = [{version.state for version in versions} for versions in self._registry.models().values()]
        served = sum(State.READY in known for known in states)
        return served, sum(State.FAILED in known and State.READY not in known for known in states)

    def is_live(self) -> bool:
        """Whether the process is of use: not once it was told to stop, nor once a device is lost, until a new one."""
        return not self._is_exiting and not self.lost

    def is_ready(self) -> bool:
        """Whether initial loading is over, the server is not stopping, and no model that must serve has failed to.

        Never again once a device is lost.
        """
        if self._is_exiting or not self._registry.is_loaded or self.lost:
            return False
        return all(self._may_be_ready_with(records) for records in self._registry.models().values())

    def _may_be_ready_with(self, versions: Sequence[VersionRecord]) -> bool:
        """Whether a model's versions do not hold readiness back. What was unloaded on purpose never does."""
        missed = [record for record in versions if not record.is_unloaded]
        serves = any(record.state is State.READY for record in missed)
        if self._strict_readiness:
            # A version that is loading beside one that serves is no loss.
            return all(record.state is State.READY or (serves and record.state < State.READY) for record in missed)
        return serves or not any(record.is_required for record in missed)

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether this version, or for ``""`` any version, of the model is ready; False for an unknown model."""
        try:
            self._registry.find(name, version)
        except ServeError:
            return False
        return True

    def is_known(self, name: str) -> bool:
        """Whether the model was ever asked for; until initial loading is over it may yet be, whatever its name."""
        return self._registry.knows(name) or not self._registry.is_loaded

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata(self._server_name, __version__, self._extensions)

    def batching(self, name: str, version: str) -> Learned:
        """What the batcher of a version has learned and decided.

        Raises:
            ServeError: not_found or not_ready.
        """
        return self._registry.find(name, version).learned()

    def model_config(self, name: str, version: str) -> ModelConfig:
        """The configuration that a version, or for ``""`` the highest that is ready, really has.

        Raises:
            ServeError: not_found or not_ready.
        """
        return describe_config(self._registry.find(name, version))

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        """Describe a version, or for ``""`` the highest that is ready.

        Raises:
            ServeError: not_found or not_ready.
        """
        served = self._registry.find(name, version)
        versions = (version,) if version else tuple(str(ready) for ready in self._registry.ready_versions(name))
        return ModelMetadata(
            served.name, versions, PLATFORM, served.signature.inputs, served.signature.outputs, served.properties
        )
