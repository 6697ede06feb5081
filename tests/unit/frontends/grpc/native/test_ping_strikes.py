"""Pings as grpc counts them."""

from ortserve.frontends.grpc.native.limits import Limits
from ortserve.frontends.grpc.native.ping_strikes import PingStrikes

S = 10**9


def count_until_too_many(strikes: PingStrikes, every_s: float, *, has_calls: bool) -> int | None:
    for number in range(50):
        if strikes.on_ping(int(number * every_s * S), has_calls=has_calls):
            return number
    return None


def test_pings_that_keep_their_distance_are_borne_for_ever() -> None:
    assert count_until_too_many(PingStrikes(Limits(min_ping_interval_s=10)), 10, has_calls=True) is None
    assert count_until_too_many(PingStrikes(Limits()), 7200, has_calls=False) is None


def test_pings_that_come_too_soon_are_too_many_after_the_strikes() -> None:
    assert count_until_too_many(PingStrikes(Limits(min_ping_interval_s=10)), 9.9, has_calls=True) == 3
    assert count_until_too_many(PingStrikes(Limits(max_ping_strikes=5)), 1, has_calls=True) == 6
    assert count_until_too_many(PingStrikes(Limits(max_ping_strikes=0)), 1, has_calls=True) is None


def test_connection_without_calls_may_be_asked_every_two_hours_or_as_the_option_says() -> None:
    assert count_until_too_many(PingStrikes(Limits(min_ping_interval_s=10)), 10, has_calls=False) == 3
    without = Limits(min_ping_interval_s=10, pings_without_calls=True)
    assert count_until_too_many(PingStrikes(without), 10, has_calls=False) is None


def test_calls_that_were_answered_since_forgive_all() -> None:
    strikes = PingStrikes(Limits())
    for number in range(50):
        assert not strikes.on_ping(number, has_calls=False)
        strikes.forget()
