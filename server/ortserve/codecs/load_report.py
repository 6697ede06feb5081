"""Load reports in the three formats of ORCA (github.com/cncf/xds), as callers and load balancers read them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import orjson

from ortserve._pb.orca_load_report_v3_pb2 import OrcaLoadReport


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of the server, averaged over some seconds. The fields have the names of ORCA's load report.

    Attributes:
        application_utilization: The largest of ``named_metrics``: the share of the capacity that is requested, above 1
            if more is requested than the server can do.
        cpu_utilization: Share of the available processors in use, 0 to about 1.
        rps_fractional: Requests per second, with any outcome.
        eps: Requests per second that were rejected or failed without a fault of the caller.
        named_metrics: Utilization by resource.
    """

    application_utilization: float
    cpu_utilization: float
    rps_fractional: float
    eps: float
    named_metrics: Mapping[str, float]


_FIELDS: Final = ("application_utilization", "cpu_utilization", "rps_fractional", "eps")

_DIGITS: Final = 6
"""Decimal places. Weights of load balancers need no more, and headers stay short."""


class LoadFormat(StrEnum):
    """A format, as callers name it in ``endpoint-load-metrics-format``."""

    TEXT = "text"
    JSON = "json"
    BIN = "bin"


def read_load_format(text: str) -> LoadFormat | None:
    """The requested format; case is ignored. None for an unknown format, for which no report is sent."""
    try:
        return LoadFormat(text.strip().lower())
    except ValueError:
        return None


def encode_text(report: LoadReport) -> bytes:
    """``TEXT name=value, ...``; entries of the map are ``named_metrics.<name>``."""
    values = {name: getattr(report, name) for name in _FIELDS}
    values |= {f"named_metrics.{name}": value for name, value in report.named_metrics.items()}
    return b"TEXT " + ", ".join(f"{name}={round(value, _DIGITS):g}" for name, value in values.items()).encode()


def encode_json(report: LoadReport) -> bytes:
    """``JSON {...}``, in protobuf's JSON mapping."""
    values: dict[str, object] = {name: round(getattr(report, name), _DIGITS) for name in _FIELDS}
    values["named_metrics"] = {name: round(value, _DIGITS) for name, value in report.named_metrics.items()}
    return b"JSON " + orjson.dumps(values)


def encode_message(report: LoadReport) -> bytes:
    """A serialized ``xds.data.orca.v3.OrcaLoadReport``."""
    message = OrcaLoadReport(named_metrics=report.named_metrics)
    for name in _FIELDS:
        setattr(message, name, getattr(report, name))
    return message.SerializeToString(deterministic=True)
