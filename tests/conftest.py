"""Fixtures for all tests. Importing the package first silences ONNX Runtime's telemetry in this process."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import grpc
import pytest
from httpx._transports import default
from hypothesis import HealthCheck, settings

import ortserve  # noqa: F401
from preloaded import PreloadedPopen
from rewritten import rewrite_share

# A shell without job control starts its background commands with SIGINT ignored, and children inherit that. Tests of
# interruptions need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Other work on the machine makes examples slow, which is not a failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def authorities_read_once() -> Iterator[None]:
    """Read the certificate authorities once; ``httpx`` reads them for each call outside a client, 35 of its 37 ms."""
    with pytest.MonkeyPatch.context() as patch:
        name = "create_ssl_context"  # a private name of httpx, which does not export it
        patch.setattr(default, name, cache(getattr(default, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def grpc_aio_kept() -> None:
    """Keep ``grpc.aio`` alive.

    Otherwise it ends when the last of its channels is collected, and may wait forever for calls of closed event loops.
    """
    grpc.aio.init_grpc_aio()


@pytest.fixture
def importable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that a test starts import the functions of its file and of ``support``."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(request.path.parent), *filter(None, sys.path)]))


@pytest.fixture
def preloaded_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the commands of ``ortserve`` and the processes that they start from one that has imported their packages."""
    monkeypatch.setattr(subprocess, "Popen", PreloadedPopen)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Share the rewriting of assertions between the workers of pytest-xdist."""
    if worker := getattr(session.config, "workerinput", None):
        files = sorted(Path(__file__).parent.rglob("test_*.py"))
        number = int(worker["workerid"].removeprefix("gw"))
        rewrite_share(session.config, files, number, worker["workercount"])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage before all tests are collected: most objects stay, and each pass inspects them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude what the tests of a file leave, such as imported modules, from garbage collections in later files."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``native`` also to tests that are not ``ON_BOTH_TRANSPORTS``.

    pytest then runs all tests of a file on one transport before those on the other, and starts the file's servers once
    for each transport.
    """
    marks = metafunc.definition.iter_markers("parametrize")
    if "grpc_transport" in metafunc.fixturenames and not any("grpc_transport" in mark.args[0] for mark in marks):
        metafunc.parametrize("grpc_transport", ["native"], indirect=True, scope="session", ids=[pytest.HIDDEN_PARAM])


@pytest.fixture(scope="session")
def grpc_transport(request: pytest.FixtureRequest) -> str:
    """The value of ``--grpc-transport``: ``native``, or each value for tests that are ``ON_BOTH_TRANSPORTS``."""
    transport: str = request.param
    return transport


@pytest.fixture(scope="session")
def ways(grpc_transport: str) -> tuple[str, ...]:
    """The gRPC transport as flags, for tests of both protocols."""
    return (f"--grpc-transport={grpc_transport}",)
