"""What every test needs. Importing the package first silences ONNX Runtime's telemetry in this process."""

from collections.abc import Iterator
from functools import cache

import grpc
import httpx
import pytest
from httpx._transports import default

import ortserve  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def authorities_read_once() -> Iterator[None]:
    """Without it ``httpx`` reads the certificate authorities for each call outside a client: 35 of a call's 37 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def grpc_aio_kept() -> None:
    """Without it ``grpc.aio`` ends when the last of its channels is collected, and can wait for ever for calls of event
    loops that are closed.
    """
    grpc.aio.init_grpc_aio()


@pytest.fixture(scope="session", params=["--http-lane", "--no-http-lane"])
def http_way(request: pytest.FixtureRequest) -> str:
    """The flag of each way that infer requests take through the HTTP frontend: what holds for one holds for both."""
    way: str = request.param
    return way


@pytest.fixture(scope="session", params=["grpcio", "native"])
def grpc_transport(request: pytest.FixtureRequest) -> str:
    """What speaks HTTP/2 on the gRPC port, as ``--grpc-transport`` has it: what holds for one holds for both."""
    transport: str = request.param
    return transport


@pytest.fixture(scope="session")
def ways(http_way: str) -> tuple[str, ...]:
    """Flags for tests of both protocols: each way through one of them goes with a way through the other."""
    return (http_way, f"--grpc-transport={'native' if http_way == '--http-lane' else 'grpcio'}")
