"""The services that manage a running server, in one record for the frontends that offer them."""

from dataclasses import dataclass

from ortserve.service.repository import RepositoryService
from ortserve.service.settings import LogSettings, TraceSettings
from ortserve.service.statistics import StatisticsService


@dataclass(frozen=True, slots=True)
class Management:
    repository: RepositoryService
    statistics: StatisticsService
    logs: LogSettings
    traces: TraceSettings
