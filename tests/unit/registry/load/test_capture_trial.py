"""Trials of captures in another process: each outcome there becomes a reason here."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from fakes.host_device import HostDevice
from models import builders
from ortserve.device.devices import DeviceProvider
from ortserve.device.protocol import BoundRun
from ortserve.engine.provider_options import CPU
from ortserve.registry.load.capture_trial import VERDICT, CaptureTrials, TrialRequest, try_capture

TESTS = str(Path(__file__).parents[3] / "support")

ON_HOST_MEMORY = (
    sys.executable,
    "-c",
    f"""
import sys
sys.path.insert(0, {TESTS!r})
from fakes.host_device import HostDevice
from ortserve.device.devices import DeviceProvider
from ortserve.registry.load.capture_trial import main
main({{'{CPU}': DeviceProvider(HostDevice)}})
""",
)


ONE_GRAPH_PER_SESSION = (
    sys.executable,
    "-c",
    f"""
import sys
sys.path.insert(0, {TESTS!r})
from fakes.host_device import HostDevice
from ortserve.device.devices import DeviceProvider
from ortserve.registry.load.capture_trial import main
make = lambda number: HostDevice(number, one_graph_per_session=True)
main({{'{CPU}': DeviceProvider(make, one_graph_per_session=True)}})
""",
)


def order(path: Path, provider: str = CPU) -> TrialRequest:
    return TrialRequest(str(path), "m/1", provider, {}, 1, [1, 4], {})


def child(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import json, os, signal, sys, time\n{script}")


def test_capturable_model_is_captured_once(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    trials = CaptureTrials(ON_HOST_MEMORY, timeout_s=60)
    assert trials.why_not(order(path)) == ""
    trials._command = ("/does/not/exist",)
    assert trials.why_not(order(path)) == ""
    builders.mlp(path, hidden=128)
    assert trials.why_not(order(path)) == "it could not be tried in another process: No such file or directory"


def test_trial_supports_one_graph_per_session(tmp_path: Path) -> None:
    trials = CaptureTrials(ONE_GRAPH_PER_SESSION, timeout_s=60)
    assert trials.why_not(order(builders.mlp(tmp_path / "m.onnx"))) == ""
    refused = trials.why_not(order(builders.slow(tmp_path / "l.onnx", steps=3)))
    assert refused == "which nodes run is decided during the run, by Loop"


def test_real_child_process_reports_a_missing_device(tmp_path: Path) -> None:
    reason = CaptureTrials(timeout_s=60).why_not(order(builders.mlp(tmp_path / "m.onnx")))
    assert reason == f"{CPU} has none"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"print('ORT says hello'); print({VERDICT + json.dumps('no')!r}); print('more')", "no"),
        ("sys.exit('it is bad')", "the trial in another process failed: exit status 1: it is bad"),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            f"the trial in another process failed: ended by signal {int(signal.SIGSEGV)}: no output",
        ),
        ("pass", "the trial in another process failed: exit status 0: no output"),
        (
            f"print({VERDICT + json.dumps('')!r}, flush=True); os.abort()",
            f"the trial in another process failed: ended by signal {int(signal.SIGABRT)}: no output",
        ),
    ],
    ids=["refusal", "failure", "crash", "silence", "crash after the verdict"],
)
def test_refusals_failures_and_crashes_are_distinguished(tmp_path: Path, script: str, expected: str) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    assert CaptureTrials(child(script), timeout_s=60).why_not(order(path)) == expected


def test_hanging_child_process_is_killed(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    hanging = child(f"open({str(noted)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)")
    trials = CaptureTrials(hanging, timeout_s=1)
    assert trials.why_not(order(builders.mlp(tmp_path / "m.onnx"))) == (
        "the trial in another process took more than 1 s"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


def test_verdict_of_the_child_is_the_reason(tmp_path: Path) -> None:
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
        reasons: list[str] = []
        try_capture(order(path), reasons.append, {CPU: DeviceProvider(device)})
        (reason,) = reasons
        return reason

    path = builders.identity(tmp_path / "m.onnx")
    assert tried(path) == ""
    assert tried(path, Broken).startswith("its capture failed: CUDA failure 900")
    assert tried(path, Lost).startswith("the process of the trial lost its device: host:0 is lost: CUDA failure 700")
    assert "decided during the run, by Loop" in tried(builders.slow(tmp_path / "l.onnx", steps=3))
    assert "does not fix the shapes" in tried(builders.unnamed_dims(tmp_path / "t.onnx"))
    assert "cannot load the model" in tried(builders.not_onnx(tmp_path / "n.onnx"))
