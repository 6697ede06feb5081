"""Log and trace settings, as clients of either protocol change them."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from models import builders
from ortserve.config.model import LoadOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.registry import Registry
from ortserve.service.settings import LogSettings, TraceSettings
from ortserve.telemetry.logs import LogSwitches
from ortserve.telemetry.metrics import Metrics

LOG_START = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
TRACE_START = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> LogSettings:
    monkeypatch.setattr(LogSwitches, "apply", lambda self: None)  # the process' own loggers are the test runner's
    return LogSettings(LogSwitches("info"))


@pytest_asyncio.fixture
async def traces(tmp_path: Path) -> AsyncIterator[TraceSettings]:
    """Of a server with the model ``m``."""
    builders.identity(tmp_path / "m.onnx")
    registry = Registry([tmp_path], LoadOptions(warmup_s=0), Metrics(CollectorRegistry()), time.monotonic_ns)
    await registry.load_all()
    yield TraceSettings(registry)
    await registry.close()


def test_log_settings_change_one_by_one_and_are_returned_whole(logs: LogSettings) -> None:
    assert logs.read() == LOG_START
    assert logs.update({"log_info": False}) == {**LOG_START, "log_info": False}
    changed = {**LOG_START, "log_info": False, "log_verbose_level": 3, "log_format": "ISO8601"}
    assert logs.update({"log_verbose_level": 3, "log_format": "ISO8601"}) == changed
    assert logs.update({"log_error": None, "made_up": 1}) == changed
    assert logs.read() == changed


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"log_info": 1}, ErrorKind.INVALID_INPUT, "expect boolean for 'log_info', got 1"),
        ({"log_error": "no"}, ErrorKind.INVALID_INPUT, "expect boolean for 'log_error', got 'no'"),
        ({"log_verbose_level": -1}, ErrorKind.INVALID_INPUT, "expect unsigned integer for 'log_verbose_level', got -1"),
        ({"log_verbose_level": True}, ErrorKind.INVALID_INPUT, "expect unsigned integer for 'log_verbose_level'"),
        ({"log_verbose_level": 2**32}, ErrorKind.INVALID_INPUT, "expect unsigned integer for 'log_verbose_level'"),
        ({"log_format": "json"}, ErrorKind.INVALID_INPUT, "invalid argument for --log_format, got: json"),
        ({"log_format": ["default"]}, ErrorKind.INVALID_INPUT, "invalid argument for --log_format"),
        ({"log_file": "x"}, ErrorKind.UNSUPPORTED, "log file location can not be updated through network protocol"),
    ],
)
def test_log_setting_that_cannot_be_is_refused_and_changes_nothing(
    logs: LogSettings, changes: dict[str, Any], kind: ErrorKind, text: str
) -> None:
    with pytest.raises(ServeError) as caught:
        logs.update({"log_warning": False, **changes})
    assert caught.value.kind is kind
    assert text in caught.value.message
    assert logs.read() == LOG_START


async def test_model_follows_the_server_where_it_has_no_setting_of_its_own(traces: TraceSettings) -> None:
    assert traces.read() == traces.read("m") == TRACE_START
    assert traces.update({"trace_rate": 7, "trace_count": "5"}) == {
        **TRACE_START,
        "trace_rate": "7",
        "trace_count": "5",
    }
    assert traces.update({"trace_rate": ["9"], "trace_level": "OFF"}, "m")["trace_rate"] == "9"
    assert (traces.read("m")["trace_count"], traces.read()["trace_rate"]) == ("5", "7")
    assert traces.update({"trace_rate": None}, "m")["trace_rate"] == "7"
    assert traces.update({"trace_rate": [], "trace_count": None}) == TRACE_START


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"trace_level": ["TIMESTAMPS"]}, ErrorKind.UNSUPPORTED, "trace_level: expected OFF, got 'TIMESTAMPS'"),
        ({"trace_level": ["OFF", "TENSORS"]}, ErrorKind.UNSUPPORTED, "this server writes no trace files"),
        ({"trace_level": ["LOUD"]}, ErrorKind.INVALID_INPUT, "expected OFF, TIMESTAMPS or TENSORS, got 'LOUD'"),
        ({"trace_file": "x"}, ErrorKind.UNSUPPORTED, "trace file location can not be updated through network protocol"),
        ({"trace_mode": "opentelemetry"}, ErrorKind.UNSUPPORTED, "trace_mode: expected 'triton', got 'opentelemetry'"),
        ({"trace_rate": 0}, ErrorKind.INVALID_INPUT, "trace_rate: expected an integer, at least 1, got '0'"),
        ({"trace_rate": "often"}, ErrorKind.INVALID_INPUT, "trace_rate: expected an integer, at least 1, got 'often'"),
        ({"trace_rate": True}, ErrorKind.INVALID_INPUT, "trace_rate: expected an integer"),
        ({"trace_count": -2}, ErrorKind.INVALID_INPUT, "trace_count: expected an integer, at least -1, got '-2'"),
        ({"log_frequency": ["1", "2"]}, ErrorKind.INVALID_INPUT, "expect one value for 'log_frequency', got 2"),
        ({"made_up": 1}, ErrorKind.INVALID_INPUT, "unknown trace setting 'made_up'"),
    ],
)
async def test_trace_setting_that_cannot_be_is_refused_and_changes_nothing(
    traces: TraceSettings, changes: dict[str, Any], kind: ErrorKind, text: str
) -> None:
    for model in ("", "m"):
        with pytest.raises(ServeError) as caught:
            traces.update({"trace_count": 3, **changes}, model)
        assert caught.value.kind is kind
        assert text in caught.value.message
        assert traces.read(model) == TRACE_START


async def test_unknown_model_has_no_trace_settings(traces: TraceSettings) -> None:
    with pytest.raises(ServeError, match="Request for unknown model : none") as caught:
        traces.read("none")
    assert caught.value.kind is ErrorKind.NOT_FOUND
    with pytest.raises(ServeError, match="Request for unknown model : none"):
        traces.update({}, "none")
