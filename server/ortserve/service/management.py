"""The services that manage a running server, in one record for the frontends that offer them."""

from dataclasses import dataclass

from ortserve.service.log_settings import LogSettings
from ortserve.service.repository import RepositoryService
from ortserve.service.statistics import StatisticsService
from ortserve.service.trace_settings import TraceSettings


@dataclass(frozen=True, slots=True)
class Management:
    repository: RepositoryService
    statistics: StatisticsService
    logs: LogSettings
    traces: TraceSettings
