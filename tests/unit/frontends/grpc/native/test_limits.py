"""Limits from the options, and the times at which a connection is pinged, drained or aborted."""

from dataclasses import asdict

import pytest

from ortserve.config.option_groups import GrpcOptions
from ortserve.frontends.grpc.native.limits import Lifetime, LifetimeAction, Limits, connection_limits

S = 10**9


def test_defaults_are_those_of_the_options() -> None:
    assert connection_limits(GrpcOptions(), max_message_bytes=Limits().max_message_bytes) == Limits()


def test_every_limit_has_its_option() -> None:
    options = {
        "grpc_keepalive_permit_without_calls": "pings_without_calls",
        "grpc_max_connection_calls": "max_streams",
        "grpc_max_connection_age_s": "max_age_s",
        "grpc_max_connection_age_grace_s": "max_age_grace_s",
        "grpc_max_connection_idle_s": "max_idle_s",
        "grpc_keepalive_time_s": "keepalive_s",
        "grpc_keepalive_timeout_s": "keepalive_timeout_s",
        "grpc_http2_max_pings_without_data": "max_useless_pings",
        "grpc_http2_min_recv_ping_interval_without_data_s": "min_ping_interval_s",
        "grpc_http2_max_ping_strikes": "max_ping_strikes",
        "grpc_max_connections": "max_connections",
        "grpc_message_timeout_s": "message_timeout_s",
        "grpc_min_message_bytes_per_s": "min_message_bytes_per_s",
        "grpc_send_timeout_s": "send_timeout_s",
        "grpc_unsent_bytes": "max_unsent_bytes",
    }
    values = {option: number for number, option in enumerate(options, 1)}  # the first is a boolean
    limits = connection_limits(GrpcOptions.model_validate(values), max_message_bytes=100)
    expected = {limit: values[option] for option, limit in options.items()}
    assert asdict(limits) == expected | {"max_message_bytes": 100}


def test_connection_can_have_all_streams_and_further_calls() -> None:
    options = GrpcOptions(grpc_max_streams=5000)
    assert connection_limits(options, max_message_bytes=10).max_streams == 6000


@pytest.mark.parametrize(
    ("limits", "tick_s"),
    [(Limits(), 1.0), (Limits(max_age_s=2.0), 0.5), (Limits(max_idle_s=0.001), 0.01), (Limits(keepalive_s=0.4), 0.1)],
)
def test_timer_period_suits_the_shortest_bound(limits: Limits, tick_s: float) -> None:
    assert limits.tick_s == tick_s


def look(
    life: Lifetime, at_s: float, *, has_settings: bool = True, has_calls: bool = True, unfinished_s: float | None = None
) -> LifetimeAction:
    unfinished_ns = None if unfinished_s is None else int(unfinished_s * S)
    return life.next_action(
        int(at_s * S), has_settings=has_settings, has_calls=has_calls, unfinished_since_ns=unfinished_ns
    )


def test_handshake_times_out() -> None:
    life = Lifetime(Limits(), 0, None)
    assert look(life, 10, has_settings=False) is LifetimeAction.NOTHING
    assert look(life, 10.1, has_settings=False) is LifetimeAction.ABORT
    assert look(life, 10.1) is LifetimeAction.NOTHING


def test_unfinished_frame_times_out() -> None:
    life = Lifetime(Limits(), 0, None)
    assert look(life, 25, unfinished_s=5) is LifetimeAction.NOTHING
    assert look(life, 25.1, unfinished_s=5) is LifetimeAction.ABORT


def test_silent_peer_is_pinged_and_then_disconnected() -> None:
    life = Lifetime(Limits(keepalive_s=10, keepalive_timeout_s=5), 0, None)
    assert look(life, 9.9) is LifetimeAction.NOTHING
    assert look(life, 10) is LifetimeAction.PING
    assert look(life, 14.9) is LifetimeAction.NOTHING
    life.heard_ns = int(14.95 * S)
    assert look(life, 15) is LifetimeAction.NOTHING
    assert look(life, 24.9) is LifetimeAction.NOTHING
    assert look(life, 25) is LifetimeAction.PING
    assert look(life, 30) is LifetimeAction.ABORT


def test_idle_peer_is_pinged_only_when_configured() -> None:
    assert look(Lifetime(Limits(keepalive_s=10), 0, None), 11, has_calls=False) is LifetimeAction.NOTHING
    assert (
        look(Lifetime(Limits(keepalive_s=10, pings_without_calls=True), 0, None), 11, has_calls=False)
        is LifetimeAction.PING
    )


@pytest.mark.parametrize(("most", "asked"), [(2, 2), (0, 9)])
def test_pings_without_calls_are_limited(most: int, asked: int) -> None:
    life = Lifetime(Limits(keepalive_s=10, max_useless_pings=most), 0, None)
    count = 0
    for second in range(100):
        if look(life, second) is LifetimeAction.PING:
            count += 1
            life.heard_ns = second * S + 1
    assert count == asked
    life.useful_ns = 100 * S
    assert look(life, 200) is LifetimeAction.PING


def test_idle_connection_is_drained_after_the_idle_timeout() -> None:
    life = Lifetime(Limits(max_idle_s=10), 0, None)
    assert look(life, 11) is LifetimeAction.NOTHING
    assert look(life, 9.9, has_calls=False) is LifetimeAction.NOTHING
    life.useful_ns = 5 * S
    assert look(life, 14.9, has_calls=False) is LifetimeAction.NOTHING
    assert look(life, 15, has_calls=False) is LifetimeAction.DRAIN
    life.begin_drain(15 * S, None)
    assert look(life, 1000, has_calls=False) is LifetimeAction.NOTHING


def test_expired_connection_drains_and_ends_after_the_grace() -> None:
    life = Lifetime(Limits(max_age_grace_s=3), 0, 10.0)
    assert look(life, 9.9) is LifetimeAction.NOTHING
    assert look(life, 10) is LifetimeAction.RETIRE
    life.begin_drain(10 * S, 3)
    assert look(life, 12.9) is LifetimeAction.NOTHING
    assert look(life, 13) is LifetimeAction.ABORT


def test_peer_is_pinged_during_a_drain() -> None:
    life = Lifetime(Limits(keepalive_s=10), 0, 1.0)
    life.begin_drain(1 * S, None)
    assert look(life, 10) is LifetimeAction.PING


def test_earlier_end_applies() -> None:
    life = Lifetime(Limits(), 0, None)
    life.abort_by(0, 5)
    life.abort_by(0, 9)
    assert look(life, 5) is LifetimeAction.ABORT
