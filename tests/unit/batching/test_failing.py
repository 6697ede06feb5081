"""What riders of a run that failed for good are told."""

import pytest

from ortserve.batching.failing import fail
from ortserve.batching.isolation import Group
from ortserve.batching.queue import RiderQueue
from ortserve.batching.riders import Rider
from ortserve.core.promise import Promise
from ortserve.core.timing import Timing
from ortserve.errors import (
    DeviceLostError,
    ErrorKind,
    ModelRejectionError,
    OutOfMemoryError,
    ServeError,
    invalid_input,
)


def settled(riders: int, error: Exception) -> list[ServeError]:
    waiting = [Rider((), 1, Promise(), Timing(0)) for _ in range(riders)]
    fail(Group(RiderQueue().shape_class(None), waiting, riders), 7, error)
    assert all(rider.timing.taken_ns == 7 for rider in waiting)
    found = [rider.promise.exception() for rider in waiting]
    return [one for one in found if isinstance(one, ServeError)]


def told(riders: int, error: Exception) -> set[str]:
    found = settled(riders, error)
    assert len(found) == riders
    return {str(one) for one in found}


@pytest.mark.parametrize(
    ("riders", "error", "text"),
    [
        (1, invalid_input("idx=700"), "idx=700"),
        (3, OutOfMemoryError("cuda:0 is full"), "cuda:0 is full"),
        (3, DeviceLostError("cuda:0 is lost"), "cuda:0 is lost"),
    ],
)
def test_what_is_about_a_rider_or_the_device_is_told(riders: int, error: Exception, text: str) -> None:
    assert told(riders, error) == {text}


def test_what_may_be_about_another_is_not_told() -> None:
    (text,) = told(2, invalid_input("idx=700"))
    assert "was not found out" in text
    assert "700" not in text


@pytest.mark.parametrize("riders", [1, 2])
def test_fault_of_ours_is_logged_and_its_text_told_to_nobody(caplog: pytest.LogCaptureFixture, riders: int) -> None:
    (text,) = told(riders, ZeroDivisionError("tensors: 1, 2"))
    assert "tensors" not in text
    assert [record.message for record in caplog.records] == ["a run failed unexpectedly"]


def test_lone_request_is_blamed_for_a_rejection_and_one_of_several_may_try_again() -> None:
    rejection = ModelRejectionError("idx=700", "Gather")
    assert settled(1, rejection) == [rejection]
    for error in settled(3, rejection):
        assert (error.kind, error.retry_after_s) == (ErrorKind.NOT_READY, 1)
    assert {error.kind for error in settled(3, ServeError(ErrorKind.INTERNAL, "EP_FAIL"))} == {ErrorKind.INTERNAL}
