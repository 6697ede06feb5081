"""How long a caller is waited for, by literals."""

import pytest

from ortserve.frontends.http.limits import Due, HttpLimits, Stage, Waiting, header_bytes

LIMITS = HttpLimits(
    max_connections=10,
    max_headers=10,
    max_header_bytes=1000,
    max_chunk_bytes=1000,
    header_timeout_s=2,
    body_timeout_s=4,
    min_body_bytes_per_s=100,
    send_timeout_s=6,
    idle_timeout_s=8,
)
REQUEST = object()


def look(
    waiting: Waiting, at_s: float, stage: Stage, *, subject: object = REQUEST, came: int = 0, unsent: int = 0
) -> Due:
    return waiting.look(int(at_s * 1e9), stage, subject, came, unsent)


@pytest.mark.parametrize(
    ("stage", "limit_s", "due"),
    [(Stage.REQUEST, 8, Due.CLOSE), (Stage.HEADERS, 2, Due.REFUSE), (Stage.BODY, 4, Due.REFUSE)],
)
def test_caller_who_sends_nothing_is_waited_for_as_long_as_the_limit_says(
    stage: Stage, limit_s: float, due: Due
) -> None:
    waiting = Waiting(LIMITS)
    assert look(waiting, 100, stage) is Due.NOTHING
    assert look(waiting, 100 + limit_s - 0.1, stage) is Due.NOTHING
    assert look(waiting, 100 + limit_s, stage) is due


def test_headers_that_trickle_are_not_waited_for_any_longer() -> None:
    waiting = Waiting(LIMITS)
    dues = [look(waiting, tenth / 10, Stage.HEADERS, came=tenth * 40) for tenth in range(21)]
    assert dues == [Due.NOTHING] * 20 + [Due.REFUSE]


@pytest.mark.parametrize("per_second", [99, 100, 1000])
def test_body_must_come_at_the_rate_in_each_span(per_second: int) -> None:
    waiting = Waiting(LIMITS)
    dues = [look(waiting, second, Stage.BODY, came=second * per_second) for second in range(13)]
    assert (Due.REFUSE in dues) == (per_second < 100)


def test_body_that_came_fast_at_first_has_no_credit_for_later() -> None:
    waiting = Waiting(LIMITS)
    came = [0, 1_000_000, 1_000_000, 1_000_001, 1_000_001, 1_000_002, 1_000_002, 1_000_003, 1_000_003]
    dues = [look(waiting, second, Stage.BODY, came=size) for second, size in enumerate(came)]
    assert dues == [Due.NOTHING] * 8 + [Due.REFUSE]


def test_next_request_is_waited_for_anew() -> None:
    waiting = Waiting(LIMITS)
    for number in range(50):
        assert look(waiting, number, Stage.HEADERS, subject=object()) is Due.NOTHING
        assert look(waiting, number + 0.5, Stage.REQUEST, subject=object()) is Due.NOTHING


def test_server_is_waited_for_without_a_limit() -> None:
    waiting = Waiting(LIMITS)
    assert {look(waiting, second, Stage.ANSWER) for second in range(100)} == {Due.NOTHING}


def test_caller_who_takes_nothing_of_an_answer_is_left() -> None:
    waiting = Waiting(LIMITS)
    unsent = [0, 1000, 1000, 900, 900, 900, 900, 900, 900, 900]
    dues = [look(waiting, second, Stage.ANSWER, unsent=size) for second, size in enumerate(unsent)]
    assert dues == [Due.NOTHING] * 9 + [Due.ABORT]


def test_each_limit_is_looked_at_four_times() -> None:
    assert LIMITS.tick_s == 0.5


def test_headers_are_as_large_as_they_travel() -> None:
    head = b"/v2 HTTP/1.1\r\n" + b"a: b\r\n" + b"long-name: value\r\n"
    assert header_bytes(b"/v2 HTTP/1.1\r\n", [(b"a", b"b"), (b"long-name", b"value")]) == len(head)
