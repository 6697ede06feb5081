"""What doctor measures and tries: steadiness, execution providers, GPUs, loads, and the way of a request."""

import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import builders
from ortserve.config.model import LoadOptions, ModelOptions
from ortserve.core.timing import PHASES, Timing
from ortserve.device.devices import DeviceRuntime
from ortserve.registry.repository.source import read_sources
from ortserve.tools.doctor import loading, request_path, steadiness, trial
from ortserve.tools.doctor.loading import ToLoad, list_models, load_all, load_one, without_files, without_room
from ortserve.tools.doctor.result import ModelCheck, ProviderTrial
from ortserve.tools.doctor.server import samples, sum_metrics
from servers import add_model

MIB = 1024**2


def test_steadiness_of_equal_work_is_1() -> None:
    found = steadiness.summarize([[1_000_000] * 100] * 4, 2.0, 0.0, 0, None, None)

    assert found is not None
    assert (found.processors, found.median_ms, found.spread, found.worst_spread, found.slowest) == (4, 1.0, 1, 1, 1)


def test_one_bad_processor_and_late_units_are_seen() -> None:
    steady, slow = [1_000_000] * 100, [2_000_000] * 100
    late = [1_000_000] * 95 + [5_000_000] * 5

    found = steadiness.summarize([steady, steady, slow, late], 2.0, None, 0, None, None)

    assert found is not None
    assert (found.spread, found.worst_spread, found.slowest) == (1, 5, 2)


def test_too_few_units_show_nothing() -> None:
    assert steadiness.summarize([[1] * 100, [1] * 9], 2.0, None, 0, None, None) is None
    assert steadiness.summarize([], 2.0, None, 0, None, None) is None


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0", "cpu  50 0 0 40 0 0 0 10 0 0\ncpu0", 0.1),
        ("cpu  5 0 0 0 0 0 0 1", "cpu  5 0 0 0 0 0 0 1", None),
        ("", "cpu  5 0 0 0 0 0 0 1", None),
        ("cpu  a b c d e f g h", "cpu  5 0 0 0 0 0 0 1", None),
    ],
)
def test_stolen_share(before: str, after: str, share: float | None) -> None:
    assert steadiness.stolen_share(before, after) == share


def test_steadiness_is_measured_on_all_processors_in_bounded_time() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    steps: list[float] = []

    found = steadiness.measure_steadiness(allowed, cache_bytes=MIB, free_bytes=2**40, seconds=0.2, step=steps.append)

    assert os.sched_getaffinity(0) == set(allowed), "only its own threads are pinned"
    if found is not None:  # a busy machine may not give every thread ten units of work
        assert found.processors == min(len(allowed), 16)
        assert found.spread >= 1
    assert steps == sorted(steps)


def test_steadiness_without_time_or_memory() -> None:
    assert steadiness.measure_steadiness([0], cache_bytes=0, free_bytes=0, seconds=0, step=lambda _: None) is None
    assert steadiness._copy_speeds(2, MIB, 100 * MIB) == (None, None)


def test_tiny_model_is_one_matmul() -> None:
    matrices = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 2]) for name in "xy"]
    node = onnx.helper.make_node("MatMul", ["x", "x"], ["y"])
    graph = onnx.helper.make_graph([node], "tiny", matrices[:1], matrices[1:])

    model = onnx.load_from_string(trial.TINY_MODEL)

    onnx.checker.check_model(model)
    assert model.graph == graph


def test_tiny_model_runs_on_the_cpu_and_a_missing_provider_says_why() -> None:
    assert trial.try_provider("CPUExecutionProvider") == ProviderTrial("CPUExecutionProvider", True, True)

    found = trial.try_provider("CUDAExecutionProvider")

    assert not found.is_usable
    assert found.problem
    assert "cannot open shared object file" in found.libraries["libcudnn.so.9"]


def module(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module for a process of its own, in place of the one that tries providers."""
    (folder / "stand_in.py").write_text(f"import os, signal, sys, time\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return "stand_in"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process ended with signal 11: no output"),
        ("sys.exit('libfoo.so: no such symbol')", "its process ended with exit status 1: libfoo.so: no such symbol"),
        ("time.sleep(60)", "gave no result within 0.5 s"),
    ],
)
def test_trial_that_crashes_or_hangs_is_a_problem(
    body: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 0.5 if "sleep" in body else 60
    assert trial.in_child([], limit_s, module(tmp_path, body, monkeypatch)) == {"problem": problem}


class FakeNvml:
    """Two GPUs; the second supports no calls but those that find it."""

    class NVMLError(Exception):
        """As NVML's module raises."""

    def __getattr__(self, call: str) -> Any:
        told: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": 2,
            "nvmlSystemGetDriverVersion": "580.65",
            "nvmlSystemGetCudaDriverVersion_v2": 13010,
        }
        of_first: dict[str, Any] = {
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=2**36, used=2**30),
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x24,
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetMigMode": (0, 0),
            "nvmlDeviceGetComputeRunningProcesses": [1, 2, 3],
        }

        def answer(*arguments: Any) -> Any:
            if call in told:
                return told[call]
            if call == "nvmlDeviceGetHandleByIndex":
                return arguments[0]
            if call == "nvmlDeviceGetUUID":
                return f"GPU-{arguments[0]}"
            if call == "nvmlDeviceGetName":
                return "H100"
            if arguments == (0,) and call in of_first:
                return of_first[call]
            raise self.NVMLError(call)

        return answer


def test_gpus_are_described_as_far_as_they_tell() -> None:
    (first, second), problem = trial.read_gpus({}, FakeNvml())

    assert problem == ""
    assert (first.name, first.capability, first.memory_bytes, first.used_bytes) == ("H100", "9.0", 2**36, 2**30)
    assert (first.driver, first.cuda, first.persistence, first.partitioned, first.processes) == (
        ("580.65", "13.1", True, False, 3)
    )
    assert first.throttled_because == ("power limit", "temperature")
    assert (second.capability, second.memory_bytes, second.persistence) == (None, None, None)


def test_hidden_gpus_are_named() -> None:
    assert trial.read_gpus({"CUDA_VISIBLE_DEVICES": ""}, FakeNvml()) == ([], "CUDA_VISIBLE_DEVICES hides all 2")
    (second,), problem = trial.read_gpus({"CUDA_VISIBLE_DEVICES": "1"}, FakeNvml())
    assert (second.capability, problem) == (None, "")


def test_settings_that_write_files_are_removed() -> None:
    options = ModelOptions.model_validate(
        {
            "execution_providers": [
                {"tensorrt": {"trt_engine_cache_enable": True, "trt_engine_cache_path": "c", "trt_fp16_enable": True}},
                "cpu",
            ],
            "session": {
                "optimized_model_file": "/tmp/x.onnx",
                "entries": {"session.dynamic_block_base": 4, "ep.context_enable": 1},
            },
        }
    )

    changed = without_files(options)

    assert changed.execution_providers == ({"tensorrt": {"trt_fp16_enable": "1"}}, "cpu")
    assert changed.session.optimized_model_file is None
    assert changed.session.entries == {"session.dynamic_block_base": 4}


def test_load_writes_no_optimized_model(tmp_path: Path) -> None:
    builders.mlp(tmp_path / "model.onnx")
    options = ModelOptions.model_validate(
        {"warmup_s": 0.05, "intra_op_threads": 1, "session": {"optimized_model_file": str(tmp_path / "optimized")}}
    )

    found = load_one(tmp_path / "model.onnx", "m", options, tmp_path, DeviceRuntime())

    assert found["execution_provider"] == "CPUExecutionProvider"
    assert found["row_ms"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def repository(folder: Path, *names: str) -> ToLoad:
    for name in names:
        add_model(folder, name, builders.mlp)
    return ToLoad(str(folder), LoadOptions(warmup_s=0.05).model_dump(mode="json"), [], False, ())


def test_models_are_loaded_in_one_process(tmp_path: Path) -> None:
    wanted = repository(tmp_path, "a", "b")
    (tmp_path / "a" / "model.yaml").write_text("gpus: [1]\n")
    (tmp_path / "b" / "1" / "model.onnx").write_bytes(b"not ONNX")
    steps: list[tuple[int, str]] = []

    a, b = load_all(
        list_models(read_sources([tmp_path], LoadOptions())), wanted, seconds=60, step=lambda *now: steps.append(now)
    )

    assert (a.label, a.problem, a.instances, a.execution_provider) == ("a/1", "", 1, "CPUExecutionProvider")
    assert [event.reason for event in a.events] == ["gpus: the model is on CPUExecutionProvider"]
    assert a.files_bytes == (tmp_path / "a" / "1" / "model.onnx").stat().st_size
    assert (a.load_s or 0) > 0
    assert b.label == "b/1"
    assert b.problem
    assert b.load_s is None
    assert steps == [(0, "loading a 1"), (1, "loading b 1")]


CRASHES_ON_A = """
import json
wanted = json.load(sys.stdin)
for name, _ in wanted["names"]:
    if name == "a":
        HOW
    print('verdict: {"row_ms": 1.5}', flush=True)
"""


@pytest.mark.parametrize(
    ("how", "problem", "skipped"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process that loaded it ended with status -11", ""),
        ("time.sleep(60)", "", "loading took more than 1 s"),
    ],
)
def test_model_on_which_the_process_crashes_or_hangs_does_not_stop_others(
    how: str, problem: str, skipped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MODULE", module(tmp_path, CRASHES_ON_A.replace("HOW", how), monkeypatch))
    models = [ModelCheck(name, 1) for name in ("z", "a", "b")]
    limit_s = 1 if "sleep" in how else 60

    z, a, b = load_all(models, repository(tmp_path), seconds=limit_s, step=lambda *_: None)

    assert (z.row_ms, b.row_ms) == (1.5, 1.5)
    assert a.problem.startswith(problem)
    assert bool(a.problem) == bool(problem)
    assert a.skipped == skipped


def test_process_of_an_interrupted_load_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "print('verdict: {}', flush=True)\nprint(os.getpid(), file=sys.stderr, flush=True)\ntime.sleep(600)"
    monkeypatch.setattr(loading, "MODULE", module(tmp_path, body, monkeypatch))
    verdicts = loading._run_child(repository(tmp_path), 600)
    assert next(verdicts) == {}
    children = {child.pid for child in psutil.Process().children()}
    assert len(children) == 1

    verdicts.close()  # as Ctrl-C ends it

    assert not children & {child.pid for child in psutil.Process().children()}
    for timer in (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)):
        timer.join(10)
        assert not timer.is_alive(), "it would keep this process for minutes"


def test_process_that_ends_before_it_reads_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MODULE", module(tmp_path, "os.close(0); sys.exit('no memory')", monkeypatch))
    many = replace(repository(tmp_path), names=[("n" * 200, 1)] * 5000)

    (verdict,) = loading._run_child(many, 60)

    assert verdict == {"problem": "the process that loaded it ended with status 1: no memory"}


def test_models_that_do_not_fit_are_not_loaded() -> None:
    small, large = ModelCheck("s", 1, files_bytes=10), ModelCheck("l", 1, files_bytes=10 * MIB, instances=2)

    checked = without_room([small, large], 19 * MIB)

    assert checked[0] == small
    assert checked[1].skipped == "its 2 instances need 20.0 MiB, and 19.0 MiB are free"
    assert without_room([small, large], None) == [small, large]
    assert load_all([checked[1]], ToLoad("", {}, [], False, ()), seconds=1, step=lambda *_: None) == [checked[1]]


def test_times_of_the_server_are_read_as_it_writes_them() -> None:
    timing = Timing(1_000, 22_000, 86_000, 95_000, 138_000, 169_000)

    assert request_path.parse_timing(timing.server_timing().decode()) == [21, 64, 9, 43, 31]
    assert request_path.parse_timing("decode;dur=1.0, queue;dur=2") == []
    assert request_path.parse_timing("") == []


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(1, 1e5), min_size=5, max_size=5), min_size=1, max_size=30), st.floats(0, 1e4))
def test_stages_and_the_rest_are_the_whole(phases: list[list[float]], outside: float) -> None:
    total = [int((sum(each) + outside) * 1e3) for each in phases]

    found = request_path.summarize("m", "synthetic", total, phases, [], {"queue": 3.0})

    assert [stage.name for stage in found.stages] == ["network and HTTP", *PHASES]
    assert found.stages[0].median_us == pytest.approx(outside, abs=0.01)
    assert found.dominant == max(found.stages, key=lambda stage: stage.median_us).name
    assert [stage.usual_us for stage in found.stages] == [None, None, 3.0, None, None, None]
    assert found.bare_us is None
    if len(phases) == 1:
        assert sum(stage.share for stage in found.stages) == pytest.approx(1, abs=0.01)


METRICS = """\
# HELP ortserve_saturation x
ortserve_saturation{model="a",version="1"} 0.25
ortserve_saturation{model="b",version="1"} 0.75
ortserve_rejected_requests_total{model="a\\"}",reason="overloaded"} 3
ortserve_rejected_requests_total{model="b",reason="deadline"} 4
ortserve_batching_decisions_total{model="a",version="1",decision="abandoned"} 1
ortserve_batching_decisions_total{model="b",version="1",decision="abandoned"} 1
ortserve_checked_requests_total{model="a",outcome="differed"} 2
ortserve_request_phase_duration_seconds_sum{model="a",version="1",phase="queue"} 0.5
ortserve_request_phase_duration_seconds_count{model="a",version="1",phase="queue"} 1000
ortserve_request_phase_duration_seconds_count{model="a",version="1",phase="stage"} 0
process_open_fds 24.0
process_start_time_seconds NaN
broken{ 1
nothing
"""


def test_metrics_are_added_up() -> None:
    assert sum_metrics(METRICS) == {
        "saturation": 0.75,
        "rejected_requests_total": 7,
        "batching_abandoned": 2,
        "checked_differed": 2,
        "process_open_fds": 24,
    }
    assert request_path.usual_phases(METRICS, "a") == {"queue": pytest.approx(500)}
    assert request_path.usual_phases(METRICS, "b") == {}


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_may_come_from_a_metrics_port(text: str) -> None:
    list(samples(text))
    sum_metrics(text)
    request_path.usual_phases(text, "a")
    request_path.parse_timing(text)


def test_module_of_trials_writes_its_verdict(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: None)

    trial.main(["provider", "CPUExecutionProvider"])

    line = capfd.readouterr().out.strip()
    assert json.loads(line.removeprefix(trial.VERDICT)) == asdict(trial.try_provider("CPUExecutionProvider"))
