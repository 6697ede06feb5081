"""What every test needs. Importing the package first silences ONNX Runtime's telemetry in this process."""

import pytest

import ortserve  # noqa: F401


@pytest.fixture(scope="session", params=["--http-lane", "--no-http-lane"])
def http_way(request: pytest.FixtureRequest) -> str:
    """The flag of each way that infer requests take through the HTTP frontend: what holds for one holds for both."""
    way: str = request.param
    return way
