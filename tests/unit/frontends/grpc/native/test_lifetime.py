"""When a connection is asked, drained or cut off, by the clock alone."""

import pytest

from ortserve.frontends.grpc.native.lifetime import Due, Lifetime
from ortserve.frontends.grpc.native.limits import Limits

S = 10**9


def look(
    life: Lifetime, at_s: float, *, has_settings: bool = True, has_calls: bool = True, unfinished_s: float | None = None
) -> Due:
    unfinished_ns = None if unfinished_s is None else int(unfinished_s * S)
    return life.look(int(at_s * S), has_settings=has_settings, has_calls=has_calls, unfinished_since_ns=unfinished_ns)


def test_handshake_has_its_time_and_no_more() -> None:
    life = Lifetime(Limits(), 0, None)
    assert look(life, 10, has_settings=False) is Due.NOTHING
    assert look(life, 10.1, has_settings=False) is Due.ABORT
    assert look(life, 10.1) is Due.NOTHING


def test_frame_that_is_not_whole_has_its_time_and_no_more() -> None:
    life = Lifetime(Limits(), 0, None)
    assert look(life, 25, unfinished_s=5) is Due.NOTHING
    assert look(life, 25.1, unfinished_s=5) is Due.ABORT


def test_silent_peer_is_asked_and_given_up_when_it_does_not_answer() -> None:
    life = Lifetime(Limits(keepalive_s=10, keepalive_timeout_s=5), 0, None)
    assert look(life, 9.9) is Due.NOTHING
    assert look(life, 10) is Due.PING
    assert look(life, 14.9) is Due.NOTHING
    life.heard_ns = int(14.95 * S)
    assert look(life, 15) is Due.NOTHING
    assert look(life, 24.9) is Due.NOTHING
    assert look(life, 25) is Due.PING
    assert look(life, 30) is Due.ABORT


def test_peer_without_calls_is_asked_only_where_the_option_says_so() -> None:
    assert look(Lifetime(Limits(keepalive_s=10), 0, None), 11, has_calls=False) is Due.NOTHING
    assert look(Lifetime(Limits(keepalive_s=10, pings_without_calls=True), 0, None), 11, has_calls=False) is Due.PING


@pytest.mark.parametrize(("most", "asked"), [(2, 2), (0, 9)])
def test_peer_is_asked_only_so_often_without_a_call_in_between(most: int, asked: int) -> None:
    life = Lifetime(Limits(keepalive_s=10, max_useless_pings=most), 0, None)
    count = 0
    for second in range(100):
        if look(life, second) is Due.PING:
            count += 1
            life.heard_ns = second * S + 1
    assert count == asked
    life.useful_ns = 100 * S
    assert look(life, 200) is Due.PING


def test_connection_without_calls_is_drained_when_it_was_idle_for_long_enough() -> None:
    life = Lifetime(Limits(max_idle_s=10), 0, None)
    assert look(life, 11) is Due.NOTHING
    assert look(life, 9.9, has_calls=False) is Due.NOTHING
    life.useful_ns = 5 * S
    assert look(life, 14.9, has_calls=False) is Due.NOTHING
    assert look(life, 15, has_calls=False) is Due.DRAIN
    life.begin_drain(15 * S, None)
    assert look(life, 1000, has_calls=False) is Due.NOTHING


def test_old_connection_retires_once_and_is_cut_off_after_the_grace() -> None:
    life = Lifetime(Limits(max_age_grace_s=3), 0, 10.0)
    assert look(life, 9.9) is Due.NOTHING
    assert look(life, 10) is Due.RETIRE
    life.begin_drain(10 * S, 3)
    assert look(life, 12.9) is Due.NOTHING
    assert look(life, 13) is Due.ABORT


def test_peer_is_still_asked_while_the_connection_drains() -> None:
    life = Lifetime(Limits(keepalive_s=10), 0, 1.0)
    life.begin_drain(1 * S, None)
    assert look(life, 10) is Due.PING


def test_earlier_end_counts() -> None:
    life = Lifetime(Limits(), 0, None)
    life.abort_by(0, 5)
    life.abort_by(0, 9)
    assert look(life, 5) is Due.ABORT
