"""Fixtures for all tests. Importing the package first silences ONNX Runtime's telemetry in this process."""

from collections.abc import Iterator
from functools import cache

import grpc
import pytest
from httpx._transports import default

import ortserve  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def authorities_read_once() -> Iterator[None]:
    """Without it ``httpx`` reads the certificate authorities for each call outside a client: 35 of a call's 37 ms."""
    with pytest.MonkeyPatch.context() as patch:
        name = "create_ssl_context"  # of httpx alone, which does not export it
        patch.setattr(default, name, cache(getattr(default, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def grpc_aio_kept() -> None:
    """Without it ``grpc.aio`` ends when the last of its channels is collected, and can wait for ever for calls of event
    loops that are closed.
    """
    grpc.aio.init_grpc_aio()


@pytest.fixture(scope="session")
def grpc_transport(request: pytest.FixtureRequest) -> str:
    """The value of ``--grpc-transport``: ``native``, or each value for tests that are ``ON_BOTH_TRANSPORTS``."""
    transport: str = getattr(request, "param", "native")
    return transport


@pytest.fixture(scope="session")
def ways(grpc_transport: str) -> tuple[str, ...]:
    """Flags for tests of both protocols: the gRPC transport."""
    return (f"--grpc-transport={grpc_transport}",)
