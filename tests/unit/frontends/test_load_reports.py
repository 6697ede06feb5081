"""The responses that carry a load report, and its format."""

import base64

import pytest
from prometheus_client import CollectorRegistry

from ortserve._pb.orca_load_report_v3_pb2 import OrcaLoadReport
from ortserve.codecs.load_report import LoadFormat
from ortserve.frontends.load_reports import LoadReports
from ortserve.service.load_meter import LoadMeter
from ortserve.telemetry.metrics import Metrics


def reports(*, is_always: bool) -> LoadReports:
    clock = iter(range(0, 100_000_000_000, 1_000_000_000)).__next__  # a new report each time
    return LoadReports(LoadMeter(Metrics(CollectorRegistry()), processors=1, clock=clock), is_always=is_always)


def test_response_without_a_request_for_it_carries_a_report_only_if_all_do() -> None:
    assert reports(is_always=False).default is None

    always = reports(is_always=True)
    assert always.default is LoadFormat.BIN
    header, entry = always.header(always.default), always.metadata(always.default)
    assert header[0] == b"endpoint-load-metrics-bin"
    OrcaLoadReport.FromString(base64.b64decode(header[1], validate=True))
    assert entry[0] == "endpoint-load-metrics-bin"
    assert isinstance(entry[1], bytes)
    OrcaLoadReport.FromString(entry[1])


@pytest.mark.parametrize("is_always", [False, True])
@pytest.mark.parametrize(("asked", "begins"), [(LoadFormat.TEXT, "TEXT "), (LoadFormat.JSON, "JSON {")])
def test_report_has_the_requested_format(asked: LoadFormat, begins: str, is_always: bool) -> None:
    encoder = reports(is_always=is_always)
    header, entry = encoder.header(asked), encoder.metadata(asked)
    assert header[0] == b"endpoint-load-metrics"
    assert header[1].startswith(begins.encode())
    assert entry[0] == "endpoint-load-metrics"
    assert str(entry[1]).startswith(begins)


def test_report_is_encoded_once_until_the_next_one() -> None:
    now_ns = [0]
    meter = LoadMeter(Metrics(CollectorRegistry()), processors=1, clock=lambda: now_ns[0])
    encoder = LoadReports(meter, is_always=True)
    _, first = encoder.header(LoadFormat.BIN)
    assert encoder.header(LoadFormat.BIN)[1] is first
    now_ns[0] = 100_000_000_000
    assert encoder.header(LoadFormat.BIN)[1] is not first
