"""How often rejections are logged, and with what."""

import logging

import pytest

from ortserve.errors import ModelRejectionError
from ortserve.telemetry.rejection_log import RejectionLog

S = 1_000_000_000


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [vars(record)["fields"] for record in caplog.records if record.message == "model rejected requests"]


def test_one_line_a_minute_counts_the_requests_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RejectionLog("m", "1")
    for at_s in (5, 6, 64, 65, 66, 124.9, 125):
        log.note(ModelRejectionError("idx=99", "Gather 'lookup'"), round(at_s * S))
    told = {"model": "m", "version": "1", "by": "Gather 'lookup'"}
    assert lines(caplog) == [{**told, "requests": 1}, {**told, "requests": 3}, {**told, "requests": 3}]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_each_version_has_its_own_line_and_no_line_quotes_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for version in ("1", "2"):
        RejectionLog("m", version).note(ModelRejectionError("idx=99", ""), 5 * S)
    assert [line["version"] for line in lines(caplog)] == ["1", "2"]
    assert {line["by"] for line in lines(caplog)} == {"the check of the inputs"}
    assert "99" not in str(lines(caplog))
