"""Limits on frames that carry no request: tokens, and pings as grpc counts them."""

from ortserve.config.option_groups import GrpcOptions
from ortserve.frontends.grpc.native.flood_limits import PingLimit, TokenBucket

S = 10**9


def spend(bucket: TokenBucket, now_ns: int) -> int:
    count = 0
    while bucket.take(now_ns):
        count += 1
    return count


def test_burst_is_tolerated_then_a_fixed_rate() -> None:
    bucket = TokenBucket(0)
    assert spend(bucket, 0) == 2000
    assert spend(bucket, S) == 1000
    assert spend(bucket, S) == 0
    assert spend(bucket, 100 * S) == 2000


def test_earned_allowance_is_tolerated_up_to_a_burst() -> None:
    bucket = TokenBucket(0)
    assert spend(bucket, 0) == 2000
    assert bucket.take(0, 3)
    assert spend(bucket, 0) == 2
    assert bucket.take(0, 1_000_000)
    assert spend(bucket, 0) == 1999


def count_until_too_many(pings: PingLimit, every_s: float, *, has_calls: bool) -> int | None:
    for number in range(50):
        if not pings.admit(int(number * every_s * S), has_calls=has_calls):
            return number
    return None


EVERY_10_S = GrpcOptions(grpc_http2_min_recv_ping_interval_without_data_s=10)


def test_spaced_pings_are_always_tolerated() -> None:
    assert count_until_too_many(PingLimit(EVERY_10_S), 10, has_calls=True) is None
    assert count_until_too_many(PingLimit(GrpcOptions()), 7200, has_calls=False) is None


def test_early_pings_are_too_many_after_the_strikes() -> None:
    assert count_until_too_many(PingLimit(EVERY_10_S), 9.9, has_calls=True) == 3
    assert count_until_too_many(PingLimit(GrpcOptions(grpc_http2_max_ping_strikes=5)), 1, has_calls=True) == 6
    assert count_until_too_many(PingLimit(GrpcOptions(grpc_http2_max_ping_strikes=0)), 1, has_calls=True) is None


def test_idle_connection_can_be_pinged_at_the_configured_interval() -> None:
    assert count_until_too_many(PingLimit(EVERY_10_S), 10, has_calls=False) == 3
    without = GrpcOptions(grpc_http2_min_recv_ping_interval_without_data_s=10, grpc_keepalive_permit_without_calls=True)
    assert count_until_too_many(PingLimit(without), 10, has_calls=False) is None


def test_answered_calls_reset_the_strikes() -> None:
    pings = PingLimit(GrpcOptions())
    for number in range(50):
        assert pings.admit(number, has_calls=False)
        pings.reset()
