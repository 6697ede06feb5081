"""Doctor's measurements and trials: steadiness, execution providers, GPUs, loads, and the path of a request."""

import os
import pickle
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import builders, ragged
from ortserve.config.model import ModelOptions
from ortserve.config.options import ServerOptions
from ortserve.core.timing import PHASES, Timing
from ortserve.engine.child_process import Failure, run_in_child, run_in_children
from ortserve.registry.load.trial_load import trial_options
from ortserve.registry.repository.configuration import Configuration
from ortserve.registry.repository.source import ModelSource, VersionSource
from ortserve.tools.doctor import loading, request_path, runtime, steadiness
from ortserve.tools.doctor.findings import find_in_models
from ortserve.tools.doctor.loading import LoadItem, check_models, load_one
from ortserve.tools.doctor.result import ModelCheck, ProviderTrial
from ortserve.tools.doctor.server import sum_metrics
from servers import add_model

MIB = 1024**2


def test_steadiness_of_equal_work_is_1() -> None:
    found = steadiness.summarize([[1e-3] * 100] * 4, 0.0, 0, None, None)

    assert found is not None
    assert (found.processors, found.median_ms, found.spread, found.slowest) == (4, 1.0, 1, 1)


def test_slow_processor_and_late_units_are_seen() -> None:
    steady, slow = [1e-3] * 100, [2e-3] * 100
    late = [1e-3] * 95 + [5e-3] * 5

    found = steadiness.summarize([steady, slow, steady], 0.0, 0, None, None)

    assert found is not None
    assert (found.spread, found.slowest) == pytest.approx((1, 2))
    found = steadiness.summarize([late, late, steady], 0.0, 0, None, None)
    assert found is not None
    assert (found.spread, found.slowest) == pytest.approx((5, 1))


def test_too_few_units_show_nothing() -> None:
    assert steadiness.summarize([[1] * 100, [1] * 9], 0.0, 0, None, None) is None
    assert steadiness.summarize([], 0.0, 0, None, None) is None


def test_steadiness_is_measured_on_all_processors_in_bounded_time() -> None:
    allowed = sorted(os.sched_getaffinity(0))

    found = steadiness.measure_steadiness(allowed, 2**40, 0.2)

    assert os.sched_getaffinity(0) == set(allowed), "only its own threads are pinned"
    if found is not None:  # a busy machine may not give every thread ten units of work
        assert found.processors == min(len(allowed), 16)
        assert found.spread >= 1
        assert 0 <= found.stolen <= 1
        assert (found.copy_all_gb_per_s or 0) > 0


def test_steadiness_without_time_or_memory() -> None:
    assert steadiness.measure_steadiness([0], 0, 0) is None
    assert steadiness._copy_speed(1, 2, 100 * MIB) is None


def test_tiny_model_is_one_matmul() -> None:
    matrices = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 2]) for name in "xy"]
    node = onnx.helper.make_node("MatMul", ["x", "x"], ["y"])
    graph = onnx.helper.make_graph([node], "tiny", matrices[:1], matrices[1:])

    model = onnx.load_from_string(runtime.TINY_MODEL)

    onnx.checker.check_model(model)
    assert model.graph == graph


def test_tiny_model_runs_on_the_cpu_and_a_missing_provider_says_why() -> None:
    assert runtime.try_provider("CPUExecutionProvider") == ProviderTrial("CPUExecutionProvider", True, True)

    found = runtime.try_provider("CUDAExecutionProvider")

    assert not found.is_usable
    assert found.problem
    assert "cannot open shared object file" in found.libraries["libcudnn.so.9"]


def end_by_signal(item: str) -> str:
    """Work that crashes the process for the item ``bad``."""
    if item == "bad":
        os.kill(os.getpid(), signal.SIGSEGV)
    return item.upper()


def fail(item: str) -> str:
    """Work that fails with an unexpected exception."""
    print("noise of a library", flush=True)
    raise RuntimeError(f"libfoo.so: no such symbol in {item}")


def hang(item: str) -> str:
    """Work that never ends for the item ``bad``."""
    while item == "bad":
        time.sleep(1)
    return item.upper()


def tell_processes(_: str) -> list[int]:
    """The process ids of this process, and of one that it has started."""
    return [os.getpid(), subprocess.Popen(["sleep", "600"]).pid]


@pytest.mark.usefixtures("importable", "preloaded_commands")
@pytest.mark.parametrize(
    ("work", "failure", "limit_s"),
    [
        (end_by_signal, Failure("ended with signal 11: no output"), 60),
        (fail, Failure("ended with exit status 1: RuntimeError: libfoo.so: no such symbol in bad"), 60),
        (hang, Failure("returned no result within 2 s", is_late=True), 2),
    ],
)
def test_process_that_crashes_or_hangs_is_a_failure(work: Callable[[str], str], failure: Failure, limit_s: int) -> None:
    assert list(run_in_child(work, ["bad"], limit_s)) == [failure]


@pytest.mark.usefixtures("importable", "preloaded_commands")
def test_item_on_which_the_process_crashes_does_not_stop_others() -> None:
    results = list(run_in_child(end_by_signal, ["a", "b", "bad", "c"], 60))

    assert results == ["A", "B", Failure("ended with signal 11: no output"), "C"]


@pytest.mark.usefixtures("importable", "preloaded_commands")
def test_processes_of_interrupted_work_are_ended() -> None:
    results = run_in_child(tell_processes, ["a", "b"], 60)
    processes = [psutil.Process(pid) for pid in next(results)]

    results.close()  # as Ctrl-C would end it

    gone, _ = psutil.wait_procs(processes, timeout=10)
    assert len(gone) == 2


@pytest.mark.usefixtures("importable", "preloaded_commands")
def test_items_side_by_side_each_get_their_result_or_failure() -> None:
    items = ["a", "b", "bad", "c", "d"]

    results = dict(run_in_children(end_by_signal, items, 60, 2))

    assert results == {one: one.upper() for one in items} | {"bad": Failure("ended with signal 11: no output")}


@pytest.mark.usefixtures("importable", "preloaded_commands")
def test_processes_side_by_side_are_ended_although_others_still_hang() -> None:
    before = psutil.Process().children()
    results = run_in_children(hang, ["a", "bad"], 600, 2)
    assert next(results) == ("a", "A")
    assert len(psutil.Process().children()) > len(before)

    results.close()

    assert not set(psutil.Process().children()) - set(before)


@pytest.mark.timeout(60)
def test_error_of_a_process_side_by_side_is_raised() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        list(run_in_children(lambda item: item, ["a", "b", "c"], 60, 2))


def test_process_that_cannot_begin_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    assert list(run_in_child(len, ["n" * 10**6], 60)) == [Failure("ended with exit status 3: no output")]


class FakeNvml:
    """Two GPUs; the second supports only the calls that find it."""

    class NVMLError(Exception):
        """The error class of NVML's module."""

    def __getattr__(self, call: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": 2,
            "nvmlSystemGetDriverVersion": "580.65",
            "nvmlSystemGetCudaDriverVersion_v2": 13010,
        }
        of_first: dict[str, Any] = {
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=2**36, used=2**30),
        }

        def answer(*arguments: Any) -> Any:
            if call in answers:
                return answers[call]
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
    (first, second), problem = runtime.read_gpus({}, FakeNvml())

    assert problem == ""
    assert (first.name, first.capability, first.memory_bytes, first.used_bytes) == ("H100", "9.0", 2**36, 2**30)
    assert (first.driver, first.cuda) == ("580.65", "13.1")
    assert (second.name, second.capability, second.memory_bytes) == ("H100", None, None)


def test_hidden_gpus_are_named() -> None:
    assert runtime.read_gpus({"CUDA_VISIBLE_DEVICES": ""}, FakeNvml()) == ([], "CUDA_VISIBLE_DEVICES hides all 2")
    (second,), problem = runtime.read_gpus({"CUDA_VISIBLE_DEVICES": "1"}, FakeNvml())
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

    changed = trial_options(options)

    assert changed.execution_providers == ({"tensorrt": {"trt_fp16_enable": "1"}}, "cpu")
    assert changed.session.optimized_model_file is None
    assert changed.session.entries == {"session.dynamic_block_base": 4}


def test_load_writes_no_optimized_model(tmp_path: Path) -> None:
    builders.mlp(tmp_path / "model.onnx")
    options = ModelOptions.model_validate(
        {"warmup_s": 0.05, "intra_op_threads": 1, "session": {"optimized_model_file": str(tmp_path / "optimized")}}
    )

    version = VersionSource(tmp_path / "model.onnx", tmp_path, Configuration(options), ())

    item = LoadItem(ModelCheck("m"), version, ModelSource("m"))
    found = load_one(item, libraries=(), global_threads=False)

    assert found.execution_provider == "CPUExecutionProvider"
    assert (found.row_ms or 0) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def check(repository: Path, free_bytes: int = 2**40, *, global_threads: bool = False) -> list[ModelCheck]:
    return check_models(repository, ServerOptions(warmup_s=0.05, global_threads=global_threads), free_bytes, 60)


@pytest.mark.usefixtures("preloaded_commands")
def test_models_are_loaded_in_one_process(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        add_model(tmp_path, name, builders.mlp)
    (tmp_path / "a" / "model.yaml").write_text("gpus: [1]\n")
    (tmp_path / "b" / "1" / "model.onnx").write_bytes(b"not ONNX")

    a, b, c = check(tmp_path)

    assert (a.label, a.problem, a.instances, a.execution_provider) == ("a/1", "", 1, "CPUExecutionProvider")
    assert a.events == ("option has no effect: gpus: the model is on CPUExecutionProvider",)
    assert a.files_bytes == (tmp_path / "a" / "1" / "model.onnx").stat().st_size
    assert (a.load_s or 0) > 0
    assert (b.label, b.load_s) == ("b/1", None)
    assert b.problem
    assert (c.label, c.problem, c.events) == ("c/1", "", ())


def test_memory_of_a_model_is_not_that_which_an_earlier_one_freed(tmp_path: Path) -> None:
    """Weights of 2 MiB come from heaps of malloc, which keep what is freed."""
    for name in ("a", "b", "c"):
        add_model(tmp_path, name, partial(builders.mlp, inputs=512, hidden=1024))

    for model in check(tmp_path):
        assert model.memory_bytes is not None
        assert model.memory_bytes > 0.7 * model.files_bytes, model


@pytest.mark.usefixtures("preloaded_commands")
def test_ragged_model_has_no_warning_that_nothing_could_end(tmp_path: Path) -> None:
    joined = add_model(tmp_path, "joined", ragged.double)
    (joined / "model.yaml").write_text("batched: true\nmax_rows: 8\ninputs: {X: {ragged: true}}\n")

    (model,) = check(tmp_path)

    assert model.events[0].startswith("rows run together because the configuration says so: ")
    assert list(find_in_models([model], None, 2**40)) == []


@pytest.mark.parametrize("has_global_threads", [False, True])
def test_memory_of_onnx_runtime_is_not_that_of_the_first_model(has_global_threads: bool, tmp_path: Path) -> None:
    add_model(tmp_path, "m", builders.mlp)

    (model,) = check(tmp_path, global_threads=has_global_threads)

    assert 0 < (model.memory_bytes or 0) < 5 * MIB, "ONNX Runtime itself takes more"


@pytest.mark.usefixtures("preloaded_commands")
def test_label_of_a_version_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    add_model(tmp_path, "m", builders.mlp)
    (tmp_path / "m" / "model.yaml").write_text("labels: {stable: 1, canary: 2}\n")

    served, missing = check(tmp_path)

    assert (served.label, served.problem) == ("m/1", "")
    assert missing.label == "m/2"
    assert missing.problem == "labels.canary: expected a version that is in the repository, got 2"


@pytest.mark.parametrize(
    ("failure", "problem", "skipped"),
    [
        (Failure("ended with signal 11: x"), "the process that loaded it ended with signal 11: x", ""),
        (Failure("gave no result", is_late=True), "", "the process that loaded it gave no result"),
    ],
)
def test_model_on_which_the_process_crashes_or_hangs(
    failure: Failure, problem: str, skipped: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add_model(tmp_path, "m", builders.mlp)
    monkeypatch.setattr(loading, "run_in_children", lambda _, items, *more: iter([(items[0], failure)]))

    (found,) = check(tmp_path)

    assert (found.label, found.problem, found.skipped) == ("m/1", problem, skipped)


def test_models_that_do_not_fit_are_not_loaded(tmp_path: Path) -> None:
    add_model(tmp_path, "m", builders.mlp)
    (tmp_path / "m" / "model.yaml").write_text("instances: 2\n")
    nbytes = (tmp_path / "m" / "1" / "model.onnx").stat().st_size

    (found,) = check(tmp_path, 2 * nbytes - 1)

    assert re.fullmatch(r"2 instances need \S+ \w+, \S+ \w+ are free", found.skipped)
    assert found.load_s is None


def test_times_of_the_server_are_read_as_it_writes_them() -> None:
    timing = Timing(1_000, 22_000, 86_000, 95_000, 138_000, 169_000)

    assert request_path.parse_timing(timing.server_timing().decode()) == [21, 64, 9, 43, 31]
    assert request_path.parse_timing("decode;dur=1.0, queue;dur=2") == []
    assert request_path.parse_timing("") == []


@given(st.lists(st.lists(st.floats(1, 1e5), min_size=5, max_size=5), min_size=1, max_size=30), st.floats(0, 1e4))
def test_stages_and_the_rest_are_the_whole(phases: list[list[float]], outside: float) -> None:
    total = [int((sum(each) + outside) * 1e3) for each in phases]

    found = request_path.summarize("m", "synthetic", total, phases, [])

    assert [stage.name for stage in found.stages] == ["network and HTTP", *PHASES]
    assert found.stages[0].median_us == pytest.approx(outside, abs=0.01)
    assert found.dominant == max(found.stages, key=lambda stage: stage.median_us).name
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
ortserve_batching_decisions_total{model="b",version="1",decision="batched"} 8
process_open_fds 24.0
process_max_fds NaN
broken{ 1
nothing
"""


def test_metrics_are_added_up() -> None:
    assert sum_metrics(METRICS) == {
        "saturation": 0.75,
        "rejected_requests": 7,
        "abandoned_runs": 2,
        "rows_depend": 2,
        "open_files": 24,
    }


@given(st.text(max_size=200))
def test_any_text_may_come_from_a_metrics_port(text: str) -> None:
    sum_metrics(text)
    request_path.parse_timing(text)
