"""A server whose device is lost rejects requests, and is neither ready nor live, so that it is replaced.

This holds while it serves and while it is still loading.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from prometheus_client import CollectorRegistry

from fakes.host_device import HostDevice, LosableDevice
from fakes.inflight import submit_to
from models import builders
from ortserve.config.model import LoadOptions
from ortserve.core.timing import Timing
from ortserve.device.devices import DeviceProvider, DeviceRuntime, Devices
from ortserve.device.protocol import BoundRun
from ortserve.engine.provider_options import CPU
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.model_file.graph import Model
from ortserve.registry.catalog import State
from ortserve.registry.load.capture_trial import CaptureTrials
from ortserve.registry.registry import Registry
from ortserve.registry.served_version import ServedVersion
from ortserve.service.models import ModelService
from ortserve.telemetry.metrics import Metrics


async def ask(served: ServedVersion) -> None:
    x = np.ones((1, 4), np.float32)
    terms = served.terms(time.monotonic_ns())
    (y,) = await submit_to(served, (x,), 1, Timing(time.monotonic_ns()), terms)
    assert np.array_equal(y, x)


async def test_a_server_whose_device_is_lost_is_neither_ready_nor_live(tmp_path: Path) -> None:
    for name in ("one", "two"):
        builders.identity(tmp_path / f"{name}.onnx")
    device = LosableDevice()
    runtime = DeviceRuntime(devices=Devices({CPU: DeviceProvider(lambda number: device)}))
    defaults = LoadOptions(warmup_s=0.2, max_rows=2)
    registry = Registry([tmp_path], defaults, Metrics(CollectorRegistry()), time.monotonic_ns, runtime)
    models = ModelService(registry, server_name="s", strict_readiness=False)
    await registry.load_all()
    served = [registry.find(name, "") for name in ("one", "two")]
    await asyncio.gather(*map(ask, served))
    assert (models.is_live(), models.is_ready()) == (True, True)

    device.is_lost = True
    with pytest.raises(ServeError, match="host:0 is lost: CUDA failure 719") as failed:
        await ask(served[0])
    assert failed.value.kind is ErrorKind.NOT_READY
    assert (models.is_live(), models.is_ready()) == (False, False)
    (record,) = registry.models()["one"]
    assert (record.state, record.reason) == (State.FAILED, registry.lost)
    with pytest.raises(ServeError, match="FAILED") as refused:
        registry.find("one", "")
    assert refused.value.kind is ErrorKind.NOT_READY

    device.is_lost = False  # it seems to work again, but a lost context is never reused
    with pytest.raises(ServeError, match="host:0 is lost"):
        await ask(served[1])
    await registry.close()
    assert device.allocated_bytes == 0


LOST = "CUDA failure 719: unspecified launch failure"


class FailsOnce(HostDevice):
    """A device that fails once at a step of a later load, and then seems to work again."""

    step = ""
    error = LOST

    def _fail(self, step: str) -> None:
        if step == self.step:
            self.step = ""
            raise RuntimeError(self.error)

    def make_stream(self) -> int:
        self._fail("opening")
        return super().make_stream()

    def allocate_host(self, nbytes: int) -> np.ndarray:
        self._fail("making buffers")
        return super().allocate_host(nbytes)

    def run(self, bound: BoundRun, stream: int) -> None:
        if bound.graph_id is None:
            self._fail("trying buffers")
        else:
            graph = self._graphs.get(bound.session, {}).get(bound.graph_id)
            self._fail("capturing" if graph is None or graph.captured is None else "replaying")
        super().run(bound, stream)

    def elapsed_ns(self, first: int, second: int) -> int:
        self._fail("timing")
        return super().elapsed_ns(first, second)


class FailingSession:
    """A session that fails at the device's step in plain runs, which do not use the fake device."""

    def __init__(self, session: ort.InferenceSession, device: FailsOnce) -> None:
        self._session = session
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, *args: Any) -> Any:
        self._device._fail("warming up")
        return self._session.run(*args)


class Loading:
    """A server with a model that serves, and a model ``late`` that is not loaded yet."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = FailsOnce()

        def open_it(path: Path, name: str, options: SessionOptions, model: Model) -> Any:
            try:
                self.device._fail("making the session")
            except RuntimeError as error:
                raise invalid_input(f"ONNX Runtime cannot load the model: {error}") from error
            session = open_session(path, name, options)
            return FailingSession(session, self.device) if name == "late/1" else session

        monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_it)
        monkeypatch.setattr(CaptureTrials, "why_not", lambda *arguments: "")
        for name in ("early", "late"):
            builders.identity(folder / f"{name}.onnx")
        runtime = DeviceRuntime(devices=Devices({CPU: DeviceProvider(lambda number: self.device)}))
        defaults = LoadOptions(warmup_s=0.2, max_rows=2, graph_replay=True, intra_op_threads=1)
        self.registry = Registry([folder], defaults, Metrics(CollectorRegistry()), time.monotonic_ns, runtime)
        self.models = ModelService(self.registry, server_name="s", strict_readiness=False)

    @property
    def health(self) -> tuple[bool, bool]:
        return self.models.is_live(), self.models.is_ready()

    async def load_late(self, step: str, error: str) -> ServeError:
        """The outcome of a load that fails at a step."""
        self.device.step, self.device.error = step, error
        with pytest.raises(ServeError, match="load failed for model 'late'") as failed:
            await self.registry.load("late")
        assert not self.device.step, "it did not come to that"
        return failed.value


@pytest.mark.parametrize(
    "step",
    [
        "opening",
        "making the session",
        "warming up",
        "making buffers",
        "trying buffers",
        "capturing",
        "replaying",
        "timing",
    ],
)
async def test_device_that_is_lost_while_a_model_loads_is_lost_for_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    server = Loading(tmp_path, monkeypatch)
    await server.registry.load_all({"early"})
    served = server.registry.find("early", "")
    assert server.health == (True, True)
    change = server.models.readiness_change()
    failed = await server.load_late(step, LOST)
    assert f"host:0 is lost: {LOST}" in failed.message
    assert server.health == (False, False)
    assert change.is_set()
    assert server.models.lost == f"host:0 is lost: {LOST}"
    (record,) = server.registry.models()["late"]
    assert (record.state, record.reason) == (State.FAILED, server.models.lost)
    assert "device is lost" in caplog.messages

    with pytest.raises(ServeError, match="host:0 is lost"):  # the model that served before now fails
        await ask(served)
    with pytest.raises(ServeError, match="host:0 is lost"):  # no model is loaded, although the device seems to work
        await server.registry.load("late")
    await server.registry.close()


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("opening", "CUDA failure 2: out of memory"),
        ("opening", "CUDA failure 1: invalid argument"),
        ("making buffers", "CUDA failure 2: out of memory"),
    ],
)
async def test_load_that_fails_for_another_reason_leaves_the_server_live_and_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: str
) -> None:
    server = Loading(tmp_path, monkeypatch)
    await server.registry.load_all({"early"})
    failed = await server.load_late(step, error)
    assert "lost" not in failed.message
    assert server.health == (True, True)
    assert not server.models.lost
    await ask(server.registry.find("early", ""))
    await server.registry.load("late")
    await ask(server.registry.find("late", ""))
    await server.registry.close()


@pytest.mark.parametrize("step", ["making the session", "capturing", "replaying", "making buffers"])
async def test_model_that_runs_plainly_after_a_failure_leaves_the_server_live_and_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    server = Loading(tmp_path, monkeypatch)
    server.device.step, server.device.error = step, "CUDA failure 900: operation not permitted"
    await server.registry.load_all()
    assert not server.device.step
    assert server.health == (True, True)
    for name in ("early", "late"):
        await ask(server.registry.find(name, ""))
    await server.registry.close()


async def test_device_lost_at_the_start_is_reported_before_loading_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Loading(tmp_path, monkeypatch)
    server.device.step = "capturing"
    await server.registry.load_all()
    assert server.health == (False, False)
    assert server.models.count_models() == (0, 2, 0)
    await server.registry.close()
