"""The requests that get a load report, and its format."""

import base64

import pytest
from prometheus_client import CollectorRegistry

from ortserve._pb.orca_load_report_v3_pb2 import OrcaLoadReport
from ortserve.codecs.load_report import LoadFormat
from ortserve.frontends.load_reports import LoadReports
from ortserve.service.load import LoadMeter
from ortserve.telemetry.metrics import Metrics


def reports(*, is_always: bool) -> LoadReports:
    clock = iter(range(0, 100_000_000_000, 1_000_000_000)).__next__  # a report is made anew each time
    return LoadReports(LoadMeter(Metrics(CollectorRegistry()), processors=1, clock=clock), is_always=is_always)


def test_unrequested_report_is_sent_only_in_always_mode() -> None:
    asked = reports(is_always=False)
    assert (asked.header(None), asked.metadata(None)) == (None, None)

    always = reports(is_always=True)
    header, entry = always.header(None), always.metadata(None)
    assert header is not None
    assert header[0] == b"endpoint-load-metrics-bin"
    OrcaLoadReport.FromString(base64.b64decode(header[1], validate=True))
    assert entry is not None
    assert entry[0] == "endpoint-load-metrics-bin"
    assert isinstance(entry[1], bytes)
    OrcaLoadReport.FromString(entry[1])


@pytest.mark.parametrize("is_always", [False, True])
@pytest.mark.parametrize(("asked", "begins"), [(LoadFormat.TEXT, "TEXT "), (LoadFormat.JSON, "JSON {")])
def test_requested_report_has_the_requested_format(asked: LoadFormat, begins: str, is_always: bool) -> None:
    encoders = reports(is_always=is_always)
    header, entry = encoders.header(asked), encoders.metadata(asked)
    assert header is not None
    assert header[0] == b"endpoint-load-metrics"
    assert header[1].startswith(begins.encode())
    assert entry is not None
    assert entry[0] == "endpoint-load-metrics"
    assert str(entry[1]).startswith(begins)
