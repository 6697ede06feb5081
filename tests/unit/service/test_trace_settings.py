"""Trace settings, changed by clients of either protocol, and the requests that they select."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from models import builders
from ortserve.config.model import LoadOptions
from ortserve.config.option_groups import TraceFileOptions
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.registry import Registry
from ortserve.service.trace_settings import TraceSettings
from ortserve.telemetry.metrics import Metrics
from ortserve.telemetry.trace_files import TraceFiles

START = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "trace.json",
    "trace_mode": "triton",
}


@dataclass
class Stage:
    registry: Registry
    folder: Path

    def settings(self, **options: Any) -> TraceSettings:
        file = self.folder / "trace.json"
        return TraceSettings(
            self.registry, TraceFileOptions(trace_file=file, **options), TraceFiles(file, max_bytes=10**6)
        )


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """The settings of a server with the models ``m`` and ``n``."""
    for name in "mn":
        builders.identity(tmp_path / f"{name}.onnx")
    registry = Registry([tmp_path], LoadOptions(warmup_s=0), Metrics(CollectorRegistry()), time.monotonic_ns)
    await registry.load_all()
    yield Stage(registry, tmp_path)
    await registry.close()


def taken(settings: TraceSettings, model: str, requests: int) -> list[int]:
    """The numbers, from 1, of the traced requests among ``requests`` for a model."""
    return [number for number in range(1, requests + 1) if settings.of(model).take()]


async def test_model_uses_the_servers_settings_unless_it_has_its_own(stage: Stage) -> None:
    traces = stage.settings()
    assert traces.read() == traces.read("m") == START
    changed = {**START, "trace_rate": "7", "trace_count": "5"}
    assert traces.update({"trace_rate": 7, "trace_count": "5"}) == changed
    assert traces.update({"trace_rate": ["9"], "trace_level": "OFF"}, "m") == {**changed, "trace_rate": "9"}
    assert traces.update({"trace_level": ["TIMESTAMPS"], "log_frequency": 3})["trace_rate"] == "7"
    assert traces.read("m") == {**changed, "trace_rate": "9", "log_frequency": "3"}
    assert traces.update({"trace_rate": None, "trace_level": None}, "m") == traces.read()
    assert traces.update({"trace_rate": [], "trace_count": None, "log_frequency": None, "trace_level": None}) == START


async def test_reset_setting_has_the_value_of_the_option(stage: Stage) -> None:
    traces = stage.settings(trace_level="TIMESTAMPS", trace_rate=3, trace_count=20, trace_log_frequency=4)
    start = {**START, "trace_level": ["TIMESTAMPS"], "trace_rate": "3", "trace_count": "20", "log_frequency": "4"}
    assert traces.read() == start
    traces.update({"trace_level": ["OFF"], "trace_rate": "1", "trace_count": "-1", "log_frequency": "0"})
    assert traces.update({"trace_level": None, "trace_rate": None, "trace_count": None, "log_frequency": None}) == start


async def test_one_of_rate_requests_is_traced_and_each_change_restarts_the_count(stage: Stage) -> None:
    traces = stage.settings(trace_level="TIMESTAMPS", trace_rate=3)
    assert taken(traces, "m", 7) == [3, 6]
    assert taken(traces, "n", 2) == [2]  # m's seventh request was their first
    traces.update({"trace_rate": 2})
    assert taken(traces, "n", 5) == [2, 4]
    traces.update({})  # only reads the settings
    assert taken(traces, "n", 1) == [1]


async def test_model_with_settings_of_its_own_counts_by_itself(stage: Stage) -> None:
    traces = stage.settings(trace_level="TIMESTAMPS", trace_rate=3)
    traces.update({"trace_rate": 1}, "m")
    assert taken(traces, "m", 2) == [1, 2]
    assert taken(traces, "n", 3) == [3]
    traces.update({"trace_level": ["OFF"]}, "m")
    assert taken(traces, "m", 2) == []
    assert taken(traces, "n", 3) == [3]


async def test_count_decreases_to_zero_and_ends_tracing(stage: Stage) -> None:
    traces = stage.settings(trace_level="TIMESTAMPS", trace_rate=2)
    traces.update({"trace_count": 2})
    assert taken(traces, "m", 3) == [2]
    assert traces.read("n")["trace_count"] == "1"
    assert taken(traces, "m", 9) == [1]
    assert traces.read("m")["trace_count"] == "0"
    assert traces.read("m")["trace_level"] == ["TIMESTAMPS"]
    traces.update({"trace_count": None})
    assert taken(traces, "m", 2) == [2]


async def test_remaining_count_survives_changes_of_other_settings(stage: Stage) -> None:
    traces = stage.settings(trace_level="TIMESTAMPS", trace_rate=1)
    traces.update({"trace_count": 10})
    traces.update({"trace_count": 5}, "m")
    taken(traces, "m", 2)
    taken(traces, "n", 4)
    traces.update({"log_frequency": 7})
    assert (traces.read()["trace_count"], traces.read("m")["trace_count"]) == ("6", "3")
    assert (
        traces.update({"trace_rate": 1, "trace_count": None}, "m")["trace_count"] == "6"
    )  # the server's, as it stands


@pytest.mark.parametrize("level", ["TIMESTAMPS", ["TIMESTAMPS"], ["MIN"], ["MAX", "TIMESTAMPS"]])
async def test_old_names_of_levels_mean_timestamps(stage: Stage, level: Any) -> None:
    assert stage.settings().update({"trace_level": level})["trace_level"] == ["TIMESTAMPS"]


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        (
            {"trace_level": ["OFF", "TIMESTAMPS"]},
            ErrorKind.INVALID_INPUT,
            "expected OFF alone or TIMESTAMPS, got",
        ),
        ({"trace_level": ["TENSORS"]}, ErrorKind.UNSUPPORTED, "never writes tensors to trace files"),
        (
            {"trace_level": ["TIMESTAMPS", "TENSORS"]},
            ErrorKind.UNSUPPORTED,
            "expected OFF or TIMESTAMPS, got 'TENSORS'",
        ),
        ({"trace_level": ["LOUD"]}, ErrorKind.INVALID_INPUT, "expected OFF or TIMESTAMPS, got 'LOUD'"),
        ({"trace_mode": "opentelemetry"}, ErrorKind.UNSUPPORTED, "trace_mode: expected 'triton', got 'opentelemetry'"),
        ({"trace_rate": 0}, ErrorKind.INVALID_INPUT, "trace_rate: expected an integer, 1 to 2147483647, got '0'"),
        ({"trace_rate": "often"}, ErrorKind.INVALID_INPUT, "trace_rate: expected an integer, 1 to 2147483647, got 'of"),
        ({"trace_rate": "10000000000"}, ErrorKind.INVALID_INPUT, "trace_rate: expected an integer, 1 to 2147483647"),
        ({"trace_rate": True}, ErrorKind.INVALID_INPUT, "trace_rate: expected an integer"),
        ({"trace_count": -2}, ErrorKind.INVALID_INPUT, "trace_count: expected an integer, -1 to 2147483647, got '-2'"),
        ({"trace_count": 10**10}, ErrorKind.INVALID_INPUT, "trace_count: expected an integer, -1 to 2147483647"),
        ({"log_frequency": 10**10}, ErrorKind.INVALID_INPUT, "log_frequency: expected an integer, 0 to 2147483647"),
        ({"log_frequency": ["1", "2"]}, ErrorKind.INVALID_INPUT, "expect one value for 'log_frequency', got 2"),
        ({"made_up": 1}, ErrorKind.INVALID_INPUT, "unknown trace setting 'made_up'"),
    ],
)
async def test_invalid_trace_setting_is_rejected_and_changes_nothing(
    stage: Stage, changes: dict[str, Any], kind: ErrorKind, text: str
) -> None:
    traces = stage.settings()
    for model in ("", "m"):
        with pytest.raises(ServeError) as caught:
            traces.update({"trace_count": 3, **changes}, model)
        assert caught.value.kind is kind
        assert text in caught.value.message
        assert traces.read(model) == START


@pytest.mark.parametrize("file", ["x", "trace.json", "/etc/cron.d/x", "../x", "a\0b", "", ["x"]])
async def test_clients_cannot_choose_the_trace_file(stage: Stage, file: Any) -> None:
    traces = stage.settings()
    with pytest.raises(ServeError, match="trace file location can not be updated through network protocol") as caught:
        traces.update({"trace_file": file})
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert traces.read() == START


async def test_without_a_file_settings_are_stored_and_tracing_is_rejected(stage: Stage) -> None:
    traces = TraceSettings(stage.registry, TraceFileOptions(), None)
    assert traces.update({"trace_rate": 1}) == {**START, "trace_rate": "1", "trace_file": ""}
    with pytest.raises(ServeError, match=r"expected OFF, got 'TIMESTAMPS': .* without --trace-file") as caught:
        traces.update({"trace_level": ["TIMESTAMPS"]})
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert taken(traces, "m", 3) == []


async def test_unknown_model_has_no_trace_settings(stage: Stage) -> None:
    traces = stage.settings()
    with pytest.raises(ServeError, match="Request for unknown model : none") as caught:
        traces.read("none")
    assert caught.value.kind is ErrorKind.NOT_FOUND
    with pytest.raises(ServeError, match="Request for unknown model : none"):
        traces.update({}, "none")
