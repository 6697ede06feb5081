"""From options to the limits of a connection."""

import pytest

from ortserve.config.option_groups import GrpcOptions
from ortserve.frontends.grpc.native.limits import Limits, connection_limits


def test_defaults_are_those_of_the_options() -> None:
    assert connection_limits(GrpcOptions(), max_message_bytes=Limits().max_message_bytes) == Limits()


def test_every_option_of_connections_has_its_limit() -> None:
    options = GrpcOptions(
        grpc_max_connection_calls=1,
        grpc_max_connection_age_s=2,
        grpc_max_connection_age_grace_s=3,
        grpc_max_connection_idle_s=4,
        grpc_keepalive_time_s=5,
        grpc_keepalive_timeout_s=6,
        grpc_keepalive_permit_without_calls=True,
        grpc_http2_max_pings_without_data=7,
        grpc_http2_min_recv_ping_interval_without_data_s=8,
        grpc_http2_max_ping_strikes=9,
        grpc_max_connections=11,
        grpc_message_timeout_s=12,
        grpc_min_message_bytes_per_s=13,
        grpc_send_timeout_s=14,
        grpc_unsent_bytes=15,
    )
    expected = Limits(
        max_streams=1,
        max_message_bytes=10,
        max_age_s=2,
        max_age_grace_s=3,
        max_idle_s=4,
        keepalive_s=5,
        keepalive_timeout_s=6,
        pings_without_calls=True,
        max_useless_pings=7,
        min_ping_interval_s=8,
        max_ping_strikes=9,
        max_connections=11,
        message_timeout_s=12,
        min_message_bytes_per_s=13,
        send_timeout_s=14,
        max_unsent_bytes=15,
    )
    assert connection_limits(options, max_message_bytes=10) == expected


def test_connection_may_have_all_streams_of_the_server_and_calls_beside_them() -> None:
    options = GrpcOptions(grpc_max_streams=5000)
    assert connection_limits(options, max_message_bytes=10).max_streams == 6000


@pytest.mark.parametrize(
    ("limits", "tick_s"),
    [(Limits(), 1.0), (Limits(max_age_s=2.0), 0.5), (Limits(max_idle_s=0.001), 0.01), (Limits(keepalive_s=0.4), 0.1)],
)
def test_clock_is_looked_at_often_enough_for_the_shortest_bound(limits: Limits, tick_s: float) -> None:
    assert limits.tick_s == tick_s
