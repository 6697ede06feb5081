"""The trace of a request, as readers of Triton's trace files find it."""

import json
from typing import Any

import pytest

from ortserve.core.timing import Timing
from ortserve.telemetry.trace_record import spell_record

WHOLE = Timing(10, 20, 30, 40, 50, 60, begun_ns=5)


def trace(
    timing: Timing = WHOLE, *, protocol: str = "http", request_id: str = "", sent_ns: int | None = 70
) -> dict[str, Any]:
    text = spell_record(7, "m", "3", request_id, protocol, timing, ended_ns=60, sent_ns=sent_ns)
    document: dict[str, Any] = json.loads(text)
    return document


def timestamps(document: dict[str, Any]) -> dict[str, int]:
    return {one["name"]: one["ns"] for one in document["timestamps"]}


def test_answered_request_has_every_timestamp_in_order() -> None:
    document = trace()
    assert {key: value for key, value in document.items() if key != "timestamps"} == {
        "id": 7,
        "model_name": "m",
        "model_version": 3,
    }
    assert list(timestamps(document).items()) == [
        ("HTTP_RECV_START", 5),
        ("HTTP_RECV_END", 10),
        ("REQUEST_START", 10),
        ("QUEUE_START", 20),
        ("COMPUTE_START", 30),
        ("COMPUTE_INPUT_END", 40),
        ("COMPUTE_OUTPUT_START", 50),
        ("COMPUTE_END", 60),
        ("REQUEST_END", 60),
        ("HTTP_SEND_START", 60),
        ("HTTP_SEND_END", 70),
    ]


def test_grpc_has_its_own_names_and_knows_no_time_of_reading() -> None:
    found = timestamps(trace(Timing(10, 20, 30, 40, 50, 60), protocol="grpc"))
    assert (found["GRPC_WAITREAD_START"], found["GRPC_WAITREAD_END"]) == (10, 10)
    assert (found["GRPC_SEND_START"], found["GRPC_SEND_END"]) == (60, 70)
    assert not any(name.startswith("HTTP") for name in found)


@pytest.mark.parametrize(
    ("timing", "missing"),
    [
        (Timing(10), {"QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"}),
        (Timing(10, 20), {"COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"}),
        (Timing(10, 20, 30), {"COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"}),
        (Timing(10, 20, 30, 40), {"COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"}),
        (Timing(10, 20, 30, 40, 50), set()),
    ],
)
def test_failed_request_has_the_timestamps_it_reached(timing: Timing, missing: set[str]) -> None:
    found = timestamps(trace(timing))
    assert set(timestamps(trace())) - set(found) == missing
    assert list(found.values()) == sorted(found.values())


def test_nothing_was_sent_to_a_caller_who_left() -> None:
    assert set(timestamps(trace())) - set(timestamps(trace(sent_ns=None))) == {"HTTP_SEND_START", "HTTP_SEND_END"}


@pytest.mark.parametrize("request_id", ['"]', "a\nb", "é\0\ud800", "\\"])
def test_request_id_is_whatever_its_caller_chose(request_id: str) -> None:
    assert trace(request_id=request_id)["request_id"] == request_id


def test_long_request_id_is_cut() -> None:
    assert trace(request_id="a" * 10_000_000)["request_id"] == "a" * 256
