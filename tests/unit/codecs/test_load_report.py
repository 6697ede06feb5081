"""Load reports in the three formats, each parsed back by its reader."""

import struct

import orjson
import pytest

from ortserve._pb.orca_load_report_v3_pb2 import OrcaLoadReport
from ortserve.codecs.load_report import (
    LoadFormat,
    LoadReport,
    encode_json,
    encode_message,
    encode_text,
    read_load_format,
)

REPORT = LoadReport(0.8, 1 / 3, 1234.5, 0.0, {"saturation": 0.8, "event_loop_utilization": 1e-9})


def test_text_format_uses_dotted_names_for_map_fields() -> None:
    assert encode_text(REPORT) == (
        b"TEXT application_utilization=0.8, cpu_utilization=0.333333, rps_fractional=1234.5, eps=0, "
        b"named_metrics.saturation=0.8, named_metrics.event_loop_utilization=0"
    )


def test_json_format_uses_the_field_names() -> None:
    prefix, _, document = encode_json(REPORT).partition(b" ")
    assert prefix == b"JSON"
    assert orjson.loads(document) == {
        "application_utilization": 0.8,
        "cpu_utilization": 0.333333,
        "rps_fractional": 1234.5,
        "eps": 0.0,
        "named_metrics": {"saturation": 0.8, "event_loop_utilization": 0.0},
    }


def test_message_has_the_public_field_numbers() -> None:
    # Tags as in cncf/xds: cpu_utilization 1, rps_fractional 6, application_utilization 9, all of 64 bits.
    fields = ((1 << 3 | 1, 0.25), (6 << 3 | 1, 2.0), (9 << 3 | 1, 1.5))
    expected = b"".join(bytes([tag]) + struct.pack("<d", value) for tag, value in fields)
    assert encode_message(LoadReport(1.5, 0.25, 2.0, 0.0, {})) == expected
    read = OrcaLoadReport.FromString(encode_message(REPORT))
    assert dict(read.named_metrics) == REPORT.named_metrics
    assert read.cpu_utilization == REPORT.cpu_utilization


@pytest.mark.parametrize(
    ("text", "known"), [("text", LoadFormat.TEXT), (" JSON ", LoadFormat.JSON), ("Bin", LoadFormat.BIN), ("", None)]
)
def test_format_names_are_case_insensitive(text: str, known: LoadFormat | None) -> None:
    assert read_load_format(text) is known
    assert read_load_format(text + "x") is None
