"""The errors of the requests of a failed run."""

import pytest

from fakes.inflight import inflight
from ortserve.batching.groups import RequestGroup, fail_group
from ortserve.batching.queue import RequestQueue
from ortserve.core.timing import Timing
from ortserve.errors import (
    DeviceLostError,
    OutOfMemoryError,
    ServeError,
    invalid_input,
)


def settled(requests: int, error: Exception) -> list[ServeError]:
    waiting = [inflight((), 1, Timing(0)) for _ in range(requests)]
    fail_group(RequestGroup(RequestQueue().shape_class(None), waiting, requests), 7, error)
    assert all(request.timing.taken_ns == 7 for request in waiting)
    found = []
    for request in waiting:
        with pytest.raises(ServeError) as caught:
            request.take_outputs()
        found.append(caught.value)
    return found


def reported(requests: int, error: Exception) -> set[str]:
    found = settled(requests, error)
    assert len(found) == requests
    return {str(one) for one in found}


@pytest.mark.parametrize(
    ("requests", "error", "text"),
    [
        (1, invalid_input("idx=700"), "idx=700"),
        (3, OutOfMemoryError("cuda:0 is full"), "cuda:0 is full"),
        (3, DeviceLostError("cuda:0 is lost"), "cuda:0 is lost"),
    ],
)
def test_error_about_the_request_itself_or_the_device_is_reported(requests: int, error: Exception, text: str) -> None:
    assert reported(requests, error) == {text}


@pytest.mark.parametrize("requests", [1, 2])
def test_unexpected_error_is_logged_and_not_quoted(caplog: pytest.LogCaptureFixture, requests: int) -> None:
    (text,) = reported(requests, ZeroDivisionError("tensors: 1, 2"))
    assert "tensors" not in text
    assert [record.message for record in caplog.records] == ["a run failed unexpectedly"]
