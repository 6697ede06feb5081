"""How sessions are opened, beyond what loading a model shows."""

import time
from pathlib import Path
from typing import Any

import pytest

from models import builders
from ortserve.config.model import ModelOptions
from ortserve.engine.provider_options import TENSORRT
from ortserve.engine.providers import ProviderChoice
from ortserve.engine.runtime import Runtime
from ortserve.errors import ServeError
from ortserve.registry.capture_trial import CaptureTrials
from ortserve.registry.opening import Opening, model_nbytes
from ortserve.registry.progress import Progress


def opening_of(path: Path, options: ModelOptions, progress: Progress | None = None) -> Opening:
    clock = time.monotonic_ns
    return Opening(path, "m/1", options, Runtime(), CaptureTrials(), (), clock, progress or Progress(clock))


def test_weights_in_files_of_their_own_count(tmp_path: Path) -> None:
    path = builders.identity(tmp_path / "model.onnx")
    (tmp_path / "model.onnx.data").write_bytes(b"x" * 500)
    (tmp_path / "other.onnx").write_bytes(b"x" * 1000)
    assert model_nbytes(path) == path.stat().st_size + 500


@pytest.mark.parametrize(
    ("build", "buckets", "expected"),
    [
        (builders.mlp, (1, 8), {"x:1x64", "x:8x64"}),
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
