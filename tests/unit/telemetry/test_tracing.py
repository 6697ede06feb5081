"""Conditions of tracing: options, OpenTelemetry's variables, and an absent library."""

import logging
import sys
from typing import Any

import pytest

from ortserve.clock import monotonic_ns
from ortserve.errors import ErrorKind, ServeError
from ortserve.telemetry.trace_export import start_tracing
from ortserve.telemetry.tracing import Tracing, http_operation

ENDPOINT = "http://127.0.0.1:9"
OPERATION = http_operation("/infer", "http", {None: 200})


def start(environment: dict[str, str], **options: Any) -> Tracing | None:
    unset: dict[str, Any] = {"endpoint": None, "protocol": None, "sample_ratio": None, "service_name": None}
    return start_tracing(environment, **(unset | options), default_service_name="ortserve", clock=monotonic_ns)


def samples(environment: dict[str, str], **options: Any) -> bool:
    """Whether a request without a parent is traced."""
    tracing = start(environment, endpoint=ENDPOINT, **options)
    assert tracing is not None
    tracing.close(0)
    return tracing.begin(OPERATION, None, ()) is not None


def refusal(environment: dict[str, str], **options: Any) -> str:
    with pytest.raises(ServeError) as caught:
        start(environment, **options)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    return caught.value.message


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_SERVICE_NAME": "named"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_tracing_needs_an_endpoint_and_no_off_switch(
    environment: dict[str, str],
) -> None:
    assert start(environment) is None


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_opentelemetry_variables_set_the_endpoint(variable: str) -> None:
    tracing = start({variable: ENDPOINT})
    assert tracing is not None
    tracing.close(0)


@pytest.mark.parametrize(
    ("environment", "options", "is_sampled"),
    [
        ({}, {}, True),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, {}, True),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, {}, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, {}, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, {}, True),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, {"sample_ratio": 0.0}, False),
        ({"OTEL_TRACES_SAMPLER": "unknown"}, {"sample_ratio": 1.0}, True),
    ],
)
def test_sample_ratio_is_the_option_or_the_variable(
    environment: dict[str, str], options: dict[str, float], is_sampled: bool
) -> None:
    assert samples(environment, **options) is is_sampled


def test_invalid_variables_are_rejected_by_name() -> None:
    assert refusal({"OTEL_TRACES_SAMPLER": "always_on"}, endpoint=ENDPOINT) == (
        "OTEL_TRACES_SAMPLER: expected parentbased_always_on, parentbased_always_off or parentbased_traceidratio, "
        "got 'always_on'"
    )
    ratio = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}
    assert refusal(ratio, endpoint=ENDPOINT) == "OTEL_TRACES_SAMPLER_ARG: expected a number from 0 to 1, got '2'"
    assert refusal({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, endpoint=ENDPOINT) == (
        "OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf or grpc, got 'http/json'"
    )


def test_variables_that_the_library_rejects_show_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "bogus")
    message = refusal({}, endpoint=ENDPOINT, protocol="grpc")
    assert message.startswith("traces cannot be exported: ")
    assert "bogus" in message


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://user:pass@127.0.0.1:9/base",
        "http://user:p@ss@127.0.0.1:9/base",
        "http://127.0.0.1:9/base?token=pass",
        "http://user:pass@127.0.0.1:9/base#pass@",
    ],
)
def test_startup_log_names_the_endpoint_without_credentials(caplog: pytest.LogCaptureFixture, endpoint: str) -> None:
    caplog.set_level(logging.INFO)
    tracing = start({}, endpoint=endpoint, sample_ratio=0.5)
    assert tracing is not None
    tracing.close(0)
    fields: dict[str, object] = caplog.records[0].fields  # type: ignore[attr-defined]
    assert fields == {"endpoint": "http://127.0.0.1:9/base", "protocol": "http/protobuf", "sample_ratio": 0.5}


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates that the extra is not installed."""
    for name in ("ortserve.telemetry.otlp", "ortserve.telemetry.otlp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)


@pytest.mark.usefixtures("without_library")
def test_option_without_the_library_is_rejected_with_the_command_to_install_it() -> None:
    message = refusal({}, endpoint=ENDPOINT)
    assert message.startswith("otlp_endpoint: expected OpenTelemetry to be installed, got ")
    assert message.endswith("; try: pip install 'ortserve[otel]'")


@pytest.mark.usefixtures("without_library")
def test_trace_variable_without_the_library_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert start({"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    fields: dict[str, str] = record.fields  # type: ignore[attr-defined]
    assert fields["reason"] == "OTEL_EXPORTER_OTLP_ENDPOINT is set; try: pip install 'ortserve[otel]'"
