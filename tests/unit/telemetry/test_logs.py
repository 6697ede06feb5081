"""Log lines, the access log, and the log of rejections by models."""

import asyncio
import io
import json
import logging
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import hpack
import pytest
from opentelemetry.util.re import parse_env_headers

from ortserve.errors import ModelRejectionError
from ortserve.telemetry.logs import (
    AccessLog,
    LogSwitches,
    RejectionLog,
    StderrHandler,
    configure_logging,
    fit_fields,
    log_event,
    log_fault,
)

LOGGER = logging.getLogger("ortserve.test")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    for handler in [handler for handler in root.handlers if isinstance(handler, StderrHandler)]:
        root.removeHandler(handler)
    root.setLevel(level)


def test_event_is_one_line_with_time_level_logger_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")

    log_event(LOGGER, logging.INFO, "version is ready", model="m", version=1, reason="two words")

    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO ortserve\.test "
        r'version is ready model=m version=1 reason="two words"\n',
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("long", ["a" * 5000, "two words " * 500, 'é "\n' * 1000, "x" * 290])
@pytest.mark.parametrize("model", ["m", "m" * 350, "m" * 500])
def test_fields_fit_a_line_in_their_order_and_the_last_is_cut(
    capsys: pytest.CaptureFixture[str], long: str, model: str
) -> None:
    configure_logging("info")
    fields = {"model": model, "version": 1, "batching": long, "operators": "1 Add"}
    fitting = fit_fields(fields, LOGGER.name, "model is ready")
    log_event(LOGGER, logging.INFO, "model is ready", **fitting)
    (line,) = capsys.readouterr().err.splitlines()
    assert 390 <= len(line) < 400 or fitting == fields or len(fitting) < 3
    assert len(line) < 400
    assert list(fitting) == list(fields)[: len(fitting)]
    *whole, last = fitting
    assert all(fitting[key] == fields[key] for key in whole)
    assert str(fields[last]).startswith(str(fitting[last]).removesuffix("…"))


def test_fields_of_a_short_line_are_unchanged() -> None:
    fields = {"model": "m", "seconds": 0.5, "operators": "1 Add"}
    assert fit_fields(fields, LOGGER.name, "model is ready") == fields


def test_client_text_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")

    LOGGER.info("asked for %s", "a\nb")
    log_event(LOGGER, logging.INFO, "refused", model="c\nd e=f")
    log_event(LOGGER, logging.INFO, "refused", model="1, 2, … é", other="g\u2028h …")

    first, second, third = capsys.readouterr().err.splitlines()
    assert third.endswith('refused model="1, 2, … é" other="g\\u2028h \\u2026"')
    assert first.endswith("asked for a\\nb")
    assert second.endswith('refused model="c\\nd e=f"')


def test_header_parsers_do_not_log_headers(capsys: pytest.CaptureFixture[str]) -> None:
    switches = configure_logging("debug")
    switches.set(info=True, warning=True, error=True, verbose_level=2)
    logging.getLogger("opentelemetry").setLevel(logging.NOTSET)  # as in a process that has no other level before

    hpack.Decoder().decode(hpack.Encoder().encode([("authorization", "Bearer secret")]))
    parse_env_headers("authorization Bearer secret")  # of OTEL_EXPORTER_OTLP_HEADERS, without "="
    LOGGER.debug("seen")

    assert capsys.readouterr().err.count("\n") == 1


def test_json_line_is_one_object_with_time_level_logger_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", log_format="json")

    log_event(LOGGER, logging.INFO, "a\nb", model='m "é"', ms=1.5, ready=True, path=Path("c"), rate=math.inf)

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {
        "level": "info",
        "logger": "ortserve.test",
        "message": "a\nb",
        "model": 'm "é"',
        "ms": 1.5,
        "ready": True,
        "path": "c",
        "rate": "inf",
    }


def test_version_is_a_text_in_each_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", log_format="json")
    log_event(LOGGER, logging.INFO, "model is ready", version=1)
    log_event(LOGGER, logging.INFO, "request", version="")
    assert [json.loads(line)["version"] for line in capsys.readouterr().err.splitlines()] == ["1", ""]


def test_json_line_keeps_its_traceback_and_own_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", log_format="json")
    try:
        raise ValueError("broken")
    except ValueError as error:
        log_fault(LOGGER, "failed", error, model="m", time="noon")

    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: broken")
    assert (found["message"], found["field_time"], found["model"]) == ("failed", "noon", "m")
    assert found["time"] != "noon"


def test_second_configuration_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug")
    configure_logging("warning")

    LOGGER.info("hidden")
    LOGGER.warning("shown")

    assert capsys.readouterr().err.count("\n") == 1


def test_exception_follows_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")

    try:
        raise ValueError("broken")
    except ValueError:
        LOGGER.exception("load failed")

    assert "ERROR ortserve.test load failed\nTraceback" in capsys.readouterr().err


@pytest.mark.parametrize("off", ["info", "warning", "error"])
def test_each_severity_is_switched_separately(capsys: pytest.CaptureFixture[str], off: str) -> None:
    switches = configure_logging("info")
    numbers = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

    def log_all() -> list[str]:
        for name, number in {**numbers, "debug": logging.DEBUG}.items():
            LOGGER.log(number, "line %s", name)
        return [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()]

    switches.set(**{**dict.fromkeys(numbers, True), off: False}, verbose_level=0)
    assert log_all() == [name for name in numbers if name != off]
    switches.set(info=True, warning=True, error=True, verbose_level=2)
    assert log_all() == [*numbers, "debug"]
    switches.set(info=False, warning=False, error=False, verbose_level=0)
    assert log_all() == []


@pytest.mark.parametrize(
    ("level", "switches"),
    [
        ("debug", (True, True, True, 1)),
        ("info", (True, True, True, 0)),
        ("warning", (False, True, True, 0)),
        ("error", (False, False, True, 0)),
    ],
)
def test_switches_start_at_the_configured_level(
    level: Literal["debug", "info", "warning", "error"], switches: tuple[bool, bool, bool, int]
) -> None:
    known = LogSwitches(level)
    assert (known.info, known.warning, known.error, known.verbose_level) == switches


FIELDS = {"protocol": "http", "model": "m", "request_id": "two words", "ms": 1.25}


class Writes(io.StringIO):
    """Standard error that records each write separately."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def write(self, text: str) -> int:
        self.all.append(text)
        return len(text)


@pytest.fixture(autouse=True)
def level_as_before() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


async def test_access_line_has_the_common_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", writes := Writes())
    AccessLog(LogSwitches("info"), "text").write(FIELDS)
    AccessLog(LogSwitches("info"), "json").write(FIELDS)
    await asyncio.sleep(0)

    text, document = writes.all
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO ortserve\.access "
        r'request protocol=http model=m request_id="two words" ms=1\.25\n',
        text,
    )
    found = json.loads(document)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {"level": "info", "logger": "ortserve.access", "message": "request", **FIELDS}


async def test_lines_of_one_turn_of_the_loop_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", writes := Writes())
    log = AccessLog(LogSwitches("info"), "text")

    for number in (1, 2, 3):
        log.write({"request_id": number})
    assert writes.all == []
    await asyncio.sleep(0)
    log.write({"request_id": 4})
    await asyncio.sleep(0)

    assert [re.findall(r"request_id=(\d)\n", text) for text in writes.all] == [["1", "2", "3"], ["4"]]


async def test_access_lines_follow_their_severity_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", writes := Writes())
    switches = LogSwitches("warning")
    log = AccessLog(switches, "text")

    log.write({"request_id": "quiet"})
    switches.set(info=True, warning=True, error=True, verbose_level=0)
    log.write({"request_id": "written"})
    await asyncio.sleep(0)

    assert len(writes.all) == 1
    assert "written" in writes.all[0]
    assert "quiet" not in writes.all[0]


async def test_process_without_standard_error_writes_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))

    AccessLog(LogSwitches("info"), "text").write(FIELDS)
    await asyncio.sleep(0)
    assert faults == []


async def test_closed_standard_error_disturbs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    monkeypatch.setattr(sys, "stderr", Broken())

    AccessLog(LogSwitches("info"), "text").write(FIELDS)
    await asyncio.sleep(0)
    assert faults == []


S = 1_000_000_000


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [vars(record)["fields"] for record in caplog.records if record.message == "model rejected requests"]


def test_one_line_a_minute_counts_the_requests_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RejectionLog("m", "1")
    for at_s in (5, 6, 64, 65, 66, 124.9, 125):
        log.note(ModelRejectionError("idx=99", "Gather 'lookup'"), round(at_s * S))
    expected = {"model": "m", "version": "1", "by": "Gather 'lookup'"}
    assert lines(caplog) == [{**expected, "requests": 1}, {**expected, "requests": 3}, {**expected, "requests": 3}]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_each_version_has_its_own_line_without_request_data(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for version in ("1", "2"):
        RejectionLog("m", version).note(ModelRejectionError("idx=99", ""), 5 * S)
    assert [line["version"] for line in lines(caplog)] == ["1", "2"]
    assert {line["by"] for line in lines(caplog)} == {"the check of the inputs"}
    assert "99" not in str(lines(caplog))
