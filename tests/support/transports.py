"""Selects which of the two servers of the gRPC port a test uses.

Tests use the native transport unless they are marked. Marked tests also run on grpcio's server: every call, its errors,
streams, limits, deadlines, keys, TLS and the drain. Shared parts, such as codecs and the service, are tested once.
"""

from typing import Final

import pytest

ON_BOTH_TRANSPORTS: Final = pytest.mark.parametrize(
    "grpc_transport", ["native", "grpcio"], indirect=True, scope="session"
)
"""Runs a test, or with ``pytestmark`` all tests of a file, on both; tests use the fixture ``grpc_transport``."""
