"""How sessions are opened, beyond what loading a model shows."""

import time
from pathlib import Path
from typing import Any

import onnx
import pytest

from models import builders
from ortserve.config.model import ModelOptions
from ortserve.engine.provider_options import CPU, CUDA, TENSORRT
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.runtime import Runtime
from ortserve.errors import DeviceLostError, ErrorKind, ServeError, invalid_input
from ortserve.registry.capture_trial import CaptureTrials
from ortserve.registry.opening import Opening, model_nbytes
from ortserve.registry.progress import Progress


def opening_of(path: Path, options: ModelOptions, progress: Progress | None = None) -> Opening:
    clock = time.monotonic_ns
    return Opening(path, "m/1", options, Runtime(), CaptureTrials(), (), clock, progress or Progress(clock))


def test_weights_in_files_of_their_own_count(tmp_path: Path) -> None:
    path = builders.mlp(tmp_path / "model.onnx")
    assert model_nbytes(path) == path.stat().st_size
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    weights = (tmp_path / "weights.bin").stat().st_size
    assert weights > 1000
    (tmp_path / "model.onnx.bak").write_bytes(b"x" * 1000)
    assert model_nbytes(path) == path.stat().st_size + weights
    (tmp_path / "weights.bin").unlink()
    assert model_nbytes(path) == path.stat().st_size


@pytest.mark.parametrize(
    ("build", "buckets", "expected"),
    [
        (builders.mlp, (1, 8), {"x:1x64", "x:8x64"}),
        (builders.mlp, (4, 8), {"x:1x64", "x:8x64"}),  # warm-up runs single rows
        (builders.mlp, (1, 2), {"x:1x64", "x:3x64"}),  # and three together
        (builders.mlp, (), set()),
        (builders.not_onnx, (1, 8), set()),
    ],
)
def test_a_choice_of_tensorrt_is_told_of_the_buckets(
    tmp_path: Path, build: Any, buckets: tuple[int, ...], expected: set[str]
) -> None:
    path = build(tmp_path / "m.onnx")
    options = ModelOptions(buckets=buckets)
    assert set(opening_of(path, options).with_profile(ProviderChoice(TENSORRT)).options.values()) == expected


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.parametrize(
    ("buckets", "told"),
    [
        ((1, 8), "which builds its engines here"),
        ((), "which builds its engines here or, where dimensions are free, at the first run of each shape"),
    ],
)
def test_who_waits_for_tensorrt_is_told_when_it_builds(tmp_path: Path, buckets: tuple[int, ...], told: str) -> None:
    """TensorRT itself is not there: what it was doing is left to be read."""
    progress = Progress(lambda: 0)
    opening = opening_of(builders.mlp(tmp_path / "m.onnx"), ModelOptions(buckets=buckets), progress)
    with pytest.raises(ServeError, match=TENSORRT):
        opening.open(ProviderChoice(TENSORRT), 1)
    assert progress.describe() == f"opening the session on {TENSORRT}, {told}, for 0 s"


@pytest.mark.parametrize("provider", [CPU, CUDA, TENSORRT])
def test_session_that_cannot_be_made_as_its_gpu_is_lost_says_so_though_it_has_no_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    """On the CPU it is a text like any other."""

    def fail(*_: Any) -> Any:
        try:
            raise RuntimeError("CUDA failure 719: unspecified launch failure")
        except RuntimeError as error:
            raise invalid_input(f"ONNX Runtime cannot load the model: {error}") from error

    monkeypatch.setattr("ortserve.registry.opening.open_session", fail)
    opening = opening_of(builders.mlp(tmp_path / "m.onnx"), ModelOptions(device_buffers=False))
    with pytest.raises(ServeError, match="CUDA failure 719") as failed:
        opening.open(ProviderChoice(provider), 1)
    assert isinstance(failed.value, DeviceLostError) is (provider != CPU)
    assert failed.value.kind is (ErrorKind.INVALID_INPUT if provider == CPU else ErrorKind.NOT_READY)
