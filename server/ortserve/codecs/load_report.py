"""Load reports in the three formats of ORCA (github.com/cncf/xds), as callers and load balancers read them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import orjson

from ortserve._pb.orca_load_report_v3_pb2 import OrcaLoadReport


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


_FIELDS: Final = ("application_utilization", "cpu_utilization", "rps_fractional", "eps")

_DIGITS: Final = 6
"""Behind the point: a balancer's weights need no more, and headers stay short."""


class LoadFormat(StrEnum):
    """As callers ask for them in ``endpoint-load-metrics-format``."""

    TEXT = "text"
    JSON = "json"
    BIN = "bin"


def read_load_format(text: str) -> LoadFormat | None:
    """The format that a caller asks for, in any case; None for one that nobody knows, which asks for nothing."""
    try:
        return LoadFormat(text.strip().lower())
    except ValueError:
        return None


def encode_text(report: LoadReport) -> bytes:
    """``TEXT name=value, …``; fields of the map are ``named_metrics.<name>``."""
    values = {name: getattr(report, name) for name in _FIELDS}
    values |= {f"named_metrics.{name}": value for name, value in report.named_metrics.items()}
    return b"TEXT " + ", ".join(f"{name}={round(value, _DIGITS):g}" for name, value in values.items()).encode()


def encode_json(report: LoadReport) -> bytes:
    """``JSON {…}``, by protobuf's mapping to JSON."""
    values: dict[str, object] = {name: round(getattr(report, name), _DIGITS) for name in _FIELDS}
    values["named_metrics"] = {name: round(value, _DIGITS) for name, value in report.named_metrics.items()}
    return b"JSON " + orjson.dumps(values)


def encode_message(report: LoadReport) -> bytes:
    """A serialized ``xds.data.orca.v3.OrcaLoadReport``."""
    message = OrcaLoadReport(named_metrics=report.named_metrics)
    for name in _FIELDS:
        setattr(message, name, getattr(report, name))
    return message.SerializeToString(deterministic=True)
