"""The errors of the requests of a failed run."""

import pytest

from fakes.inflight import inflight
from ortserve.batching.groups import RequestGroup, fail_group
from ortserve.batching.queue import RequestQueue
from ortserve.core.timing import Timing
from ortserve.errors import (
    DeviceLostError,
    ErrorKind,
    ModelRejectionError,
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


def test_error_that_may_quote_another_request_is_not_reported() -> None:
    (text,) = reported(2, invalid_input("idx=700"))
    assert "could not be isolated" in text
    assert "700" not in text


@pytest.mark.parametrize("requests", [1, 2])
def test_unexpected_error_is_logged_and_not_quoted(caplog: pytest.LogCaptureFixture, requests: int) -> None:
    (text,) = reported(requests, ZeroDivisionError("tensors: 1, 2"))
    assert "tensors" not in text
    assert [record.message for record in caplog.records] == ["a run failed unexpectedly"]


def test_rejection_is_final_for_a_lone_request_and_retried_for_one_of_several() -> None:
    rejection = ModelRejectionError("idx=700", "Gather")
    assert settled(1, rejection) == [rejection]
    for error in settled(3, rejection):
        assert (error.kind, error.retry_after_s) == (ErrorKind.NOT_READY, 1)
    assert {error.kind for error in settled(3, ServeError(ErrorKind.INTERNAL, "EP_FAIL"))} == {ErrorKind.INTERNAL}
