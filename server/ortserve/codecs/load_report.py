"""Load reports in the three formats of ORCA (github.com/cncf/xds), as callers and load balancers read them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import orjson

from ortserve._pb.orca_load_report_v3_pb2 import OrcaLoadReport


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of the server, averaged over some seconds. The fields have the names of the load report of ORCA.

    Attributes:
        application_utilization: The largest value of ``named_metrics``: requested share of the capacity, above 1 if
            callers request more than the server can do.
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
"""Decimal places in text and JSON. Weights of load balancers need no more, and headers stay short."""


class LoadFormat(StrEnum):
    """Formats, as callers name them in ``endpoint-load-metrics-format``."""

    TEXT = "text"
    JSON = "json"
    BIN = "bin"


def read_load_format(text: str) -> LoadFormat | None:
    """Parse the name of a format in any case; None for an unknown format, which requests no report."""
    try:
        return LoadFormat(text.strip().lower())
    except ValueError:
        return None


def encode_text(report: LoadReport) -> bytes:
    """Encode as ``TEXT name=value, ...``. The names of map entries are ``named_metrics.<name>``."""
    values = {name: getattr(report, name) for name in _FIELDS}
    values |= {f"named_metrics.{name}": value for name, value in report.named_metrics.items()}
    return b"TEXT " + ", ".join(f"{name}={round(value, _DIGITS):g}" for name, value in values.items()).encode()


def encode_json(report: LoadReport) -> bytes:
    """Encode as ``JSON {...}``, in the JSON mapping of protobuf."""
    values: dict[str, object] = {name: round(getattr(report, name), _DIGITS) for name in _FIELDS}
    values["named_metrics"] = {name: round(value, _DIGITS) for name, value in report.named_metrics.items()}
    return b"JSON " + orjson.dumps(values)


def encode_message(report: LoadReport) -> bytes:
    """Serialize a ``xds.data.orca.v3.OrcaLoadReport``."""
    message = OrcaLoadReport(named_metrics=report.named_metrics)
    for name in _FIELDS:
        setattr(message, name, getattr(report, name))
    return message.SerializeToString(deterministic=True)
