"""From a file to a warm instance, with the real ONNX Runtime."""

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from apart import UnavailableError
from fakes.host_device import HostDevice
from hung_folders import hung
from models import builders, interfaces
from ortserve.config.model import ModelOptions
from ortserve.config.session import SessionSettings
from ortserve.core.batch import Batch
from ortserve.core.dtypes import DataType
from ortserve.device.devices import DeviceProvider, DeviceRuntime, Devices
from ortserve.engine import model_signature
from ortserve.engine.placement import Placement
from ortserve.engine.process_limits import core_budget
from ortserve.engine.provider_options import CPU, CUDA
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.runtime import Offer
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import DeviceLostError, ErrorKind, ServeError
from ortserve.model_file.graph import Model
from ortserve.registry.load import analysed_model, provider_settings
from ortserve.registry.load.batch_policy import batch_policy
from ortserve.registry.load.load_limits import LoadLimiter
from ortserve.registry.load.loaded_model import (
    LoadedModel,
    describe_properties,
    gpus_without_effect,
    sizes_without_effect,
    threads_without_effect,
)
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.load.progress import LoadCancelledError, Progress
from ortserve.registry.load.session_opener import OpenedSession, SessionOpener
from ortserve.rows import Sizes, find_sizes
from rows.cases import fill_weights
from servers import LONG_S

QUICK = ModelOptions(warmup_s=0.1)


def load(path: Path, options: ModelOptions = QUICK, progress: Progress | None = None) -> LoadedModel:
    loaded = load_model(path, "m/1", options, progress=progress)
    loaded.close()
    return loaded


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("run m/1")]


@pytest.mark.parametrize(
    ("steps", "few_nbytes", "opened", "threads"),
    [(1, 2**22, [1], 1), (1, 0, [2, 1], 1), (2000, 2**22, [1, 2], 2), (2000, 0, [2], 2)],
    ids=["short and small", "short and large", "long and small", "long and large"],
)
def test_model_is_reopened_only_if_its_size_suggested_the_wrong_number_of_threads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    few_nbytes: int,
    opened: list[int],
    threads: int,
) -> None:
    monkeypatch.setattr(provider_settings, "core_budget", lambda: 2)
    monkeypatch.setattr(provider_settings, "_SMALL_MODEL_NBYTES", few_nbytes)
    seen: list[int] = []

    def open_noted(opener: SessionOpener, choice: ProviderChoice, threads: int) -> OpenedSession:
        seen.append(threads)
        return open_really(opener, choice, threads)

    open_really = SessionOpener.open
    monkeypatch.setattr(SessionOpener, "open", open_noted)
    loaded = load(builders.slow(tmp_path / "model.onnx", steps=steps), ModelOptions(warmup_s=0.01))
    assert (seen, loaded.intra_op_threads) == (opened, threads)
    assert loaded.warm_up.latencies  # even if the first session used all of the time


def test_short_runs_get_one_thread_unless_configured(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "model.onnx")
    assert load(path).intra_op_threads == 1
    assert load(path, QUICK.model_copy(update={"intra_op_threads": 2})).intra_op_threads == 2
    assert not workers()


def test_load_reads_the_number_of_cores_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quota may change meanwhile, and each read takes 0.4 ms."""
    reads = iter([2])
    monkeypatch.setattr(provider_settings, "core_budget", lambda: next(reads))
    load(builders.mlp(tmp_path / "model.onnx"))
    assert not list(reads)


def test_load_follows_the_sizes_of_tensors_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that the graph needs and the axes that may be empty come from the same walk."""
    walks: list[bool] = []

    def find_noted(model: Model, *, keeps_targets: bool = False) -> Sizes:
        walks.append(keeps_targets)
        return find_sizes(model, keeps_targets=keeps_targets)

    for module in (analysed_model, model_signature):
        monkeypatch.setattr(module, "find_sizes", find_noted)
    path = tmp_path / "model.onnx"
    text = "float[batch,n] a, float[batch,m] b) => (float[batch,k] y) { y = Concat <axis = 1> (a, b) }"
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["": 21]> m ({text}'), path)
    loaded = load(path)
    assert loaded.empty_axes == {"a": frozenset({1}), "b": frozenset({1})}
    assert walks == [True]


def test_long_runs_get_the_whole_budget(tmp_path: Path) -> None:
    assert load(builders.slow(tmp_path / "model.onnx", steps=2000)).intra_op_threads == core_budget()


def test_signature_names_dependent_rows_as_the_reason(tmp_path: Path) -> None:
    loaded = load(builders.row_mixer(tmp_path / "model.onnx"))
    because = "rows may depend on each other: node 'ReduceMean #0': ReduceMean reduces along the axis of the rows"
    assert loaded.signature.unbatched_because == because


CORPUS = Path(__file__).parents[3] / "rows" / "corpus"
"""Models of public exporters (``tests/rows/README.md``)."""


def test_dependence_that_no_trial_reveals_prevents_batching(tmp_path: Path) -> None:
    """For the small synthetic counts of warm-up, a scale over all rows equals the scale of each row."""
    path = builders.quantized_counts(tmp_path / "model.onnx")
    loaded = load(path)
    because = "rows may depend on each other: node 'scale': DynamicQuantizeLinear quantizes all rows with one scale"
    assert loaded.signature.unbatched_because.startswith(because)
    believed = load(path, QUICK.model_copy(update={"batched": True}))
    assert believed.signature.is_batched
    assert believed.warm_up.latencies[-1].rows > 1, "sizes are measured as of a model whose rows are independent"


def test_rows_proven_independent_run_together() -> None:
    assert load(CORPUS / "torch_mlp.onnx").signature.is_batched


class NotedProgress(Progress):
    """Records the reported steps by their descriptions."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        super().__init__(lambda: 0, lambda: self.steps.append("WARMING"))

    def begin(self, doing: str) -> None:
        super().begin(doing)
        self.steps.append(self.describe().removesuffix(", for 0 s"))


def test_each_step_of_a_load_is_reported_when_it_begins(tmp_path: Path) -> None:
    options = ModelOptions.model_validate(
        {"warmup_s": 60, "max_rows": 4, "instances": 2, "intra_op_threads": 1, "warmup_samples": [{"name": "mine"}]}
    )
    progress = NotedProgress()
    load(builders.in_sequence(tmp_path / "model.onnx"), options, progress)
    assert progress.steps == [
        "waiting for its file",
        "following rows through the graph",
        "choosing an execution provider",
        "opening the session on CPUExecutionProvider",
        "reading its signature and samples",
        "WARMING",
        "warming up: batches of 1 rows",
        "warming up: rows alone and together",
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


def test_synthetic_inputs_are_a_separate_step(tmp_path: Path) -> None:
    progress = NotedProgress()
    load(builders.pools_images(tmp_path / "model.onnx"), QUICK, progress)
    assert "warming up: looking for inputs that the model accepts" in progress.steps


def test_instance_is_closed_when_there_is_no_memory_for_its_warm_up(tmp_path: Path) -> None:
    # Synthetic inputs of 8 exabytes, for which there is no memory.
    path = builders.identity(tmp_path / "model.onnx", DataType.FP64, ("batch", 2**30, 2**30))
    with pytest.raises(ServeError, match="too little memory for input 'x'"):
        load(path)
    assert not workers()


def test_unavailable_wishes_are_an_error(tmp_path: Path) -> None:
    options = ModelOptions(execution_providers=("no_such",), warmup_s=0)
    with pytest.raises(ServeError, match="none of no_such can be used") as caught:
        load(builders.identity(tmp_path / "model.onnx"), options)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


def test_configured_number_of_instances_is_warm_and_works(tmp_path: Path) -> None:
    path = builders.unnamed_dims(tmp_path / "model.onnx")
    options = QUICK.model_copy(update={"instances": 3, "max_rows": 4})
    loaded = load_model(path, "m/1", options)
    try:
        assert len({id(instance) for instance in loaded.instances}) == 3
        assert len(workers()) == 3
        rows = np.ones((2, 3), np.float32)
        for instance in loaded.instances:
            np.testing.assert_array_equal(instance.run(Batch(((rows,),), 2, 2)).outputs[0], rows * 2)
    finally:
        loaded.close()
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

    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_some)
    options = QUICK.model_copy(update={"instances": 4, "intra_op_threads": 1})
    with pytest.raises(ServeError, match="no memory"):
        load_model(path, "m/1", options)
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
    loaded = load_model(path, "m/1", options, tmp_path)
    loaded.close()
    assert loaded.interface.client.inputs[0].shape == (-1, 8, 8)
    assert loaded.signature.inputs[0].shape == (-1, 64)
    assert loaded.output_labels == {"y": ("a", "b")}


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


def test_sample_that_the_model_rejects_fails_the_load(tmp_path: Path) -> None:
    path = builders.refuses_synthetic(tmp_path / "model.onnx")
    options = ModelOptions.model_validate(
        {"warmup_s": 0.05, "warmup_samples": ({"name": "mine", "inputs": {"x": {"data": "zeros"}}},)}
    )
    with pytest.raises(ServeError, match="warm-up sample 'mine': the model rejected the inputs") as caught:
        load(path, options)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert not workers()


def test_session_settings_apply_to_every_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_noted(*args: Any) -> Any:
        opened.append(open_session(*args))
        return opened[-1]

    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_noted)
    options = ModelOptions.model_validate(
        {"warmup_s": 0, "instances": 2, "intra_op_threads": 1, "session": {"graph_optimization": "basic"}}
    )
    load(builders.mlp(tmp_path / "model.onnx"), options)
    levels = {str(session.get_session_options().graph_optimization_level) for session in opened}
    assert len(opened) == 2
    assert levels == {"GraphOptimizationLevel.ORT_ENABLE_BASIC"}


def test_configured_batch_axis_missing_in_the_model_fails_the_load(tmp_path: Path) -> None:
    options = QUICK.model_copy(update={"batched": True})
    with pytest.raises(ServeError, match="the configuration says that the model is batched, but the first dimension"):
        load(builders.fixed_batch(tmp_path / "model.onnx"), options)
    assert not workers()


def test_batch_options_are_reported_if_requests_run_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(builders.row_mixer(tmp_path / "model.onnx"), QUICK.model_copy(update={"buckets": (2, 8)}))
    (logged,) = [record for record in caplog.records if record.message == "option has no effect"]
    assert "buckets: each request runs alone: rows may depend on each other: node 'ReduceMean #0'" in str(vars(logged))


@pytest.mark.parametrize(
    ("options", "has_global_threads", "expected"),
    [
        ({"session": {"inter_op_threads": 4}}, False, ["session.inter_op_threads: only the execution_mode"]),
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
def test_thread_options_without_effect_are_reported(
    options: Any, has_global_threads: bool, expected: list[str]
) -> None:
    found = threads_without_effect(ModelOptions.model_validate(options), has_global_threads=has_global_threads)
    assert len(found) == len(expected)
    assert all(reason.startswith(begun) for reason, begun in zip(found, expected, strict=True))


def test_gpu_and_batching_options_without_effect_are_reported() -> None:
    options = ModelOptions.model_validate({"gpus": (0, 1), "graph_replay": True, "preferred_rows": (4, 8, 100)})
    assert gpus_without_effect(options, "CPUExecutionProvider") == [
        "gpus: the model is on CPUExecutionProvider",
        "graph_replay: the model is on CPUExecutionProvider",
    ]
    assert gpus_without_effect(ModelOptions(), "CPUExecutionProvider") == []
    assert sizes_without_effect(options, 8) == ["preferred_rows: 100: batches have at most 8 rows"]
    assert sizes_without_effect(options, 100) == sizes_without_effect(options, None) == []


def test_options_without_effect_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = QUICK.model_copy(update={"graph_replay": True, "preferred_rows": (9,), "max_rows": 8})
    load(builders.mlp(tmp_path / "model.onnx"), options)
    records = [record for record in caplog.records if record.message == "option has no effect"]
    assert len(records) == 2


AZURE = "AzureExecutionProvider"
"""A provider in every build of ONNX Runtime; it accepts no node of these models."""


def test_failing_provider_fails_the_load_without_allow_fallback(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "model.onnx")
    options = QUICK.model_copy(update={"execution_providers": (AZURE, "cpu"), "instances": 2})
    with pytest.raises(ServeError, match="with allow_fallback it would be tried on CPUExecutionProvider"):
        load(path, options)
    progress = NotedProgress()
    loaded = load(path, options.model_copy(update={"allow_fallback": True}), progress)
    assert progress.steps[3:5] == [f"opening the session on {name}" for name in (AZURE, "CPUExecutionProvider")]
    assert (loaded.execution_provider, loaded.nodes) == ("CPUExecutionProvider", {"CPUExecutionProvider": 4})
    assert loaded.providers.passed_over == (
        f"execution_providers: {AZURE} runs none of the model's nodes; CPUExecutionProvider runs 4",
    )
    assert len(loaded.instances) == 2
    assert not workers()


def test_run_reserves_the_threads_it_can_use(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "model.onnx")
    settings = SessionSettings(execution_mode="parallel", inter_op_threads=3)
    loaded = load(path, QUICK.model_copy(update={"intra_op_threads": 2, "session": settings}))
    assert (loaded.intra_op_threads, loaded.run_threads) == (2, 4)
    settings = SessionSettings(inter_op_threads=3)  # has no effect in the other mode
    assert load(path, QUICK.model_copy(update={"intra_op_threads": 2, "session": settings})).run_threads == 2


OTHER = "OtherExecutionProvider"
"""A provider that computes on the host, such as OpenVINO's; ``CUDA`` has buffers on a device, here of host memory."""


class OfferingOthers(DeviceRuntime):
    """Offers every provider, and CUDA's device."""

    def __init__(self, *, has_global_threads: bool = False) -> None:
        super().__init__(global_threads=has_global_threads, devices=Devices({CUDA: DeviceProvider(HostDevice)}))

    def offer(self, name: str) -> Offer:
        return Offer()


class Failing:
    """A session whose runs fail above a number of rows, with an error text of ONNX Runtime or of a device."""

    def __init__(self, session: Session, text: str, most_rows: int) -> None:
        self._session = session
        self._text = text
        self._most_rows = most_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, names: Sequence[str], feeds: Mapping[str, np.ndarray], options: Any = None) -> Any:
        if max(len(array) for array in feeds.values()) > self._most_rows:
            raise RuntimeError(self._text)
        return self._session.run(names, feeds, options)


class Providers:
    """Opens real sessions on the CPU for any provider, and fails the runs of some.

    Attributes:
        opened: The requested provider of each session, in order.
        alive: The number of earlier sessions that still existed when each was opened.
        tried: How sessions were opened to try runs on the CPU that a provider rejected.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Mapping[str, str], most_rows: int = 0) -> None:
        """``fails`` are texts by provider, for runs of more than ``most_rows`` rows."""
        self.opened: list[str] = []
        self.alive: list[int] = []
        self.tried: list[SessionOptions] = []
        self._fails = fails
        self._most_rows = most_rows
        self._sessions: list[weakref.ref[Any]] = []
        monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", self._open)
        monkeypatch.setattr("ortserve.registry.load.provider_settings.open_session", self._try)

    def _open(self, path: Path, name: str, options: SessionOptions, model: Model | None = None) -> Any:
        asked = options.provider.name
        self.opened.append(asked)
        self.alive.append(sum(session() is not None for session in self._sessions))
        session: Any = open_session(path, name, replace(options, provider=ProviderChoice(CPU)))
        self._sessions.append(weakref.ref(session))
        return Failing(session, self._fails[asked], self._most_rows) if asked in self._fails else session

    def _try(self, path: Path, name: str, options: SessionOptions, model: Model) -> Any:
        self.tried.append(options)
        session = open_session(path, name, options, model)
        self._sessions.append(weakref.ref(session))
        return session


def load_on(path: Path, wishes: Sequence[str], **options: Any) -> LoadedModel:
    chosen = ModelOptions.model_validate({"warmup_s": 5, "execution_providers": tuple(wishes)} | options)
    loaded = load_model(path, "m/1", chosen, None, OfferingOthers())
    loaded.close()
    return loaded


on_each_kind = pytest.mark.parametrize("provider", [OTHER, CUDA])
BROKEN = "Non-zero status code returned: Tensor data equal nullptr!"


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@on_each_kind
@pytest.mark.parametrize(
    "build",
    [
        builders.mlp,
        builders.fixed_batch,
        partial(builders.pools_images, least=32),  # the CPU also rejects its small inputs
        interfaces.optional_bias,
    ],
)
def test_provider_that_fails_every_run_fails_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, build: Callable[[Path], Path]
) -> None:
    providers = Providers(monkeypatch, {provider: BROKEN})
    with pytest.raises(ServeError) as caught:
        load_on(build(tmp_path / "model.onnx"), [provider, "cpu"])
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == (
        f"execution_providers: {provider} opens the model, but fails on inputs that {CPU} accepts: "
        f"ONNX Runtime failed to run the model: {BROKEN} (with allow_fallback it would be tried on {CPU})"
    )
    assert (providers.opened, len(providers.tried)) == ([provider], 1)
    assert not workers()


@on_each_kind
def test_provider_that_fails_every_run_is_freed_before_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The next provider is warmed up on its own."""
    providers = Providers(monkeypatch, {provider: BROKEN, AZURE: "nor does it"})
    with without_garbage_collector():
        loaded = load_on(
            builders.mlp(tmp_path / "model.onnx"), [provider, AZURE, "cpu"], allow_fallback=True, max_rows=4
        )
    assert (loaded.execution_provider, [size.rows for size in loaded.warm_up.latencies]) == (CPU, [1, 2, 4])
    assert loaded.providers.passed_over == tuple(
        f"execution_providers: {name} opens the model, but fails on inputs that {CPU} accepts: "
        f"ONNX Runtime failed to run the model: {text}"
        for name, text in ((provider, BROKEN), (AZURE, "nor does it"))
    )
    assert sum(record.message == "execution provider passed over" for record in caplog.records) == 2
    assert providers.opened[:3] == [provider, AZURE, CPU]
    assert set(providers.alive) == {0}
    assert not workers()


def test_failures_to_open_and_to_run_are_reported_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    providers = Providers(monkeypatch, {OTHER: BROKEN})
    real = providers._open

    def open_some(path: Path, name: str, options: SessionOptions, model: Model) -> Any:
        if options.provider.name == AZURE:
            raise ServeError(ErrorKind.INVALID_INPUT, "it cannot be opened there")
        return real(path, name, options)

    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_some)
    expected = rf"^it cannot be opened there; execution_providers: {OTHER} opens the model, but fails on .* nullptr!$"
    with pytest.raises(ServeError, match=expected):
        load_on(builders.mlp(tmp_path / "model.onnx"), [AZURE, OTHER], allow_fallback=True)


def test_model_with_unnamed_free_axes_is_warmed_up_with_as_many_features_as_its_weights(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> m (float[?,?] x) => (float[?,?] y) <float[5,3] w> {
        y = MatMul (x, w) }"""
    model = onnx.parser.parse_model(text)
    fill_weights(model)
    onnx.save(model, tmp_path / "model.onnx")
    loaded = load(tmp_path / "model.onnx")
    assert not loaded.warm_up.rejection
    assert loaded.warm_up.latencies


@on_each_kind
@pytest.mark.parametrize("allow_fallback", [False, True])
def test_model_that_fails_on_the_cpu_too_is_served_as_picky(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, allow_fallback: bool
) -> None:
    providers = Providers(monkeypatch, {})
    path = builders.refuses_synthetic(tmp_path / "model.onnx", is_proven=False)
    loaded = load_on(path, [provider, "cpu"], allow_fallback=allow_fallback)
    assert (loaded.execution_provider, loaded.providers.passed_over) == (provider, ())
    assert "indices element out of data bounds" in loaded.warm_up.rejection
    assert "rejects synthetic inputs" in loaded.signature.unbatched_because
    assert len(providers.tried) == 1
    assert not workers()


def test_model_that_the_cpu_cannot_open_is_served_as_picky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Providers(monkeypatch, {OTHER: BROKEN})

    def open_none(*args: Any) -> Any:
        raise ServeError(ErrorKind.INVALID_INPUT, "No Op registered for Own")

    monkeypatch.setattr("ortserve.registry.load.provider_settings.open_session", open_none)
    loaded = load_on(builders.mlp(tmp_path / "model.onnx"), [OTHER, "cpu"])
    assert (loaded.execution_provider, loaded.warm_up.rejection) == (
        OTHER,
        f"ONNX Runtime failed to run the model: {BROKEN}",
    )


@pytest.mark.parametrize(
    ("build", "fails", "wishes", "options"),
    [
        (builders.mlp, {}, [OTHER, "cpu"], {}),
        (builders.mlp, {OTHER: BROKEN}, [OTHER, "cpu"], {"warmup_s": 0}),  # without runs there is nothing to decide
        (builders.refuses_synthetic, {}, ["cpu"], {}),
        (partial(builders.pools_images, least=32), {}, [OTHER, "cpu"], {}),
    ],
)
def test_rows_run_on_the_cpu_only_if_another_provider_ran_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[Path], Path],
    fails: Mapping[str, str],
    wishes: Sequence[str],
    options: dict[str, Any],
) -> None:
    providers = Providers(monkeypatch, fails)
    load_on(build(tmp_path / "model.onnx"), wishes, intra_op_threads=1, **options)
    assert (len(providers.opened), providers.tried) == (1, [])


@on_each_kind
def test_provider_that_runs_some_synthetic_inputs_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    providers = Providers(monkeypatch, {provider: BROKEN}, most_rows=4)
    loaded = load_on(builders.mlp(tmp_path / "model.onnx"), [provider, "cpu"], max_rows=8)
    assert BROKEN in loaded.warm_up.rejection
    assert (loaded.execution_provider, providers.tried) == (provider, [])


def test_rows_that_a_provider_rejects_are_tried_on_the_cpu_with_only_the_settings_that_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.onnx"
    libraries = (tmp_path / "ops.so",)
    providers = Providers(monkeypatch, {CUDA: BROKEN})
    real = providers._try

    def try_without_libraries(path: Path, name: str, options: SessionOptions, model: Model) -> Any:
        assert options.operator_libraries == libraries
        return real(path, name, replace(options, operator_libraries=()), model)

    def open_without_libraries(path: Path, name: str, options: SessionOptions, model: Model) -> Any:
        kept.unlink(missing_ok=True)
        session = providers._open(path, name, replace(options, operator_libraries=()))
        kept.write_bytes(b"of the provider")
        return session

    monkeypatch.setattr("ortserve.registry.load.provider_settings.open_session", try_without_libraries)
    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_without_libraries)
    monkeypatch.setattr("ortserve.registry.load.analysed_model.operator_libraries", lambda options, folder: libraries)
    monkeypatch.setattr("ortserve.engine.session._check_settings", lambda options: None)  # the CPU has no gpu:0
    settings = {
        "free_dimensions": {"batch": 2},
        "graph_optimization": "basic",
        "optimized_model_file": str(kept),
        "shrink_arenas": ("gpu:0",),
        "thread_affinities": "1",
        "entries": {"session.dynamic_block_base": 4},
    }
    with pytest.raises(ServeError, match=f"{CUDA} opens the model, but fails on inputs"):
        load_on(builders.mlp(tmp_path / "model.onnx"), ["cuda", "cpu"], session=settings)
    (options,) = providers.tried
    assert options.provider == ProviderChoice(CPU)
    assert options.settings == SessionSettings(free_dimensions={"batch": 2}, graph_optimization="basic")
    assert kept.read_bytes() == b"of the provider"


def test_options_that_do_not_fit_the_model_are_not_tried_on_the_next_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers = Providers(monkeypatch, {})
    pad = {"no": {"axis": 1, "multiple": 2, "value": 0}}
    for allow_fallback in (False, True):
        with pytest.raises(ServeError, match=r"pad\.no: expected one of the inputs x, got 'no'$"):
            load_on(builders.mlp(tmp_path / "m.onnx"), [OTHER, "cpu"], pad=pad, allow_fallback=allow_fallback)
    assert providers.opened == [OTHER] * 2


def test_device_lost_in_warm_up_causes_no_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    providers = Providers(monkeypatch, {CUDA: "CUDA failure 719: unspecified launch failure"})
    with pytest.raises(DeviceLostError, match="host:0 is lost"):
        load_on(builders.mlp(tmp_path / "m.onnx"), ["cuda", "cpu"], allow_fallback=True)
    assert (providers.opened, providers.tried) == ([CUDA], [])
    assert not workers()


NO_MEMORY = "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 4096"


@pytest.mark.parametrize("options", [{}, {"max_rows": 32}, {"max_rows": 32, "instances": 2}])
def test_batch_sizes_are_those_that_fit_in_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    providers = Providers(monkeypatch, {CUDA: NO_MEMORY}, most_rows=10)
    loaded = load_on(builders.mlp(tmp_path / "m.onnx"), ["cuda", "cpu"], warmup_s=60, **options)
    found = loaded.warm_up
    assert loaded.signature.is_batched
    assert found.max_rows == 8
    assert [size.rows for size in found.latencies] == list(loaded.on_device.sizes) == [1, 2, 4, 8]
    (fields,) = [
        vars(line)["fields"] for line in caplog.records if line.message == "too little memory for larger batches"
    ]
    assert fields["max_rows"] == 8
    assert fields["reason"] == f"host:0 has too little memory for the batch: {NO_MEMORY}"
    assert (set(providers.opened), providers.tried) == ({CUDA}, [])


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("most_rows", [8, 10, 20, 31])
def test_buckets_are_those_that_fit_in_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int, instances: int
) -> None:
    Providers(monkeypatch, {CUDA: NO_MEMORY}, most_rows)
    options = {"max_rows": 32, "buckets": (8, 32), "warmup_s": 60, "instances": instances}
    loaded = load_on(builders.mlp(tmp_path / "m.onnx"), ["cuda", "cpu"], **options)
    assert (loaded.warm_up.max_rows, loaded.on_device.sizes) == (8, (8,))
    policy = batch_policy(loaded, ModelOptions.model_validate(options))
    assert {policy.bucket_for(rows) for rows in range(1, policy.max_rows + 1)} == {8}


@pytest.mark.parametrize(
    ("most_rows", "options", "error"),
    [
        (0, {}, rf"host:0 has too little memory for the batch: {NO_MEMORY}"),
        (0, {"buckets": (8, 32)}, rf"host:0 has too little memory for the batch: {NO_MEMORY}"),
        (7, {"buckets": (8, 32)}, rf"buckets: expected one of at most 4 rows, .* got 8, 32: .*{NO_MEMORY}"),
    ],
)
def test_model_without_memory_for_one_row_fails_or_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int, options: dict[str, Any], error: str
) -> None:
    """The error equals that of a model whose weights alone do not fit."""
    providers = Providers(monkeypatch, {CUDA: NO_MEMORY}, most_rows)
    path = builders.mlp(tmp_path / "m.onnx")
    with pytest.raises(ServeError, match=rf"^{error} \(with allow_fallback it would be tried on {CPU}\)$") as caught:
        load_on(path, ["cuda", "cpu"], **options)
    assert caught.value.kind is ErrorKind.INTERNAL
    assert (providers.opened, providers.tried) == ([CUDA], [])
    assert not workers()
    with without_garbage_collector():
        loaded = load_on(path, ["cuda", "cpu"], allow_fallback=True, intra_op_threads=1, **options)
    assert (loaded.execution_provider, loaded.warm_up.no_memory) == (CPU, "")
    assert set(providers.alive) == {0}


@pytest.mark.parametrize(
    "session", [{"thread_affinities": "1"}, {"entries": {"session.intra_op_thread_affinities": "1"}}]
)
def test_pinned_threads_are_kept_for_short_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: dict[str, Any]
) -> None:
    """A single thread has no affinity to set, and ONNX Runtime would not report it."""
    monkeypatch.setattr("ortserve.registry.load.provider_settings.core_budget", lambda: 2)
    path = builders.mlp(tmp_path / "model.onnx")
    options = ModelOptions.model_validate({"warmup_s": 0.1, "session": session})
    assert load(path, options).intra_op_threads == 2


class OfferingCuda(DeviceRuntime):
    """Offers CUDA, with devices of host memory."""

    def __init__(self) -> None:
        super().__init__(devices=Devices({CUDA: DeviceProvider(HostDevice)}))

    def offer(self, name: str) -> Offer:
        return Offer()


def test_operators_are_reported_by_provider_and_cpu_nodes_of_a_gpu_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Simulates that ONNX Runtime placed the nodes on CUDA and ran them there."""
    placed = {CUDA: {"MatMul": 2}, CPU: {"Relu": 1, "Softmax": 1}}

    def open_on_cpu(path: Path, name: str, options: SessionOptions, model: Model) -> Session:
        return open_session(path, name, replace(options, provider=ProviderChoice(CPU)))

    def count_operators(session: Session) -> Placement:
        return Placement(placed, {name: tuple(kinds) for name, kinds in placed.items()})

    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_on_cpu)
    monkeypatch.setattr("ortserve.registry.load.pipeline.count_operators", count_operators)
    path = builders.mlp(tmp_path / "m.onnx")

    def load_and_warn(*wishes: str) -> list[dict[str, Any]]:
        caplog.clear()
        options = ModelOptions(warmup_s=0.1, max_rows=2, instances=2, execution_providers=wishes)
        with caplog.at_level(logging.WARNING):
            loaded = load_model(path, "m/1", options, None, OfferingCuda())
        loaded.close()
        operators = describe_properties(loaded, 2)["operators"]
        assert operators == f"{CUDA}: 2 MatMul; {CPU}: 1 Relu, 1 Softmax"
        return [vars(line)["fields"] for line in caplog.records if line.message == "nodes are left to the CPU"]

    (warned,) = load_and_warn("cuda", "cpu")
    assert warned == {
        "model": "m/1",
        "execution_provider": CUDA,
        "count": 2,
        "of": 4,
        "operators": "1 Relu, 1 Softmax",
    }
    assert load_and_warn("cpu") == []


def test_endless_warm_up_fails_the_load(tmp_path: Path) -> None:
    options = ModelOptions(warmup_run_timeout_s=0.2, warmup_s=0.1)
    with pytest.raises(ServeError, match=r"a run in warm-up was terminated after warmup_run_timeout_s 0.2 s") as caught:
        load(builders.repeats(tmp_path / "m.onnx", steps=2**62), options)
    assert caught.value.kind is ErrorKind.DEADLINE
    assert not workers()


def test_cancelled_load_does_not_read_its_file_to_the_end(tmp_path: Path) -> None:
    """A poll or an unload waits for its end; the file server may take minutes for a large file."""

    class Reading(Progress):
        pieces = 0

        def check(self) -> None:
            super().check()
            self.pieces += self.describe().startswith("waiting for its file")
            if self.pieces == 2:
                self.cancel("the model is unloaded")

    path = tmp_path / "m.onnx"
    path.touch()
    os.truncate(path, 64 << 20)
    progress = Reading(time.monotonic_ns)
    with pytest.raises(LoadCancelledError, match="its load was cancelled: the model is unloaded"):
        load_model(path, "m/1", ModelOptions(), progress=progress)
    assert progress.pieces == 2
    assert progress.describe().startswith("waiting for its file")


@pytest.mark.parametrize("silent", ["libraries", "weights"])
def test_load_that_waits_for_libraries_or_weights_keeps_no_other_from_being_analysed(
    tmp_path: Path, silent: str
) -> None:
    class Noted(Progress):
        def begin(self, step: str) -> None:
            super().begin(step)
            steps.put(step)

    steps, limiter = SimpleQueue[str](), LoadLimiter(2)
    folder = tmp_path / silent
    folder.mkdir()
    path, other = builders.identity(tmp_path / "m.onnx"), builders.identity(tmp_path / "other.onnx")
    options = ModelOptions(warmup_s=0, session=SessionSettings(operator_libraries=("libraries/ops.so",)))
    awaited = ["waiting for its file"]
    if silent == "weights":
        path, options = builders.external_weights(path, "weights/w"), QUICK
        awaited.append("following rows through the graph")
    try:
        with ThreadPoolExecutor(2) as pool, hung(folder):
            progress = Noted(time.monotonic_ns)
            waiting = pool.submit(load_model, path, "m/1", options, tmp_path, progress=progress, limiter=limiter)
            assert [steps.get(timeout=LONG_S) for _ in awaited] == awaited
            pool.submit(load_model, other, "other/1", QUICK, limiter=limiter).result(LONG_S).close()
            assert steps.empty()
            progress.cancel("its files do not answer")
    except UnavailableError as error:
        pytest.skip(str(error))
    with pytest.raises(LoadCancelledError):
        waiting.result()


def test_cancelled_load_ends_the_opening_of_its_session(tmp_path: Path) -> None:
    steps: list[str] = []

    class Opening(Progress):
        def begin(self, step: str) -> None:
            steps.append(step)
            super().begin(step)
            if step.startswith("opening"):
                self.cancel("the model is unloaded")

    path = builders.mlp(tmp_path / "m.onnx")
    with pytest.raises(LoadCancelledError, match="its load was cancelled: the model is unloaded"):
        load_model(path, "m/1", ModelOptions(), progress=Opening(time.monotonic_ns))
    assert steps[-1].startswith("opening")


def test_cancelled_load_ends_an_endless_run_at_once(tmp_path: Path) -> None:
    class Warming(Progress):
        def begin(self, step: str) -> None:
            super().begin(step)
            if step.startswith("warming up"):
                threading.Timer(0.2, self.cancel, ("the model is unloaded",)).start()

    path = builders.repeats(tmp_path / "m.onnx", steps=2**62)
    progress = Warming(time.monotonic_ns)
    with pytest.raises(LoadCancelledError, match="its load was cancelled: the model is unloaded"):
        load_model(path, "m/1", ModelOptions(), progress=progress)
    assert not workers()


def test_load_does_not_wait_for_an_unabortable_run(tmp_path: Path) -> None:
    options = ModelOptions(run_grace_s=0.1, warmup_s=0.1, intra_op_threads=1)
    running: list[threading.Thread] = []
    # A fast machine finishes the operator within a short limit; a busy one ends the run before it begins the operator.
    for least, limit_s in ((3072, 0.1), (4096, 0.5), (6144, 2.0), (8192, 8.0)):
        path = builders.multiplies(tmp_path / f"{least}.onnx", least=least)
        with pytest.raises(ServeError, match="a run in warm-up was terminated"):
            load(path, options.model_copy(update={"warmup_run_timeout_s": limit_s}))
        running = workers()
        if running:
            break
    (worker,) = running  # it is still inside the operator
    worker.join(300)
    assert not workers()


class CancelledProgress(Progress):
    """Is cancelled when a step starts."""

    def __init__(self, step: str) -> None:
        super().__init__(time.monotonic_ns)
        self._last = step

    def begin(self, step: str) -> None:
        if step.startswith(self._last):
            self.cancel("the model is unloaded")
        super().begin(step)


@pytest.mark.parametrize("step", ["opening", "reading its signature", "warming up", "checking golden"])
def test_load_that_is_cancelled_at_any_step_keeps_no_instance(tmp_path: Path, step: str) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    path = builders.identity(folder / "1" / "model.onnx")
    if step == "checking golden":
        (folder / "1" / "golden").mkdir()
        arrays: dict[str, Any] = {"input.x": np.ones((1, 4), np.float32), "output.y": np.ones((1, 4), np.float32)}
        np.savez(folder / "1" / "golden" / "a.npz", **arrays)
    options = ModelOptions(warmup_s=0.1, intra_op_threads=1)
    with pytest.raises(ServeError, match="its load was cancelled: the model is unloaded"):
        load_model(path, "m/1", options, folder, progress=CancelledProgress(step))
    assert workers() == []
