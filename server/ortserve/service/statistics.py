"""The statistics of models, as the protocol asks for them."""

import time
from dataclasses import dataclass
from typing import Final

from ortserve.clock import Clock
from ortserve.errors import ServeError, invalid_input
from ortserve.registry.registry import Registry
from ortserve.registry.served import ServedModel
from ortserve.telemetry.statistics import VersionStatistics, read_statistics

_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """A version's numbers; ``last_inference_ms`` since the epoch is when a request was last answered, 0 if none was."""

    last_inference_ms: int
    version: VersionStatistics


class StatisticsService:
    """Answers statistics calls. Loop thread only."""

    def __init__(self, registry: Registry, clock: Clock, wall_clock: Clock = time.time_ns) -> None:
        """``clock`` is the monotonic one that requests are stamped by, ``wall_clock`` nanoseconds since the epoch."""
        self._registry = registry
        self._clock = clock
        self._wall_clock = wall_clock

    def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """The numbers of a version, of all ready versions of a model, or, without a name, of all models.

        Raises:
            ServeError: invalid_input, as the protocol has it, for a model or version that does not serve.
        """
        if not name:
            return [self._describe(served) for model in self._registry.models() for served in self._serving(model)]
        if version:
            try:
                return [self._describe(self._registry.find(name, version))]
            except ServeError:
                if self._registry.ready_versions(name):
                    raise invalid_input(f"requested model version is not available for model '{name}'") from None
        if serving := self._serving(name):
            return [self._describe(served) for served in serving]
        raise invalid_input(f"requested model '{name}' is not available")

    def _serving(self, name: str) -> list[ServedModel]:
        return [self._registry.find(name, str(version)) for version in self._registry.ready_versions(name)]

    def _describe(self, served: ServedModel) -> ModelStatistics:
        numbers = read_statistics(served.metrics)
        last_ns = 0
        if numbers.last_done_ns:
            last_ns = self._wall_clock() - (self._clock() - numbers.last_done_ns)
        return ModelStatistics(last_ns // _NS_PER_MS, numbers)
