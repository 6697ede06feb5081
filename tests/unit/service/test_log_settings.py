"""Log settings, changed by clients of either protocol."""

from typing import Any

import pytest

from ortserve.errors import ErrorKind, ServeError
from ortserve.service.management import LogSettings
from ortserve.telemetry.logs import LogSwitches

LOG_START = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> LogSettings:
    monkeypatch.setattr(LogSwitches, "apply", lambda self: None)  # the process' own loggers are the test runner's
    return LogSettings(LogSwitches("info"))


def test_log_settings_change_one_by_one_and_all_are_returned(logs: LogSettings) -> None:
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
def test_invalid_log_setting_is_rejected_and_changes_nothing(
    logs: LogSettings, changes: dict[str, Any], kind: ErrorKind, text: str
) -> None:
    with pytest.raises(ServeError) as caught:
        logs.update({"log_warning": False, **changes})
    assert caught.value.kind is kind
    assert text in caught.value.message
    assert logs.read() == LOG_START
