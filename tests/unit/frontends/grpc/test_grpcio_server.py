"""Options of the gRPC port as grpc's channel arguments."""

import pytest

from ortserve.codecs.grpc_answer import MAX_MESSAGE_BYTES
from ortserve.config.options import ServerOptions
from ortserve.frontends.grpc.grpcio_server import channel_arguments

DEFAULTS = {
    "grpc.max_receive_message_length": 1000,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_metadata_size": 16384,
    "grpc.absolute_max_metadata_size": 16384,
    "grpc.server.max_pending_requests": 100_000,
    "grpc.server.max_pending_requests_hard_limit": 100_000,
    "grpc.so_reuseport": 0,
    "grpc.max_allowed_incoming_connections": 4096,
    "grpc.keepalive_time_ms": 7_200_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.http2.max_pings_without_data": 2,
    "grpc.http2.min_ping_interval_without_data_ms": 300_000,
    "grpc.http2.max_ping_strikes": 2,
}


def test_defaults_equal_those_of_the_reference_server_except_connections() -> None:
    assert dict(channel_arguments(ServerOptions(max_body_bytes=1000))) == DEFAULTS


@pytest.mark.parametrize(
    ("option", "value", "argument", "expected"),
    [
        ("grpc_max_connections", 5, "grpc.max_allowed_incoming_connections", 5),
        ("grpc_max_connection_calls", 7, "grpc.max_concurrent_streams", 7),
        ("grpc_max_connection_age_s", 1.5, "grpc.max_connection_age_ms", 1500),
        ("grpc_max_connection_age_grace_s", 0.0, "grpc.max_connection_age_grace_ms", 0),
        ("grpc_max_connection_idle_s", 0.25, "grpc.max_connection_idle_ms", 250),
        ("grpc_keepalive_time_s", 31_536_000.0, "grpc.keepalive_time_ms", 2**31 - 2),
        ("grpc_keepalive_timeout_s", 3.0, "grpc.keepalive_timeout_ms", 3000),
        ("grpc_keepalive_permit_without_calls", True, "grpc.keepalive_permit_without_calls", 1),
        ("grpc_http2_max_pings_without_data", 0, "grpc.http2.max_pings_without_data", 0),
        (
            "grpc_http2_min_recv_ping_interval_without_data_s",
            10.0,
            "grpc.http2.min_ping_interval_without_data_ms",
            10_000,
        ),
        ("grpc_http2_max_ping_strikes", 0, "grpc.http2.max_ping_strikes", 0),
    ],
)
def test_each_option_sets_only_its_argument(option: str, value: object, argument: str, expected: int) -> None:
    options = ServerOptions.model_validate({option: value, "max_body_bytes": 1000})
    assert dict(channel_arguments(options)) == DEFAULTS | {argument: expected}


def test_handshake_timeout_is_applied_if_set() -> None:
    bounded = dict(channel_arguments(ServerOptions(max_body_bytes=1000, tls_handshake_timeout_s=2.5), has_tls=True))
    assert bounded == DEFAULTS | {"grpc.server_handshake_timeout_ms": 2500}
