"""Limits from the options, and the times at which a connection is pinged, drained or aborted."""

import pytest

from ortserve.config.option_groups import GrpcOptions
from ortserve.frontends.grpc.native.limits import Lifetime, LifetimeAction, max_calls, tick_s

S = 10**9


def test_connection_can_have_all_streams_and_further_calls() -> None:
    assert max_calls(GrpcOptions(grpc_max_streams=5000)) == 6000
    assert max_calls(GrpcOptions(grpc_max_streams=5000, grpc_max_connection_calls=10)) == 10


@pytest.mark.parametrize(
    ("options", "expected_s"),
    [
        (GrpcOptions(), 1.0),
        (GrpcOptions(grpc_max_connection_age_s=2.0), 0.5),
        (GrpcOptions(grpc_max_connection_idle_s=0.001), 0.01),
        (GrpcOptions(grpc_keepalive_time_s=0.4), 0.1),
    ],
)
def test_timer_period_suits_the_shortest_bound(options: GrpcOptions, expected_s: float) -> None:
    assert tick_s(options) == expected_s


def look(
    life: Lifetime, at_s: float, *, has_settings: bool = True, has_calls: bool = True, unfinished_s: float | None = None
) -> LifetimeAction:
    unfinished_ns = None if unfinished_s is None else int(unfinished_s * S)
    return life.next_action(
        int(at_s * S), has_settings=has_settings, has_calls=has_calls, unfinished_since_ns=unfinished_ns
    )


def test_handshake_times_out() -> None:
    life = Lifetime(GrpcOptions(), 0, None)
    assert look(life, 10, has_settings=False) is LifetimeAction.NOTHING
    assert look(life, 10.1, has_settings=False) is LifetimeAction.ABORT
    assert look(life, 10.1) is LifetimeAction.NOTHING


def test_unfinished_frame_times_out() -> None:
    life = Lifetime(GrpcOptions(), 0, None)
    assert look(life, 25, unfinished_s=5) is LifetimeAction.NOTHING
    assert look(life, 25.1, unfinished_s=5) is LifetimeAction.ABORT


def test_silent_peer_is_pinged_and_then_disconnected() -> None:
    life = Lifetime(GrpcOptions(grpc_keepalive_time_s=10, grpc_keepalive_timeout_s=5), 0, None)
    assert look(life, 9.9) is LifetimeAction.NOTHING
    assert look(life, 10) is LifetimeAction.PING
    assert look(life, 14.9) is LifetimeAction.NOTHING
    life.heard_ns = int(14.95 * S)
    assert look(life, 15) is LifetimeAction.NOTHING
    assert look(life, 24.9) is LifetimeAction.NOTHING
    assert look(life, 25) is LifetimeAction.PING
    assert look(life, 30) is LifetimeAction.ABORT


def test_idle_peer_is_pinged_only_when_configured() -> None:
    assert look(Lifetime(GrpcOptions(grpc_keepalive_time_s=10), 0, None), 11, has_calls=False) is LifetimeAction.NOTHING
    assert (
        look(
            Lifetime(GrpcOptions(grpc_keepalive_time_s=10, grpc_keepalive_permit_without_calls=True), 0, None),
            11,
            has_calls=False,
        )
        is LifetimeAction.PING
    )


@pytest.mark.parametrize(("most", "asked"), [(2, 2), (0, 9)])
def test_pings_without_calls_are_limited(most: int, asked: int) -> None:
    life = Lifetime(GrpcOptions(grpc_keepalive_time_s=10, grpc_http2_max_pings_without_data=most), 0, None)
    count = 0
    for second in range(100):
        if look(life, second) is LifetimeAction.PING:
            count += 1
            life.heard_ns = second * S + 1
    assert count == asked
    life.useful_ns = 100 * S
    assert look(life, 200) is LifetimeAction.PING


def test_idle_connection_is_drained_after_the_idle_timeout() -> None:
    life = Lifetime(GrpcOptions(grpc_max_connection_idle_s=10), 0, None)
    assert look(life, 11) is LifetimeAction.NOTHING
    assert look(life, 9.9, has_calls=False) is LifetimeAction.NOTHING
    life.useful_ns = 5 * S
    assert look(life, 14.9, has_calls=False) is LifetimeAction.NOTHING
    assert look(life, 15, has_calls=False) is LifetimeAction.DRAIN
    life.begin_drain(15 * S, None)
    assert look(life, 1000, has_calls=False) is LifetimeAction.NOTHING


def test_expired_connection_drains_and_ends_after_the_grace() -> None:
    life = Lifetime(GrpcOptions(grpc_max_connection_age_grace_s=3), 0, 10.0)
    assert look(life, 9.9) is LifetimeAction.NOTHING
    assert look(life, 10) is LifetimeAction.RETIRE
    life.begin_drain(10 * S, 3)
    assert look(life, 12.9) is LifetimeAction.NOTHING
    assert look(life, 13) is LifetimeAction.ABORT


def test_peer_is_pinged_during_a_drain() -> None:
    life = Lifetime(GrpcOptions(grpc_keepalive_time_s=10), 0, 1.0)
    life.begin_drain(1 * S, None)
    assert look(life, 10) is LifetimeAction.PING


def test_earlier_end_applies() -> None:
    life = Lifetime(GrpcOptions(), 0, None)
    life.abort_by(0, 5)
    life.abort_by(0, 9)
    assert look(life, 5) is LifetimeAction.ABORT
