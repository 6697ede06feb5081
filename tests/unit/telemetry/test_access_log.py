"""Lines of requests as an operator sees them, and when they are written."""

import asyncio
import io
import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from ortserve.telemetry.access_log import AccessLog
from ortserve.telemetry.logs import LogSwitches

FIELDS = {"protocol": "http", "model": "m", "request_id": "two words", "ms": 1.25}


class Writes(io.StringIO):
    """Standard error, each write apart."""

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


async def test_line_is_as_all_lines_are(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_lines_are_turned_off_and_on_with_their_severity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", writes := Writes())
    switches = LogSwitches("warning")
    log = AccessLog(switches, "text")

    log.write({"request_id": "quiet"})
    switches.set(info=True, warning=True, error=True, verbose_level=0)
    log.write({"request_id": "told"})
    await asyncio.sleep(0)

    assert len(writes.all) == 1
    assert "told" in writes.all[0]
    assert "quiet" not in writes.all[0]


async def test_process_without_standard_error_writes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))

    AccessLog(LogSwitches("info"), "text").write(FIELDS)
    await asyncio.sleep(0)
    assert faults == []


async def test_lines_that_nobody_reads_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    monkeypatch.setattr(sys, "stderr", Broken())

    AccessLog(LogSwitches("info"), "text").write(FIELDS)
    await asyncio.sleep(0)
    assert faults == []
