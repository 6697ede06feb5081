"""Which of the two servers of the gRPC port a test runs on.

Tests run on the native transport, unless they are marked: every call, its errors, streams, limits, deadlines, keys, TLS
and the drain run on grpcio's server, too. What both servers share, such as codecs and the service, is tested once.
"""

from typing import Final

import pytest

ON_BOTH_TRANSPORTS: Final = pytest.mark.parametrize(
    "grpc_transport", ["native", "grpcio"], indirect=True, scope="session"
)
"""Marks a test, or all tests of a file by ``pytestmark``, that depend on the fixture ``grpc_transport``."""
