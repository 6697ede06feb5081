"""Trials of captures in another process: each outcome there becomes a reason here."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from device_models import strict_trials
from fakes.host_device import HostDevice
from models import builders
from ortserve.config.session import SessionSettings
from ortserve.device.devices import DeviceProvider
from ortserve.device.protocol import BoundRun
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.registry.load.capture_trial import CaptureTrial, CaptureTrials, TrialRequest
from ortserve.registry.load.progress import LoadCancelledError, Progress

pytestmark = pytest.mark.usefixtures("importable", "preloaded_commands")


def order(path: Path) -> TrialRequest:
    return TrialRequest(path, "m/1", ProviderChoice(CPU), 1, (1, 4), SessionSettings())


def why_not(trials: CaptureTrials, path: Path) -> str:
    return trials.why_not(order(path), Progress(time.monotonic_ns))


def exit_at_once(request: TrialRequest) -> CaptureTrial:
    sys.exit("it is bad")


def lack_memory(request: TrialRequest) -> CaptureTrial:
    raise OSError("no memory for the device")  # without a number, as libraries raise it


def crash(request: TrialRequest) -> CaptureTrial:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def hang(noted: Path, request: TrialRequest) -> CaptureTrial:
    noted.write_text(str(os.getpid()))
    time.sleep(60)
    raise AssertionError


def test_capturable_model_is_captured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    trials = strict_trials()
    assert why_not(trials, path) == ""
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    assert why_not(trials, path) == ""
    builders.mlp(path, hidden=128)
    assert why_not(trials, path) == "it could not be tried in another process: No such file or directory"


def test_trial_supports_one_graph_per_session(tmp_path: Path) -> None:
    trials = strict_trials(one_graph_per_session=True)
    assert why_not(trials, builders.mlp(tmp_path / "m.onnx")) == ""
    refused = why_not(trials, builders.slow(tmp_path / "l.onnx", steps=3))
    assert refused == "which nodes run is decided during the run, by Loop"


def test_real_trial_reports_a_missing_device(tmp_path: Path) -> None:
    assert why_not(CaptureTrials(timeout_s=60), builders.mlp(tmp_path / "m.onnx")) == f"{CPU} has none"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (exit_at_once, "the other process ended with exit status 1: it is bad"),
        (crash, f"the other process ended with signal {int(signal.SIGSEGV)}: no output"),
    ],
)
def test_failures_and_crashes_are_distinguished(
    tmp_path: Path, make: Callable[[TrialRequest], CaptureTrial], expected: str
) -> None:
    reason = why_not(CaptureTrials(make, timeout_s=60), builders.mlp(tmp_path / "m.onnx"))
    assert reason == f"the trial in another process failed: {expected}"


def test_error_without_a_number_is_reported_by_its_text(tmp_path: Path) -> None:
    reason = why_not(CaptureTrials(lack_memory, timeout_s=60), builders.mlp(tmp_path / "m.onnx"))
    assert reason == "it could not be tried in another process: no memory for the device"


def test_trial_that_no_process_can_make_ends_with_its_cancelled_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress(time.monotonic_ns)
    progress.cancel("the model is unloaded")
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    with pytest.raises(LoadCancelledError, match="the model is unloaded"):
        CaptureTrials().why_not(order(builders.mlp(tmp_path / "m.onnx")), progress)


def test_hanging_process_is_killed(tmp_path: Path) -> None:
    before = psutil.Process().children()
    reason = why_not(CaptureTrials(partial(hang, tmp_path / "pid"), timeout_s=1), builders.mlp(tmp_path / "m.onnx"))
    assert reason == "the trial in another process failed: returned no result within 1 s"
    assert psutil.Process().children() == before


def test_trial_ends_at_once_when_its_load_is_cancelled(tmp_path: Path) -> None:
    noted, progress = tmp_path / "pid", Progress(time.monotonic_ns)
    os.mkfifo(noted)

    def cancel() -> None:
        noted.read_text()  # as soon as the trial hangs
        progress.cancel("the model is unloaded")

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(LoadCancelledError, match="the model is unloaded"):
        CaptureTrials(partial(hang, noted)).why_not(order(builders.mlp(tmp_path / "m.onnx")), progress)
    canceller.join()


def test_result_of_a_trial_is_the_reason(tmp_path: Path) -> None:
    class Broken(HostDevice):
        def run(self, bound: BoundRun, stream: int) -> None:
            if bound.graph_id is not None:
                raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
            super().run(bound, stream)

    class Lost(HostDevice):
        def run(self, bound: BoundRun, stream: int) -> None:
            if bound.graph_id is not None:
                raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")
            super().run(bound, stream)

    def tried(path: Path, device: type[HostDevice] = HostDevice) -> str:
        trial = CaptureTrial(order(path), {CPU: DeviceProvider(device)})
        reason = trial.why_not()
        if trial._instance is not None:
            trial._instance.close()
        return reason

    path = builders.identity(tmp_path / "m.onnx")
    assert tried(path) == ""
    assert tried(path, Broken).startswith("its capture failed: CUDA failure 900")
    assert tried(path, Lost).startswith("the process of the trial lost its device: host:0 is lost: CUDA failure 700")
    assert "decided during the run, by Loop" in tried(builders.slow(tmp_path / "l.onnx", steps=3))
    assert "does not fix the shapes" in tried(builders.unnamed_dims(tmp_path / "t.onnx"))
    assert "cannot load the model" in tried(builders.not_onnx(tmp_path / "n.onnx"))
