"""Details of opening sessions that tests of loaded models do not show."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from fakes.host_device import HostDevice
from models import builders
from ortserve.config.model import ModelOptions
from ortserve.device.devices import DEVICE_PROVIDERS, DeviceRuntime, Devices
from ortserve.engine.provider_options import CPU, CUDA, TENSORRT, most_rows
from ortserve.engine.providers import ProviderChoice, choose_provider
from ortserve.engine.runtime import Offer
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import DeviceLostError, ErrorKind, ServeError, invalid_input
from ortserve.model_file.graph import Model
from ortserve.model_file.reading import model_nbytes, read_model
from ortserve.registry.load.analysed_model import analyse_model
from ortserve.registry.load.capture_trial import CaptureTrials, TrialRequest
from ortserve.registry.load.progress import Progress
from ortserve.registry.load.session_opener import SessionOpener


class FailingTrials(CaptureTrials):
    """Refuses each capture."""

    def why_not(self, request: TrialRequest, progress: Progress) -> str:
        return "the trial failed"


def opener_of(path: Path, options: ModelOptions, progress: Progress | None = None) -> SessionOpener:
    model = analyse_model(path, "m/1", options)
    return SessionOpener(model, DeviceRuntime(), CaptureTrials(), progress or Progress(time.monotonic_ns))


def test_external_weights_are_counted(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "model.onnx")
    assert model_nbytes(path, read_model(path)) == path.stat().st_size
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    weights = (tmp_path / "weights.bin").stat().st_size
    assert weights > 1000
    (tmp_path / "model.onnx.bak").write_bytes(b"x" * 1000)
    assert model_nbytes(path, read_model(path)) == path.stat().st_size + weights
    (tmp_path / "weights.bin").unlink()
    assert model_nbytes(path, read_model(path)) == path.stat().st_size


@pytest.mark.parametrize(
    ("build", "buckets", "expected"),
    [
        (builders.mlp, (1, 8), {"x:1x64", "x:8x64"}),
        (builders.mlp, (4, 8), {"x:1x64", "x:8x64"}),  # warm-up runs single rows
        (builders.mlp, (1, 2), {"x:1x64", "x:3x64"}),  # and three together
        (builders.mlp, (), {"x:1x64", "x:64x64"}),  # warm-up sweeps up to 64
        (builders.variable_length, (1, 8), set()),
        (builders.not_onnx, (1, 8), set()),
    ],
)
def test_choice_of_tensorrt_gets_profiles_of_the_buckets(
    tmp_path: Path, build: Any, buckets: tuple[int, ...], expected: set[str]
) -> None:
    path = build(tmp_path / "m.onnx")
    choice = opener_of(path, ModelOptions(buckets=buckets))._with_profile(ProviderChoice(TENSORRT))
    assert set(choice.options.values()) == expected


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (builders.mlp, "which builds its engines here"),
        (
            builders.variable_length,
            "which builds its engines here or, where dimensions are free, at the first run of each shape",
        ),
    ],
)
def test_progress_says_when_tensorrt_builds_engines(tmp_path: Path, build: Any, expected: str) -> None:
    """TensorRT itself is missing here; the test reads the options that it would have received."""
    progress = Progress(lambda: 0)
    opener = opener_of(build(tmp_path / "m.onnx"), ModelOptions(), progress)
    with pytest.raises(ServeError, match=TENSORRT):
        opener.open(ProviderChoice(TENSORRT), 1)
    assert progress.describe() == f"opening the session on {TENSORRT}, {expected}, for 0 s"


@pytest.mark.parametrize(
    ("build", "given", "because"),
    [
        (
            builders.variable_length,
            {},
            "expected trt_profile_…_shapes, because no profile can be derived and each new shape would build an engine",
        ),
        (
            builders.mlp,
            {"trt_engine_cache_path": "/engines"},
            "expected trt_engine_cache_enable with trt_engine_cache_path, to keep engines for other sessions",
        ),
        (builders.mlp, {"trt_engine_cache_enable": "1", "trt_engine_cache_path": "/engines"}, ""),
    ],
)
@pytest.mark.parametrize("asked", ["graph_replay", "trt_cuda_graph_enable", ""])
def test_graphs_on_tensorrt_need_fixed_engines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Any,
    given: dict[str, str],
    because: str,
    asked: str,
) -> None:
    """Simulates that sessions opened on the CPU are TensorRT's."""
    recorded: list[Mapping[str, str]] = []

    def open_on_cpu(path: Path, name: str, options: SessionOptions, model: Model) -> Session:
        if options.provider.name == TENSORRT:
            recorded.append(options.provider.options)
            assert (
                dict(options.provider.behind[0].options)["user_compute_stream"] == recorded[-1]["user_compute_stream"]
            )
        return open_session(path, name, replace(options, provider=ProviderChoice(CPU)), model)

    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_on_cpu)
    monkeypatch.setattr(
        "ortserve.registry.load.session_opener.read_operators", lambda session: {TENSORRT: frozenset({"MatMul"})}
    )
    uses = {name: replace(use, make=HostDevice) for name, use in DEVICE_PROVIDERS.items()}
    wish: dict[str, Any] = {"tensorrt": given | ({asked: "true"} if asked.startswith("trt") else {})}
    options = ModelOptions(graph_replay=asked == "graph_replay")
    choice = choose_provider([wish, "cuda", "cpu"], lambda name: Offer())
    runtime, trials = DeviceRuntime(devices=Devices(uses)), FailingTrials()
    path = build(tmp_path / "m.onnx")
    opener = SessionOpener(analyse_model(path, "m/1", options), runtime, trials, Progress(time.monotonic_ns))
    opened = opener.open(choice, 1)
    assert opened.open_for_graph is None
    if asked:
        assert opened.no_replay is not None
        wanted = f"each graph has a session of its own: {because}" if because else "the trial failed"
        assert opened.no_replay.because == wanted
    else:
        assert opened.no_replay is None
    assert [options["trt_cuda_graph_enable"] for options in recorded] == ["false"]
    opened.abandon()


@pytest.mark.parametrize("provider", [CPU, CUDA, TENSORRT])
def test_lost_gpu_is_reported_by_a_session_without_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    """On the CPU the text has no special meaning."""

    def fail(*_: Any) -> Any:
        try:
            raise RuntimeError("CUDA failure 719: unspecified launch failure")
        except RuntimeError as error:
            raise invalid_input(f"ONNX Runtime cannot load the model: {error}") from error

    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", fail)
    opener = opener_of(builders.mlp(tmp_path / "m.onnx"), ModelOptions(device_buffers=False))
    with pytest.raises(ServeError, match="CUDA failure 719") as failed:
        opener.open(ProviderChoice(provider), 1)
    assert isinstance(failed.value, DeviceLostError) is (provider != CPU)
    assert failed.value.kind is (ErrorKind.INVALID_INPUT if provider == CPU else ErrorKind.NOT_READY)


def test_model_partly_on_tensorrt_has_implicit_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Mapping[str, str]] = []

    def open_in_part(path: Path, name: str, options: SessionOptions, model: Model) -> Session:
        if options.provider.name == TENSORRT:
            recorded.append(options.provider.options)
            if "trt_profile_min_shapes" in options.provider.options:
                raise invalid_input(
                    "User needs to provide all the dynamic shape inputs with associated profiles if they want to "
                    "explicitly set profiles through provider options."
                )
        return open_session(path, name, replace(options, provider=ProviderChoice(CPU)), model)

    monkeypatch.setattr("ortserve.registry.load.session_opener.open_session", open_in_part)
    opener = opener_of(builders.mlp(tmp_path / "m.onnx"), ModelOptions(buckets=(1, 8), device_buffers=False))
    opener.open(ProviderChoice(TENSORRT), 1).abandon()
    opener.open(ProviderChoice(TENSORRT), 1).abandon()  # another instance
    assert ["trt_profile_min_shapes" in options for options in recorded] == [True, False, False]
    with pytest.raises(ServeError, match="associated profiles"):  # the operator's own profiles are not omitted
        opener.open(ProviderChoice(TENSORRT, options={"trt_profile_min_shapes": "x:1x64"}), 1)


def test_error_of_a_failed_session_does_not_reference_it(tmp_path: Path) -> None:
    """Its streams are released at once; frames of the error's traceback would otherwise reference them."""
    with pytest.raises(ServeError) as failed:
        opener_of(builders.not_onnx(tmp_path / "m.onnx"), ModelOptions()).open(ProviderChoice(CPU), 1)
    assert failed.value.__cause__ is not None
    assert failed.value.__cause__.__traceback__ is None


@pytest.mark.parametrize(
    ("shapes", "rows"),
    [("", None), ("x:4x64", 4), ("x:4x64,y:8x1", 4), ("x:4x64,x:16x64", 16), ("a:b:4x2", 4), ("x", None)],
)
def test_profile_rows_bound_the_batch(shapes: str, rows: int | None) -> None:
    assert most_rows({"trt_profile_max_shapes": shapes} if shapes else {}) == rows
