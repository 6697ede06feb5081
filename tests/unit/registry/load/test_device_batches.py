"""From a file to instances on a device of host memory: the sizes with buffers, and the shown properties."""

import gc
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from device_models import provider_of
from fakes.host_device import HostDevice
from models import builders
from ortserve.config.model import ModelOptions
from ortserve.core.batch import Batch, BatchResult
from ortserve.device.devices import DeviceProvider, DeviceRuntime, Devices
from ortserve.device.instance import DeviceInstance
from ortserve.device.protocol import MemoryInfo
from ortserve.engine.instance import Instance
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.session import SessionOptions, open_session
from ortserve.errors import ServeError, invalid_input
from ortserve.model_file.graph import Model
from ortserve.registry.load.analysed_model import analyse_model
from ortserve.registry.load.capture_trial import CaptureTrials, ReplayObstacles, TrialRequest
from ortserve.registry.load.device_batches import DeviceBatches, doubling
from ortserve.registry.load.loaded_model import LoadedModel, describe_properties
from ortserve.registry.load.pipeline import load_model
from ortserve.registry.load.progress import Progress


class Trials(CaptureTrials):
    """Answers with a fixed reason, and records the requests."""

    def __init__(self, reason: str = "") -> None:
        super().__init__()
        self.reason = reason
        self.orders: list[TrialRequest] = []

    def why_not(self, request: TrialRequest, progress: Progress) -> str:
        self.orders.append(request)
        return self.reason


def load(
    path: Path,
    device: HostDevice | DeviceProvider,
    trials: Trials | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> LoadedModel:
    runtime = DeviceRuntime(
        devices=Devices({CPU: provider_of(CPU, device) if isinstance(device, HostDevice) else device})
    )
    chosen = ModelOptions(**{"warmup_s": 0.2, "intra_op_threads": 1} | options)
    return load_model(path, "m/1", chosen, None, runtime, trials or Trials(), progress)


def shown(loaded: LoadedModel) -> dict[str, str]:
    return describe_properties(loaded, loaded.warm_up.max_rows)


def run(instance: Instance | DeviceInstance, *parts: np.ndarray, bucket: int) -> np.ndarray:
    landed: Future[BatchResult | Exception] = Future()
    instance.start(Batch((parts,), sum(map(len, parts)), bucket), landed.set_result)
    outcome = landed.result(30)
    assert isinstance(outcome, BatchResult)
    return outcome.outputs[0]


def test_without_configuration_sizes_double_while_they_gain(tmp_path: Path) -> None:
    device = HostDevice()
    loaded = load(builders.mlp(tmp_path / "m.onnx"), device, max_rows=6)
    (instance,) = loaded.instances
    assert isinstance(instance, DeviceInstance)
    assert loaded.on_device == DeviceBatches((1, 2, 4, 6))
    assert [size.rows for size in loaded.warm_up.latencies] == [1, 2, 4, 6]
    assert shown(loaded)["device_buffers"] == "batches of 1, 2, 4, 6 rows"
    assert "graph_replay" not in shown(loaded)
    assert instance.depth == 2
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    np.testing.assert_allclose(run(instance, x[:1], x[1:], bucket=4), run(instance, x, bucket=3), rtol=1e-4)
    loaded.close()
    assert device.allocated_bytes == 0


def test_configured_buckets_have_buffers_in_every_instance(tmp_path: Path) -> None:
    device = HostDevice()
    trials = Trials()
    path = builders.mlp(tmp_path / "m.onnx")
    loaded = load(path, device, trials, buckets=(8, 2), instances=2, graph_replay=True)
    assert loaded.on_device == DeviceBatches((2, 8), (2, 8))
    assert shown(loaded)["graph_replay"] == "batches of 2, 8 rows"
    assert all(list(order.sizes) == [2, 8] for order in trials.orders)
    for instance in loaded.instances:
        assert isinstance(instance, DeviceInstance)
        run(instance, np.zeros((2, 64), np.float32), bucket=2)
        assert instance.counts.replayed
    loaded.close()
    assert device.allocated_bytes == 0
    assert device.handles == 0


def test_trials_buffers_and_captures_are_steps_of_a_load(tmp_path: Path) -> None:
    steps: list[str] = []

    class NotedProgress(Progress):
        def begin(self, doing: str) -> None:
            steps.append(doing)

    progress = NotedProgress(time.monotonic_ns)
    load(builders.mlp(tmp_path / "m.onnx"), HostDevice(), None, progress, buckets=(2, 4), graph_replay=True).close()
    assert steps.index("trying in another process whether graphs can be captured") < steps.index(
        f"opening the session on {CPU}"
    )
    assert [step for step in steps if "buffers" in step or "capturing" in step] == [
        "making buffers for batches of up to 4 rows",
        "trying batches of 2 rows in buffers",
        "capturing the graph of batches of 2 rows",
        "trying batches of 4 rows in buffers",
        "capturing the graph of batches of 4 rows",
    ]


def one_graph_per_session(**options: Any) -> HostDevice:
    return HostDevice(one_graph_per_session=True, **options)


def test_sessions_per_graph_are_opened_after_a_successful_trial(tmp_path: Path) -> None:
    steps: list[str] = []

    class NotedProgress(Progress):
        def begin(self, doing: str) -> None:
            steps.append(doing)

    device, trials, progress = one_graph_per_session(), Trials(), NotedProgress(time.monotonic_ns)
    path = builders.mlp(tmp_path / "m.onnx")
    loaded = load(path, device, trials, progress, buckets=(2, 4), instances=2, graph_replay=True)
    assert loaded.on_device == DeviceBatches((2, 4), (2, 4))
    assert shown(loaded)["graph_replay"] == "batches of 2, 4 rows"
    (order,) = trials.orders
    assert order.sizes == (4,), "each size is a session more, in which all nodes are the same"
    listed_steps = [step for step in steps if "opening" in step or "capturing" in step or "another process" in step]
    opening = f"opening the session on {CPU}"
    captures = [f"capturing the graph of batches of {rows} rows" for rows in (2, 4)]
    assert listed_steps == [
        opening,
        "trying in another process whether graphs can be captured",
        *[captures[0], opening, opening, captures[1], opening, opening],
        *[opening, captures[0], opening, opening, captures[1], opening, opening],
    ]
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    for instance in loaded.instances:
        assert isinstance(instance, DeviceInstance)
        replayed = instance.counts.replayed
        run(instance, x, bucket=2)
        assert (instance.counts.replayed, instance.counts.captured) == (replayed + 1, 4)
    loaded.close()
    assert (device.allocated_bytes, device.handles) == (0, 0)


@pytest.mark.parametrize(
    ("build", "refused", "reason", "because"),
    [
        (builders.mlp, "it crashed", "trial_refused", "it crashed"),
        (lambda path: builders.slow(path, steps=3), "", "control_flow", "which nodes run is decided during the run"),
    ],
)
def test_refused_replay_opens_no_sessions_for_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Any, refused: str, reason: str, because: str
) -> None:
    opened: list[Path] = []

    def open_it(path: Path, name: str, options: SessionOptions, model: Model) -> ort.InferenceSession:
        opened.append(path)
        return open_session(path, name, options)

    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_it)
    loaded = load(build(tmp_path / "m.onnx"), one_graph_per_session(), Trials(refused), max_rows=2, graph_replay=True)
    (instance,) = loaded.instances
    assert isinstance(instance, DeviceInstance)
    assert len(opened) == 1
    assert shown(loaded)["graph_replay"].startswith(f"none: {because}")
    assert instance.counts.not_captured == {reason: 2}
    loaded.close()


def test_sizes_are_served_in_buffers_without_memory_for_graph_sessions(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    device = one_graph_per_session(total_bytes=path.stat().st_size + 1000)  # buffers take more than the 1000
    loaded = load(path, device, max_rows=2, graph_replay=True)
    assert loaded.on_device.sizes == (1, 2)
    assert loaded.on_device.replayed == ()
    assert "its session cannot be opened: 'm/1' needs at least" in shown(loaded)["graph_replay"]
    loaded.close()
    assert (device.allocated_bytes, device.handles) == (0, 0)


def test_graphs_leave_memory_for_unopened_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    weights = path.stat().st_size
    sessions: list[weakref.ref[ort.InferenceSession]] = []

    class Weighs(HostDevice):
        def memory(self) -> MemoryInfo:
            free = super().memory()
            taken = weights * sum(session() is not None for session in sessions)
            return MemoryInfo(free.free_bytes - taken, free.total_bytes)

    def open_it(path: Path, name: str, options: SessionOptions, model: Model) -> ort.InferenceSession:
        session = open_session(path, name, options)
        sessions.append(weakref.ref(session))
        return session

    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_it)
    device = Weighs(total_bytes=5 * weights, one_graph_per_session=True)
    loaded = load(path, device, buckets=(1, 2, 4), instances=2, graph_replay=True)
    assert len(loaded.instances) == 2
    assert loaded.on_device.replayed == (1,)
    assert "weights of other instances" in shown(loaded)["graph_replay"]
    loaded.close()


def test_model_without_buffers_is_accounted_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Weighs(HostDevice):
        weight = 0

        def memory(self) -> MemoryInfo:
            free = super().memory()
            return MemoryInfo(free.free_bytes - self.weight, free.total_bytes)

    def open_it(path: Path, name: str, options: SessionOptions, model: Model) -> ort.InferenceSession:
        device.weight = 2**20
        return open_session(path, name, options)

    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_it)
    for options in ({"batched": False}, {"warmup_s": 0}):
        device = Weighs()
        loaded = load(builders.mlp(tmp_path / "m.onnx"), device, **options)
        (instance,) = loaded.instances
        assert isinstance(instance, DeviceInstance)
        assert instance.streams.opened.ledger.totals() == {"m/1": {"session": 2**20}}
        before = dict(instance.counts.plain)
        run(instance, np.zeros((1, 64), np.float32), bucket=1)
        assert instance.counts.plain == before | {"unbound": 1}
        loaded.close()


def test_failed_trial_leaves_no_handles_open(tmp_path: Path) -> None:
    class Broken(Trials):
        def why_not(self, request: TrialRequest, progress: Progress) -> str:
            raise FileNotFoundError(request.path)

    device = one_graph_per_session()
    with pytest.raises(FileNotFoundError):
        load(builders.mlp(tmp_path / "m.onnx"), device, Broken(), max_rows=2, graph_replay=True)
    assert device.handles == 0


def test_model_that_its_trial_refuses_is_not_captured_and_the_reason_is_shown(tmp_path: Path) -> None:
    loaded = load(builders.mlp(tmp_path / "m.onnx"), HostDevice(), Trials("it crashed"), max_rows=2, graph_replay=True)
    assert loaded.on_device == DeviceBatches((1, 2), (), "", "it crashed")
    assert shown(loaded)["graph_replay"] == "none: it crashed"
    (instance,) = loaded.instances
    assert isinstance(instance, DeviceInstance)
    assert instance.counts.captured == 0
    assert instance.counts.not_captured == {"trial_refused": 2}
    loaded.close()


def test_load_runs_one_capture_trial_for_all_instances(tmp_path: Path) -> None:
    trials = Trials("it crashed")
    path = builders.mlp(tmp_path / "m.onnx")
    loaded = load(path, HostDevice(), trials, max_rows=2, graph_replay=True, instances=3)
    assert len(loaded.instances) == 3
    assert len(trials.orders) == 1
    loaded.close()


def test_kernels_tuned_during_runs_are_not_captured(tmp_path: Path) -> None:
    trials = Trials()
    path = builders.mlp(tmp_path / "m.onnx")
    devices = Devices({CPU: DeviceProvider(lambda number: HostDevice())})
    model = analyse_model(path, "m", ModelOptions(graph_replay=True))
    obstacles = ReplayObstacles(model, devices, trials, Progress(time.monotonic_ns))
    refused = obstacles.find_by_trial(ProviderChoice(CPU, options={"tunable_op_tuning_enable": "1"}), 1)
    assert refused is not None
    assert (refused.reason, trials.orders) == ("tunes", [])


@pytest.mark.parametrize(
    ("build", "options", "refused", "counted"),
    [
        (lambda path: builders.slow(path, steps=3), {}, "ONNX Runtime cannot capture it", {"control_flow": 2}),
        (lambda path: builders.slow(path, steps=3), {}, "", {"control_flow": 2}),
        (builders.mlp, {"session": {"shrink_arenas": ["gpu:0"]}, "warmup_s": 0}, "no", {"shrinks_arena": 1}),
        (builders.fixed_batch, {}, "", {"no_buffers": 1}),
        (builders.variable_length, {}, "", {"no_buffers": 2}),
        (builders.variable_length, {"graph_replay": False}, "", {}),
        (builders.mlp, {}, "", {}),
    ],
)
def test_uncaptured_sizes_are_counted_by_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Any,
    options: dict[str, Any],
    refused: str,
    counted: dict[str, int],
) -> None:
    monkeypatch.setattr("ortserve.engine.session._check_settings", lambda options: None)  # the CPU has no gpu:0
    chosen = {"max_rows": 2, "graph_replay": True} | options
    loaded = load(build(tmp_path / "m.onnx"), HostDevice(), Trials(refused), **chosen)
    (instance,) = loaded.instances
    assert isinstance(instance, DeviceInstance)
    assert instance.counts.not_captured == counted
    assert ("graph_replay" in shown(loaded)) == chosen["graph_replay"]
    if refused:
        assert shown(loaded)["graph_replay"] == f"none: {refused}"
    loaded.close()


def test_session_that_rejects_capture_counts_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_it(path: Path, name: str, options: SessionOptions, model: Model) -> ort.InferenceSession:
        if options.provider.options.pop("captures") == "1":
            raise invalid_input("This session cannot use the graph capture feature")
        return open_session(path, name, options)

    captures = DeviceProvider(HostDevice, capture_option="captures")
    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_it)
    loaded = load(builders.mlp(tmp_path / "m.onnx"), captures, max_rows=2, graph_replay=True)
    (instance,) = loaded.instances
    assert isinstance(instance, DeviceInstance)
    assert instance.counts.not_captured == {"failed": 2}
    assert shown(loaded)["graph_replay"] == "none: This session cannot use the graph capture feature"
    loaded.close()


def test_obstacle_that_the_trial_missed_prevents_the_capture(tmp_path: Path) -> None:
    """The session is opened again, because a session opened for captures would capture in every run without an id.

    The first session is freed before, because a device may not have memory for both.
    """
    opened: list[bool] = []
    sessions: list[int] = []

    class Noted(DeviceProvider):
        def provider_options(self, stream: int, *, captures: bool) -> dict[str, str]:
            opened.append(captures)
            sessions.append(sum(isinstance(one, ort.InferenceSession) for one in gc.get_objects()))
            return super().provider_options(stream, captures=captures)

    loaded = load(
        builders.slow(tmp_path / "m.onnx", steps=3), Noted(HostDevice), Trials(), max_rows=2, graph_replay=True
    )
    assert shown(loaded)["graph_replay"] == "none: which nodes run is decided during the run, by Loop"
    assert loaded.on_device.sizes == (1, 2)
    assert opened == [True, False]
    assert sessions[0] == sessions[1]
    loaded.close()


@pytest.mark.parametrize(
    ("build", "options", "because"),
    [
        (builders.fixed_batch, {}, "none: requests run one at a time: "),
        (
            builders.row_mixer,
            {},
            "none: requests run one at a time: rows may depend on each other: node 'ReduceMean #0'",
        ),
        (builders.variable_length, {}, "none: the number of rows does not fix the shapes of its inputs"),
        (builders.mlp, {"warmup_s": 0}, "none: the model was not warmed up"),
    ],
)
def test_model_without_buffers_is_served_and_its_metadata_says_why(
    tmp_path: Path, build: Any, options: dict[str, Any], because: str
) -> None:
    device = HostDevice()
    loaded = load(build(tmp_path / "m.onnx"), device, graph_replay=True, **options)
    assert shown(loaded)["device_buffers"].startswith(because)
    assert shown(loaded)["graph_replay"] == shown(loaded)["device_buffers"]
    assert device.allocated_bytes == 0
    assert loaded.instances[0].depth == 1
    loaded.close()
    assert device.handles == 0


def test_disabled_buffers_are_shown(tmp_path: Path) -> None:
    loaded = load(builders.mlp(tmp_path / "m.onnx"), HostDevice(), device_buffers=False, graph_replay=True)
    assert shown(loaded)["device_buffers"] == shown(loaded)["graph_replay"] == "none: device_buffers is off"
    assert isinstance(loaded.instances[0], Instance)
    loaded.close()


def test_cpu_model_shows_no_device_properties(tmp_path: Path) -> None:
    loaded = load_model(builders.mlp(tmp_path / "m.onnx"), "m/1", ModelOptions(warmup_s=0.1))
    assert not {"device_buffers", "graph_replay"} & set(shown(loaded))
    assert isinstance(loaded.instances[0], Instance)
    assert loaded.instances[0].runs_on_host
    loaded.close()


@pytest.mark.parametrize(
    ("build", "options"), [(builders.mlp, {"pad": {"no": {"axis": 1, "multiple": 2, "value": 0}}})]
)
def test_failed_load_leaves_nothing_on_the_device(tmp_path: Path, build: Any, options: dict[str, Any]) -> None:
    device = HostDevice()
    with pytest.raises(ServeError):
        load(build(tmp_path / "m.onnx"), device, **options)
    assert device.allocated_bytes == 0
    assert device.handles == 0


def test_weights_past_the_memory_are_rejected_unread(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "m.onnx")
    device = HostDevice(total_bytes=1000)
    with pytest.raises(
        ServeError, match=r"'m/1' needs at least 7\d.\d KiB on host:0 \(weights 7\d.\d KiB\), but 1000 B"
    ):
        load(path, device)
    assert device.handles == 0


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_sizes_double_up_to_the_maximum(most: int, sizes: Sequence[int]) -> None:
    assert doubling(most) == sizes


def test_sizes_without_replay_are_listed_beside_replayed_ones() -> None:
    assert DeviceBatches((1, 2), (1,), "", "2: it failed").properties()["graph_replay"] == (
        "batches of 1 rows; others are not: 2: it failed"
    )


def test_instances_are_placed_on_devices_round_robin(tmp_path: Path) -> None:
    made: dict[int, HostDevice] = {}

    def make(number: int) -> HostDevice:
        made[number] = HostDevice(number)
        return made[number]

    path = builders.mlp(tmp_path / "m.onnx")
    options = ModelOptions(warmup_s=0.2, intra_op_threads=1, instances=3, gpus=(2, 0), buckets=(2,))
    runtime = DeviceRuntime(devices=Devices({CPU: DeviceProvider(make)}))
    loaded = load_model(path, "m/1", options, None, runtime)
    assert loaded.device_ids == (2, 0, 2)
    assert sorted(made) == [0, 2]
    assert made[2].allocated_bytes == 2 * made[0].allocated_bytes > 0
    for instance in loaded.instances:
        run(instance, np.zeros((2, 64), np.float32), bucket=2)
    loaded.close()
    assert not any(device.allocated_bytes or device.handles for device in made.values())
