"""Timeouts of each stage of a connection, by literals."""

import pytest

from fakes.http import LIMITS
from ortserve.frontends.http.limits import Stage
from ortserve.frontends.http.timeouts import StageTimer, TimeoutAction

REQUEST = object()


def check(
    timer: StageTimer, at_s: float, stage: Stage, *, subject: object = REQUEST, came: int = 0, unsent: int = 0
) -> TimeoutAction:
    return timer.check(int(at_s * 1e9), stage, subject, came, unsent)


@pytest.mark.parametrize(
    ("stage", "limit_s", "due"),
    [
        (Stage.REQUEST, 8, TimeoutAction.CLOSE),
        (Stage.HEADERS, 2, TimeoutAction.REJECT),
        (Stage.BODY, 4, TimeoutAction.REJECT),
    ],
)
def test_silent_client_is_disconnected_at_the_timeout(stage: Stage, limit_s: float, due: TimeoutAction) -> None:
    timer = StageTimer(LIMITS)
    assert check(timer, 100, stage) is TimeoutAction.NOTHING
    assert check(timer, 100 + limit_s - 0.1, stage) is TimeoutAction.NOTHING
    assert check(timer, 100 + limit_s, stage) is due


def test_trickled_headers_time_out() -> None:
    timer = StageTimer(LIMITS)
    dues = [check(timer, tenth / 10, Stage.HEADERS, came=tenth * 40) for tenth in range(21)]
    assert dues == [TimeoutAction.NOTHING] * 20 + [TimeoutAction.REJECT]


@pytest.mark.parametrize("per_second", [99, 100, 1000])
def test_body_must_come_at_the_rate_in_each_span(per_second: int) -> None:
    timer = StageTimer(LIMITS)
    dues = [check(timer, second, Stage.BODY, came=second * per_second) for second in range(13)]
    assert (TimeoutAction.REJECT in dues) == (per_second < 100)


def test_fast_start_of_a_body_gives_no_later_credit() -> None:
    timer = StageTimer(LIMITS)
    came = [0, 1_000_000, 1_000_000, 1_000_001, 1_000_001, 1_000_002, 1_000_002, 1_000_003, 1_000_003]
    dues = [check(timer, second, Stage.BODY, came=size) for second, size in enumerate(came)]
    assert dues == [TimeoutAction.NOTHING] * 8 + [TimeoutAction.REJECT]


def test_next_request_restarts_the_timeout() -> None:
    timer = StageTimer(LIMITS)
    for number in range(50):
        assert check(timer, number, Stage.HEADERS, subject=object()) is TimeoutAction.NOTHING
        assert check(timer, number + 0.5, Stage.REQUEST, subject=object()) is TimeoutAction.NOTHING


def test_server_processing_has_no_timeout() -> None:
    timer = StageTimer(LIMITS)
    assert {check(timer, second, Stage.RESPONSE) for second in range(100)} == {TimeoutAction.NOTHING}


def test_client_that_reads_nothing_is_disconnected() -> None:
    timer = StageTimer(LIMITS)
    unsent = [0, 1000, 1000, 900, 900, 900, 900, 900, 900, 900]
    dues = [check(timer, second, Stage.RESPONSE, unsent=size) for second, size in enumerate(unsent)]
    assert dues == [TimeoutAction.NOTHING] * 9 + [TimeoutAction.ABORT]


def test_client_that_reads_slowly_is_not_disconnected_while_the_server_writes_more() -> None:
    timer = StageTimer(LIMITS)
    unsent = [*range(1000, 0, -100)] * 5  # the server writes 1,000 bytes whenever the transport accepts more
    dues = [check(timer, second, Stage.RESPONSE, unsent=size) for second, size in enumerate(unsent)]
    assert set(dues) == {TimeoutAction.NOTHING}


def test_client_that_reads_nothing_is_disconnected_although_the_server_writes_more() -> None:
    timer = StageTimer(LIMITS)
    dues = [check(timer, second, Stage.RESPONSE, unsent=1000 + second) for second in range(10)]
    assert TimeoutAction.ABORT in dues
