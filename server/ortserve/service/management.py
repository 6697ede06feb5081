"""Statistics and log settings of a running server, and the record of all management services for the frontends."""

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from ortserve.clock import Clock
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.registry import Registry
from ortserve.registry.served_version import ServedVersion
from ortserve.service.labels import LabelService
from ortserve.service.loop_turns import LoopTurns
from ortserve.service.profiling import ProfilingService
from ortserve.service.repository import RepositoryService
from ortserve.service.rollout.control import RolloutService
from ortserve.service.trace_settings import TraceSettings
from ortserve.telemetry.logs import LogSwitches
from ortserve.telemetry.statistics import VersionStatistics, read_statistics

_NS_PER_MS: Final = 1_000_000

Setting: TypeAlias = bool | int | str

LOG_FORMATS: Final = ("default", "ISO8601")
"""The protocol's names. With both, lines have a time in ISO 8601, as this server always writes. The operator chooses
between text and JSON, because their log collector expects one of them."""

_PER_TURN: Final = 25
"""Number of models whose statistics are read in one turn of the event loop; with encoding that takes about 2 ms."""

_MAX_UINT32: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The statistics of a version. ``last_inference_ms`` is when it last answered, since the epoch; 0 for never."""

    last_inference_ms: int
    version: VersionStatistics


class StatisticsService:
    """Answers statistics calls. Loop thread only."""

    def __init__(
        self, registry: Registry, clock: Clock, wall_clock: Clock = time.time_ns, *, turns: LoopTurns | None = None
    ) -> None:
        """Read from ``registry``.

        Args:
            registry: The models.
            clock: The monotonic clock of the timings.
            wall_clock: Nanoseconds since the epoch.
            turns: Divides the turns of the event loop with other services; None if no other one needs many.
        """
        self._registry = registry
        self._turns = turns or LoopTurns()
        self._clock = clock
        self._wall_clock = wall_clock

    async def statistics(self, name: str = "", version: str = "") -> AsyncIterator[ModelStatistics]:
        """The statistics of a version, of all ready versions of a model, or, without a name, of all models.

        Of all models, it yields a few in each turn of the event loop, because a server may have thousands.

        Raises:
            ServeError: invalid_input, as the protocol requires, for a model or version that does not serve.
        """
        if name:
            for served in self._named(name, version):
                yield self._describe(served)
            return
        for number, model in enumerate(self._registry.names()):
            if number % _PER_TURN == 0:
                await self._turns.next()
            for served in self._serving(model):
                yield self._describe(served)

    def _named(self, name: str, version: str) -> list[ServedVersion]:
        """The versions that a call names. Raises ServeError: see ``statistics``."""
        if version:
            try:
                return [self._registry.find(name, version)]
            except ServeError:
                if self._registry.ready_versions(name):
                    raise invalid_input(f"requested model version is not available for model '{name}'") from None
        if serving := self._serving(name):
            return serving
        raise invalid_input(f"requested model '{name}' is not available")

    def _serving(self, name: str) -> list[ServedVersion]:
        return [self._registry.find(name, str(version)) for version in self._registry.ready_versions(name)]

    def _describe(self, served: ServedVersion) -> ModelStatistics:
        numbers = read_statistics(served.metrics)
        last_ns = 0
        if numbers.last_done_ns:
            last_ns = self._wall_clock() - (self._clock() - numbers.last_done_ns)
        return ModelStatistics(last_ns // _NS_PER_MS, numbers)


class LogSettings:
    """The protocol's log settings, which clients may read and change. Loop thread only."""

    def __init__(self, switches: LogSwitches) -> None:
        self._switches = switches
        self._format = LOG_FORMATS[0]

    def read(self) -> dict[str, Setting]:
        """All settings."""
        switches = self._switches
        return {
            "log_file": "",
            "log_info": switches.info,
            "log_warning": switches.warning,
            "log_error": switches.error,
            "log_verbose_level": switches.verbose_level,
            "log_format": self._format,
        }

    def update(self, changes: Mapping[str, object]) -> dict[str, Setting]:
        """Change some settings and return all. Unknown keys and values of None are ignored.

        Raises:
            ServeError: invalid_input, for an invalid value; unsupported, for ``log_file``. No setting is changed then.
        """
        known = {key: value for key, value in changes.items() if value is not None}
        if "log_file" in known:
            raise ServeError(ErrorKind.UNSUPPORTED, "log file location can not be updated through network protocol")
        for key in ("log_info", "log_warning", "log_error"):
            if key in known and not isinstance(known[key], bool):
                raise invalid_input(f"expect boolean for '{key}', got {known[key]!r}")
        level = known.get("log_verbose_level", 0)
        if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= _MAX_UINT32:
            raise invalid_input(f"expect unsigned integer for 'log_verbose_level', got {level!r}")
        if (log_format := known.get("log_format", self._format)) not in LOG_FORMATS:
            raise invalid_input(f"invalid argument for --log_format, got: {log_format}")
        self._format = str(log_format)
        switches = self._switches
        switches.set(
            info=bool(known.get("log_info", switches.info)),
            warning=bool(known.get("log_warning", switches.warning)),
            error=bool(known.get("log_error", switches.error)),
            verbose_level=level if "log_verbose_level" in known else switches.verbose_level,
        )
        return self.read()


@dataclass(frozen=True, slots=True)
class Management:
    repository: RepositoryService
    statistics: StatisticsService
    logs: LogSettings
    traces: TraceSettings
    profiling: ProfilingService
    labels: LabelService
    rollouts: RolloutService
