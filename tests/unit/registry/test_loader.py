"""From a file to a warm instance, with the real ONNX Runtime."""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import builders
from ortserve.config.model import ModelOptions
from ortserve.config.session import SessionSettings
from ortserve.core.batch import Batch
from ortserve.core.dtypes import DataType
from ortserve.engine.cpu_budget import cpu_budget
from ortserve.engine.device.devices import Devices
from ortserve.engine.device.host import HostDevice
from ortserve.engine.device.use import DeviceUse
from ortserve.engine.provider_options import CPU, CUDA
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.runtime import Offer, Runtime
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.loaded import LoadedModel
from ortserve.registry.loader import load_model
from ortserve.registry.options_in_vain import gpus_in_vain, sizes_in_vain, threads_in_vain
from ortserve.registry.progress import Progress
from ortserve.registry.properties import describe_properties

QUICK = ModelOptions(warmup_s=0.1)


def load(path: Path, options: ModelOptions = QUICK, progress: Progress | None = None) -> LoadedModel:
    loaded = load_model(path, "m/1", options, time.monotonic_ns, progress=progress)
    for instance in loaded.instances:
        instance.close()
    return loaded


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("run m/1")]


def test_short_runs_get_one_thread_unless_told_otherwise(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "model.onnx")
    assert load(path).intra_op_threads == 1
    assert load(path, QUICK.model_copy(update={"intra_op_threads": 2})).intra_op_threads == 2
    assert not workers()


def test_long_runs_get_the_whole_budget(tmp_path: Path) -> None:
    assert load(builders.slow(tmp_path / "model.onnx", steps=2000)).intra_op_threads == cpu_budget()


def test_dependent_rows_are_the_reason_in_the_signature(tmp_path: Path) -> None:
    loaded = load(builders.row_mixer(tmp_path / "model.onnx"))
    assert loaded.signature.unbatched_because == "output 'y' of a row depends on the rows beside it"


class NotedProgress(Progress):
    """Keeps what it is told, in the words that others would read."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        super().__init__(lambda: 0, lambda: self.steps.append("WARMING"))

    def begin(self, doing: str) -> None:
        super().begin(doing)
        self.steps.append(self.describe().removesuffix(", for 0 s"))


def test_each_step_of_a_load_is_told_when_it_begins(tmp_path: Path) -> None:
    options = ModelOptions.model_validate(
        {"warmup_s": 60, "max_rows": 4, "instances": 2, "intra_op_threads": 1, "warmup_samples": [{"name": "mine"}]}
    )
    progress = NotedProgress()
    load(builders.mlp(tmp_path / "model.onnx"), options, progress)
    assert progress.steps == [
        "choosing an execution provider",
        "opening the session on CPUExecutionProvider",
        "reading its signature and samples",
        "WARMING",
        "warming up: rows alone and together",
        "warming up: batches of 1 rows",
        "warming up: batches of 2 rows",
        "warming up: batches of 4 rows",
        "warming up: sample 'mine'",
        "instance 2 of 2: opening the session on CPUExecutionProvider",
        "instance 2 of 2: warming up: batches of 4 rows",
        "instance 2 of 2: warming up: sample 'mine'",
    ]


def test_model_that_cannot_be_opened_never_warms_up(tmp_path: Path) -> None:
    progress = NotedProgress()
    with pytest.raises(ServeError):
        load(builders.not_onnx(tmp_path / "model.onnx"), progress=progress)
    assert progress.steps[-1] == "opening the session on CPUExecutionProvider"


def test_inputs_that_a_model_may_refuse_are_a_step_of_their_own(tmp_path: Path) -> None:
    progress = NotedProgress()
    load(builders.pools_images(tmp_path / "model.onnx"), QUICK, progress)
    assert "warming up: looking for inputs that the model takes" in progress.steps


def test_instance_is_closed_when_its_warm_up_fails_unexpectedly(tmp_path: Path) -> None:
    # Made-up inputs of 8 exabytes: there is no memory for them.
    path = builders.identity(tmp_path / "model.onnx", DataType.FP64, ("batch", 2**30, 2**30))
    with pytest.raises((MemoryError, ValueError)):
        load(path)
    assert not workers()


def test_wishes_that_nothing_meets_are_an_error(tmp_path: Path) -> None:
    options = ModelOptions(execution_providers=("no_such",), warmup_s=0)
    with pytest.raises(ServeError, match="none of no_such can be used") as caught:
        load(builders.identity(tmp_path / "model.onnx"), options)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


def test_instances_are_as_many_as_asked_for_and_each_is_warm_and_works(tmp_path: Path) -> None:
    path = builders.unnamed_dims(tmp_path / "model.onnx")
    options = QUICK.model_copy(update={"instances": 3, "max_rows": 4})
    loaded = load_model(path, "m/1", options, time.monotonic_ns)
    try:
        assert len({id(instance) for instance in loaded.instances}) == 3
        assert len(workers()) == 3
        rows = np.ones((2, 3), np.float32)
        for instance in loaded.instances:
            np.testing.assert_array_equal(instance.run(Batch(((rows,),), 2, 2)).outputs[0], rows * 2)
    finally:
        for instance in loaded.instances:
            instance.close()
    assert not workers()


def test_all_instances_are_closed_when_one_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = builders.identity(tmp_path / "model.onnx")
    opened = 0

    def open_some(*args: Any) -> Any:
        nonlocal opened
        opened += 1
        if opened == 3:
            raise ServeError(ErrorKind.INTERNAL, "no memory")
        return open_session(*args)

    monkeypatch.setattr("ortserve.registry.opening.open_session", open_some)
    options = QUICK.model_copy(update={"instances": 4, "intra_op_threads": 1})
    with pytest.raises(ServeError, match="no memory"):
        load_model(path, "m/1", options, time.monotonic_ns)
    assert opened == 3
    assert not workers()


@pytest.mark.parametrize(
    ("max_rows", "buckets", "expected"), [(None, (2, 8), 8), (5, (2, 8), 5), (100, (2, 8), 8), (3, (), 3)]
)
def test_batch_never_has_more_rows_than_the_largest_bucket(
    tmp_path: Path, max_rows: int | None, buckets: tuple[int, ...], expected: int
) -> None:
    options = QUICK.model_copy(update={"max_rows": max_rows, "buckets": buckets})
    assert load(builders.identity(tmp_path / "model.onnx"), options).warm_up.max_rows == expected


def test_interface_labels_and_samples_are_those_configured(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "model.onnx")
    (tmp_path / "labels.txt").write_text("a\nb\n")
    options = ModelOptions.model_validate(
        {
            "warmup_s": 0.05,
            "instances": 2,
            "inputs": {"x": {"dims": (8, 8), "reshape": (64,)}},
            "outputs": {"y": {"labels": "labels.txt"}},
            "warmup_samples": ({"rows": 2, "count": 3},),
        }
    )
    loaded = load_model(path, "m/1", options, time.monotonic_ns, tmp_path)
    for instance in loaded.instances:
        instance.close()
    assert loaded.interface.client.inputs[0].shape == (-1, 8, 8)
    assert loaded.signature.inputs[0].shape == (-1, 64)
    assert loaded.labels == {"y": ("a", "b")}


def test_samples_of_several_rows_run_on_every_instance_of_a_model_found_to_be_unbatched(tmp_path: Path) -> None:
    options = ModelOptions.model_validate(
        {
            "warmup_s": 0.05,
            "instances": 2,
            "max_rows": 4,
            "warmup_samples": ({"rows": 2, "inputs": {"x": {"dims": (4,)}}},),
        }
    )
    loaded = load(builders.row_mixer(tmp_path / "model.onnx"), options)
    assert len(loaded.instances) == 2
    assert not loaded.signature.is_batched


def test_sample_that_the_model_refuses_fails_the_load(tmp_path: Path) -> None:
    path = builders.refuses_synthetic(tmp_path / "model.onnx")
    options = ModelOptions.model_validate(
        {"warmup_s": 0.05, "warmup_samples": ({"name": "mine", "inputs": {"x": {"data": "zeros"}}},)}
    )
    with pytest.raises(ServeError, match="warm-up sample 'mine': ONNX Runtime failed to run the model") as caught:
        load(path, options)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert not workers()


def test_settings_of_the_session_hold_for_every_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_noted(*args: Any) -> Any:
        opened.append(open_session(*args))
        return opened[-1]

    monkeypatch.setattr("ortserve.registry.opening.open_session", open_noted)
    options = ModelOptions.model_validate(
        {"warmup_s": 0, "instances": 2, "intra_op_threads": 1, "session": {"graph_optimization": "basic"}}
    )
    load(builders.mlp(tmp_path / "model.onnx"), options)
    levels = {str(session.get_session_options().graph_optimization_level) for session in opened}
    assert len(opened) == 2
    assert levels == {"GraphOptimizationLevel.ORT_ENABLE_BASIC"}


def test_configured_batch_that_the_model_has_not_fails_the_load(tmp_path: Path) -> None:
    options = QUICK.model_copy(update={"batched": True})
    with pytest.raises(ServeError, match="the configuration says that the model is batched, but the first dimension"):
        load(builders.fixed_batch(tmp_path / "model.onnx"), options)
    assert not workers()


def test_options_of_batches_are_told_where_requests_run_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(builders.row_mixer(tmp_path / "model.onnx"), QUICK.model_copy(update={"buckets": (2, 8)}))
    (told,) = [record for record in caplog.records if record.message == "configured without effect"]
    assert "buckets: each request runs alone: output 'y' of a row depends on the rows beside it" in str(vars(told))


@pytest.mark.parametrize(
    ("options", "has_global_threads", "told"),
    [
        ({"session": {"inter_op_threads": 4}}, False, ["session.inter_op_threads: they are of the execution_mode"]),
        ({"session": {"inter_op_threads": 4, "execution_mode": "parallel"}}, False, []),
        ({"session": {"inter_op_threads": 1}, "intra_op_threads": 2}, False, []),
        (
            {"session": {"inter_op_threads": 4}, "intra_op_threads": 2},
            True,
            ["intra_op_threads: all models share", "session.inter_op_threads: all models share"],
        ),
        ({"session": {"spinning": True}, "intra_op_threads": None}, True, []),
    ],
)
def test_threads_that_no_session_has_are_told(options: Any, has_global_threads: bool, told: list[str]) -> None:
    found = threads_in_vain(ModelOptions.model_validate(options), has_global_threads=has_global_threads)
    assert len(found) == len(told)
    assert all(reason.startswith(begun) for reason, begun in zip(found, told, strict=True))


def test_what_is_said_of_gpus_or_of_larger_batches_is_told_where_there_are_none() -> None:
    options = ModelOptions.model_validate({"gpus": (0, 1), "graph_replay": True, "preferred_rows": (4, 8, 100)})
    assert gpus_in_vain(options, "CPUExecutionProvider") == (
        "gpus: the model is on CPUExecutionProvider",
        "graph_replay: the model is on CPUExecutionProvider",
    )
    assert gpus_in_vain(ModelOptions(), "CPUExecutionProvider") == ()
    assert sizes_in_vain(options, 8) == ("preferred_rows: 100: batches have at most 8 rows",)
    assert sizes_in_vain(options, 100) == sizes_in_vain(options, None) == ()


def test_options_without_effect_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = QUICK.model_copy(update={"graph_replay": True, "preferred_rows": (9,), "max_rows": 8})
    load(builders.mlp(tmp_path / "model.onnx"), options)
    told = [record for record in caplog.records if record.message == "configured without effect"]
    assert len(told) == 2


AZURE = "AzureExecutionProvider"
"""Built into every ONNX Runtime; it takes no node of ours."""


def test_provider_that_does_not_work_fails_the_load_unless_falling_back_is_allowed(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "model.onnx")
    options = QUICK.model_copy(update={"execution_providers": (AZURE, "cpu"), "instances": 2})
    with pytest.raises(ServeError, match="with allow_fallback it would be tried on CPUExecutionProvider"):
        load(path, options)
    progress = NotedProgress()
    loaded = load(path, options.model_copy(update={"allow_fallback": True}), progress)
    assert progress.steps[1:3] == [f"opening the session on {name}" for name in (AZURE, "CPUExecutionProvider")]
    assert (loaded.execution_provider, loaded.nodes) == ("CPUExecutionProvider", {"CPUExecutionProvider": 4})
    assert loaded.providers.passed_over == (
        f"execution_providers: {AZURE} takes none of the model's nodes; CPUExecutionProvider takes 4",
    )
    assert len(loaded.instances) == 2
    assert not workers()


def test_run_holds_as_many_threads_as_it_may_keep_busy(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "model.onnx")
    settings = SessionSettings(execution_mode="parallel", inter_op_threads=3)
    loaded = load(path, QUICK.model_copy(update={"intra_op_threads": 2, "session": settings}))
    assert (loaded.intra_op_threads, loaded.run_threads) == (2, 4)
    settings = SessionSettings(inter_op_threads=3)  # of no use in the other mode
    assert load(path, QUICK.model_copy(update={"intra_op_threads": 2, "session": settings})).run_threads == 2


class OfferingCuda(Runtime):
    """Says that there is CUDA, with devices of host memory."""

    def __init__(self) -> None:
        super().__init__(devices=Devices({CUDA: DeviceUse(HostDevice)}))

    def offer(self, name: str) -> Offer:
        return Offer()


def test_operators_are_told_of_each_provider_and_those_that_a_gpu_leaves_to_the_cpu_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if ONNX Runtime had placed the nodes so, and run on CUDA what it runs on the CPU."""
    placed = {CUDA: {"MatMul": 2}, CPU: {"Relu": 1, "Softmax": 1}}

    def open_on_cpu(path: Path, name: str, options: SessionOptions) -> Session:
        return open_session(path, name, replace(options, provider=ProviderChoice(CPU)))

    def count_operators(session: Session) -> Mapping[str, Mapping[str, int]]:
        return placed

    monkeypatch.setattr("ortserve.registry.opening.open_session", open_on_cpu)
    monkeypatch.setattr("ortserve.registry.loader.count_operators", count_operators)
    path = builders.mlp(tmp_path / "m.onnx")

    def load_and_warn(*wishes: str) -> list[dict[str, Any]]:
        caplog.clear()
        options = ModelOptions(warmup_s=0.1, max_rows=2, instances=2, execution_providers=wishes)
        with caplog.at_level(logging.WARNING):
            loaded = load_model(path, "m/1", options, time.monotonic_ns, None, OfferingCuda())
        for instance in loaded.instances:
            instance.close()
        told = describe_properties(loaded, 2)["operators"]
        assert told == f"{CUDA}: 2 MatMul; {CPU}: 1 Relu, 1 Softmax"
        return [vars(line)["fields"] for line in caplog.records if line.message == "nodes are left to the CPU"]

    (warned,) = load_and_warn("cuda", "cpu")
    assert warned == {
        "model": "m/1",
        "execution_provider": CUDA,
        "nodes": 2,
        "of": 4,
        "operators": "1 Relu, 1 Softmax",
    }
    assert load_and_warn("cpu") == []
