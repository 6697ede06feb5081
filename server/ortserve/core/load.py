"""How busy a server is."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Means over some seconds; the fields are named as those of ORCA's load report (github.com/cncf/xds).

    Attributes:
        application_utilization: Of what the server can do, by whatever is asked most of it: at least 0, and above 1
            where more is asked than it can do.
        cpu_utilization: Of the processors that it may use, 0 to about 1.
        rps_fractional: Requests a second, whatever became of them.
        eps: Of these, those that were refused for want of room or time, or failed through no fault of their caller's.
        named_metrics: What ``application_utilization`` is the largest of.
    """

    application_utilization: float
    cpu_utilization: float
    rps_fractional: float
    eps: float
    named_metrics: Mapping[str, float]
